"""The module that is sharded, and the protocol that FSDP2 and DeepSpeed implement."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine.errors import UnusableModel
from smopd.engine.models.head import Head, decode, head, response_hidden, router_loss
from smopd.engine.types import TokenBatch

Output = TypeVar("Output")
Stats = TypeVar("Stats")
ThroughHead = Callable[[Head, Tensor], Output]
"""(head, hidden_ND) -> output of the forward, such as a method of Head."""


class Policy(nn.Module):
    """The sharded root module. Its forward also calls the head, as the head's weight is gathered there."""

    def __init__(self, model: PreTrainedModel, router_aux_loss_coef: float = 0.0):
        super().__init__()
        self.model, self.coef = model, router_aux_loss_coef
        self.router_loss = router_loss(model) if self.coef else None
        if self.coef and self.router_loss is None:
            text = f"router_aux_loss_coef: got {self.coef:g}, but transformers has no such loss for"
            raise UnusableModel(f"{text} {type(model).__name__}; expected 0")

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output:
        balance = self.router_loss if torch.is_grad_enabled() and len(batch.predictor_N) else None
        output = decode(self.model, batch, **{"output_router_logits": True} if balance else {})
        ahead, hidden_ND = head(self.model), response_hidden(self.model, batch, output)
        if balance is not None:
            logits = tuple(layer.index_select(0, batch.predictor_N) for layer in output.router_logits)
            ahead = replace(ahead, router_loss=self.coef * batch.share * balance(logits))
        return through_head(ahead, hidden_ND)


class Strategy(Protocol):
    """A sharded policy in training. All methods are collective calls. Gradients are summed over ranks."""

    name: str
    """The name stored in checkpoints."""
    reshards: bool
    """Whether a run can resume from its checkpoints on another number of ranks."""
    policy: Policy
    optimizer: torch.optim.Optimizer

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output: ...

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of the loss. `last` marks the last micro-batch of an update."""
        ...

    def trial(
        self, batch: TokenBatch, through_head: ThroughHead[tuple[Tensor, Stats]]
    ) -> tuple[float, Stats]:
        """Return a norm of the loss's gradient and the statistics of the forward, without changing anything.

        The norm is NaN or infinite if a gradient is.
        """
        ...

    def step(self) -> float:
        """Clip the gradient, step if it is finite, and clear it. Return its global norm before clipping."""
        ...

    def full(self, parameter: Tensor) -> Tensor:
        """Gather a parameter or buffer of the policy. A trained parameter yields its fp32 master weight."""
        ...

    def save(self, folder: Path) -> None: ...

    def restore(self, folder: Path) -> None: ...
