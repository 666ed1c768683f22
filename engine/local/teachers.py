"""Frozen transformers models as teachers. LoRA teachers with the same base model share its weights.

Shapes: N response tokens in flat order, M teachers, S = kappa entries, D hidden, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smopd.engine.errors import UnusableModel
from smopd.engine.models.head import head, response_hidden
from smopd.engine.models.loading import load_model
from smopd.engine.models.packing import pack
from smopd.engine.models.paths import choose_together
from smopd.engine.protocols import TeacherEngine
from smopd.engine.settings import Packing
from smopd.engine.types import Rollout, TeacherTopK
from smopd.engine.weights.adapters import attach, read_adapter, same_place, use
from smopd.kernels.checks import check_kappa

if TYPE_CHECKING:
    from smopd.engine.student.student import Student

log = logging.getLogger(__name__)


class Dropping:
    """A counter of entries that are dropped as vocabulary padding. The first drop logs a warning."""

    vocabulary: int
    """The student's vocabulary size."""
    rows: int
    """The smallest vocabulary size among the teachers."""
    dropped = 0

    @property
    def shared(self) -> int:
        """The number of ids that the student and all teachers have in common."""
        return min(self.vocabulary, self.rows)

    def drop(self, entries: int) -> None:
        if entries > 0 and self.dropped == 0:
            log.warning("teachers: %d entries so far are vocabulary padding; their slots stay empty", entries)
        self.dropped += entries

    def inside(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], Tensor]:
        """Clamp response ids to the teachers' vocabularies. Return rollouts and (N,) bool: True if clamped.

        The caller sets the log-probabilities of clamped tokens to -inf.
        """
        none = torch.zeros(0, dtype=torch.int64)
        outside_N = torch.cat([none, *(r.of_policy(r.response_ids) for r in rollouts)]) >= self.rows
        if not bool(outside_N.any()):
            return list(rollouts), outside_N
        self.drop(int(outside_N.sum()))
        last = self.rows - 1
        return [replace(r, response_ids=r.response_ids.clamp(max=last)) for r in rollouts], outside_N

    def without_padding(self, top: TeacherTopK) -> TeacherTopK:
        """Return `top` with empty slots in place of ids that are not shared. Empty slots come last."""
        padding_NMS = top.ids_NMS >= self.shared
        entries = int(padding_NMS.sum())
        if entries == 0:
            return top
        self.drop(entries)
        order_NMS = padding_NMS.to(torch.int8).argsort(dim=-1, stable=True)
        ids_NMS = top.ids_NMS.masked_fill(padding_NMS, 0).gather(-1, order_NMS)
        logps_NMS = top.logps_NMS.masked_fill(padding_NMS, -torch.inf).gather(-1, order_NMS)
        return TeacherTopK(ids_NMS, logps_NMS, top.token_logps_NM)


class LocalTeacher(NamedTuple):
    """A teacher: `model` with the adapter named `adapter` or, if that is None, without any adapter."""

    model: PreTrainedModel
    adapter: str | None = None


