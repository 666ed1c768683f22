"""The guard chooses the weight merge from which a run starts, by its rewards on training prompts.

A model's gain is the increase of its own reward over the base. The guard rejects a merge that loses more than
`max_regression` of a model's gain. Trimming recovers a lost reward, but it hurts later training
(docs/merging.md). The guard therefore tries trimmed merges only if it rejects all others. Among the accepted
merges, it chooses the one with the largest weighted sum of rewards.
"""

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
from smopd.engine.files import read_json, write_atomically
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Sampling
from smopd.merging.vectors import Part, TaskVectors
from smopd.record.progress import say
from smopd.step.conversation import Conversations
from smopd.step.held_out import answers, means
from smopd.step.rewards import Rewarder

log = logging.getLogger(__name__)
SEED_OFFSET = 2_000_003  # ours: separates the guard's draws from those of training and evaluation
WHOLE, LEFT_OUT = Part(), Part(scale=0.0)

Rewards = dict[str, float]  # mean of each reward, by its name


@dataclass(frozen=True)
class Candidate:
    """A candidate for the start of a run, with one Part per model."""

    name: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Judged:
    """A candidate's rewards and the guard's verdict."""

    candidate: Candidate
    rewards: Rewards
    score: float
    """The sum of the rewards, weighted as in the run."""
    lost: dict[str, float | None]
    """Model -> the share of its gain that the candidate lacks. None means that the model gained nothing."""
    excess: float
    """Largest excess of a model's loss over its max_regression, or 0 if no loss exceeds it."""
    out: str | None
    """Why the candidate is rejected, or None if it is accepted."""

    def row(self) -> dict[str, Any]:
        """Return the row of merge.json. It omits `excess`, which may be infinite."""
        values = asdict(self)
        del values["excess"]
        return values.pop("candidate") | values


def given(merge: Merge) -> list[Candidate]:
    """Return all combinations of the models' `keep` and `exclude`. Without a guard, there is only one."""
    pairs = [product(each.keep, each.exclude) for each in merge.models]
    choices = [[Part(keep=keep, exclude=exclude) for keep, exclude in each] for each in pairs]
    return [Candidate(_name(merge, parts), parts) for parts in product(*choices)]


def alone(merge: Merge) -> list[Candidate]:
    """Return the guard's baselines: the base, and each model alone."""
    n = len(merge.models)
    parts = [tuple(WHOLE if i == j else LEFT_OUT for j in range(n)) for i in range(n)]
    names = [f"{each.model} alone" for each in merge.models]
    return [Candidate("base", (LEFT_OUT,) * n), *map(Candidate, names, parts)]


def levels(merge: Merge) -> list[list[Candidate]]:
    """Return the plain sum and the sums of `given`, once each, in groups from untrimmed to most trimmed."""
    seen = {each.parts for each in alone(merge)}
    found: dict[tuple[float, ...], list[Candidate]] = {}
    for each in [Candidate("plain sum", (WHOLE,) * len(merge.models)), *given(merge)]:
        if each.parts not in seen:
            seen.add(each.parts)
            found.setdefault(tuple(part.keep for part in each.parts), []).append(each)
    return [found[kept] for kept in sorted(found, key=math.fsum, reverse=True)]


def _name(merge: Merge, parts: Sequence[Part]) -> str:
    shown = []
    for each, part in zip(merge.models, parts, strict=True):
        share = f" (keep {part.keep})" if part.keep < 1 else ""
        without = f" without {part.exclude}" if part.exclude else ""
        shown.append(each.model + share + without)
    return " + ".join(shown)


def judged(
    rows: Sequence[tuple[Candidate, Rewards]], models: Sequence[MergedModel], weights: Rewards
) -> list[Judged]:
    """Return the guard's verdict on each of `rows`, which are the candidates of `alone`, followed by sums.

    A sum is accepted if it loses at most max_regression of each model's gain and scores at least as high as
    every accepted baseline. weights: the run's weight of each reward.
    """
    n_alone = 1 + len(models)
    base, *own = [rewards for _, rewards in rows[:n_alone]]
    found: list[Judged] = []
    for candidate, rewards in rows:
        lost: dict[str, float | None] = {}
        reasons, excess = [], 0.0
        for model, best in zip(models, own, strict=True):
            if model.reward is None:
                continue
            gain = best[model.reward] - base[model.reward]
            lacks = best[model.reward] - rewards[model.reward]
            share = lacks / gain if gain > 0 else math.inf if lacks > 0 else 0.0
            lost[model.model] = share if gain > 0 else None
            if model.max_regression is not None and share > model.max_regression:
                excess = max(excess, share - model.max_regression)
                shown = f"{share:.0%}" if gain > 0 else "some"
                reasons.append(f"lacks {shown} of what {model.model} gained")
        score = math.fsum(weight * rewards[name] for name, weight in weights.items())
        if not reasons and len(found) >= n_alone:
            better = [each for each in found[:n_alone] if each.out is None and each.score > score]
            reasons = [f"scores less than {each.candidate.name}" for each in better[:1]]
        found.append(Judged(candidate, rewards, score, lost, excess, "; ".join(reasons) or None))
    return found


def best(rows: Sequence[Judged]) -> Judged | None:
    """Return the accepted row with the largest score, or None if there is none. The first row wins a tie."""
    return max((row for row in rows if row.out is None), key=lambda row: row.score, default=None)


def nearest(rows: Sequence[Judged]) -> Judged:
    """Return the row with the least excess, for use if no sum is accepted. A larger score wins a tie."""
    return min(rows, key=lambda row: (row.excess, -row.score))


@dataclass(frozen=True)
class Starter:
    """Writes a run's initial weights. `make_engine` returns a rollout engine for the base's architecture."""

    settings: Settings
    merge: Merge
    vectors: TaskVectors
    weights: Rewards
    prompts: PromptSet
    rewarder: Rewarder
    conversations: Conversations | None
    make_engine: Callable[[], RolloutEngine]
    folder: Path

    def start(self) -> str:
        """Write the initial weights if needed, and return their folder. This is a collective call."""
        start = self.folder / "start"
        if not distributed.on_rank0(start.exists):
            chosen = given(self.merge)[0] if self.merge.guard is None else self.guarded(self.merge.guard)
            if distributed.rank() == 0:
                say(f"{self.folder.name} starts from {chosen.name}")
            self.vectors.write(start, chosen.parts)
        return str(start)

    def guarded(self, guard: Guard) -> Candidate:
        """Return the guard's choice. merge.json stores the rewards, so that a killed guard can resume."""
        done: dict[str, Rewards] = distributed.on_rank0(self._read)
        score = self._scorer(guard)
        asked: list[Candidate] = []
        for level in (alone(self.merge), *levels(self.merge)):
            for each in level:
                if each.name not in done:
                    done[each.name] = score(each)
                    self._write(rows=[{"name": name, "rewards": done[name]} for name in done])
            asked += level
            rows = judged([(each, done[each.name]) for each in asked], self.merge.models, self.weights)
            chosen = best(rows[-len(level) :])
            if chosen is not None and len(asked) > len(level):  # the baselines are the first level
                break
        else:
            chosen = nearest(rows)
        if chosen.excess > 0 and distributed.rank() == 0:
            text = "every start loses more than max_regression; taking the one that loses least"
            log.warning("%s: %s", self.folder, text)
        table = {"rollouts": guard.prompts * guard.samples, "weights": self.weights}
        self._write(chosen=chosen.candidate.name, **table, rows=[row.row() for row in rows])
        return chosen.candidate

    def _scorer(self, guard: Guard) -> Callable[[Candidate], Rewards]:
        """Return a function from a candidate to its mean rewards, which are equal on all ranks."""
        settings, engine = self.settings, cache(self.make_engine)
        names = [reward.name for reward in settings.rewards]
        seed = settings.seed + SEED_OFFSET
        prompts = [self.prompts[i] for i in batch_indices(len(self.prompts), guard.prompts, 0, seed)]
        most, temperature = settings.rollout.max_new_tokens, settings.rollout.temperature
        sampling = Sampling(guard.samples, temperature, max_new_tokens=most, seed=seed)

        def score(candidate: Candidate) -> Rewards:
            weights = self.vectors.merged(candidate.parts)
            engine().load_weights(self.vectors.with_tied(weights), engine().policy_version + 1)
            answered = answers(prompts, engine(), self.rewarder, sampling, self.conversations)
            found = means(names, answered)
            if unscored := [name for name in names if found[name] is None]:
                raise ValueError(f"guard: {unscored[0]} could score no response of {candidate.name}")
            return {name: found[name] or 0.0 for name in names}

        return score

    def _read(self) -> dict[str, Rewards]:
        file = self.folder / "merge.json"
        rows = read_json(file, rows=list)["rows"] if file.exists() else []
        return {row["name"]: row["rewards"] for row in rows}

    def _write(self, **table: Any) -> None:
        if distributed.rank() == 0:
            write_atomically(self.folder / "merge.json", json.dumps(table, indent=1).encode())
