"""Finished runs as the study's chapters read them, and what a chapter is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from smopd.cli import read_settings
from smopd.config import Settings
from smopd.report.tables import Row, markdown
from smopd.runs import BASE
from smopd.study.experiments import EXPERIMENTS
from smopd.study.measures import Spread, curve, final, finals, seconds, take_off
from smopd.study.verdicts import Verdict, table

WINDOW = 5  # steps that a drawn curve is the trailing mean of
FORMAT = "reward/format/mean"


@dataclass(frozen=True)
class Finished:
    """One variant's finished seeds."""

    experiment: str
    folders: list[Path]

    @cached_property
    def settings(self) -> Settings:
        """Of the recipe, without a variant's."""
        return read_settings(str(EXPERIMENTS[self.experiment].path))

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

    def takeoffs(self) -> str:
        """When the format's sampled mean first reached one half, by run and seed."""
        found = []
        for run, label in self.labels.items():
            if run != BASE:
                reached = [take_off(folder, run, FORMAT) for folder in self.folders]
                found.append(f"{label}: " + ", ".join("never" if at is None else str(at) for at in reached))
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
    """

    title: str
    text: str
    verdicts: Sequence[Verdict] = ()
    figure: str | None = None
    done: Sequence[Finished] = field(default=())

    def markdown(self, page_seconds: float) -> str:
        """The section; `page_seconds` is what it took to make it of finished runs."""
        picture = f"![{self.title}](study/{self.figure})\n" if self.figure else ""
        parts = [f"## {self.title}\n", picture, f"{self.text.rstrip()}\n", table(self.verdicts)]
        if self.done:
            parts.append(f"\n*{self._cost(page_seconds)}*")
        return "\n".join(part for part in parts if part) + "\n"

    def _cost(self, page_seconds: float) -> str:
        counts = sorted({len(done.folders) for done in self.done})
        seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else plural(counts[0], "seed")
        took = [seconds(folder) for done in self.done for folder in done.folders]
        return (
            f"{seeds}; {plural(len(took), 'job')} of together {sum(took) / 60:.0f} minutes, the longest "
            f"{max(took) / 60:.0f}; {page_seconds:.0f} s for the chapter itself."
        )


def row(label: str, run: str, found: Mapping[str, Spread | None]) -> Row:
    """A table's row; a value of one seed, or of none, has no deviation."""
    known = {column: value for column, value in found.items() if value is not None}
    deviations = {column: value.deviation for column, value in known.items() if value.n > 1}
    return Row(label, run, {column: value.mean for column, value in known.items()}, deviations)


def plural(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"
