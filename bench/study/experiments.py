"""What the study runs: recipes, the settings that each is run with, and how large."""

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
    """Folder name -> settings as on the command line of smopd.train."""

    @property
    def path(self) -> Path:
        return RECIPES / f"{self.recipe}.yaml"


def _profile(share: float, first: str = "accuracy", second: str = "format") -> tuple[str, ...]:
    own, other = share, round(1 - share, 4)
    return (
        *(f"--runs.{first}_teacher.reward_weights", f"[{own}, {other}]"),
        *(f"--runs.{second}_teacher.reward_weights", f"[{other}, {own}]"),
    )


EXPERIMENTS = {
    experiment.recipe: experiment
    for experiment in (
        Experiment("curves"),
        Experiment(
            "density",
            {f"rate_{rate:g}": ("--warm_start.source.kwargs.format_rate", f"{rate:g}") for rate in RATES},
        ),
        Experiment("ablations"),
        Experiment("profiles", {f"share_{share:g}": _profile(share) for share in SHARES}),
        Experiment("conflict", {"base": (), "moderate": _profile(0.7, "coverage", "brevity")}),
        Experiment("snips"),
        Experiment("merging"),
        Experiment("merging_three"),
        Experiment("merging_snips"),
    )
}

SIZES: Mapping[str, tuple[str, ...]] = {
    "cpu": (),
    "gpu": (
        "--loop.prompts_per_step",
        "512",
        "--model.kwargs.hidden_size",
        "256",
        "--model.kwargs.layers",
        "4",
    ),
}
"""Settings of every experiment by size: `cpu` is the recipes' own."""
