"""The model in training: packed micro-batches, a fused head, and one optimizer step for each update."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.errors import NonFinite, UnusableModel
from smopd.engine.models.head import Head, head
from smopd.engine.models.loading import checkpoint_activations, decoder_layers
from smopd.engine.models.packing import empty_batch, flat_offsets, pack
from smopd.engine.models.paths import brief, check_rollouts, choose
from smopd.engine.settings import TrainSettings
from smopd.engine.student import lora
from smopd.engine.student.deepspeed import DeepSpeedZero
from smopd.engine.student.fsdp import Fsdp2
from smopd.engine.student.strategy import Policy, Strategy, ThroughHead
from smopd.engine.types import Rollout, TokenBatch
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TopK

log = logging.getLogger(__name__)
MAX_SKIPPED_UPDATES = 3  # ours
PerToken = TypeVar("PerToken", TopK, LossStats)


class Update(NamedTuple):
    stats: LossStats
    """Columns are in this rank's flat token order. Loss terms are this rank's share of the global sums."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    """True if the gradient was not finite. The parameters then did not change."""
    micro_batches: int


class Student:
    """A causal language model in training.

    Args:
        model: unsharded, equal on all ranks, and in fp32. With LoRA, it is converted to the compute dtype.
        schedule: update (from 0) -> factor of the learning rate on top of the warm-up. None means 1.
    Raises:
        ValueError, UnusableModel, ImportError: the settings do not suit the model or this environment.
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
        self.vocabulary = head(model).weight_VD.shape[0]
        dtype = getattr(torch, settings.compute_dtype)
        if settings.lora is not None:
            for parameter in model.parameters():  # buffers, such as rotary frequencies, stay in fp32
                parameter.data = parameter.data.to(dtype)
        policy = Policy(model.eval(), settings.router_aux_loss_coef).to(device)
        _without_dropout(model)
        self.layout = choose(model, settings.attention, dtype)
        if settings.lora is not None:
            lora.attach(model, settings.lora)
        if settings.gradient_checkpointing:
            checkpoint_activations(model)
        train_mode(policy)
        if settings.compile:
            for layer in decoder_layers(model):  # hooks and checkpointing stay uncompiled
                layer.forward = torch.compile(layer.forward)
        make = Fsdp2 if settings.strategy == "fsdp2" else DeepSpeedZero
        self.strategy: Strategy = make(policy, settings, device)
        self.policy, self.model, self.optimizer = self.strategy.policy, model, self.strategy.optimizer
        self._require_computable()
        trained = "all parameters" if self.lora is None else f"adapters of rank {self.lora.rank}"
        where = f"{self.strategy.name} on {distributed.world_size()} ranks"
        how = settings.compute_dtype + ", compiled layers" * settings.compile
        text = "student: %s, %s in fp32, computation in %s, attention: %s"
        log.info(text, where, trained, how, self.layout.description)

    def _require_computable(self) -> None:
        """Raise UnusableModel if forward or backward fails in the compute dtype. This is a collective call.

        Gradients, optimizer state and random state do not change.
        """
        dtype = self.settings.compute_dtype
        if dtype == "float32" or self.lora is not None:  # `choose` has checked this dtype
            return
        rollouts = check_rollouts(self.model)[:2]  # the short rollouts
        ids_N = torch.cat([rollout.response_ids for rollout in rollouts]).to(self.device)
        each_N = torch.full(ids_N.shape, 1 / len(ids_N), device=self.device)
        tokens = LossTokens(token_ids_N=ids_N, adv_N=torch.ones_like(each_N), pg_weight_N=each_N)
        only, why = LossSettings(opd_coef=0.0), ""
        devices = [self.device] if self.device.type == "cuda" else []
        try:
            with torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
                for batch in self._micro_batches(rollouts):
                    norm, stats = self.strategy.trial(batch, _through_loss(tokens, batch, only))
                    if not (math.isfinite(norm) and stats.logp_N.isfinite().all()):
                        why = "NaN or infinite log-probabilities or gradients"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # such as an fp32 buffer in an operation with bf16 parameters
            if distributed.in_collective(error):
                raise
            why = brief(error)
        if why:
            text = f"got {dtype}, in which a {type(self.model).__name__} fails on {self.device} ({why})"
            raise UnusableModel(f"student.compute_dtype: {text}; expected float32, in which it works")

    def logps(self, rollouts: Sequence[Rollout], temperature: float, *, adapters: bool = True) -> Tensor:
        """Return the tokens' (N,) fp32 logps, without `adapters` those of LoRA's base. A collective call."""
        with nullcontext() if adapters else lora.adapters_disabled(self.model):
            logp_N = self.topk(rollouts, 0, temperature).token_logp_N
        assert logp_N is not None
        return logp_N

    def topk(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TopK:
        """Return the `kappa` most likely tokens at the N response positions. This is a collective call."""
        batches, parts = self._micro_batches(rollouts), []
        self.policy.eval()  # no checkpointing, as no backward follows
        with torch.no_grad():
            for batch in batches:
                topk = partial(Head.topk, kappa=kappa, token_ids_N=batch.token_ids_N, temperature=temperature)
                parts.append(self.strategy.forward(batch, topk))
        train_mode(self.policy)
        return joined(parts, batches)

    def update(self, rollouts: Sequence[Rollout], tokens: LossTokens, settings: LossSettings) -> Update:
        """Take an optimizer step on this rank's share of a mini-batch, which may be empty.

        This is a collective call. tokens: in the flat token order of `rollouts`, with global denominators.
        Raise NonFinite after more than MAX_SKIPPED_UPDATES skipped updates.
        """
        batches, parts = self._micro_batches(rollouts), []
        if self.settings.router_aux_loss_coef:
            here = torch.tensor(flat_offsets(rollouts)[-1], device=self.device)
            every = max(1, int(distributed.all_reduce(here)))
            batches = [replace(batch, share=len(batch.flat_N) / every) for batch in batches]
        for i, batch in enumerate(batches):
            loss, stats = self.strategy.forward(batch, _through_loss(tokens, batch, settings))
            self.strategy.backward(loss, last=i + 1 == len(batches))
            parts.append(stats)
        factor = min(1.0, (self.updates + 1) / max(1, self.settings.warmup_steps))
        if self.schedule is not None:
            factor *= self.schedule(self.updates)
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * factor
        grad_norm = self.strategy.step()
        skipped = not math.isfinite(grad_norm)
        self.updates += 1
        self.skipped += skipped
        if self.skipped > MAX_SKIPPED_UPDATES:
            skips = f"{self.skipped} updates were skipped, at most {MAX_SKIPPED_UPDATES} are allowed"
            raise NonFinite(f"update {self.updates}: gradient norm {grad_norm}; {skips}")
        return Update(joined(parts, batches), grad_norm, skipped, len(batches))

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors under the base model's names, with adapters merged. This is a collective call.

        A tied head follows the embedding as the same tensor, which is gathered only once.

        Raises:
            NonFinite: a tensor, which the error names, has NaN or infinite elements.
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
            bounds = value.aminmax() if value.is_floating_point() and value.numel() else ()
            if not all(bound.isfinite() for bound in bounds):
                raise NonFinite(f"the weight {name} is not finite")
            yield name, value
            for other in tied.get(name, ()):
                yield other, value
            del value  # free it before the next tensor is gathered

    def adapter(self, folder: Path) -> Path:
        """Write a LoRA student's adapters to `folder` in peft's format. This is a collective call."""
        return lora.save(self.model, self._tensors(), self.strategy.full, folder)

    def _tensors(self) -> dict[str, Tensor]:
        """Return the model's sharded state dict. Take it from the root, whose hooks reshard the model."""
        tensors = self.policy.state_dict(keep_vars=True)
        return {name.removeprefix("model."): value for name, value in tensors.items()}

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[TokenBatch]:
        """Pack into the same number of micro-batches on every rank, at least one. Some may be empty."""
        batches = [*pack(rollouts, self.settings, self.layout)]
        count = torch.tensor(len(batches), device=self.device)
        most = max(1, int(distributed.all_reduce(count, "max")))
        batches += [empty_batch()] * (most - len(batches))
        return [batch.to(self.device) for batch in batches]


def _through_loss(
    tokens: LossTokens, batch: TokenBatch, settings: LossSettings
) -> ThroughHead[tuple[Tensor, LossStats]]:
    return partial(Head.loss, tokens=tokens.at(batch.flat_N), settings=settings)


def train_mode(model: nn.Module) -> None:
    """Set eval mode, except in modules with activation checkpointing, which need train mode.

    In train mode, dropout and random routers would change the ratio of two forwards with equal parameters.
    """
    model.eval()
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def _without_dropout(model: PreTrainedModel) -> None:
    """Set all dropout rates to 0, because checkpointed layers stay in train mode."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)


def joined(parts: Sequence[PerToken], batches: Sequence[TokenBatch]) -> PerToken:
    """Join the results of micro-batches. Columns are put into the flat token order; loss terms are summed."""
    place_N = torch.cat([batch.flat_N for batch in batches])
    fields: dict[str, Tensor] = {}
    for name, first in vars(parts[0]).items():
        values = [getattr(part, name) for part in parts]
        if first.dim() == 0:
            fields[name] = torch.stack(values).sum()
        else:
            flat_N = torch.cat(values)
            fields[name] = torch.empty_like(flat_N).index_copy_(0, place_N, flat_N)
    return type(parts[0])(**fields)
