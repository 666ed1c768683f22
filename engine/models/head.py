"""The output head, which turns final hidden states into losses and log-probabilities of response tokens.

Shapes: N response tokens, D hidden, V vocabulary.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from smopd.engine.models.attention import decoder_inputs, reset_rope
from smopd.engine.models.loading import decoder_of, logit_cap, logit_factor
from smopd.engine.types import TokenBatch
from smopd.kernels.ops.loss import linear_smopd_loss, smopd_loss
from smopd.kernels.ops.topk import linear_topk_logprobs, topk_logprobs
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TopK


@dataclass(frozen=True)
class Head:
    """A linear head. With `cap`, logits are cap * tanh(linear / cap) and are all in memory at once."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    cap: float | None = None
    router_loss: Tensor | None = None

    def loss(self, hidden_ND: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, LossStats]:
        if self.cap is not None:
            loss, stats = smopd_loss(self.logits(hidden_ND), tokens, settings)
        else:
            loss, stats = linear_smopd_loss(hidden_ND, self.weight_VD, tokens, settings, bias_V=self.bias_V)
        if self.router_loss is not None:
            loss = loss + self.router_loss
        return loss, stats

    def topk(self, hidden_ND: Tensor, kappa: int, token_ids_N: Tensor, temperature: float) -> TopK:
        options: dict[str, Any] = {"token_ids_N": token_ids_N, "temperature": temperature}
        if self.cap is not None:
            return topk_logprobs(self.logits(hidden_ND), kappa, **options)
        return linear_topk_logprobs(hidden_ND, self.weight_VD, kappa, bias_V=self.bias_V, **options)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        logits_NV = functional.linear(hidden_ND, self.weight_VD, self.bias_V)
        return logits_NV if self.cap is None else torch.tanh(logits_NV / self.cap) * self.cap


def head(model: PreTrainedModel) -> Head:
    """Return the output head of `model` without its scale, which `response_hidden` applies."""
    output = model.get_output_embeddings()
    return Head(output.weight, getattr(output, "bias", None), logit_cap(model.config.get_text_config()))


def decode(model: PreTrainedModel, batch: TokenBatch, **options: Any) -> ModelOutput:
    """Run `model` without its head, and return the output."""
    reset_rope(model)
    return decoder_of(model)(**decoder_inputs(model, batch), use_cache=False, **options)


def router_loss(model: PreTrainedModel) -> Callable[[tuple[Tensor, ...]], Tensor] | None:
    """Return the family's load-balancing loss as a function of the layers' (N, experts) logits, or None."""
    loss = getattr(sys.modules[type(model).__module__], "load_balancing_loss_func", None)
    config = model.config.get_text_config()
    names = ("num_experts", "num_experts_per_tok")
    sizes = [getattr(model, name, None) or getattr(config, name, None) for name in names]
    return (lambda logits: loss(logits, *sizes)) if loss and all(sizes) else None


def response_hidden(model: PreTrainedModel, batch: TokenBatch, output: ModelOutput | None = None) -> Tensor:
    """Return the (N, D) final hidden states that predict response tokens, scaled and cast for the head."""
    states = (output or decode(model, batch)).last_hidden_state
    hidden_ND = states.flatten(0, 1).index_select(0, batch.predictor_N)
    scale = logit_factor(model.config.get_text_config())
    hidden_ND = hidden_ND if scale == 1 else hidden_ND * scale
    return hidden_ND.to(model.get_output_embeddings().weight.dtype)  # Mamba in bf16 returns fp32 states
