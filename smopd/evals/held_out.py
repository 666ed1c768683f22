"""The recipe's own rewards on held-out prompts, greedy and sampled: the rows of a run's table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smopd.config import Settings
from smopd.data import Prompt
from smopd.engine import distributed
from smopd.engine.rollout import RolloutEngine
from smopd.engine.types import Sampling
from smopd.scoring import Scorer

SEED_OFFSET = 1_000_003  # ours: keeps the draws of evaluation apart from those of training


@dataclass(frozen=True)
class HeldOut:
    """Means over prompts and samples, and every response they come from (on rank 0)."""

    values: dict[str, float]
    """`greedy/<reward>`, `sampled/<reward>` and their sums `greedy/sum`, `sampled/sum`."""
    items: list[dict]


def evaluate_held_out(
    settings: Settings,
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    scorer: Scorer,
    *,
    greedy_only: bool = False,
) -> HeldOut:
    """Scores the engine's policy on all of `prompts`; a collective call, each rank does its share."""
    options = settings.evaluation
    limit = options.max_new_tokens or settings.rollout.max_new_tokens
    kinds = {"greedy": Sampling(n=1, temperature=0.0, max_new_tokens=limit)}
    if options.samples and not greedy_only:
        kinds["sampled"] = Sampling(
            n=options.samples,
            temperature=options.temperature,
            top_p=options.top_p,
            max_new_tokens=limit,
            seed=settings.seed + SEED_OFFSET,
        )
    names = [reward.name for reward in settings.rewards]
    values: dict[str, float] = {}
    items: list[dict] = []
    mine = list(range(distributed.rank(), len(prompts), distributed.world_size()))
    for kind, sampling in kinds.items():
        rollouts = engine.generate([prompts[i].token_ids for i in mine], mine, sampling)
        answered = [prompts[i] for i in mine for _ in range(sampling.n)]
        scores = scorer.score(answered, rollouts)
        own = [
            {
                "prompt": prompt.index,
                "kind": kind,
                "response": text,
                "finished": rollout.finished,
                "rewards": dict(zip(names, rewards, strict=True)),
            }
            for prompt, rollout, text, rewards in zip(
                answered, rollouts, scores.texts, scores.rewards_RK.tolist(), strict=True
            )
        ]
        gathered = [item for share in distributed.gather_objects(own) for item in share]
        gathered.sort(key=lambda item: item["prompt"])
        rewards_RK = np.array([list(item["rewards"].values()) for item in gathered])
        for name, mean in zip(names, np.nanmean(rewards_RK, axis=0), strict=True):
            values[f"{kind}/{name}"] = float(mean)
        values[f"{kind}/sum"] = float(sum(values[f"{kind}/{name}"] for name in names))
        items += gathered
    return HeldOut(values, items)
