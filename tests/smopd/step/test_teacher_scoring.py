"""Teachers elsewhere score while the rewards are computed, and the phase times show it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from smopd.config.settings import Settings, merged
from smopd.engine import distributed
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import Packing, TrainSettings
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.loop import Run, optimise
from smopd.record.recorder import Recorder
from tests.engine.tiny import tiny_model
from tests.patience import HANG_SECONDS
from tests.smopd.recipes import metric_lines
from tests.smopd.run.invariance_worker import SETTINGS, FixedRewarder, FixedRollouts, Numbers, prompt_set

PACKING = Packing(micro_batch_tokens=100_000)
SLOW_SECONDS = 0.05


class SlowTeachers:
    """Of another processor; where there is a `meeting`, they score only while the rewards are computed."""

    dropped = 0

    def __init__(self, vocabulary: int, meeting: threading.Barrier | None, elsewhere: bool):
        self.elsewhere = elsewhere
        self.local = LocalTeachers([tiny_model(seed=1), tiny_model(seed=2)], PACKING, vocabulary)
        self.meeting = meeting

    def overlaps(self, device: torch.device) -> bool:
        return self.elsewhere

    def score(self, *args: Any, **options: Any) -> Any:
        if self.meeting:
            self.meeting.wait(HANG_SECONDS)
        time.sleep(SLOW_SECONDS)
        return self.local.score(*args, **options)


class SlowRewarder(FixedRewarder):
    def __init__(self, meeting: threading.Barrier | None):
        self.meeting = meeting

    def score(self, *args: Any) -> Any:
        if self.meeting:
            self.meeting.wait(HANG_SECONDS)
        time.sleep(SLOW_SECONDS)
        return super().score(*args)


@pytest.mark.parametrize("elsewhere", [True, False], ids=["elsewhere", "here"])
def test_a_step_is_shorter_than_its_phases_where_they_overlap(elsewhere: bool, tmp_path: Path) -> None:
    changes = {"loop": {"steps": 2}}
    settings = Settings.model_validate(merged(SETTINGS, changes)).resolved("student")
    meeting = threading.Barrier(2) if elsewhere else None
    with distributed.process_group() as device, Recorder(tmp_path, "run", settings, Numbers()) as recorder:
        options = TrainSettings(learning_rate=1e-2, compute_dtype="float32", **dict(PACKING))
        student = Student(tiny_model(), options, device)
        optimise(
            Run(
                settings=settings,
                weights=[0.5, 0.5],
                prompts=prompt_set(),
                held_out=None,
                student=student,
                rollouts=FixedRollouts(),
                teachers=SlowTeachers(student.vocabulary, meeting, elsewhere),
                rewarder=SlowRewarder(meeting),
                checkpoints=Checkpoints(tmp_path / "checkpoints", 1),
                recorder=recorder,
            )
        )
    for line in metric_lines(tmp_path, times=True):
        others = line["seconds/rewards"] + line["seconds/old_logps"]
        spent = others + line["seconds/teachers"]
        assert min(line["seconds/rewards"], line["seconds_overlapped/teachers"]) >= SLOW_SECONDS
        assert (spent < others + line["seconds_overlapped/teachers"]) is elsewhere
