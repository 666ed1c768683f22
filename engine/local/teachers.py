"""Frozen transformers models as teachers. LoRA teachers of one base share its weights.

Shapes: N response tokens in flat order, M teachers, S support entries (kappa, or M * kappa of a union),
U of other teachers, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smopd.engine.errors import UnusableModel
from smopd.engine.local.union import Dropping, others_ids, united, without_padding
from smopd.engine.models.head import Head, head, response_hidden
from smopd.engine.models.loading import load_model
from smopd.engine.models.packing import pack
from smopd.engine.models.paths import choose_together
from smopd.engine.protocols import TeacherEngine
from smopd.engine.settings import Packing
from smopd.engine.types import Rollout, TeacherTopK, TokenBatch
from smopd.engine.weights.adapters import attach, read_adapter, same_place, use
from smopd.kernels.checks import check_kappa

if TYPE_CHECKING:
    from smopd.engine.student.student import Student


@dataclass(frozen=True)
class LocalTeacher:
    """A model with one of its adapters active, or none."""

    model: PreTrainedModel
    adapter: str | None = None


class LocalTeachers(Dropping):
    """Transformers models as a `TeacherEngine`.

    Args:
        models: on their device and in the dtype for scoring. A model may appear with several adapters.
        vocabulary: the student's vocabulary size. A teacher's may be larger because of padding.
        tokens: the number of student ids that are real tokens, which every teacher must have. None: all.
    Raises:
        ValueError: `models` is empty.
        UnusableModel: a teacher's vocabulary is smaller than `tokens`.
    """

    def __init__(
        self,
        models: Sequence[PreTrainedModel | LocalTeacher],
        packing: Packing,
        vocabulary: int,
        tokens: int | None = None,
    ):
        if not models:
            raise ValueError("teachers: got none, expected at least one")
        self.teachers = [
            model if isinstance(model, LocalTeacher) else LocalTeacher(model) for model in models
        ]
        sizes = [head(teacher.model).weight_VD.shape[0] for teacher in self.teachers]
        self.rows = min(sizes)
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
    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        check_kappa("score", kappa, self.shared)
        rollouts, outside_N = self.inside(rollouts)
        n_tokens, n_teachers = len(outside_N), len(self.teachers)
        result = empty_topk(n_tokens, n_teachers, n_teachers * kappa if union else kappa, self.device)
        for batch in self._batches(rollouts):
            states = [self._states(teacher, batch) for teacher in self.teachers]
            own = self._own(states, batch, kappa, temperature)
            if union and kappa > 0:
                of_others = {}
                for m, (output, hidden_ND) in enumerate(states):
                    others_NU, _ = others_ids(own.ids_NMS, own.logps_NMS, m)
                    known = (batch.token_ids_N, own.token_logps_NM[:, m])
                    of_others[m] = output.given(hidden_ND, others_NU, *known, temperature)
                own = united(own, of_others)
            for name, value in vars(own).items():
                getattr(result, name)[batch.flat_N] = value
        result.token_logps_NM[outside_N.to(self.device)] = -torch.inf
        return result

    @torch.no_grad()
    def given(
        self, rollouts: Sequence[Rollout], ids_NMU: Tensor, token_logps_NM: Tensor, temperature: float
    ) -> Tensor:
        """Return (N, M, U) fp32 log-probabilities of the given ids, each in [0, V).

        `token_logps_NM` is from `score` at the same temperature.
        """
        ids_NMU, token_logps_NM = ids_NMU.to(self.device), token_logps_NM.to(self.device)
        result = torch.empty(ids_NMU.shape, device=self.device)
        for batch in self._batches(self.inside(rollouts)[0]):
            flat_N = batch.flat_N
            for m, teacher in enumerate(self.teachers):
                output, hidden_ND = self._states(teacher, batch)
                known = (batch.token_ids_N, token_logps_NM[flat_N, m])
                result[flat_N, m] = output.given(hidden_ND, ids_NMU[flat_N, m], *known, temperature)
        return result

    def overlaps(self, device: torch.device) -> bool:
        return self.device != device

    def base(self, path: str | Path) -> LocalTeachers | None:
        for teacher in self.teachers:
            if same_place(teacher.model.name_or_path) == same_place(path):
                return LocalTeachers([teacher.model], self.packing, self.vocabulary, self.rows)
        return None

    def _batches(self, rollouts: Sequence[Rollout]) -> Iterator[TokenBatch]:
        for batch in pack(rollouts, self.packing, self.layout):
            yield batch.to(self.device)

    def _states(self, teacher: LocalTeacher, batch: TokenBatch) -> tuple[Head, Tensor]:
        """Return the teacher's head and its (N, D) hidden states."""
        use(teacher.model, teacher.adapter)
        return head(teacher.model), response_hidden(teacher.model, batch)

    def _own(
        self, states: Sequence[tuple[Head, Tensor]], batch: TokenBatch, kappa: int, temperature: float
    ) -> TeacherTopK:
        """Return each teacher's top entries of a micro-batch, without vocabulary padding."""
        ids, logps, token_logps = [], [], []
        for output, hidden_ND in states:
            top = output.topk(hidden_ND, kappa, batch.token_ids_N, temperature)
            ids_NS, logps_NS = top.ids_NS, top.logps_NS
            if output.weight_VD.shape[0] > self.shared:
                ids_NS, logps_NS, dropped = without_padding(ids_NS, logps_NS, self.shared)
                self.drop(dropped)
            assert top.token_logp_N is not None
            ids.append(ids_NS)
            logps.append(logps_NS)
            token_logps.append(top.token_logp_N)
        return TeacherTopK(torch.stack(ids, 1), torch.stack(logps, 1), torch.stack(token_logps, 1))


