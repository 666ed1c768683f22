"""Checks of strategies on two ranks. Arguments: a folder, and some of fsdp2, zero2 and zero3."""

import json
import math
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from smopd.engine import distributed
from smopd.engine.errors import NonFinite
from smopd.engine.local.teachers import LocalTeachers, StudentsBase
from smopd.engine.settings import Lora, Packing
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from tests.engine.models.families import family
from tests.engine.student.training import (
    NLL,
    TOKENS,
    advance,
    equal,
    loss_tokens,
    make_student,
    parameters,
    settings_of,
    share,
)
from tests.engine.tiny import VOCABULARY, plain_logps, ragged_rollouts, tiny_model

Make = Callable[..., Student]
LORA = {"lora": Lora(rank=4, alpha=8.0)}


def resumes_bit_for_bit(make: Make, folder: Path, **options) -> None:
    straight, checkpoints = make(**options), Checkpoints(folder, keep=1)
    advance(straight, range(2))
    checkpoints.save(2, straight, distributed.rank())
    advance(straight, range(2, 4))
    resumed = make(**options, **({} if "lora" in options else {"seed": 9}))
    assert checkpoints.restore(resumed) == (2, distributed.rank())
    advance(resumed, range(2, 4))
    assert equal(parameters(resumed), parameters(straight)) and resumed.updates == 4


@mock.patch("smopd.engine.student.student.MAX_SKIPPED_UPDATES", 1)
def skips_a_gradient_that_is_not_finite_on_one_rank(make: Make) -> None:
    student, rollouts = make(), share(3)
    before = parameters(student)
    bad = loss_tokens(rollouts, adv=math.nan if distributed.rank() == 1 else 1.0)
    assert student.update(rollouts, bad, NLL).skipped
    assert equal(parameters(student), before)
    advance(student, range(1))
    assert student.skipped == 1 and not equal(parameters(student), before)
    with pytest.raises(NonFinite, match=r"update 3: .*; 2 updates were skipped, at most 1"):
        student.update(rollouts, bad, NLL)


def a_rank_without_responses_takes_part(student: Student) -> None:
    rollouts = ragged_rollouts(5) if distributed.rank() == 0 else []
    update = student.update(rollouts, loss_tokens(rollouts), NLL)
    counts = distributed.gather_objects(update.micro_batches)
    assert counts[0] == counts[1] > 1 and math.isfinite(update.grad_norm)
    assert len(student.logps(rollouts, 1.0)) == sum(len(rollout.response_ids) for rollout in rollouts)


def offloaded_masters_train_as_the_others_do(make: Make) -> None:
    plain, offloaded = make(), make(offload_optimizer=True)
    before = parameters(plain)
    for student in (plain, offloaded):
        advance(student, range(3))
    assert equal(parameters(plain), parameters(offloaded)) and not equal(before, parameters(plain))


def a_lora_student_gives_its_base_and_trains_as_if_it_had_not(make: Make) -> None:
    """Score the base before the first update, which must leave no trace in a sharded model, and later."""
    student, twin, rollouts = make(**LORA), make(**LORA), share(1)
    truth = LocalTeachers([tiny_model()], Packing(micro_batch_tokens=200), VOCABULARY)
    expected = truth.score(rollouts, 0, 0.7).token_logps_NM
    for _ in range(2):
        found = StudentsBase(student).score(rollouts, 0, 0.7).token_logps_NM
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for trained in (student, twin):
            advance(trained, range(2))
    assert not torch.allclose(student.logps(rollouts, 0.7), expected[:, 0], atol=1e-2)
    assert equal(parameters(student), parameters(twin))


def an_unpacked_model_trains_as_transformers_computes_it(device: torch.device) -> None:
    model, rollouts = family("lfm2"), ragged_rollouts(3)
    student = Student(deepcopy(model), settings_of(max_grad_norm=1e9, micro_batch_tokens=60), device)
    update = student.update(share(3), loss_tokens(share(3)), NLL)
    (-plain_logps(model, rollouts).sum() / TOKENS).backward()
    expected = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    assert student.layout.attends == "plain"
    assert update.grad_norm == pytest.approx(float(expected), rel=1e-4)


def experts_are_balanced_by_the_tokens_of_both_ranks(device: torch.device) -> None:
    settings, rollouts = settings_of(router_aux_loss_coef=20.0, max_grad_norm=1e9), ragged_rollouts(3)
    norms = []
    for own in (rollouts, rollouts if distributed.rank() == 0 else []):
        student = Student(family("qwen3_moe"), settings, device)
        norms.append(student.update(own, loss_tokens(own, adv=0.0), NLL).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0


def clips_as_fsdp2_does(make: Make) -> None:
    """Use a large learning rate, so that updates are far above the rounding of the parameters."""
    rollouts, norms, moved = share(4), [], []
    for options in ({}, {"strategy": "fsdp2"}):
        student = make(max_grad_norm=1e-3, adam_eps=1e-2, learning_rate=1.0, **options)
        before = parameters(student)
        norms.append(student.update(rollouts, loss_tokens(rollouts), NLL).grad_norm)
        moved.append({name: value - before[name] for name, value in parameters(student).items()})
    assert norms[0] == pytest.approx(norms[1], rel=1e-5) and norms[0] > 1e-3, "before clipping"
    for name, value in moved[1].items():
        assert (moved[0][name] - value).norm() / value.norm() < 1e-4, name


def masters_are_fp32_under_bfloat16(make: Make) -> None:
    student = make(compute_dtype="bfloat16", learning_rate=1e-6)
    student.logps(share(2), 1.0)  # which gathers them in bfloat16
    before = parameters(student)
    assert all(value.dtype == torch.float32 for value in before.values())
    assert equal(before, dict(tiny_model().state_dict()))
    buffers = list(student.policy.buffers())
    assert buffers and all(value.dtype == torch.float32 for value in buffers), "rotary frequencies"
    advance(student, range(1))
    after = parameters(student)
    steps = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert (steps > 0).float().mean() > 0.5 and steps.max() < 1.1e-6
    a_rank_without_responses_takes_part(student)


def main(folder: Path, *kinds: str) -> None:
    with distributed.process_group() as device:
        for kind in kinds:
            check(folder / kind, kind, device)


def check(folder: Path, kind: str, device: torch.device) -> None:
    folder.mkdir(exist_ok=True)
    make = partial(make_student, device, micro_batch_tokens=60)
    if kind != "fsdp2":
        file = folder / f"deepspeed_{distributed.rank()}.json"
        file.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 0}}))
        make = partial(make, strategy="deepspeed", zero_stage=int(kind[-1]), deepspeed_config=str(file))
    resumes_bit_for_bit(make, folder / "lora", **LORA)
    skips_a_gradient_that_is_not_finite_on_one_rank(make)
    if kind == "fsdp2":
        resumes_bit_for_bit(make, folder / "tied", tied=True, shard_size=1)
        resumes_bit_for_bit(make, folder / "offload", offload_optimizer=True)
        offloaded_masters_train_as_the_others_do(make)
        an_unpacked_model_trains_as_transformers_computes_it(device)
        experts_are_balanced_by_the_tokens_of_both_ranks(device)
        a_lora_student_gives_its_base_and_trains_as_if_it_had_not(make)
    else:
        options = {"tied": True, "gradient_checkpointing": True, "compute_dtype": "bfloat16"}
        resumes_bit_for_bit(make, folder / "tied in bfloat16", **options)
        clips_as_fsdp2_does(make)
    masters_are_fp32_under_bfloat16(make)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
