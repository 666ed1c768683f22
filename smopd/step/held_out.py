"""Evaluation with the recipe's rewards on held-out prompts, greedy and sampled."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from smopd.config.settings import Settings
from smopd.data.prompts import Prompt
from smopd.engine import distributed
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Sampling
from smopd.step.conversation import Conversations, sample
from smopd.step.rewards import Rewarder
from smopd.step.stop import all_or_raise

SEED_OFFSET = 1_000_003  # ours: makes the random draws of evaluation differ from those of training


def evaluate_held_out(
    settings: Settings,
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    rewarder: Rewarder,
    conversations: Conversations | None = None,
    *,
    greedy_only: bool = False,
) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """Evaluate the engine's policy on all prompts, which the ranks share out. This is a collective call.

    Returns:
        Means over prompts and samples, and every response, all equal on every rank. For each kind (greedy and
        sampled), the means are `kind/<reward>`, their sum `kind/sum`, the share `kind/truncated` of
        unfinished responses, and the share `kind/<reward>/unscorable` of responses without a score. If a
        reward scored no response, its mean and the sum are None.
    """
    limit, samples = settings.rollout.max_new_tokens, settings.evaluation.samples
    kinds = {"greedy": Sampling(n=1, temperature=0.0, max_new_tokens=limit)}
    if samples and not greedy_only:
        seed = settings.seed + SEED_OFFSET
        kinds["sampled"] = Sampling(n=samples, temperature=1.0, max_new_tokens=limit, seed=seed)
    names = [reward.name for reward in settings.rewards]
    values: dict[str, float | None] = {}
    items: list[dict[str, Any]] = []
    for kind, sampling in kinds.items():
        answered = answers(prompts, engine, rewarder, sampling, conversations)
        values |= {f"{kind}/{name}": value for name, value in means(names, answered).items()}
        items += [{"prompt": item["prompt"], "kind": kind} | item for item in answered]
    return values, items


def answers(
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    rewarder: Rewarder,
    sampling: Sampling,
    conversations: Conversations | None = None,
) -> list[dict[str, Any]]:
    """Return the responses of all ranks with their rewards, in prompt order. This is a collective call."""
    mine = list(range(distributed.rank(), len(prompts), distributed.world_size()))
    asked = [prompts[i] for i in mine]
    rollouts = all_or_raise(partial(sample, engine, conversations, asked, mine, sampling))
    answered = [prompt for prompt in asked for _ in range(sampling.n)]
    rewards = rewarder.score(answered, rollouts)
    own = []
    for r, (prompt, rollout) in enumerate(zip(answered, rollouts, strict=True)):
        values = [None if math.isnan(value) else value for value in rewards.rewards_RK[r].tolist()]
        item = {"prompt": prompt.index, "response": rewards.texts[r], "finished": rollout.finished}
        own.append({**item, "rewards": dict(zip(rewards.names, values, strict=True))})
    gathered = [item for share in distributed.gather_objects(own) for item in share]
    return sorted(gathered, key=lambda item: item["prompt"])


def means(names: Sequence[str], items: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Return the means of one kind that `evaluate_held_out` describes, without the prefix `kind/`."""
    result: dict[str, float | None] = {}
    for name in names:
        scored = [item["rewards"][name] for item in items if item["rewards"][name] is not None]
        result[name] = sum(scored) / len(scored) if scored else None
        result[f"{name}/unscorable"] = 1 - len(scored) / len(items)
    parts = [result[name] for name in names]
    result["sum"] = None if None in parts else sum(part for part in parts if part is not None)
    result["truncated"] = sum(not item["finished"] for item in items) / len(items)
    return result
