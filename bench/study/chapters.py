"""The study's chapters in order: each reads finished runs, draws its figure, has its table and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.study.finished import Study
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
    "conflict": conflict,
    "snips": partial(training, "snips"),
}
