"""`init: {merge: ...}`: a run that starts from a sum of what others changed of their base. Loads no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag

from smopd.engine.settings import Section


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


Share = Annotated[float, Field(gt=0, le=1)]
Shares = Annotated[list[Share], BeforeValidator(_listed), Field(min_length=1)]
Factors = Annotated[list[float], BeforeValidator(_listed), Field(min_length=1)]


def _pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"got {value!r}, expected a regular expression ({error})") from None
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]
Patterns = Annotated[list[Pattern], BeforeValidator(_listed), Field(min_length=1)]


class MergedModel(Section):
    """A model whose change of the base, its task vector, goes into the sum."""

    model: str
    """An earlier run of this recipe, a path or hub id, or a LoRA adapter's folder."""
    scale: Factors = Field(default=[1.0])
    """Of its change; several are the guard's to choose from."""
    keep: Shares = Field(default=[1.0])
    """The share of each tensor's changes that stays, the largest by magnitude; several as well."""
    leave_out: Patterns = Field(default=[""])
    """Tensors whose names match this pattern stay the base's (self_attn|embed); several are the guard's, and
    an empty one leaves none out."""
    reward: str | None = None
    """The guard: the reward dimension that this model stands for."""
    may_lose: float | None = Field(default=None, ge=0)
    """The guard: the largest share of this model's own gain in its reward, over the base, that a start may
    lack; null is any."""


class Guard(Section):
    """Rollouts of training prompts that choose among the starts before any step is taken."""

    prompts: int = Field(default=128, ge=1)
    samples: int = Field(default=8, ge=1)
    """Responses a prompt, of each candidate."""


class Merge(Section):
    """Models merged by their weights."""

    models: list[MergedModel] = Field(min_length=1)
    base: str = "base"
    """What they were trained from: `base`, an earlier run, or a path or hub id."""
    method: Literal["sum", "ties", "ram"] = "sum"
    """ties: the mean of those with the elected sign, of each entry; ram: of all that changed it."""
    guard: Guard | None = None
    """Null takes the merge as it is given."""

    @property
    def choices(self) -> list[int]:
        """How many settings of each model there are to choose from."""
        return [len(each.scale) * len(each.keep) * len(each.leave_out) for each in self.models]

    def mistakes(self, rewards: Sequence[str]) -> list[str]:
        """What does not go together, a line each; `rewards` are the recipe's."""
        wrong = []
        names = [each.model for each in self.models]
        if len(set(names)) != len(names):
            wrong.append(f"models: must differ, got {names}")
        for i, each in enumerate(self.models):
            for name in ("scale", "keep", "leave_out"):
                if self.guard is None and len(getattr(each, name)) > 1:
                    wrong.append(
                        f"models.{i}.{name}: got {getattr(each, name)}, expected one without a guard"
                    )
            if each.reward is not None and each.reward not in rewards:
                wrong.append(f"models.{i}.reward: {each.reward!r} is none of {list(rewards)}")
            if each.may_lose is not None and (each.reward is None or self.guard is None):
                missing = "guard" if self.guard is None else "reward"
                wrong.append(f"models.{i}.may_lose: needs the {missing}, expected both or neither")
        return wrong


class MergedStart(Section):
    """A run's start that is no one model."""

    merge: Merge

    def __str__(self) -> str:
        merge = self.merge
        guarded = f", the best of {math.prod(merge.choices)}" if merge.guard else ""
        return f"{merge.base} and the changes of {', '.join(each.model for each in merge.models)}{guarded}"


def _branch(value: Any) -> str:
    return "section" if isinstance(value, dict | MergedStart) else "name"


Init = Annotated[Annotated[str, Tag("name")] | Annotated[MergedStart, Tag("section")], Discriminator(_branch)]


def models_of(init: str | MergedStart) -> tuple[str, ...]:
    """The models that a run's first weights are made of."""
    if isinstance(init, str):
        return (init,)
    return (init.merge.base, *(each.model for each in init.merge.models))
