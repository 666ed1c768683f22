"""GDPO and GD2PO as verl's advantage estimators, and the rewards' columns on their way to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smopd.integrations.verl_host import ORIGINALS, core_algos, ray_trainer, v1_trainer
from smopd.ops import gd2po_advantages, gdpo_advantages

ESTIMATORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "smopd_gdpo": (gdpo_advantages, {"whiten": "responses"}),
    "smopd_gdpo_tokens": (gdpo_advantages, {"whiten": "tokens"}),
    "smopd_gd2po": (gd2po_advantages, {"whiten": "tokens"}),
}
# What the v1 trainer leaves in its queue: its own step fetches the prompts' ids and tensors alone.
REWARDS: ContextVar[dict[str, Any]] = ContextVar("rewards", default={})  # noqa: B039  (never written to)


def estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The advantage estimator `name` in verl's signature: advantages and returns, (responses, positions).

    It reads algorithm.gdpo_reward_keys and gdpo_reward_weights; smopd_gd2po also gd2po_snr_threshold. None
    among the rewards is unscorable; over responses, one without a token of its own is left out. It raises
    ValueError where a key is missing.
    """
    advantages, options = ESTIMATORS[name]

    def estimate(
        response_mask: Tensor,
        index: Iterable[Any],
        config: Mapping[str, Any] | None = None,
        non_tensor_batch: Mapping[str, Iterable[float | None]] | None = None,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        settings, columns = config or {}, non_tensor_batch or {}
        keys = list(settings.get("gdpo_reward_keys") or ())
        if not keys or not columns.keys() >= set(keys):
            raise ValueError(
                f"{name}: algorithm.gdpo_reward_keys is {keys}, expected names that compute_score returns; "
                f"this batch has {sorted(columns)}"
            )
        rewards_KR = [[float("nan" if reward is None else reward) for reward in columns[key]] for key in keys]
        rewards_RK = torch.tensor(rewards_KR, device=response_mask.device).T.contiguous()
        numbers: dict[Any, int] = {}
        group_R = torch.tensor([numbers.setdefault(prompt, len(numbers)) for prompt in index])
        group_R = group_R.to(rewards_RK.device)
        lengths_R = response_mask.sum(-1)
        # v1's padding is a response's copy without a token. Over tokens it counts nothing anyway.
        counted_R = (lengths_R > 0) | (options["whiten"] == "tokens")
        weights = settings.get("gdpo_reward_weights")
        snr = settings.get("gd2po_snr_threshold") if advantages is gd2po_advantages else None
        counted = advantages(
            rewards_RK[counted_R],
            group_R[counted_R],
            weights_K=None if weights is None else rewards_RK.new_tensor(list(weights)),
            lengths_R=lengths_R[counted_R],
            **options,
            **({} if snr is None else {"snr_threshold": snr}),
        )
        adv_R = rewards_RK.new_zeros(len(lengths_R))
        adv_R[counted_R] = counted[0] if isinstance(counted, tuple) else counted
        return adv_R[:, None] * response_mask, adv_R[:, None] * response_mask

    return estimate


def _compute_advantage(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """In verl's v1 trainer: its own, with each response's reward_extra_info fetched before."""
    theirs, name = ORIGINALS["_compute_advantage"], self.config.algorithm.adv_estimator
    if getattr(name, "value", name) not in ESTIMATORS:
        return theirs(self, batch, *args, **kwargs)
    fetched = v1_trainer.tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
    )
    said = [fields.get("reward_extra_info") or {} for fields in fetched.pop("extra_fields").tolist()]
    names = {name for rewards in said for name in rewards}
    columns = {name: np.array([rewards.get(name) for rewards in said], dtype=object) for name in names}
    token = REWARDS.set(columns)
    try:
        return theirs(self, batch, *args, **kwargs)
    finally:
        REWARDS.reset(token)


def compute_advantage(data: Any, adv_estimator: Any, *args: Any, **kwargs: Any) -> Any:
    """verl's own, which gives the rewards' columns to gdpo alone; here SMOPD's estimators get them too."""
    name = getattr(adv_estimator, "value", adv_estimator)
    if name not in ESTIMATORS:
        return ORIGINALS["compute_advantage"](data, adv_estimator, *args, **kwargs)
    if "response_mask" not in data.batch.keys():  # noqa: SIM118  (a TensorDict)
        data.batch["response_mask"] = ray_trainer.compute_response_mask(data)
    data.batch["advantages"], data.batch["returns"] = core_algos.get_adv_estimator_fn(name)(
        token_level_rewards=data.batch["token_level_rewards"],
        response_mask=data.batch["response_mask"],
        index=data.non_tensor_batch["uid"],
        config=kwargs.get("config"),
        non_tensor_batch={**data.non_tensor_batch, **REWARDS.get()},
    )
    return data
