"""How a policy is sharded and stepped: the module, and the protocol of FSDP2 and DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine.models.loading import head, response_hidden
from smopd.engine.types import TokenBatch

Output = TypeVar("Output")
ThroughHead = Callable[..., Output]
"""(hidden_ND, weight_VD, bias_V=None) -> what the forward returns."""


class Policy(nn.Module):
    """The root that is sharded. The head runs inside its forward, where its weight is whole."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output:
        weight, bias = head(self.model)
        return through_head(response_hidden(self.model, batch), weight, bias_V=bias)


class UnreadableState(ValueError):
    """A saved state is not what its strategy writes."""


class Strategy(Protocol):
    """Parameters, gradients and optimiser state on the ranks. All methods are collective calls.

    Gradients are sums over ranks and micro-batches: nothing is averaged.
    """

    name: str
    """What checkpoints call it."""
    reshards: bool
    """Whether another number of ranks can resume from its checkpoints."""
    policy: Policy
    optimizer: torch.optim.Optimizer
    """Of the trained parameters; its state is sharded with them."""

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output:
        """The policy's forward, with whole weights where they are used."""
        ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the loss's gradient to this update's; `last`: no other micro-batch follows."""
        ...

    def step(self, learning_rate: float) -> float:
        """Clips, steps unless the gradient is not finite, and clears it.

        Returns:
            The gradient's global 2-norm before clipping, the same on every rank.
        """
        ...

    def full(self, parameter: Tensor) -> Tensor:
        """A parameter or buffer of the policy, whole: the fp32 master where it is trained."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the trained parameters and the optimiser's state."""
        ...

    def restore(self, folder: Path) -> None:
        """Reads what `save` wrote."""
        ...
