"""The model that is being trained.

Packed micro-batches, a fused head, one optimiser step an update; how it is sharded is its strategy's
(fsdp.py, deepspeed.py), adapters are lora.py's.

Gradients are sums over all ranks and micro-batches of a loss whose denominators are already global, so
nothing here divides: how a batch is cut changes no gradient. Parameters and optimiser state are fp32;
computation is in `compute_dtype`; reductions are fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.models import attention
from smopd.engine.models.loading import head
from smopd.engine.models.packing import empty_batch, flat_offsets, pack
from smopd.engine.models.renamed import checkpoint_activations
from smopd.engine.settings import TrainSettings
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
        settings: optimiser, precision, sharding and packing.
        device: where to compute.
        schedule: the learning rate's factor at an update, counted from 0; the warm-up multiplies it. None: 1.
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
        self.settings = settings
        self.schedule = schedule
        self.device = device
        self.lora = settings.lora
        self.updates = 0
        self.skipped = 0
        self.vocabulary = head(model)[0].shape[0]
        dtype = getattr(torch, settings.compute_dtype)
        attends = attention.choose(model, settings.attention, device, dtype)
        without_dropout(model)
        if settings.lora is not None:
            from smopd.engine.student import lora

            lora.attach(model, settings.lora, dtype)
        policy = Policy(model).to(device).train()
        if settings.gradient_checkpointing:
            checkpoint_activations(model)
        if settings.compile:
            compile_layers(model)
        self.strategy = make_strategy(policy, settings, device)
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
        result_N = torch.zeros(flat_offsets(rollouts)[-1], device=self.device)
        self.policy.eval()  # the adapters' dropout, the only one there is
        with torch.no_grad(), self._without_adapters() if not adapters else nullcontext():
            for batch in self._micro_batches(rollouts):
                through_head = partial(_token_logps, token_ids_N=batch.token_ids_N, temperature=temperature)
                result_N[batch.flat_N] = self.strategy.forward(batch, through_head)
        self.policy.train()
        return result_N

    def topk(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TopK:
        """The `kappa` most likely tokens at each of the N response positions; a collective call."""
        n_tokens = flat_offsets(rollouts)[-1]
        ids_NS = torch.zeros(n_tokens, kappa, dtype=torch.int32, device=self.device)
        logps_NS = torch.zeros(n_tokens, kappa, device=self.device)
        self.policy.eval()
        with torch.no_grad():
            for batch in self._micro_batches(rollouts):
                top = self.strategy.forward(batch, partial(_top, kappa=kappa, temperature=temperature))
                ids_NS[batch.flat_N], logps_NS[batch.flat_N] = top.ids_NS, top.logps_NS
        self.policy.train()
        return TopK(ids_NS, logps_NS)

    def update(self, rollouts: Sequence[Rollout], tokens: LossTokens, settings: LossSettings) -> Update:
        """One optimiser step on this rank's share of a mini-batch; a collective call.

        Args:
            rollouts: this rank's responses; may be fewer than another rank's, or none.
            tokens: the loss's inputs in the flat token order of `rollouts`, global denominators folded in.
            settings: the objective's constants.
        Raises:
            NonFiniteGradient: more than MAX_SKIPPED_UPDATES gradients were not finite so far.
        """
        parts, places = [], []
        batches = self._micro_batches(rollouts)
        for i, batch in enumerate(batches):
            through_head = partial(
                _loss,
                tokens=select_tokens(tokens, batch.flat_N),
                settings=settings,
            )
            loss, stats = self.strategy.forward(batch, through_head)
            self.strategy.backward(loss, last=i + 1 == len(batches))
            parts.append(stats)
            places.append(batch.flat_N)
        grad_norm = self.strategy.step(self.settings.learning_rate * self._rate_scale())
        skipped = grad_norm - grad_norm != 0.0
        self._count(grad_norm, skipped)
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
        also = {first: others for first, *others in names.values()}
        tensors = {name: tensors[name] for name in also}
        if self.lora is None:
            whole: Iterable[tuple[str, Tensor]] = (
                (name, self.strategy.full(value)) for name, value in tensors.items()
            )
        else:
            from smopd.engine.student import lora

            whole = lora.merged(tensors, self.lora, self.strategy.full)
        for name, value in whole:
            yield name, value
            for other in also.get(name, ()):
                yield other, value
            del value  # before the next one is gathered

    def adapter(self, folder: Path) -> Path:
        """Writes the adapters to `folder` in peft's format, which vLLM loads too; a collective call.

        Raises:
            ValueError: the student has none.
        """
        if self.lora is None:
            raise ValueError("adapter: the student trains all parameters, expected TrainSettings.lora")
        from smopd.engine.student import lora

        return lora.save(self.model, self._tensors(), self.strategy.full, folder)

    def _without_adapters(self) -> AbstractContextManager[None]:
        if self.lora is None:
            raise ValueError("logps: the student trains all parameters, expected TrainSettings.lora")
        from smopd.engine.student import lora

        return lora.adapters_disabled(self.model)

    def _tensors(self) -> dict[str, Tensor]:
        """The model's state dict, in shards. Asked of the root, whose hooks put the shards back first."""
        tensors = self.policy.state_dict(keep_vars=True)
        return {name.removeprefix("model."): value for name, value in tensors.items()}

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
        """As many on every rank, and at least one: empty ones, which weigh nothing, fill up."""
        batches = pack(rollouts, self.settings, one_row_from=attention.one_row_from(self.model))
        count = torch.tensor(len(batches), device=self.device)
        most = max(1, int(distributed.all_reduce(count, "max")))
        batches += [empty_batch()] * (most - len(batches))
        return [batch.to(self.device) for batch in batches]

    def _rate_scale(self) -> float:
        warmed = min(1.0, (self.updates + 1) / max(1, self.settings.warmup_steps))
        return warmed * (self.schedule(self.updates) if self.schedule is not None else 1.0)

    def _count(self, grad_norm: float, skipped: bool) -> None:
        self.updates += 1
        self.skipped += skipped
        if self.skipped > MAX_SKIPPED_UPDATES:
            raise NonFiniteGradient(
                f"update {self.updates}: gradient norm {grad_norm}; {self.skipped} updates were skipped, "
                f"at most {MAX_SKIPPED_UPDATES} are allowed"
            )


