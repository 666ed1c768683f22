"""The module that is sharded, and the protocol of FSDP2 and DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine.models.head import Head, head, response_hidden
from smopd.engine.types import TokenBatch

Output = TypeVar("Output")
Stats = TypeVar("Stats")
ThroughHead = Callable[[Head, Tensor], Output]
"""(head, hidden_ND) -> output of the forward, such as a method of Head."""


class Policy(nn.Module):
    """The sharded root module. The head runs inside its forward, where the weight is gathered."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output:
        return through_head(head(self.model), response_hidden(self.model, batch))


class UnreadableState(ValueError):
    """A saved state that its strategy cannot read."""


class Strategy(Protocol):
    """Sharding of a policy in training. All methods are collective; gradients are summed, not averaged."""

    name: str
    """Name in checkpoints."""
    reshards: bool
    """Whether another number of ranks can resume from its checkpoints."""
    policy: Policy
    optimizer: torch.optim.Optimizer

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output: ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the loss; `last`: no other micro-batch follows in this update."""
        ...

    def trial(
        self, batch: TokenBatch, through_head: ThroughHead[tuple[Tensor, Stats]]
    ) -> tuple[float, Stats]:
        """Return a norm of the loss's gradient and the other output of a forward; nothing is kept.

        The norm is NaN or infinite if a gradient is.
        """
        ...

    def step(self, learning_rate: float) -> float:
        """Clip the gradient, step if it is finite, clear it, and return its global norm before clipping."""
        ...

    def full(self, parameter: Tensor) -> Tensor:
        """Gather a parameter (its fp32 master if trained) or buffer of the policy."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...
