"""Frozen models: what overlaps with their scoring, the reference's temperature and each step's padding."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from smopd.engine import distributed
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import Packing, TrainSettings
from smopd.engine.student.student import Student
from tests.engine.local.teacher_truth import widened
from tests.engine.tiny import VOCABULARY, tiny_model
from tests.patience import HANG_SECONDS
from tests.smopd.recipes import metric_lines
from tests.smopd.run.invariance_worker import FixedRewarder, FixedRollouts, run_loop, settings_of

PACKING = Packing(micro_batch_tokens=100_000)
SLOW_SECONDS = 0.05


def slowly(meeting: threading.Barrier | None) -> None:
    """Sleep; with a barrier, teachers and rewards wait for each other, so they must overlap."""
    if meeting:
        meeting.wait(HANG_SECONDS)
    time.sleep(SLOW_SECONDS)


class SlowTeachers(LocalTeachers):
    meeting: threading.Barrier | None = None

    def overlaps(self, device: torch.device) -> bool:
        return self.meeting is not None

    def score(self, *args: Any, **options: Any) -> Any:
        slowly(self.meeting)
        return super().score(*args, **options)


class SlowRewarder(FixedRewarder):
    meeting: threading.Barrier | None = None

    def score(self, *args: Any) -> Any:
        slowly(self.meeting)
        return super().score(*args)


class SlowRollouts(FixedRollouts):
    def generate(self, *args: Any) -> Any:
        before = self.policy_version
        time.sleep(10 * SLOW_SECONDS)
        assert self.policy_version == before, "weights came while it sampled"
        return super().generate(*args)


@pytest.mark.parametrize("elsewhere", [True, False], ids=["elsewhere", "here"])
def test_a_step_is_shorter_than_its_phases_where_they_overlap(elsewhere: bool, tmp_path: Path) -> None:
    teachers = SlowTeachers([tiny_model(seed=1), tiny_model(seed=2)], PACKING, VOCABULARY)
    rewarder = SlowRewarder()
    teachers.meeting = rewarder.meeting = threading.Barrier(2) if elsewhere else None
    ahead = {"loop": {"steps": 2, "async_level": 1}, "loss": {"old_logps": "rollout"}}
    parts = {"teachers": teachers, "rewarder": rewarder, "rollouts": SlowRollouts()}
    with distributed.process_group() as device:
        options = TrainSettings(learning_rate=1e-2, compute_dtype="float32", **dict(PACKING))
        run_loop(tmp_path, settings_of("student", **ahead), Student(tiny_model(), options, device), **parts)
    for line in metric_lines(tmp_path, times=True):
        scored, waited = line["seconds_overlapped/teachers"], line["seconds/teachers"]
        assert min(line["seconds/rewards"], scored) >= SLOW_SECONDS
        assert (waited < scored) is elsewhere


def test_the_reference_is_at_the_rollouts_temperature_and_a_step_counts_its_own_padding(tmp_path):
    teachers = LocalTeachers([widened(tiny_model(seed), 70) for seed in (1, 2)], PACKING, VOCABULARY)
    own = {"teachers": teachers, "reference": LocalTeachers([tiny_model()], PACKING, VOCABULARY)}
    settings = settings_of("student", opd={"temperature": 1.3}, kl_ref={"coef": 0.1})
    with distributed.process_group() as device:
        options = TrainSettings(learning_rate=1e-2, compute_dtype="float32")
        run_loop(tmp_path, settings, Student(tiny_model(), options, device), **own)
    lines = metric_lines(tmp_path)
    assert abs(lines[0]["kl_ref"]) < 1e-5, "the policy begins as its own reference"
    assert sum(line["teachers/padding_entries"] for line in lines) == teachers.dropped > 0
