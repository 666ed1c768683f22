"""Which merge a run starts from: every candidate answers the same training prompts, and the rewards choose.

A sum of task vectors can lose what one of its models alone has learned, and a few hundred rollouts show it.
So a candidate that lacks more than a stated share of a model's own gain in its reward, over the base, is
out, and of the rest the one with the largest sum of rewards, by the run's weights, is taken. The share is of
a gain, so it asks the same of a reward from 0 to 1 as of one from -3 to 3; the sum is what the run trains.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from smopd.config.merging import Merge, MergedModel
from smopd.merging.vectors import Method, Part

WHOLE, LEFT_OUT = Part(), Part(scale=0.0)
BASE = "base"
PLAIN = "plain sum"

Rewards = dict[str, float]
"""Mean reward by name."""


@dataclass(frozen=True)
class Candidate:
    """A start that the guard may choose."""

    name: str
    parts: tuple[Part, ...]
    """One a model."""
    method: Method = "sum"


@dataclass(frozen=True)
class Judged:
    """A candidate's rollouts, and what the guard says of them."""

    candidate: Candidate
    rewards: Rewards
    score: float
    """The rewards' sum by the run's weights."""
    lost: dict[str, float | None]
    """By model, the share of its own gain that the candidate lacks, negative where it has more; None where
    the model gained nothing."""
    out: str | None
    """Why it cannot be taken."""

    def row(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("candidate") | values


def given(merge: Merge) -> list[Candidate]:
    """Every choice of a scale, a share and what is left out, of each model: one where there is no guard."""
    choices = [
        [Part(*part) for part in product(each.scale, each.keep, each.leave_out)] for each in merge.models
    ]
    return [Candidate(_name(merge, parts), parts, merge.method) for parts in product(*choices)]


def candidates(merge: Merge) -> list[Candidate]:
    """The base, each model alone, their plain sum, and what the merge gives to choose from; none twice."""
    n = len(merge.models)
    found = [Candidate(BASE, (LEFT_OUT,) * n)]
    for i, each in enumerate(merge.models):
        found.append(Candidate(f"{each.model} alone", tuple(WHOLE if i == j else LEFT_OUT for j in range(n))))
    found.append(Candidate(PLAIN, (WHOLE,) * n))
    unique: dict[tuple[tuple[Part, ...], Method], Candidate] = {}
    for candidate in [*found, *given(merge)]:
        unique.setdefault((candidate.parts, candidate.method), candidate)
    return list(unique.values())


def _name(merge: Merge, parts: Sequence[Part]) -> str:
    shown = [
        " ".join(
            [each.model]
            + ([f"{part.keep:.3g}"] if part.keep < 1 else [])
            + ([f"x {part.scale:.3g}"] if part.scale != 1 else [])
            + ([f"without {part.leave_out}"] if part.leave_out else [])
        )
        for each, part in zip(merge.models, parts, strict=True)
    ]
    return " + ".join(shown) + ("" if merge.method == "sum" else f" ({merge.method})")


def judged(
    rows: Sequence[tuple[Candidate, Rewards]], models: Sequence[MergedModel], weights: Rewards
) -> tuple[list[Judged], Judged]:
    """The rows with the guard's verdicts, and the one that is taken: of those that are in the first with the
    largest score; where all are out the one that goes least over what it may lose.

    Args:
        rows: of `candidates`: the base, each model alone, the others.
        weights: the run's, by reward.
    """
    base, alone = rows[0][1], [rewards for _, rewards in rows[1 : 1 + len(models)]]
    found, excess = [], []
    for candidate, rewards in rows:
        lost: dict[str, float | None] = {}
        over: dict[str, float] = {}
        for model, own in zip(models, alone, strict=True):
            if model.reward is not None:
                gain = own[model.reward] - base[model.reward]
                lacks = own[model.reward] - rewards[model.reward]
                lost[model.model] = share = lacks / gain if gain > 0 else None
                worst = share if share is not None else math.inf if lacks > 0 else 0.0
                if model.may_lose is not None and worst > model.may_lose:
                    over[model.model] = worst - model.may_lose
        reason = "; ".join(f"lacks {_share(lost[name])} of what {name} gained" for name in over) or None
        score = math.fsum(weight * rewards[name] for name, weight in weights.items())
        found.append(Judged(candidate, rewards, score, lost, reason))
        excess.append(max(over.values(), default=0.0))
    best = min(range(len(found)), key=lambda i: (excess[i], -found[i].score))
    return found, found[best]


def _share(lost: float | None) -> str:
    return "some" if lost is None else f"{lost:.0%}"
