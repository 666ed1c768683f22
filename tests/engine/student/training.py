"""A student with a tiny model, its losses and parameters, for the tests of this folder."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.settings import TrainSettings
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from smopd.ops import LossSettings, LossTokens
from tests.engine.tiny import ragged_rollouts, tiny_model
from tests.ranks import on_ranks

NLL = LossSettings(opd_coef=0.0)
TOKENS = 100  # the losses' denominator


def make_student(device, *, seed=0, tied=False, schedule=None, **options) -> Student:
    return Student(tiny_model(seed=seed, tied=tied), settings_of(**options), device, schedule=schedule)


def settings_of(**options) -> TrainSettings:
    return TrainSettings(**{"learning_rate": 1e-2, "compute_dtype": "float32", **options})


def loss_tokens(rollouts: Sequence[Rollout], adv: float | Tensor = 1.0) -> LossTokens:
    none = torch.zeros(0, dtype=torch.int64)
    token_ids_N = torch.cat([none, *(rollout.response_ids for rollout in rollouts)])
    weight_N = torch.full((len(token_ids_N),), 1 / TOKENS)
    return LossTokens(token_ids_N=token_ids_N, adv_N=torch.ones_like(weight_N) * adv, pg_weight_N=weight_N)


def share(seed: int) -> list[Rollout]:
    """Return this rank's rollouts, fewer on the second rank."""
    rollouts = ragged_rollouts(seed)
    if distributed.world_size() == 1:
        return rollouts
    return rollouts[:11] if distributed.rank() == 0 else rollouts[11:]


def advance(student: Student, seeds: range) -> None:
    for seed in seeds:
        rollouts = share(seed)
        student.update(rollouts, loss_tokens(rollouts), NLL)


def parameters(student: Student) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in student.weights()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(value.equal(b[name]) for name, value in a.items())


def on_two_ranks(folder: Path, *kinds: str) -> str:
    """Run ranks_worker.py and return its output."""
    pytest.importorskip("peft")
    worker = str(Path(__file__).with_name("ranks_worker.py"))
    done = on_ranks(2, worker, str(folder), *kinds)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr
