"""Which merge a run starts from: the candidates answer the same training prompts, and the rewards choose.

A sum of task vectors can lose what one of its models alone has learned, and a few hundred rollouts show it:
who lacks more than a stated share of a model's own gain in its reward, over the base, is out. The share is of
a gain, so it asks the same of a reward from 0 to 1 as of one from -3 to 3.

Trimming brings back what a sum lost, and costs what only training shows (docs/merging.md): so the whole sums
are tried first, and less is kept only where none of them is in. Among equally whole ones the largest sum of
rewards, by the run's weights, wins: it is what the run trains.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from smopd.config.settings import Guard, Merge, MergedModel, Settings
from smopd.data.prompts import PromptSet, batch_indices
from smopd.engine import distributed
from smopd.engine.files import write_atomically
from smopd.engine.models.loading import load_tokenizer
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Sampling
from smopd.merging.vectors import Method, Part, TaskVectors
from smopd.record.progress import say
from smopd.rewards.pool import RewardPool
from smopd.step.held_out import answers, means
from smopd.step.rewards import Rewarder

log = logging.getLogger(__name__)
SEED_OFFSET = 2_000_003  # ours: other prompts and draws than those of training and of evaluation
TABLE = "merge.json"
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
    excess: float
    """What it lost beyond what it may, the largest over the models; 0 where the guard lets it in."""
    out: str | None
    """Why it cannot be taken."""

    def row(self) -> dict[str, Any]:
        """As merge.json has it; the excess may be infinite."""
        values = {name: value for name, value in asdict(self).items() if name != "excess"}
        return values.pop("candidate") | values


def given(merge: Merge) -> list[Candidate]:
    """Every choice of a share and of what is excluded, of each model: one where there is no guard."""
    choices = [[Part(*part) for part in product([1.0], each.keep, each.exclude)] for each in merge.models]
    return [Candidate(_name(merge, parts), parts, merge.rule) for parts in product(*choices)]


def alone(merge: Merge) -> list[Candidate]:
    """The base and each model whole: what the guard measures the sums by."""
    n = len(merge.models)
    parts = [tuple(WHOLE if i == j else LEFT_OUT for j in range(n)) for i in range(n)]
    names = [f"{each.model} alone" for each in merge.models]
    return [Candidate(BASE, (LEFT_OUT,) * n), *map(Candidate, names, parts)]


def levels(merge: Merge) -> list[list[Candidate]]:
    """The sums, from whole ones to the most trimmed: those of a level keep the same share of each model.

    The plain sum is always among them; none stands twice.
    """
    seen = {(each.parts, each.method) for each in alone(merge)}
    found: dict[tuple[float, ...], list[Candidate]] = {}
    for each in [Candidate(PLAIN, (WHOLE,) * len(merge.models)), *given(merge)]:
        if (each.parts, each.method) not in seen:
            seen.add((each.parts, each.method))
            found.setdefault(tuple(part.keep for part in each.parts), []).append(each)
    return [found[kept] for kept in sorted(found, key=math.fsum, reverse=True)]


def _name(merge: Merge, parts: Sequence[Part]) -> str:
    shown = [
        " ".join(
            [each.model]
            + ([f"{part.keep:.3g}"] if part.keep < 1 else [])
            + ([f"x {part.scale:.3g}"] if part.scale != 1 else [])
            + ([f"without {part.exclude}"] if part.exclude else [])
        )
        for each, part in zip(merge.models, parts, strict=True)
    ]
    return " + ".join(shown) + ("" if merge.rule == "sum" else f" ({merge.rule})")


def judged(
    rows: Sequence[tuple[Candidate, Rewards]], models: Sequence[MergedModel], weights: Rewards
) -> list[Judged]:
    """The guard's verdicts. A sum is in where it loses no more than it may of each model's gain, and has no
    less than the base and each model have that are in.

    Args:
        rows: of `alone`, then of sums.
        weights: the run's, by reward.
    """
    first = rows[: 1 + len(models)]
    base, own = first[0][1], [rewards for _, rewards in first[1:]]
    found: list[Judged] = []
    for candidate, rewards in rows:
        lost: dict[str, float | None] = {}
        over: dict[str, float] = {}
        for model, best in zip(models, own, strict=True):
            if model.reward is None:
                continue
            gain = best[model.reward] - base[model.reward]
            lacks = best[model.reward] - rewards[model.reward]
            lost[model.model] = share = lacks / gain if gain > 0 else None
            worst = share if share is not None else math.inf if lacks > 0 else 0.0
            if model.max_regression is not None and worst > model.max_regression:
                over[model.model] = worst - model.max_regression
        out = "; ".join(f"lacks {_share(lost[name])} of what {name} gained" for name in over) or None
        score = math.fsum(weight * rewards[name] for name, weight in weights.items())
        better = [each for each in found[: len(first)] if each.out is None and each.score > score]
        if out is None and len(found) >= len(first) and better:
            out = f"has less than {better[0].candidate.name}"
        found.append(Judged(candidate, rewards, score, lost, max(over.values(), default=0.0), out))
    return found


def best(rows: Sequence[Judged]) -> Judged | None:
    """The first of those that are in with the largest score."""
    return max((row for row in rows if row.out is None), key=lambda row: row.score, default=None)


def nearest(rows: Sequence[Judged]) -> Judged:
    """Where no sum is in: the one that goes least over what it may lose, and of equal ones the best."""
    return min(rows, key=lambda row: (row.excess, -row.score))


def _share(lost: float | None) -> str:
    return "some" if lost is None else f"{lost:.0%}"


@dataclass(frozen=True)
class Starter:
    """Makes the first weights of one run, by the guard where there is one, and keeps them in its folder.

    Args:
        settings: of the run, resolved.
        weights: the run's, by reward.
        make_engine: samples from a full model of the base's architecture.
    """

    settings: Settings
    merge: Merge
    vectors: TaskVectors
    weights: Rewards
    prompts: PromptSet
    pool: RewardPool
    make_engine: Callable[[], RolloutEngine]
    folder: Path

    def start(self) -> str:
        """The folder of the first weights, made where they are not there yet; a collective call."""
        start = self.folder / "start"
        if not distributed.on_rank0(start.exists):
            chosen = given(self.merge)[0] if self.merge.guard is None else self.guarded(self.merge.guard)
            if distributed.rank() == 0:
                say(f"{self.folder.name} starts from {chosen.name}")
            self.vectors.write(start, chosen.parts, chosen.method)
        return str(start)

    def guarded(self, guard: Guard) -> Candidate:
        """The guard's choice. What has been scored stands in merge.json, so a killed guard goes on."""
        done: dict[str, Rewards] = distributed.on_rank0(self._read)
        asked: list[Candidate] = []
        score = self._scorer(guard)
        chosen: Judged | None = None
        for level in (alone(self.merge), *levels(self.merge)):
            for each in level:
                if each.name not in done:
                    done[each.name] = score(each)
                    self._write(rows=[{"name": name, "rewards": done[name]} for name in done])
            asked += level
            rows = judged([(each, done[each.name]) for each in asked], self.merge.models, self.weights)
            chosen = best(rows[-len(level) :]) if len(asked) > len(level) else None
            if chosen is not None:
                break
        else:
            chosen = nearest(rows)
        if chosen.excess > 0 and distributed.rank() == 0:
            log.warning("%s: every start loses more than max_regression; the nearest is taken", self.folder)
        self._write(
            chosen=chosen.candidate.name,
            rollouts=guard.prompts * guard.samples,
            weights=self.weights,
            rows=[row.row() for row in rows],
        )
        return chosen.candidate

    def _scorer(self, guard: Guard) -> Callable[[Candidate], Rewards]:
        """What gives a candidate's mean rewards, the same on every rank; the engine takes it as a policy."""
        settings, engine = self.settings, cache(self.make_engine)
        names = [reward.name for reward in settings.rewards]
        seed = settings.seed + SEED_OFFSET
        prompts = [self.prompts[i] for i in batch_indices(len(self.prompts), guard.prompts, 0, seed)]
        sampling = Sampling(
            n=guard.samples,
            temperature=settings.rollout.temperature,
            top_p=settings.rollout.top_p,
            max_new_tokens=settings.rollout.max_new_tokens,
            seed=seed,
        )
        tokenizer = load_tokenizer(self.vectors.base.path)
        rewarder = Rewarder(self.pool, tokenizer, settings.scoring.max_unscorable_share)

        def score(candidate: Candidate) -> Rewards:
            weights = self.vectors.merged(candidate.parts, candidate.method)
            engine().load_weights(self.vectors.with_tied(weights), engine().policy_version + 1)
            found = means(names, answers(names, prompts, engine(), rewarder, sampling))
            if unscored := [name for name in names if found[name] is None]:
                raise ValueError(f"guard: {unscored[0]} could score no response of {candidate.name}")
            return {name: found[name] or 0.0 for name in names}

        return score

    def _read(self) -> dict[str, Rewards]:
        file = self.folder / TABLE
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        return {row["name"]: row["rewards"] for row in rows}

    def _write(self, **table: Any) -> None:
        if distributed.rank() == 0:
            write_atomically(self.folder / TABLE, json.dumps(table, indent=1).encode())
