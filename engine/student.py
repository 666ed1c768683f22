"""The model that is being trained.

FSDP2 shards, packed micro-batches, a fused head, one optimiser step an update.

Gradients are sums over all ranks and micro-batches of a loss whose denominators are already global, so
nothing here divides: how a batch is cut changes no gradient. Parameters and optimiser state are fp32;
computation is in `compute_dtype`; reductions are fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.models import head, response_hidden
from smopd.engine.packing import empty_batch, flat_offsets, pack
from smopd.engine.types import Rollout, TokenBatch, TrainSettings
from smopd.kernels.smopd_loss import linear_smopd_loss
from smopd.kernels.topk_logprobs import linear_topk_logprobs
from smopd.kernels.types import LossSettings, LossStats, LossTokens

Output = TypeVar("Output")


class NonFiniteGradient(RuntimeError):
    """Too many updates had a gradient that was not finite."""


@dataclass(frozen=True)
class Update:
    """What one optimiser step did."""

    stats: LossStats
    """Per token in this rank's flat order; the loss terms are this rank's share of the global sums."""
    grad_norm: float
    """Global 2-norm of the gradient before clipping."""
    skipped: bool
    """The gradient was not finite and the parameters were left alone."""
    micro_batches: int


class Policy(nn.Module):
    """The sharded root. The head runs inside its forward, where its weight is whole."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(
        self, batch: TokenBatch, through_head: Callable[[Tensor, Tensor, Tensor | None], Output]
    ) -> Output:
        weight, bias = head(self.model)
        return through_head(response_hidden(self.model, batch), weight, bias)


class Student:
    """Trains one causal language model.

    Args:
        model: fp32, unsharded, the same on every rank.
        settings: optimiser, precision and packing.
        device: where to compute.
    """

    def __init__(self, model: PreTrainedModel, settings: TrainSettings, device: torch.device):
        self.settings = settings
        self.device = device
        self.updates = 0
        self.skipped = 0
        policy = Policy(without_dropout(model)).to(device).train()
        if settings.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = shard(policy, getattr(torch, settings.compute_dtype))
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=settings.adam_eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    @property
    def vocabulary(self) -> int:
        return head(self.model)[0].shape[0]

    def logps(self, rollouts: Sequence[Rollout], temperature: float) -> Tensor:
        """(N,) fp32 log-probabilities of the response tokens under the training forward."""
        result_N = torch.zeros(flat_offsets(rollouts)[-1], device=self.device)

        with torch.no_grad():
            for batch in self._micro_batches(rollouts):
                through_head = partial(_token_logps, token_ids_N=batch.token_ids_N, temperature=temperature)
                result_N[batch.flat_N] = self.policy(batch, through_head)
        return result_N

    def update(self, rollouts: Sequence[Rollout], tokens: LossTokens, settings: LossSettings) -> Update:
        """One optimiser step on this rank's share of a mini-batch; a collective call.

        Args:
            rollouts: this rank's responses; may be fewer than another rank's, or none.
            tokens: the loss's inputs in the flat token order of `rollouts`, global denominators folded in.
            settings: the objective's constants.
        Raises:
            NonFiniteGradient: more than `max_skipped_updates` gradients were not finite so far.
        """
        parts, places = [], []
        batches = self._micro_batches(rollouts)
        for batch in batches:
            through_head = partial(
                _loss,
                tokens=take(tokens, batch.flat_N),
                settings=settings,
                chunk_bytes=self.settings.head_chunk_bytes,
            )
            loss, stats = self.policy(batch, through_head)
            loss.backward()
            parts.append(stats)
            places.append(batch.flat_N)
        grad_norm, skipped = self._step()
        return Update(join(parts, places), grad_norm, skipped, len(batches))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by name, one at a time; a collective call. A tied head is named as well."""
        for name, value in self.model.state_dict().items():
            yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
        """As many on every rank: a rank that has fewer adds empty ones, which weigh nothing."""
        batches = pack(rollouts, self.settings.packing)
        count = torch.tensor(len(batches), device=self.device)
        most = int(distributed.all_reduce(count, "max"))
        batches += [empty_batch()] * (most - len(batches))
        return [batch.to(self.device) for batch in batches]

    def _rate_scale(self) -> float:
        scale = min(1.0, (self.updates + 1) / max(1, self.settings.warmup_steps))
        if self.settings.decay is not None:
            begin, end = self.settings.decay
            scale *= min(1.0, max(0.0, (end - self.updates) / max(1, end - begin)))
        return scale

    def _step(self) -> tuple[float, bool]:
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self._rate_scale()
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        finite = grad_norm - grad_norm == 0.0
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.updates += 1
        self.skipped += not finite
        if self.skipped > self.settings.max_skipped_updates:
            raise NonFiniteGradient(
                f"update {self.updates}: gradient norm {grad_norm}; {self.skipped} updates were skipped, "
                f"at most {self.settings.max_skipped_updates} are allowed (student.max_skipped_updates)"
            )
        return grad_norm, not finite


def shard(policy: Policy, compute_dtype: torch.dtype) -> Policy:
    """Shards each decoder layer and the root in place; gradients are summed over ranks, not averaged."""
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in policy.model.get_decoder().layers:
        fully_shard(layer, mp_policy=precision)
    fully_shard(policy, mp_policy=precision)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    return policy


def _token_logps(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, token_ids_N: Tensor, temperature: float
) -> Tensor:
    top = linear_topk_logprobs(
        hidden_ND, weight_VD, 0, token_ids_N=token_ids_N, bias_V=bias_V, temperature=temperature
    )
    assert top.token_logp_N is not None  # ids were given
    return top.token_logp_N


def _loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    tokens: LossTokens,
    settings: LossSettings,
    chunk_bytes: int,
) -> tuple[Tensor, LossStats]:
    return linear_smopd_loss(hidden_ND, weight_VD, tokens, settings, bias_V=bias_V, chunk_bytes=chunk_bytes)


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Sets every dropout rate to 0: the ratio of two forwards is to be that of the parameters alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  a plain number beside the submodules
    return model


def take(tokens: LossTokens, index_n: Tensor) -> LossTokens:
    """The rows `index_n` of every per-token field."""
    n_tokens = tokens.token_ids_N.shape[0]
    rows = {
        field.name: value.index_select(0, index_n)
        for field in fields(tokens)
        if isinstance(value := getattr(tokens, field.name), Tensor)
        and (field.name != "log_alpha" or value.dim() > 1)
        and value.shape[0] == n_tokens
    }
    return replace(tokens, **rows)


def join(parts: Sequence[LossStats], places: Sequence[Tensor]) -> LossStats:
    """Micro-batch statistics back in flat order: per-token fields scattered, loss terms summed."""
    place_N = torch.cat(list(places))
    joined: dict[str, Any] = {}
    for field in fields(parts[0]):
        values = [getattr(part, field.name) for part in parts]
        if values[0] is None:
            joined[field.name] = None
        elif values[0].dim() == 0:
            joined[field.name] = torch.stack(values).sum()
        else:
            flat_N = torch.cat(values)
            joined[field.name] = torch.empty_like(flat_N).index_copy_(0, place_N, flat_N)
    return LossStats(**joined)
