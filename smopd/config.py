"""The settings of a run: typed, validated, and free of torch, so that a mistake is answered at once.

A recipe is a YAML file with the sections of smopd.sections and smopd.engine_sections. `runs` names the policy
optimisations of the recipe in order; each is the recipe's settings with its own `set` merged over them
(`Settings.resolved`).

A check across settings raises a line for each mistake, `setting: what came, what was expected`, where the
setting's path begins at the section that checks.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from smopd.contradictions import contradictions
from smopd.engine_sections import KlRef, Remote, Rollout, Student, Teachers
from smopd.sections import (
    Advantage,
    Checkpoint,
    Data,
    Evaluation,
    Log,
    Loop,
    Loss,
    Model,
    Opd,
    Reward,
    Scoring,
    Section,
    WarmStart,
)

Stage = Literal["specialize", "merge", "control"]

_NAME = re.compile(r"\w[\w.-]*")
_RUN_NAME = re.compile(r"\w[\w-]*")


SHARED = (
    "name", "description", "seed", "processes", "output", "model", "data", "rewards", "scoring", "warm_start",
    "evaluation", "runs",
)  # fmt: skip
"""What all runs of a recipe have in common."""


class Run(Section):
    """One policy optimisation: a teacher, a student, or a control beside them."""

    stage: Stage
    init: str = "base"
    """`base`, or the name of an earlier run whose export this one starts from."""
    reward_weights: list[float] | None = None
    """The priority profile, one weight a reward; None takes the rewards' own."""
    label: str | None = None
    """The row's name in tables."""
    reproduces: str | None = None
    """Which row of which published table this is, for `--list`."""
    set: dict[str, Any] = Field(default={})
    """Settings that differ from the recipe's, nested as in the recipe."""

    @model_validator(mode="after")
    def _set_belongs_to_the_run(self) -> Run:
        whole = [key for key in SHARED if key in self.set]
        if whole:
            raise ValueError(f"set: {', '.join(whole)} cannot differ between runs")
        return self


class Settings(Section):
    """All settings of `python -m smopd.train`."""

    name: str
    """What this experiment is called."""
    description: str = ""
    """What it shows; the caption of its table."""
    seed: int = Field(default=0, ge=0)
    """All random draws follow from it."""
    processes: int = Field(default=1, ge=1)
    """Local processes to start unless torchrun started this one; each holds a shard and samples its share."""
    output: str = "runs/{name}"
    """The run directory."""
    model: Model
    data: Data
    rewards: list[Reward] = Field(min_length=1)
    scoring: Scoring = Scoring()
    warm_start: WarmStart | None = None
    rollout: Rollout = Rollout()
    advantage: Advantage = Advantage()
    loss: Loss = Loss()
    opd: Opd = Opd()
    teachers: Teachers = Teachers()
    remote: Remote = Remote()
    kl_ref: KlRef = KlRef()
    student: Student = Student()
    loop: Loop = Loop()
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    log: Log = Log()
    runs: dict[str, Run] = Field(min_length=1)

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest prompt with its longest response, in training and evaluation."""
        trained, new = self.data.max_prompt_tokens, self.rollout.max_new_tokens
        evaluated = self.data.max_evaluation_tokens or trained
        return max(trained + new, evaluated + (self.evaluation.max_new_tokens or new))

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError(f"got {value!r}, expected letters, digits, '_', '-' and '.'")
        return value

    @field_validator("output")
    @classmethod
    def _only_the_name(cls, value: str) -> str:
        if re.search(r"[{}]", value.replace("{name}", "")):
            raise ValueError(f"got {value!r}, expected a folder in which only {{name}} stands in braces")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        rewards = [reward.name for reward in self.rewards]
        wrong = []
        if len(set(rewards)) != len(rewards):
            wrong.append(f"rewards: names must differ, got {rewards}")
        earlier = ["base"]
        for name, run in self.runs.items():
            if name == "base":
                wrong.append("runs.base: 'base' names the starting model; choose another name")
            elif not _RUN_NAME.fullmatch(name):
                wrong.append(f"runs.{name}: a run's name has letters, digits, '_' and '-' only")
            if run.init not in earlier:
                wrong.append(f"runs.{name}.init: {run.init!r} is no earlier run, expected one of {earlier}")
            if run.reward_weights is not None and len(run.reward_weights) != len(rewards):
                wrong.append(
                    f"runs.{name}.reward_weights: got {len(run.reward_weights)} weights, "
                    f"expected one for each of the rewards {rewards}"
                )
            earlier.append(name)
        teachers, gate = self.teachers.models, self.opd.gate
        for i, teacher in enumerate(teachers):
            if teacher.reward not in rewards:
                wrong.append(f"teachers.models.{i}.reward: {teacher.reward!r} is none of {rewards}")
        if gate.kind != "uniform":
            if gate.floor * len(teachers) > 1:
                wrong.append(f"opd.gate.floor: {gate.floor} times {len(teachers)} teachers exceeds 1")
            for i, reward in enumerate(self.rewards):
                if reward.range is None and any(teacher.reward == reward.name for teacher in teachers):
                    wrong.append(f"rewards.{i}.range: the gate needs [lo, hi] or batch for {reward.name!r}")
        wrong += contradictions(self)
        if wrong:
            raise ValueError("\n".join(wrong))
        return self

    def resolved(self, run_name: str) -> Settings:
        """The settings of one run: the recipe's with the run's `set` merged over them, validated again.

        Raises:
            KeyError: no such run.
            pydantic.ValidationError: `set` names what does not exist or is out of range.
        """
        values = merged(self.model_dump(), self.runs[run_name].set)
        return Settings.model_validate(values)

    def weights(self, run_name: str) -> list[float]:
        """The run's priority profile, one weight a reward."""
        return self.runs[run_name].reward_weights or [reward.weight for reward in self.rewards]


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the nested keys of `over` put in; lists are replaced whole."""
    result = dict(base)
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = merged(result[key], value)
        else:
            result[key] = value
    return result
