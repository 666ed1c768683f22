"""The protocols of the engines that sample (prompts in, responses out, weights by version) and that score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from smopd.engine.types import Rollout, Sampling, TeacherTopK


class RolloutEngine(Protocol):
    """Samples from its own copy of the policy; each rank has one and calls it on its own prompts."""

    policy_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """`sampling.n` responses to each prompt, those of one prompt together and in order of sample.

        Args:
            prompts: token ids, template applied.
            groups: one number a prompt, which keys its random draws and tells equal prompts apart.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes full tensors by their transformers names, and serves them as `version` from now on."""
        ...


@runtime_checkable
class AdapterRolloutEngine(RolloutEngine, Protocol):
    """Also takes a LoRA student's adapter instead of whole weights."""

    @property
    def takes_adapters(self) -> bool:
        """Whether this one was made with room for them."""
        ...

    def load_adapter(self, folder: str | Path, version: int) -> None:
        """Serves the first weights with the adapter in `folder` (peft's format) as `version` from now on."""
        ...


class TeacherEngine(Protocol):
    dropped: int
    """Entries so far, of this rank's tokens, whose id is padding of a teacher's own vocabulary: they became
    empty slots (id 0, -inf). It only grows."""

    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        """Each teacher's `kappa` largest log-probabilities at `temperature`, and the sampled token's own.

        Normalised over the teacher's whole vocabulary: what lies on padded ids is off the support.

        Args:
            kappa: 0 gives the sampled tokens' log-probabilities alone, S = 0.
            union: S = M * kappa. Behind its own kappa entries, a teacher gives its log-probabilities of the
                other teachers' ids, in the order of teachers, so that their mixture is exact on the union.
                An id stands once a teacher; a repeated one is an empty slot (id 0, -inf).
        """
        ...

    def overlaps(self, device: torch.device) -> bool:
        """Whether it computes elsewhere than on `device`, so that scoring may go on beside work there."""
        ...

    def base(self, path: str | Path) -> TeacherEngine | None:
        """The model at `path` alone, where this engine holds its weights under adapters; else None."""
        ...


class UnionTeacherEngine(TeacherEngine, Protocol):
    """Also says what its teachers think of ids that are asked for: a part of a union over several engines."""

    def given(
        self, rollouts: Sequence[Rollout], ids_NMU: Tensor, token_logps_NM: Tensor, temperature: float
    ) -> Tensor:
        """(N, M, U) fp32, each teacher's log-probabilities of its ids, each in [0, V).

        Args:
            token_logps_NM: of the sampled tokens at this temperature, as `score` gave them.
        """
        ...