def load_teachers(
    paths: Sequence[str | Path],
    packing: Packing,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    *,
    tokens: int | None = None,
) -> LocalTeachers:
    """Load models (folders or hub ids) and peft adapters (folders) as teachers; each base is loaded once."""
    loaded: dict[str, PreTrainedModel] = {}
    teachers = []
    for i, path in enumerate(paths):
        adapter = read_adapter(path)
        place = same_place(adapter.base if adapter else path)
        if place not in loaded:
            loaded[place] = load_model(adapter.base if adapter else path, dtype, device)
        teachers.append(
            LocalTeacher(loaded[place], attach(loaded[place], adapter, f"teacher{i}") if adapter else None)
        )
    return LocalTeachers(teachers, packing, vocabulary, tokens)


def require_vocabulary(teacher: int, path: str, size: int, tokens: int) -> None:
    """Raise UnusableModel if the teacher's vocabulary is smaller than `tokens`."""
    if size < tokens:
        raise UnusableModel(
            f"teachers.models.{teacher}: {path} has a vocabulary of {size}, the student has {tokens} tokens"
        )


def empty_topk(n_tokens: int, n_teachers: int, n_support: int, device: torch.device | str) -> TeacherTopK:
    shape = (n_tokens, n_teachers)
    return TeacherTopK(
        torch.zeros(*shape, n_support, dtype=torch.int32, device=device),
        torch.full((*shape, n_support), -torch.inf, device=device),
        torch.zeros(shape, device=device),
    )


class StudentsBase:
    """A LoRA student's frozen base as a `TeacherEngine`; scores only sampled tokens, as a collective call."""

    def __init__(self, student: Student):
        self.student, self.dropped = student, 0

    def overlaps(self, device: torch.device) -> bool:
        return False

    def base(self, path: str | Path) -> TeacherEngine | None:
        return None

    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        if kappa != 0:
            raise ValueError(f"score: kappa is {kappa}, expected 0 for a student's base")
        logp_N = self.student.logps(rollouts, temperature, adapters=False)
        result = empty_topk(len(logp_N), 1, 0, self.student.device)
        result.token_logps_NM[:, 0] = logp_N
        return result


def held_already(
    path: str | Path, student_path: str | Path, student: Student, teachers: TeacherEngine | None
) -> TeacherEngine | None:
    """Return an engine for the model at `path` if a LoRA student or LoRA teachers hold its weights."""
    if student.lora is not None and same_place(path) == same_place(student_path):
        return StudentsBase(student)
    return None if teachers is None else teachers.base(path)
