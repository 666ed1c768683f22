"""GDPO and GD2PO in the signature of verl's advantage estimators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from smopd.ops import gd2po_advantages, gdpo_advantages

ESTIMATORS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "smopd_gdpo": (gdpo_advantages, {"whiten": "responses"}),
    "smopd_gdpo_tokens": (gdpo_advantages, {"whiten": "tokens"}),
    "smopd_gd2po": (gd2po_advantages, {"whiten": "tokens"}),
}


def estimator(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """The advantage estimator `name` in verl's signature: advantages and returns, (responses, positions).

    It reads algorithm.gdpo_reward_keys and gdpo_reward_weights; smopd_gd2po also gd2po_snr_threshold. None
    among the rewards is unscorable. It raises ValueError where a key is missing.
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
        group_R = [numbers.setdefault(prompt, len(numbers)) for prompt in index]
        weights = settings.get("gdpo_reward_weights")
        snr = settings.get("gd2po_snr_threshold") if advantages is gd2po_advantages else None
        adv_R = advantages(
            rewards_RK,
            torch.tensor(group_R, device=response_mask.device),
            weights_K=None if weights is None else rewards_RK.new_tensor(list(weights)),
            lengths_R=response_mask.sum(-1),
            **options,
            **({} if snr is None else {"snr_threshold": snr}),
        )
        adv_R = adv_R[0] if isinstance(adv_R, tuple) else adv_R
        return adv_R[:, None] * response_mask, adv_R[:, None] * response_mask

    return estimate
