"""Finished runs as the study's chapters read them, and what a chapter is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from bench.study.experiments import EXPERIMENTS
from bench.study.measures import Spread, cores, curve, final, finals, seconds, spread, take_off
from bench.study.verdicts import Verdict, differences, table
from smopd.config.cli import read_settings
from smopd.config.schedule import BASE
from smopd.config.settings import Settings
from smopd.report.tables import Row, heading, markdown

WINDOW = 5  # steps that a drawn curve is the trailing mean of
FEW = 3  # runs that a caption names where they are alike
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

    def table(self, columns: Sequence[str]) -> str:
        """Means and deviations of the held-out evaluations."""
        rows = []
        for run, label in self.labels.items():
            found = row(label, run, {column: final(self.folders, run, column) for column in columns})
            if found.values:
                rows.append(found)
        return markdown(rows, columns)

    def curves(self, metric: str) -> dict[str, list[tuple[int, Spread]]]:
        """A training metric of every run that has it, by label."""
        drawn = {label: curve(self.folders, run, metric, WINDOW) for run, label in self.labels.items()}
        del drawn["Base"]
        return {label: line for label, line in drawn.items() if line}

    def leader(self, runs: Sequence[str], column: str) -> str:
        """Which of the runs is highest, and what the seeds say of its distance to the next."""
        found = {run: value for run in runs if (value := final(self.folders, run, column)) is not None}
        if not found:
            return ""
        ranked = sorted(found, key=lambda run: found[run].mean, reverse=True)
        first = self.values(ranked[0], column)
        level = [run for run in ranked if self.values(run, column) == first]
        names = ", ".join(f"“{self.labels[run]}”" for run in level)
        if len(level) > FEW:
            names = f"{len(level)} of {len(found)} runs alike"
        said = f"{heading(column)} is highest for {names} ({found[ranked[0]]})"
        for run in [run for run in ranked if run not in level][:1]:
            if (ahead := spread(differences(first, self.values(run, column)))) is not None:
                said += f", {ahead:+} from the next, “{self.labels[run]}”"
        return said

    def budget(self) -> str:
        """Each run's own steps, and those of the runs that it needs."""
        return "Steps: " + "; ".join(
            f"“{self.labels[run]}” {own}" + (f" after {before} of the runs that it needs" if before else "")
            for run, (own, before) in budgets(self.settings).items()
        )

    def continues(self, run: str) -> bool:
        """Whether it starts where another run ended, so that when it took off says nothing of it."""
        return self.settings.runs[run].init in self.settings.runs

    def takeoffs(self) -> str:
        """When the format's sampled mean first reached one half, by run and seed."""
        found = []
        for run, label in self.labels.items():
            if run != BASE and not self.continues(run):
                reached = [take_off(folder, run, FORMAT) for folder in self.folders]
                found.append(f"“{label}” " + ", ".join("never" if at is None else str(at) for at in reached))
        return "First step with half of the samples in the exact format, by seed: " + "; ".join(found) + "."


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


@dataclass(frozen=True)
class Chapter:
    """A section of docs/study.md.

    Attributes:
        verdicts: on claims of the paper, by what the runs show.
        figure: the file's name, of an SVG beside the page.
        done: the runs that it reads.
        caption: what the figure shows, from the runs.
    """

    title: str
    text: str
    verdicts: Sequence[Verdict] = ()
    figure: str | None = None
    done: Sequence[Finished] = field(default=())
    caption: str = ""

    def markdown(self, page_seconds: float) -> str:
        """The section; `page_seconds` is what it took to make it of finished runs."""
        picture = f"![{self.title}](study/{self.figure})\n" if self.figure else ""
        caption = f"*{' '.join(filter(None, (self.caption, self._tally())))}*\n" if self.caption else ""
        parts = [f"## {self.title}\n", picture, caption, f"{self.text.rstrip()}\n", table(self.verdicts)]
        if self.done:
            parts.append(f"\n*{self._cost(page_seconds)}*")
        return "\n".join(part for part in parts if part) + "\n"

    def _tally(self) -> str:
        """What the claims came to, and which were contradicted."""
        if not self.verdicts:
            return ""
        agreeing = sum(verdict.answer == "agrees" for verdict in self.verdicts)
        against = "; ".join(verdict.claim for verdict in self.verdicts if verdict.answer == "contradicts")
        contradicted = f" Contradicted: {against}." if against else ""
        return f"Claims that agree: {agreeing} of {len(self.verdicts)}.{contradicted}"

    def _cost(self, page_seconds: float) -> str:
        counts = sorted({len(done.folders) for done in self.done})
        seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else plural(counts[0], "seed")
        folders = [folder for done in self.done for folder in done.folders]
        took = [seconds(folder) for folder in folders]
        known = [n for folder in folders if (n := cores(folder)) is not None]
        shared = ""
        if len(known) == len(folders):
            there = " or ".join(map(str, sorted(set(known))))
            minutes = sum(t / n for t, n in zip(took, known, strict=True)) / 60
            shared = f" ({minutes:.0f} minutes where {there} cores are kept busy)"
        return (
            f"{seeds}; {plural(len(took), 'job')} of together {sum(took) / 60:.0f} thread-minutes{shared}, "
            f"the longest {max(took) / 60:.0f}; {page_seconds:.0f} s for the chapter itself."
        )


def row(label: str, run: str, found: Mapping[str, Spread | None]) -> Row:
    """A table's row; a value of one seed, or of none, has no deviation."""
    known = {column: value for column, value in found.items() if value is not None}
    deviations = {column: value.deviation for column, value in known.items() if value.n > 1}
    return Row(label, run, {column: value.mean for column, value in known.items()}, deviations)


def paired(column: str, *which: tuple[Finished, str]) -> list[list[float | None]]:
    """A column of runs of several variants, over the seeds that all have, told by their folders' names."""
    by_seed = [
        dict(zip((folder.name for folder in done.folders), done.values(run, column), strict=True))
        for done, run in which
    ]
    shared = [seed for seed in by_seed[0] if all(seed in values for values in by_seed)]
    return [[values[seed] for seed in shared] for values in by_seed]


def extremes(values: Mapping[str, Spread]) -> str:
    """The lowest and the highest, with their labels, or how many are alike."""

    def named(end: Spread) -> str:
        alike = [label for label, value in values.items() if value == end]
        return f"{end} (“{alike[0]}”)" if len(alike) == 1 else f"{end} ({len(alike)} of {len(values)})"

    ranked = sorted(values.values(), key=lambda value: value.mean)
    return f"from {named(ranked[0])} to {named(ranked[-1])}"


def budgets(settings: Settings) -> dict[str, tuple[int, int]]:
    """Run -> its own steps, and those of the runs that it needs: its teachers and what it starts from."""
    needed: dict[str, set[str]] = {}
    own = {run: settings.resolved(run).loop.steps for run in settings.runs}
    for name, run in settings.runs.items():
        direct = {run.init} if run.init in own else set()
        if run.stage == "merge":
            direct |= {teacher.model for teacher in settings.resolved(name).teachers.models} & set(own)
        needed[name] = direct.union(*(needed[other] for other in direct))
    return {run: (own[run], sum(own[other] for other in needed[run])) for run in own}


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
