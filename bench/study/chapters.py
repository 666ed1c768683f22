"""The study's chapters in order: each reads finished runs, draws its figure, has its table and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.study.finished import Study
from bench.study.merging import alone, merging
from bench.study.methods import conflict, training
from bench.study.page import Chapter
from bench.study.sparsity import density, figure_1, signal
from bench.study.students import ablations, mass, profiles

CHAPTERS: Mapping[str, Callable[[Study, Path], Chapter | None]] = {
    "figure_1": figure_1,
    "curves": partial(training, "curves"),
    "density": density,
    "signal": signal,
    "mass": mass,
    "ablations": ablations,
    "profiles": profiles,
    "conflict": partial(conflict, "base"),
    "conflict_moderate": partial(conflict, "moderate"),
    "snips": partial(training, "snips"),
    "merging": partial(merging, "merging"),
    "merging_snips": partial(merging, "merging_snips"),
    "merging_three": partial(merging, "merging_three"),
    "alone": alone,
}
