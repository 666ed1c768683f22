"""The protocols of rollout engines and of teacher engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from smopd.engine.types import Rollout, Sampling, TeacherTopK


class RolloutEngine(Protocol):
    """A sampler with its own copy of the policy. Each rank has its own sampler and its own prompts."""

    policy_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """Return `sampling.n` responses to each prompt, grouped by prompt and in sample order.

        Args:
            prompts: token ids after the chat template.
            groups: for each prompt, a number below 2^63 that seeds its draws. Equal prompts have different
                numbers.
        """
        ...

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load full tensors under their transformers names, and set `policy_version` to `version`."""
        ...


class TeacherEngine(Protocol):
    dropped: int
    """The number of entries so far on this rank that were vocabulary padding and became empty slots."""

    def score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TeacherTopK:
        """Return each teacher's `kappa` largest log-probabilities, and those of the sampled tokens.

        All are at `temperature`, over the teacher's whole vocabulary. An empty slot has id 0 and logp -inf.

        Args:
            kappa: if 0, only the sampled tokens' log-probabilities are returned (S = 0).
        """
        ...

    def overlaps(self, device: torch.device) -> bool:
        """Return whether scoring can run in parallel with work on `device`."""
        ...

    def base(self, path: str | Path) -> TeacherEngine | None:
        """Return an engine for the model at `path` if this engine can also score with it, else None."""
        ...
