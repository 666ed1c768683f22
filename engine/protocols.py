"""The protocols of the engines that sample (prompts in, responses out, weights by version) and that score."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

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
            groups: one number a prompt, which keys its random draws; equal prompts have different ones.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Takes full tensors by their transformers names, and serves them as `version` from now on."""
        ...


class TeacherEngine(Protocol):
    dropped: int
    """Entries of this rank's tokens so far that are padding of a vocabulary and became empty slots."""

    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        """Each teacher's `kappa` largest log-probabilities at `temperature`, and the sampled token's own.

        Normalised over the teacher's whole vocabulary: what lies on padded ids is off the support. An empty
        slot is id 0 and -inf.

        Args:
            kappa: 0 gives the sampled tokens' log-probabilities alone, S = 0.
            union: S = M * kappa. Behind its own kappa entries, a teacher gives its log-probabilities of the
                other teachers' ids, in the order of teachers, so that their mixture is exact on the union.
                An id stands once a teacher; a repeated one is an empty slot.
        """
        ...

    def overlaps(self, device: torch.device) -> bool:
        """Whether it computes elsewhere than on `device`, so that scoring may run beside work there."""
        ...

    def base(self, path: str | Path) -> TeacherEngine | None:
        """The model at `path` alone, where this engine holds its weights under adapters; else None."""
        ...
