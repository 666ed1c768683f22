"""A run's first weights where they are a merge: chosen, by the guard where there is one, and written once."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from smopd.config.merging import Guard, Merge
from smopd.config.settings import Settings
from smopd.data.prompts import PromptSet, batch_indices
from smopd.engine import distributed
from smopd.engine.files import write_atomically
from smopd.engine.models.loading import load_tokenizer
from smopd.engine.types import Sampling
from smopd.merging.guard import Candidate, Rewards, candidates, given, judged
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
        todo = candidates(self.merge)
        done: dict[str, Rewards] = distributed.on_first(self._read)
        if missing := [each for each in todo if each.name not in done]:
            for name, rewards in self._scored(guard, missing):
                done[name] = rewards
                self._write({"rows": [{"name": each, "rewards": done[each]} for each in done]})
        rows, chosen = judged([(each, done[each.name]) for each in todo], self.merge.models, self.weights)
        facts = {"chosen": chosen.candidate.name, "rollouts": guard.prompts * guard.samples}
        self._write({**facts, "weights": self.weights, "rows": [row.row() for row in rows]})
        if chosen.out is not None and distributed.rank() == 0:
            log.warning(
                "%s: every start is out (may_lose); %s loses least too much",
                self.folder,
                chosen.candidate.name,
            )
        return chosen.candidate

    def _scored(self, guard: Guard, todo: list[Candidate]) -> Iterator[tuple[str, Rewards]]:
        """Each candidate's mean rewards, the same on every rank; the engine takes it as a policy."""
        settings = self.settings
        whole = settings.model_copy(update={"student": settings.student.model_copy(update={"lora": None})})
        engine = build.rollout_engine(whole, self.vectors.base.path, self.device, self.recipe)
        tokenizer = load_tokenizer(self.vectors.base.path)
        rewarder = Rewarder(self.pool, tokenizer, settings.scoring.max_unscorable_share)
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
        for number, each in enumerate(todo, 1):
            weights = self.vectors.merged(each.parts, each.method)
            engine.load_weights(self.vectors.with_tied(weights), number)
            found = means(names, answers(names, prompts, engine, rewarder, sampling))
            unscored = [name for name in names if found[name] is None]
            if unscored:
                raise ValueError(f"guard: {unscored[0]} could score no response of {each.name}")
            yield each.name, {name: found[name] or 0.0 for name in names}

    def _read(self) -> dict[str, Rewards]:
        file = self.folder / TABLE
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        return {row["name"]: row["rewards"] for row in rows}

    def _write(self, table: dict[str, Any]) -> None:
        if distributed.rank() == 0:
            write_atomically(self.folder / TABLE, json.dumps(table, indent=1).encode())
