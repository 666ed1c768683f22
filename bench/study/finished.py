"""Finished runs as the study's chapters read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from bench.study.experiments import EXPERIMENTS
from bench.study.measures import Spread, curve, final, finals, mean_of, spread, take_off
from smopd.config.cli import read_settings
from smopd.config.merging import models_of
from smopd.config.schedule import BASE
from smopd.config.settings import Settings

WINDOW = 5  # steps that a drawn curve is the trailing mean of
FORMAT = "reward/format/mean"
KINDS = {"greedy": "greedy", "sampled": "sampled, ours"}
"""Decodings of the held-out evaluation -> how a claim names them: the paper's is greedy."""


@dataclass(frozen=True)
class Finished:
    """One variant's finished seeds."""

    experiment: str
    folders: list[Path]

    @cached_property
    def settings(self) -> Settings:
        """As run, in the first seed's folder; the recipe's where none is noted."""
        noted = [path for folder in self.folders if (path := folder / "config.yaml").exists()]
        return read_settings(str(noted[0] if noted else EXPERIMENTS[self.experiment].path))

    @property
    def labels(self) -> dict[str, str]:
        """Run -> label, the base first, in the recipe's order."""
        return {BASE: "Base"} | {name: run.label or name for name, run in self.settings.runs.items()}

    def of_stage(self, *stages: str) -> list[str]:
        """The runs of these stages."""
        return [name for name, run in self.settings.runs.items() if run.stage in stages]

    def values(self, run: str, column: str) -> list[float | None]:
        """A column of the held-out evaluation, by seed."""
        return finals(self.folders, run, column)

    def mean(self, run: str, metric: str) -> Spread | None:
        """A training metric's mean over the steps, over the seeds."""
        return spread([mean_of(folder / run, metric) for folder in self.folders])

    def table(
        self, columns: Sequence[str], more: Mapping[str, Mapping[str, object]] | None = None
    ) -> tuple[list[str], list[list[object]]]:
        """Header and rows, a run a row: its steps, other columns (name -> run -> cell), held-out means."""
        steps, more = budgets(self.settings), more or {}
        rows: list[list[object]] = []
        for run, label in self.labels.items():
            ended = [final(self.folders, run, column) for column in columns]
            if any(ended):
                others = [cells.get(run) for cells in more.values()]
                rows.append([label, steps.get(run), *others, *ended])
        return ["run", "steps", *more, *columns], rows

    def curves(self, metric: str) -> dict[str, list[tuple[int, Spread]]]:
        """A training metric of every run that has it, by label."""
        drawn = {label: curve(self.folders, run, metric, WINDOW) for run, label in self.labels.items()}
        del drawn["Base"]
        return {label: line for label, line in drawn.items() if line}

    def continues(self, run: str) -> bool:
        """Whether it starts where another run ended, so that when it took off says nothing of it."""
        return any(start in self.settings.runs for start in models_of(self.settings.runs[run].init))

    def takeoffs(self) -> dict[str, str]:
        """When the format's sampled mean first reached one half, by run: a step or "never" for each seed."""
        found = {}
        for run in self.settings.runs:
            if not self.continues(run):
                reached = [take_off(folder, run, FORMAT) for folder in self.folders]
                found[run] = ", ".join("never" if at is None else str(at) for at in reached)
        return found

    @property
    def facts(self) -> dict[str, object]:
        """What a chapter's note says of the settings."""
        kwargs = self.settings.warm_start.source.kwargs if self.settings.warm_start else {}
        return {
            "prompts": self.settings.loop.prompts_per_step,
            "rollouts": self.settings.rollout.group_size,
            "samples": self.settings.evaluation.samples,
            "rate": f"{kwargs['format_rate']:.2%}" if "format_rate" in kwargs else "an unknown share",
        }


@dataclass(frozen=True)
class Study:
    """The finished jobs' folders, by experiment and variant, in the order of their seeds."""

    folders: Mapping[tuple[str, str], list[Path]]

    def finished(self, experiment: str, variant: str = "base") -> Finished:
        return Finished(experiment, self.folders.get((experiment, variant), []))

    def variants(self, experiment: str) -> dict[str, Finished]:
        """Those of an experiment that have a finished seed."""
        every = {variant: self.finished(experiment, variant) for variant in EXPERIMENTS[experiment].variants}
        return {variant: done for variant, done in every.items() if done.folders}


def paired(column: str, *which: tuple[Finished, str]) -> list[list[float | None]]:
    """A column of runs of several variants, over the seeds that all have, told by their folders' names."""
    by_seed = [
        dict(zip((folder.name for folder in done.folders), done.values(run, column), strict=True))
        for done, run in which
    ]
    shared = [seed for seed in by_seed[0] if all(seed in values for values in by_seed)]
    return [[values[seed] for seed in shared] for values in by_seed]


class Budget(NamedTuple):
    """A run's own steps, and those of the runs that it needs: its teachers and what it starts from."""

    own: int
    needed: int
    critical_path: int
    """Steps that have to be taken one after the other; teachers train side by side."""

    @property
    def total(self) -> int:
        return self.own + self.needed

    def __str__(self) -> str:
        return f"{self.own} + {self.needed}" if self.needed else str(self.own)


def budgets(settings: Settings) -> dict[str, Budget]:
    """The steps of every run."""
    needed: dict[str, set[str]] = {}
    longest: dict[str, int] = {}
    own = {run: settings.resolved(run).loop.steps for run in settings.runs}
    for name, run in settings.runs.items():
        direct = set(models_of(run.init)) & set(own)
        if run.stage == "merge":
            direct |= {teacher.model for teacher in settings.resolved(name).teachers.models} & set(own)
        needed[name] = direct.union(*(needed[other] for other in direct))
        longest[name] = own[name] + max((longest[other] for other in direct), default=0)
    return {run: Budget(own[run], sum(own[other] for other in needed[run]), longest[run]) for run in own}


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
