"""The study's chapters in order: each reads finished runs, draws its figure and says what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from bench.study.finished import Chapter, Study
from bench.study.methods import conflict, curves, snips
from bench.study.sparsity import density, figure_1, signal
from bench.study.students import ablations, mass, profiles

CHAPTERS: Mapping[str, Callable[[Study, Path], Chapter | None]] = {
    function.__name__: function
    for function in (figure_1, curves, density, signal, mass, ablations, profiles, conflict, snips)
}
