"""The rewards' columns on their way to SMOPD's advantage estimators, through either of verl's trainers."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import numpy as np

from smopd.integrations.verl_advantages import ESTIMATORS
from smopd.integrations.verl_host import ORIGINALS, core_algos, ray_trainer, v1_trainer

# What the v1 trainer leaves in its queue: its own step fetches the prompts' ids and tensors alone.
REWARDS: ContextVar[dict[str, Any]] = ContextVar("rewards", default={})  # noqa: B039  (never written to)


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
