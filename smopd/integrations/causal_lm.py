"""A causal language model as hidden states and a head: what the fused operations take of it.

Shapes: B sequences, T completion tokens, V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from smopd.engine.models.loading import logit_scale


class Head(NamedTuple):
    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    """What the model multiplies its logits with; a softmax at temperature T of them is one at T / scale."""


def base_of(model: Any) -> Any:
    """The transformers model under peft's wrapper, if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def completion_hidden(model: Any, input_ids: Tensor, attention_mask: Tensor, n_completion: int) -> Tensor:
    """(B, T, D) final hidden states that predict the last `n_completion` = T tokens."""
    decoder = base_of(model).get_decoder()
    states = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return states[:, -n_completion - 1 : -1]


def head_of(model: Any, dtype: torch.dtype | None) -> Head:
    """The output embedding in `dtype` (None: its own), whole: FSDP2's shards are gathered."""
    model = base_of(model)
    output = model.get_output_embeddings()
    weight_VD, bias_V = (_whole(x, dtype) for x in (output.weight, getattr(output, "bias", None)))
    assert weight_VD is not None
    return Head(weight_VD, bias_V, logit_scale(model.config.get_text_config()))


def _whole(parameter: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if isinstance(parameter, DTensor):
        parameter = parameter.full_tensor()
    return parameter if parameter is None or dtype is None else parameter.to(dtype)
