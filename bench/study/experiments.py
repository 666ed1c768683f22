"""The experiments of the study: each has a recipe, the settings of its variants, and a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"
RATES = (0.0018, 0.0006, 0.0002)  # of the exact format in the demonstrations
LEARNING_RATES = (3e-4, 3e-3)  # besides the recipe's 1e-3
GROUPS = (4, 16)  # group sizes besides the recipe's 8, with the same number of rollouts per step


@dataclass(frozen=True)
class Experiment:
    """A recipe that runs once per seed and variant, with the settings of the variant."""

    recipe: str
    """Name of a file in `RECIPES`, without .yaml."""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"base": ()})
    """Name -> settings, as on the command line of smopd.train."""
    baseline: str = "gdpo"
    """The run with which the other runs are compared."""
    teachers: str | None = None
    """Name of an experiment whose runs of the same seed are the teachers, one per reward."""
    served: bool = False
    """Whether the teachers answer from servers, which need vLLM."""

    @property
    def path(self) -> Path:
        return RECIPES / f"{self.recipe}.yaml"


EXPERIMENTS = {
    "tuning": Experiment(
        "equal_cost", {f"lr_{rate:g}": ("--student.learning_rate", f"{rate:g}") for rate in LEARNING_RATES}
    ),
    "equal_cost": Experiment("equal_cost"),
    "rarity": Experiment(
        "rarity",
        {f"rate_{rate:g}": ("--warm_start.source.kwargs.format_rate", f"{rate:g}") for rate in RATES},
    ),
    "rarity_map": Experiment(
        "rarity",
        {
            f"rate_{rate:g}_{name}": ("--warm_start.source.kwargs.format_rate", f"{rate:g}", *settings)
            for rate in RATES
            for name, settings in {
                **{f"lr_{each:g}": ("--student.learning_rate", f"{each:g}") for each in LEARNING_RATES},
                **{
                    f"group_{each}": (
                        "--rollout.group_size",
                        f"{each}",
                        "--loop.prompts_per_step",
                        f"{512 // each}",
                    )
                    for each in GROUPS
                },
            }.items()
        },
    ),
    "more_compute": Experiment("more_compute", baseline="batch_balanced"),
    "conflict": Experiment("conflict"),
    "merging_snips": Experiment("merging_snips", baseline="sequential"),
    "wide_teachers": Experiment("wide_teachers", baseline="format_teacher"),
    "wide_students": Experiment("wide_students", baseline="batch_balanced", teachers="wide_teachers"),
    "wide_served": Experiment(
        "wide_served", baseline="smopd_paper_balanced", teachers="wide_teachers", served=True
    ),
    "ablations": Experiment("ablations", baseline="smopd_paper"),
}