def make_strategy(policy: Policy, settings: TrainSettings, device: torch.device) -> Strategy:
    """Shards `policy` as the settings say.

    Raises:
        ValueError, ImportError: as Student.
    """
    if settings.strategy == "fsdp2":
        from smopd.engine.student.fsdp import Fsdp2

        return Fsdp2(policy, settings, device)
    from smopd.engine.student.deepspeed import DeepSpeedZero

    return DeepSpeedZero(policy, settings, device)


def compile_layers(model: PreTrainedModel) -> None:
    """torch.compile of each decoder layer's forward; hooks and checkpointing stay outside."""
    for layer in model.get_decoder().layers:
        layer.forward = torch.compile(layer.forward)


def _token_logps(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, token_ids_N: Tensor, temperature: float
) -> Tensor:
    top = linear_topk_logprobs(
        hidden_ND, weight_VD, 0, token_ids_N=token_ids_N, bias_V=bias_V, temperature=temperature
    )
    assert top.token_logp_N is not None  # ids were given
    return top.token_logp_N


def _top(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, kappa: int, temperature: float
) -> TopK:
    return linear_topk_logprobs(hidden_ND, weight_VD, kappa, bias_V=bias_V, temperature=temperature)


def _loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    *,
    tokens: LossTokens,
    settings: LossSettings,
) -> tuple[Tensor, LossStats]:
    return linear_smopd_loss(hidden_ND, weight_VD, tokens, settings, bias_V=bias_V)


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Sets every dropout rate to 0: the ratio of two forwards is to be that of the parameters alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            setattr(module, "attention_dropout", 0.0)  # noqa: B010  a plain number beside the submodules
    return model


def select_tokens(tokens: LossTokens, index_n: Tensor) -> LossTokens:
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


def join_stats(parts: Sequence[LossStats], places: Sequence[Tensor]) -> LossStats:
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
