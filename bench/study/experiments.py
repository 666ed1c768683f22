"""What the study runs: each recipe with the settings of its variants, and how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
RATES = (0.0005, 0.0018, 0.005, 0.015, 0.05)
"""Of the exact format in the demonstrations."""
SHARES = (0.6, 0.7, 0.8, 0.9, 0.95)
"""Of a teacher's own reward in its profile."""


@dataclass(frozen=True)
class Experiment:
    """One recipe, run once a seed with the settings of each of its variants."""

    recipe: str
    """A file of `RECIPES`."""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"base": ()})
    """Name -> settings as on the command line of smopd.train."""
    baselines: tuple[str, ...] = ("sequential",)
    """The runs that others are compared with; each seed takes the best of these."""

    @property
    def path(self) -> Path:
        return RECIPES / f"{self.recipe}.yaml"


def _profile(share: float, first: str = "accuracy", second: str = "format") -> tuple[str, ...]:
    own, other = share, round(1 - share, 4)
    return (
        *(f"--runs.{first}_teacher.reward_weights", f"[{own}, {other}]"),
        *(f"--runs.{second}_teacher.reward_weights", f"[{other}, {own}]"),
    )


_LEARNING_RATES = {f"lr_{rate:g}": ("--student.learning_rate", f"{rate:g}") for rate in (3e-4, 1e-3, 3e-3)}
_RATES = {f"rate_{rate:g}": ("--warm_start.source.kwargs.format_rate", f"{rate:g}") for rate in RATES}
_PROFILES = {f"share_{share:g}": _profile(share) for share in SHARES}
_CONFLICT = {"base": (), "moderate": _profile(0.7, "coverage", "brevity")}

EXPERIMENTS = {
    "tuning": Experiment("equal_cost", _LEARNING_RATES, baselines=("gdpo",)),
} | {
    experiment.recipe: experiment
    for experiment in (
        Experiment("equal_cost", baselines=("gdpo",)),
        Experiment("curves"),
        Experiment("density", _RATES),
        Experiment("ablations", baselines=("smopd_paper",)),
        Experiment("profiles", _PROFILES, baselines=("smopd_paper",)),
        Experiment("conflict", _CONFLICT, baselines=("sequential_coverage", "sequential_brevity")),
        Experiment("snips"),
        Experiment("merging"),
        Experiment("merging_three", baselines=("sequential_two",)),
        Experiment("merging_snips"),
    )
}
