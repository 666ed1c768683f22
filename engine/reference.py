"""The reference policy where the student or the teachers hold its weights already, under their adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from smopd.engine.student import Student
from smopd.engine.teachers import LocalTeachers, TeacherEngine, empty_topk, same_place
from smopd.engine.types import Rollout, TeacherTopK


class StudentsBase(LocalTeachers):
    """Serves `TeacherEngine` for sampled tokens alone, with a LoRA student's frozen base.

    It computes where the student does, sharded as it is, in its compute dtype; scoring is a collective call.
    """

    def __init__(self, student: Student):
        self.student, self.vocabulary = student, student.vocabulary

    @property
    def device(self) -> torch.device:
        return self.student.device

    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        """As `TeacherEngine`.

        Raises:
            ValueError: `kappa` is not 0.
        """
        if kappa != 0:
            raise ValueError(f"score: kappa is {kappa}, expected 0 of a student's base")
        logp_N = self.student.logps(rollouts, temperature, adapters=False)
        result = empty_topk(len(logp_N), 1, 0, self.device)
        result.token_logps_NM[:, 0] = logp_N
        return result


def held_already(
    path: str | Path, student_path: str | Path, student: Student, teachers: TeacherEngine | None
) -> TeacherEngine | None:
    """The model at `path` from weights that are here: a LoRA student's base, or that of its teachers.

    Args:
        student_path: what the student was loaded from.
    """
    if student.lora is not None and same_place(path) == same_place(student_path):
        return StudentsBase(student)
    find = getattr(teachers, "base", None)
    return None if find is None else find(path)