class LocalTeachers(Dropping):
    """Transformers models as a `TeacherEngine`.

    Args:
        models: at least one, all on one device and in the dtype for scoring. Teachers may share a model.
        vocabulary: the student's vocabulary size. A teacher's size may differ because of padding.
        tokens: the student's number of real tokens. Every teacher must have them. None means `vocabulary`.
    Raises:
        UnusableModel: a teacher's vocabulary is smaller than `tokens`.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel | LocalTeacher],
        packing: Packing,
        vocabulary: int,
        tokens: int | None = None,
    ):
        self.teachers = [each if isinstance(each, LocalTeacher) else LocalTeacher(each) for each in models]
        sizes = [head(teacher.model).weight_VD.shape[0] for teacher in self.teachers]
        self.rows, self.largest = min(sizes), max(sizes)
        for i, (teacher, size) in enumerate(zip(self.teachers, sizes, strict=True)):
            require_vocabulary(i, teacher.model.name_or_path or "a model", size, tokens or vocabulary)
            teacher.model.eval().requires_grad_(False)
        self.layout = choose_together([teacher.model for teacher in self.teachers])
        self.packing = packing
        self.vocabulary = vocabulary

    @property
    def device(self) -> torch.device:
        return self.teachers[0].model.device

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TeacherTopK:
        check_kappa("score", kappa, self.shared)
        rollouts, outside_N = self.inside(rollouts)
        result = empty_topk(len(outside_N), len(self.teachers), kappa, self.device)
        for packed in pack(rollouts, self.packing, self.layout):
            batch = packed.to(self.device)
            for m, teacher in enumerate(self.teachers):
                use(teacher.model, teacher.adapter)
                hidden_ND = response_hidden(teacher.model, batch)
                top = head(teacher.model).topk(hidden_ND, kappa, batch.token_ids_N, temperature)
                assert top.token_logp_N is not None
                place = (batch.flat_N, m)
                result.ids_NMS[place], result.logps_NMS[place] = top.ids_NS, top.logps_NS
                result.token_logps_NM[place] = top.token_logp_N
        result.token_logps_NM[outside_N.to(self.device)] = -torch.inf
        return self.without_padding(result) if self.largest > self.shared else result

    def overlaps(self, device: torch.device) -> bool:
        return self.device != device

    def base(self, path: str | Path) -> LocalTeachers | None:
        for teacher in self.teachers:
            if same_place(teacher.model.name_or_path) == same_place(path):
                return LocalTeachers([teacher.model], self.packing, self.vocabulary, self.rows)
        return None


def load_teachers(
    paths: Sequence[str | Path],
    packing: Packing,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    tokens: int | None = None,
) -> LocalTeachers:
    """Load models (folders or hub ids) and peft adapters (folders) as teachers. Load each base only once."""
    loaded: dict[str, PreTrainedModel] = {}
    teachers = []
    for i, path in enumerate(paths):
        adapter = read_adapter(path)
        place = same_place(adapter.base if adapter else path)
        if place not in loaded:
            loaded[place] = load_model(adapter.base if adapter else path, dtype, device)
        attached = attach(loaded[place], adapter, f"teacher{i}") if adapter else None
        teachers.append(LocalTeacher(loaded[place], attached))
    return LocalTeachers(teachers, packing, vocabulary, tokens)


def require_vocabulary(teacher: int, path: str, size: int, tokens: int) -> None:
    """Raise UnusableModel if the teacher's vocabulary is smaller than `tokens`."""
    if size < tokens:
        raise UnusableModel(f"teachers.models.{teacher}: {path} has {size} tokens, the student has {tokens}")


def empty_topk(n_tokens: int, n_teachers: int, n_support: int, device: torch.device | str) -> TeacherTopK:
    shape = (n_tokens, n_teachers)
    return TeacherTopK(
        torch.zeros(*shape, n_support, dtype=torch.int32, device=device),
        torch.full((*shape, n_support), -torch.inf, device=device),
        torch.zeros(shape, device=device),
    )


class StudentsBase:
    """The frozen base of a LoRA student as a `TeacherEngine` with kappa 0. `score` is a collective call."""

    def __init__(self, student: Student):
        self.student, self.dropped = student, 0

    def overlaps(self, device: torch.device) -> bool:
        return False

    def base(self, path: str | Path) -> TeacherEngine | None:
        return None

    def score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TeacherTopK:
        logp_N = self.student.logps(rollouts, temperature, adapters=False)
        result = empty_topk(len(logp_N), 1, 0, self.student.device)
        result.token_logps_NM[:, 0] = logp_N
        return result


def held_already(
    path: str | Path, student_path: str | Path, student: Student, teachers: TeacherEngine | None
) -> TeacherEngine | None:
    """Return an engine for the model at `path` if a LoRA student or `teachers` can provide it, else None."""
    if student.lora is not None and same_place(path) == same_place(student_path):
        return StudentsBase(student)
    return None if teachers is None else teachers.base(path)
