"""What crosses the rooms between sampling, scoring and training: frozen, torch only.

Shapes: N response tokens of a batch in flat order (responses one after another), M teachers, S = kappa
support entries, L positions of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Draws depend only on (seed, prompt key, sample, position)."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Rollout:
    """One response to one prompt."""

    prompt_ids: tuple[int, ...]
    response_ids: Tensor
    """(T,) int64 on the CPU, the end-of-sequence token included where it was reached."""
    logps: Tensor
    """(T,) fp32, nats, under the distribution that the tokens were drawn from."""
    group: int
    """Which prompt of the global batch this answers; equal prompts keep different groups."""
    finished: bool
    """Ended by an end-of-sequence token rather than by the limit."""
    policy_version: int = 0


@dataclass(frozen=True)
class TeacherTopK:
    """The teachers' largest log-probabilities at each response token, and the sampled token's own."""

    ids_NMS: Tensor
    logps_NMS: Tensor
    token_logps_NM: Tensor


class Piece(NamedTuple):
    """Flat positions that attend causally to themselves and, before that, to all of a prompt elsewhere.

    A prompt and its first response are one piece; each further response is one, and so is a row's padding.
    """

    begin: int
    end: int
    prompt_begin: int = 0
    prompt_end: int = 0
    """`prompt_begin` where there is none."""


@dataclass(frozen=True)
class TokenBatch:
    """A packed micro-batch: rows of several sequences. A prompt may stand once for several responses."""

    input_ids: Tensor
    """(rows, L) int64."""
    position_ids: Tensor
    """(rows, L) int64, from 0 in each prompt."""
    predictor_N: Tensor
    """(N,) int64, the flat position in (rows * L) whose hidden state predicts each response token."""
    token_ids_N: Tensor
    """(N,) int64, the response tokens."""
    flat_N: Tensor
    """(N,) int64, where each token stands in the flat order of the whole batch."""
    pieces: tuple[Piece, ...]
    """In order; they hold every flat position once."""
    one_row: bool
    """Laid out for attention by pieces: one row without padding."""

    def to(self, device: torch.device) -> TokenBatch:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)
