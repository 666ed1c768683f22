"""How a `merge` run combines its teachers, and the merge of weights that it may start from; no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from smopd.engine.settings import Section


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"got {value!r}, expected a regular expression ({error})") from None
    return value


Share = Annotated[float, Field(gt=0, le=1)]
Shares = Annotated[list[Share], BeforeValidator(_listed), Field(min_length=1)]
Pattern = Annotated[str, AfterValidator(_pattern)]
Patterns = Annotated[list[Pattern], BeforeValidator(_listed), Field(min_length=1)]


class MergedModel(Section):
    """A model whose change of the run's `init`, its task vector, goes into the sum."""

    model: str
    """An earlier run of this recipe, a path or hub id, or a LoRA adapter's folder."""
    keep: Shares = Field(default=[1.0])
    """The share of each tensor's changes that stays, the largest by magnitude; several are the guard's."""
    exclude: Patterns = Field(default=[""])
    """Tensors whose names match this pattern stay as in `init` (self_attn|embed); several are the guard's,
    and an empty one excludes none."""
    reward: str | None = None
    """The guard: the reward dimension that this model stands for."""
    max_regression: float | None = Field(default=None, ge=0)
    """The guard: the largest share of this model's own gain in its reward, over `init`, that a merge may
    lack; null is any."""


class Guard(Section):
    """Rollouts of training prompts that choose among the merges before the first step."""

    prompts: int = Field(default=64, ge=1)
    samples: int = Field(default=8, ge=1)
    """Responses a prompt, of each candidate."""


class Merge(Section):
    """How a run of the stage `merge` combines its teachers."""

    method: Literal["weights", "product", "published"] = "weights"
    """weights: start from a merge of the teachers' weights, then train without them (recommended); product:
    distil the product of what they changed; published: distil their mixture, as in the paper."""
    models: list[MergedModel] = Field(default=[])
    """weights: what is merged; none given: each teacher, with the guard's usual choices."""
    rule: Literal["sum", "ties", "ram"] = "sum"
    """weights: the sum of the changes; ties: of each entry, the mean of those with the elected sign; ram: the
    mean of all that changed it."""
    guard: Guard | None = Guard()
    """weights: null takes the merge as it is given."""

    def mistakes(self, rewards: Sequence[str]) -> list[str]:
        """What does not go together, a line each; `rewards` are the recipe's."""
        wrong = []
        names = [each.model for each in self.models]
        if len(set(names)) != len(names):
            wrong.append(f"models: must differ, got {names}")
        for i, each in enumerate(self.models):
            for name in ("keep", "exclude"):
                if self.guard is None and len(getattr(each, name)) > 1:
                    wrong.append(
                        f"models.{i}.{name}: got {getattr(each, name)}, expected one without a guard"
                    )
            if each.reward is not None and each.reward not in rewards:
                wrong.append(f"models.{i}.reward: {each.reward!r} is none of {list(rewards)}")
            if each.max_regression is not None and (each.reward is None or self.guard is None):
                missing = "guard" if self.guard is None else "reward"
                wrong.append(f"models.{i}.max_regression: needs the {missing}, expected both or neither")
        return wrong

    def choices(self) -> int:
        """How many merges there are to choose from."""
        return math.prod(len(each.keep) * len(each.exclude) for each in self.models)


USUAL_KEEP = [1.0, 0.5, 0.2, 0.05]
USUAL_EXCLUDE = ["", "self_attn"]
USUAL_MAX_REGRESSION = 0.5
"""Ours: what the shipped recipes give the guard (docs/merging.md)."""


def usual(model: str, reward: str, *, guarded: bool) -> MergedModel:
    """A teacher as `merge.models` has it where the recipe names none: whole without a guard."""
    if not guarded:
        return MergedModel(model=model, reward=reward)
    return MergedModel(
        model=model,
        reward=reward,
        keep=USUAL_KEEP,
        exclude=USUAL_EXCLUDE,
        max_regression=USUAL_MAX_REGRESSION,
    )
