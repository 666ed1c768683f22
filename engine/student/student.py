"""The model that is being trained: packed micro-batches, a fused head, one optimiser step an update.

Gradients are sums over ranks and micro-batches of a loss whose denominators are global: nothing here divides.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.models import attention
from smopd.engine.models.loading import checkpoint_activations, head
from smopd.engine.models.packing import empty_batch, flat_offsets, pack
from smopd.engine.settings import TrainSettings
from smopd.engine.student import lora
from smopd.engine.student.deepspeed import DeepSpeedZero
from smopd.engine.student.fsdp import Fsdp2
from smopd.engine.student.strategy import Policy, Strategy
from smopd.engine.types import Rollout, TokenBatch
from smopd.kernels.ops.linear import linear_smopd_loss
from smopd.kernels.ops.linear_topk import linear_topk_logprobs
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TopK

log = logging.getLogger(__name__)
MAX_SKIPPED_UPDATES = 3  # ours: updates of a run whose gradient is not finite


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


class Student:
    """Trains one causal language model.

    Args:
        model: fp32 (with adapters the compute dtype will do), unsharded, the same on every rank.
        schedule: the learning rate's factor at an update, counted from 0, beside the warm-up. None: 1.
    Raises:
        ValueError: settings that do not go together, or that this model cannot serve.
        ImportError: the strategy's or the adapters' package is not installed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: TrainSettings,
        device: torch.device,
        *,
        schedule: Callable[[int], float] | None = None,
    ):
        self.settings, self.schedule, self.device = settings, schedule, device
        self.lora = settings.lora
        self.updates = self.skipped = 0
        self.vocabulary = head(model)[0].shape[0]
        dtype = getattr(torch, settings.compute_dtype)
        attends = attention.choose(model, settings.attention, device, dtype)
        _without_dropout(model)
        if settings.lora is not None:
            lora.attach(model, settings.lora, dtype)
        policy = Policy(model).to(device).train()
        if settings.gradient_checkpointing:
            checkpoint_activations(model)
        if settings.compile:
            for layer in model.get_decoder().layers:  # hooks and checkpointing stay outside
                layer.forward = torch.compile(layer.forward)
        self.strategy: Strategy = (
            Fsdp2(policy, settings, device)
            if settings.strategy == "fsdp2"
            else DeepSpeedZero(policy, settings, device)
        )
        trained = "all parameters" if self.lora is None else f"adapters of rank {self.lora.rank}"
        log.info(
            "student: %s on %d ranks, %s in fp32, computation in %s%s, attention: %s",
            self.strategy.name,
            distributed.world_size(),
            trained,
            settings.compute_dtype,
            ", compiled layers" if settings.compile else "",
            attends,
        )

    @property
    def policy(self) -> Policy:
        return self.strategy.policy

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.strategy.optimizer

    def logps(self, rollouts: Sequence[Rollout], temperature: float, *, adapters: bool = True) -> Tensor:
        """(N,) fp32 log-probabilities of the response tokens under the training forward; a collective call.

        Args:
            adapters: False leaves them out: what the student began with.
        """
        if adapters:
            logp_N = self.topk(rollouts, 0, temperature).token_logp_N
        elif self.lora is None:
            raise ValueError("logps: the student trains all parameters, expected TrainSettings.lora")
        else:
            with lora.adapters_disabled(self.model):
                logp_N = self.topk(rollouts, 0, temperature).token_logp_N
        assert logp_N is not None  # topk gives it
        return logp_N

    def topk(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TopK:
        """The `kappa` most likely tokens at each of the N response positions; a collective call."""
        n_tokens = flat_offsets(rollouts)[-1]
        ids_NS = torch.zeros(n_tokens, kappa, dtype=torch.int32, device=self.device)
        logps_NS = torch.zeros(n_tokens, kappa, device=self.device)
        token_logp_N = torch.zeros(n_tokens, device=self.device)
        self.policy.eval()  # the adapters' dropout, the only one there is
        with torch.no_grad():
            for batch in self._micro_batches(rollouts):
                through_head = partial(
                    linear_topk_logprobs, kappa=kappa, token_ids_N=batch.token_ids_N, temperature=temperature
                )
                top: TopK = self.strategy.forward(batch, through_head)
                assert top.token_logp_N is not None  # token_ids_N are given
                ids_NS[batch.flat_N], logps_NS[batch.flat_N] = top.ids_NS, top.logps_NS
                token_logp_N[batch.flat_N] = top.token_logp_N
        self.policy.train()
        return TopK(ids_NS, logps_NS, token_logp_N)

    def update(self, rollouts: Sequence[Rollout], tokens: LossTokens, settings: LossSettings) -> Update:
        """One optimiser step on this rank's share of a mini-batch, which may be empty; a collective call.

        Args:
            tokens: the loss's inputs in the flat token order of `rollouts`, global denominators folded in.
        Raises:
            NonFiniteGradient: more than MAX_SKIPPED_UPDATES gradients were not finite so far.
        """
        parts, places = [], []
        batches = self._micro_batches(rollouts)
        for i, batch in enumerate(batches):
            own = select_tokens(tokens, batch.flat_N)
            through_head = partial(linear_smopd_loss, tokens=own, settings=settings)
            loss, stats = self.strategy.forward(batch, through_head)
            self.strategy.backward(loss, last=i + 1 == len(batches))
            parts.append(stats)
            places.append(batch.flat_N)
        factor = min(1.0, (self.updates + 1) / max(1, self.settings.warmup_steps))
        if self.schedule is not None:
            factor *= self.schedule(self.updates)
        grad_norm = self.strategy.step(self.settings.learning_rate * factor)
        skipped = not math.isfinite(grad_norm)
        self.updates += 1
        self.skipped += skipped
        if self.skipped > MAX_SKIPPED_UPDATES:
            raise NonFiniteGradient(
                f"update {self.updates}: gradient norm {grad_norm}; {self.skipped} updates were skipped, "
                f"at most {MAX_SKIPPED_UPDATES} are allowed"
            )
        return Update(join_stats(parts, places), grad_norm, skipped, len(batches))

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Full tensors by the base model's names, one at a time, adapters merged; a collective call.

        A tied head is named as well, behind the embedding: the same tensor, gathered once.
        """
        tensors = self._tensors()
        names: dict[int, list[str]] = {}
        for name, value in tensors.items():
            names.setdefault(id(value), []).append(name)
        tied = {first: others for first, *others in names.values()}
        tensors = {name: tensors[name] for name in tied}
        whole: Iterator[tuple[str, Tensor]]
        if self.lora is None:
            whole = ((name, self.strategy.full(value)) for name, value in tensors.items())
        else:
            whole = lora.merged(tensors, self.lora, self.strategy.full)
        for name, value in whole:
            yield name, value
            for other in tied.get(name, ()):
                yield other, value
            del value  # before the next one is gathered

    def adapter(self, folder: Path) -> Path:
        """Writes the adapters to `folder` in peft's format, which vLLM loads too; a collective call."""
        if self.lora is None:
            raise ValueError("adapter: the student trains all parameters, expected TrainSettings.lora")
        return lora.save(self.model, self._tensors(), self.strategy.full, folder)

    def _tensors(self) -> dict[str, Tensor]:
        """The model's state dict, in shards. Asked of the root, whose hooks put the shards back first."""
        tensors = self.policy.state_dict(keep_vars=True)
        return {name.removeprefix("model."): value for name, value in tensors.items()}

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
        """As many on every rank, and at least one: empty ones, which weigh nothing, fill up."""
        batches = [*pack(rollouts, self.settings, one_row_from=attention.one_row_from(self.model))]
        count = torch.tensor(len(batches), device=self.device)
        most = max(1, int(distributed.all_reduce(count, "max")))
        batches += [empty_batch()] * (most - len(batches))
        return [batch.to(self.device) for batch in batches]


def _without_dropout(model: PreTrainedModel) -> None:
    """The ratio of two forwards is to be that of the parameters alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  a plain number beside the submodules


def select_tokens(tokens: LossTokens, index_n: Tensor) -> LossTokens:
    """The rows `index_n` of every per-token field."""
    n_tokens = tokens.token_ids_N.shape[0]
    rows = {
        name: value.index_select(0, index_n)
        for name, value in vars(tokens).items()
        if value is not None and value.shape[0] == n_tokens and (name != "log_alpha" or value.dim() > 1)
    }
    return replace(tokens, **rows)


def join_stats(parts: Sequence[LossStats], places: Sequence[Tensor]) -> LossStats:
    """Micro-batch statistics back in flat order: per-token fields scattered, loss terms summed."""
    place_N = torch.cat(list(places))
    joined: dict[str, Tensor] = {}
    for name, first in vars(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if first.dim() == 0:
            joined[name] = torch.stack(values).sum()
        else:
            flat_N = torch.cat(values)
            joined[name] = torch.empty_like(flat_N).index_copy_(0, place_N, flat_N)
    return LossStats(**joined)
