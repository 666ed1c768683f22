"""A gradient that is not finite on one of two ranks: both leave it out, count it, and stop together."""

from __future__ import annotations

import sys

import pytest
import torch

from smopd.engine import distributed
from smopd.engine.settings import TrainSettings
from smopd.engine.student.student import NonFiniteGradient, Student
from smopd.ops import LossSettings, LossTokens
from tests import warm
from tests.engine.tiny import ragged_rollouts, tiny_model

pytestmark = pytest.mark.slow


def test_both_ranks_skip_what_is_not_finite_on_one() -> None:
    done = warm.on_ranks(2, __file__)
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.split()) == ["rank0:ok", "rank1:ok"]


def check(device: torch.device) -> None:
    rank, rollouts = distributed.rank(), ragged_rollouts(distributed.rank())
    settings = TrainSettings(learning_rate=1e-2, compute_dtype="float32")
    student = Student(tiny_model(), settings, device)

    def weights() -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in student.weights()}

    def update(adv: float):
        token_ids_N = torch.cat([rollout.response_ids for rollout in rollouts])
        weight_N = torch.full((len(token_ids_N),), 1 / 100)
        tokens = LossTokens(
            token_ids_N=token_ids_N, adv_N=torch.full_like(weight_N, adv), pg_weight_N=weight_N
        )
        return student.update(rollouts, tokens, LossSettings(opd_coef=0.0))

    before = weights()
    bad = float("nan") if rank == 1 else 1.0
    assert update(bad).skipped
    assert all(value.equal(before[name]) for name, value in weights().items())
    assert not update(1.0).skipped
    assert not all(value.equal(before[name]) for name, value in weights().items())
    try:
        for _ in range(3):
            update(bad)
    except NonFiniteGradient as error:
        assert "4 updates were skipped, at most 3" in str(error)
        sys.stdout.write(f"rank{rank}:ok\n")  # at once, as the other rank writes too


if __name__ == "__main__":
    torch.set_num_threads(1)
    with distributed.process_group() as device:
        check(device)
