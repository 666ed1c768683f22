"""A run's first weights where they are a merge: chosen, by the guard where there is one, and written once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from smopd.config.merging import Guard, Merge
from smopd.config.settings import Settings
from smopd.data.prompts import PromptSet, batch_indices
from smopd.engine import distributed
from smopd.engine.files import write_atomically
from smopd.engine.models.loading import load_tokenizer
from smopd.engine.protocols import RolloutEngine
from smopd.engine.types import Sampling
from smopd.merging.guard import Candidate, Judged, Rewards, alone, best, given, judged, levels, nearest
from smopd.merging.vectors import TaskVectors
from smopd.record.progress import say
from smopd.rewards.pool import RewardPool
from smopd.run import build
from smopd.step.held_out import answers, means
from smopd.step.rewards import Rewarder

log = logging.getLogger(__name__)
SEED_OFFSET = 2_000_003  # ours: other prompts and draws than those of training and of evaluation
TABLE = "merge.json"


@dataclass(frozen=True)
class Starter:
    """Makes the first weights of one run, and keeps them in its folder.

    Args:
        settings: of the run, resolved; `recipe` those of all runs.
        weights: the run's, by reward.
    """

    settings: Settings
    recipe: Settings
    merge: Merge
    vectors: TaskVectors
    weights: dict[str, float]
    prompts: PromptSet
    pool: RewardPool
    device: torch.device
    folder: Path

    def start(self) -> str:
        """The folder of the first weights, made where they are not there yet; a collective call."""
        start = self.folder / "start"
        if not distributed.on_first(start.exists):
            chosen = given(self.merge)[0] if self.merge.guard is None else self.guarded(self.merge.guard)
            if distributed.rank() == 0:
                say(f"{self.folder.name} starts from {chosen.name}")
            self.vectors.write(start, chosen.parts, chosen.method)
        return str(start)

    def guarded(self, guard: Guard) -> Candidate:
        """The guard's choice. What has been scored stands in merge.json, so a killed guard goes on."""
        done: dict[str, Rewards] = distributed.on_first(self._read)
        asked: list[Candidate] = []
        score = self._scorer(guard)
        chosen: Judged | None = None
        for level in (alone(self.merge), *levels(self.merge)):
            for each in level:
                if each.name not in done:
                    done[each.name] = score(each)
                    self._write({"rows": [{"name": name, "rewards": done[name]} for name in done]})
            asked += level
            rows = judged([(each, done[each.name]) for each in asked], self.merge.models, self.weights)
            chosen = best(rows[-len(level) :]) if len(asked) > len(level) else None
            if chosen is not None:
                break
        else:
            chosen = nearest(rows)
        if chosen.excess > 0 and distributed.rank() == 0:
            log.warning("%s: every start loses more than may_lose; the nearest is taken", self.folder)
        facts = {"chosen": chosen.candidate.name, "rollouts": guard.prompts * guard.samples}
        self._write({**facts, "weights": self.weights, "rows": [row.row() for row in rows]})
        return chosen.candidate

    def _scorer(self, guard: Guard) -> Callable[[Candidate], Rewards]:
        """What gives a candidate's mean rewards, the same on every rank; the engine takes it as a policy."""
        settings = self.settings
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
        rewarder = Rewarder(
            self.pool, load_tokenizer(self.vectors.base.path), settings.scoring.max_unscorable_share
        )

        @cache
        def engine() -> RolloutEngine:
            whole = settings.student.model_copy(update={"lora": None})
            own = settings.model_copy(update={"student": whole})
            return build.rollout_engine(own, self.vectors.base.path, self.device, self.recipe)

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

    def _write(self, table: dict[str, Any]) -> None:
        if distributed.rank() == 0:
            write_atomically(self.folder / TABLE, json.dumps(table, indent=1).encode())
