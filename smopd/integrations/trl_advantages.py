"""GDPO's and GD2PO's advantages over the rollout batch of TRL's GRPOTrainer, where they are asked for.

Shapes: B responses of this rank, R of all ranks, G groups of P, K rewards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smopd.ops import gd2po_advantages, gdpo_advantages

ESTIMATORS = ("trl", "gdpo", "gd2po")
WHITEN = ("default", "responses", "tokens", None)
OF_TRL = {"scale_rewards": "group", "multi_objective_aggregation": "sum_then_normalize"}


@dataclass
class AdvantageConfig:
    """Whose advantages the anchor has; beside TRL's own settings."""

    advantage_estimator: str = field(
        default="trl", metadata={"help": "trl: TRL's own; or gdpo or gd2po, by reward_weights."}
    )
    whiten: str | None = field(
        default="default",
        metadata={
            "help": "What gdpo and gd2po whiten over: responses, tokens or (None) nothing; "
            "default: responses for gdpo, tokens for gd2po."
        },
    )


def require_advantages(args: Any) -> None:
    """Raises ValueError where a setting is unknown, or of the advantages that were not chosen."""
    for name, known in {"advantage_estimator": ESTIMATORS, "whiten": WHITEN}.items():
        if (value := getattr(args, name)) not in known:
            raise ValueError(f"{name} is {value!r}, expected {' or '.join(map(repr, known))}")
    chosen = args.advantage_estimator
    for name, default in ({"whiten": "default"} if chosen == "trl" else OF_TRL).items():
        if (value := getattr(args, name)) != default:
            raise ValueError(
                f"{name} is {value!r}, expected {default!r}: advantage_estimator={chosen!r} has no use for it"
            )


def advantages_of(trainer: Any, batch: dict[str, Any], rewards_RK: Tensor) -> tuple[Tensor, Tensor]:
    """(R,) advantages, and (G,) whether no reward of the group differs: before whitening it adds nothing."""
    mask_BT = batch["completion_mask"]
    lengths_B = (mask_BT * batch["tool_mask"] if "tool_mask" in batch else mask_BT).sum(1)
    per_prompt = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
    weights_K = trainer.reward_weights.to(rewards_RK.device)
    group_R = torch.arange(len(rewards_RK), device=rewards_RK.device) // per_prompt
    options = {"weights_K": weights_K, "lengths_R": trainer.accelerator.gather(lengths_B)}
    if trainer.args.whiten != "default":
        options["whiten"] = trainer.args.whiten
    if trainer.args.advantage_estimator == "gdpo":
        adv_R = gdpo_advantages(rewards_RK, group_R, **options)
    else:
        adv_R, _ = gd2po_advantages(rewards_RK, group_R, **options)
    rewards_GPK = rewards_RK.view(-1, per_prompt, len(weights_K))
    lowest_GK = rewards_GPK.masked_fill(rewards_GPK.isnan(), torch.inf).amin(1)
    highest_GK = rewards_GPK.masked_fill(rewards_GPK.isnan(), -torch.inf).amax(1)
    return adv_R, ~((lowest_GK < highest_GK) & (weights_K != 0)).any(1)
