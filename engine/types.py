"""Frozen dataclasses shared by sampling, scoring and training.

Shapes: N response tokens of a batch in flat order (the policy's tokens, one response after another), M
teachers, S = kappa support entries, L positions of a packed row.
"""

from __future__ import annotations

import hashlib
from collections import UserList
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters. A draw depends only on (seed, group, sample, position)."""

    n: int = 1
    temperature: float = 1.0
    """0 means greedy sampling."""
    max_new_tokens: int = 1024
    seed: int = 0


def draw_key(*numbers: int) -> int:
    """Hash numbers, such as a seed, a group and a sample, to a 63-bit seed for a draw."""
    digest = hashlib.blake2b(" ".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


ENDINGS = ("environment", "response", "turns", "tokens")
"""What can end a conversation: its environment, or the limit on a response, on turns or on all tokens."""
FAILED = ("exception", "timeout", "worker_died")
"""What can end a conversation whose environment fails."""


@dataclass(frozen=True, eq=False)
class Rollout:
    """One response to one prompt, or the rest of a conversation after its first prompt.

    Only the policy's tokens are scored and trained on, so only they have a place in a batch's flat order.
    """

    prompt_ids: tuple[int, ...]
    response_ids: Tensor
    """(T,) int64 on the CPU, including the end-of-sequence token if the response is finished."""
    logps: Tensor
    """(T,) fp32 log-probabilities (nats) under the sampling distribution, 0 at tokens of the environment."""
    group: int
    """Index of the prompt in the global batch. Equal prompts have different groups."""
    finished: bool
    """Whether an end token ended the response or, in a conversation, the environment ended it."""
    policy_version: int = 0
    loss_mask: Tensor | None = None
    """(T,) bool on the CPU, False at tokens of the environment. None means all tokens are the policy's."""
    messages: tuple[dict[str, Any], ...] = ()
    """Messages of the policy and the environment after the first prompt. Empty without an environment."""
    ended: str = ""
    """How a conversation ended: an entry of ENDINGS or FAILED. Empty without an environment."""
    drift: bool = False
    """Whether the chat template renders earlier turns differently from what the policy read."""

    @property
    def n_tokens(self) -> int:
        """Number of the policy's tokens."""
        return len(self.response_ids) if self.loss_mask is None else int(self.loss_mask.sum())

    def of_policy(self, values: Tensor) -> Tensor:
        """Return `values`, (T, ...), at the policy's tokens only."""
        return values if self.loss_mask is None else values[self.loss_mask]


@dataclass(frozen=True)
class TeacherTopK:
    """Each teacher's top log-probabilities at each response token, and those of the sampled tokens."""

    ids_NMS: Tensor
    logps_NMS: Tensor
    token_logps_NM: Tensor


Attends = Literal["pieces", "mask", "plain"]
"""How a micro-batch attends: one row by pieces, packed rows under a mask, or one plain sequence per row."""


@dataclass(frozen=True)
class Layout:
    """How micro-batches are laid out for a model."""

    attends: Attends = "mask"
    one_row_from: int = 0
    """With pieces, a micro-batch whose longest unit is shorter than this is computed as masked rows."""
    alone_above: int | None = None
    """Longer sequences are processed alone, because they change the rotary embedding of their whole batch."""
    description: str = field(default="", compare=False)


class Piece(NamedTuple):
    """A range of flat positions that attends causally to itself, and also to the whole of a shared prompt.

    A prompt and its first response form one piece. Each further response forms a piece, and so does padding.
    """

    begin: int
    end: int
    prompt_begin: int = 0
    prompt_end: int = 0
    """Equal to `prompt_begin` if no shared prompt precedes the piece."""


class Pieces(UserList[Piece]):
    """The pieces of a batch. If this were a list or tuple, FSDP would search it for tensors in each layer."""


@dataclass(frozen=True)
class TokenBatch:
    """A packed micro-batch. A row may contain several sequences. Responses may share one copy of a prompt."""

    input_ids: Tensor
    """(rows, L) int64."""
    position_ids: Tensor
    """(rows, L) int64, counted from 0 in each sequence."""
    predictor_N: Tensor
    """(N,) int64: for each response token, the position in (rows * L) whose hidden state predicts it."""
    token_ids_N: Tensor
    """(N,) int64, the response tokens."""
    flat_N: Tensor
    """(N,) int64, the index of each token in the flat order of the whole batch."""
    pieces: Pieces
    """In order of position. Together they cover every flat position once."""
    attends: Attends
    share: float = 1.0
    """This micro-batch's share of the update's response tokens on all ranks."""

    def to(self, device: torch.device) -> TokenBatch:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)
