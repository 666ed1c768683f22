"""The plan of a command: its runs in order, the models that each run needs, and which runs are finished."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from smopd.config.settings import Merge, MergedModel, Settings
from smopd.engine.files import read_json

Part = Literal["all", "warm-start", "specialize", "merge", "train", "evaluate"]
BASE = "base"
USUAL = {"keep": [1.0, 0.5, 0.2, 0.05], "exclude": ["", "self_attn"], "max_regression": 0.5}
"""Ours: the guard's choices for each teacher if `merge.models` is empty (docs/merging.md)."""


class Steps(NamedTuple):
    """Training steps of a run."""

    own: int
    total: int
    """The run's own steps plus those of all runs that it needs."""
    wall_clock: int
    """Steps that must be made one after the other if independent runs train in parallel."""


def count_steps(own: Mapping[str, int], needs: Mapping[str, set[str]]) -> dict[str, Steps]:
    """Return each run's steps. `needs` names the runs that a run is made from. Only earlier runs count."""
    needed: dict[str, set[str]] = {}
    found: dict[str, Steps] = {}
    for run, steps in own.items():
        direct = needs[run] & set(found)
        needed[run] = direct.union(*(needed[other] for other in direct))
        total = steps + sum(own[other] for other in needed[run])
        before = max((found[other].wall_clock for other in direct), default=0)
        found[run] = Steps(steps, total, steps + before)
    return found


class PlannedRun(NamedTuple):
    """One run of the plan. The warm start is the run `base`."""

    name: str
    stage: str
    init: str
    weights: dict[str, float]
    """Reward weights by reward name."""
    steps: int
    done: bool
    """Whether the run is finished in the output directory."""
    teachers: tuple[str, ...] = ()
    """Models to distill."""
    merge: Merge | None = None
    """Weight merge to start from."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Models that the initial weights are made from."""
        return (self.init, *(each.model for each in self.merge.models)) if self.merge else (self.init,)

    @property
    def start(self) -> str:
        if self.merge is None:
            return self.init
        guarded = f", the best of {self.merge.choices()}" if self.merge.guard else ""
        return f"{self.init} and the changes of {', '.join(self.starts[1:])}{guarded}"


def done_steps(settings: Settings, run: str) -> int | None:
    """Return the number of steps of a run or of the warm start `base`, or None if it is not finished."""
    file = Path(settings.output) / run / "done.json"
    return read_json(file, steps=int)["steps"] if file.is_file() else None


def is_done(settings: Settings, run: str) -> bool:
    """Return whether a run has finished all steps of its settings. For `base`, return whether it exists."""
    done = done_steps(settings, run)
    return done is not None and (run == BASE or done >= settings.resolved(run).loop.steps)


def needs_base(settings: Settings) -> bool:
    """Return whether the base model must be built or warmed up before the first run."""
    return settings.model.factory is not None or settings.warm_start is not None


def distils(own: Settings, name: str) -> bool:
    """Return whether the run has teachers during training. `own` are the run's resolved settings."""
    return own.runs[name].stage == "merge" and own.merge.method != "weights"


def weight_merge(own: Settings, name: str) -> Merge | None:
    """Return the weight merge that the run starts from, or None. `own` are the run's resolved settings."""
    if own.runs[name].stage != "merge" or distils(own, name):
        return None
    choices = USUAL if own.merge.guard is not None else {}
    teachers = [MergedModel.model_validate(each.model_dump() | choices) for each in own.teachers.models]
    return own.merge.model_copy(update={"models": own.merge.models or teachers})


def plan(settings: Settings, part: Part = "all", only: tuple[str, ...] = ()) -> list[PlannedRun]:
    """Return the runs of `part` in order. A non-empty `only` selects runs, and keeps the warm start."""
    runs = []
    if needs_base(settings) and part in ("all", "warm-start", "specialize", "train"):
        steps = settings.warm_start.steps if settings.warm_start else 0
        runs.append(PlannedRun(BASE, "warm-start", "model", {}, steps, is_done(settings, BASE)))
    for name, run in settings.runs.items():
        if part not in ("all", run.stage) or (only and name not in only):
            continue
        own, done = settings.resolved(name), is_done(settings, name)
        weights = dict(zip((reward.name for reward in own.rewards), own.weights(name), strict=True))
        teachers = tuple(each.model for each in own.teachers.models) if distils(own, name) else ()
        merge = weight_merge(own, name)
        runs.append(PlannedRun(name, run.stage, run.init, weights, own.loop.steps, done, teachers, merge))
    return runs
