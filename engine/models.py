"""Causal language models from a path or hub id, and the two halves that the fused operations need of them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from smopd.engine.types import TokenBatch


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model at `path` in `dtype`, with sdpa attention.

    Raises:
        FileNotFoundError: `path` looks like a folder and is none.
        ValueError: its attention is not causal over the whole context, so packed rows cannot be masked.
    """
    _check_path(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"model {path}: has {sorted(kinds)} layers, expected full_attention alone")
    module: nn.Module = model  # transformers' own annotation of `to` takes no device
    module.to(device)
    return model.eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    _check_path(path)
    return AutoTokenizer.from_pretrained(path)


def stored_dtype(path: str | Path) -> torch.dtype:
    """The dtype in which the model at `path` is stored; exports keep it."""
    dtype = AutoConfig.from_pretrained(path).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id that ends a response: the tokenizer's and the generation config's."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = ends if isinstance(ends, list) else [ends]
    found = {int(end) for end in [*listed, tokenizer.eos_token_id] if end is not None}
    if not found:
        raise ValueError(
            f"model {model.name_or_path}: neither its generation config nor its tokenizer has an eos token"
        )
    return tuple(sorted(found))


def response_hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """(N, D) final-norm hidden states that predict the batch's response tokens."""
    states = model.get_decoder()(
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask(),
        position_ids=batch.position_ids,
        use_cache=False,
    ).last_hidden_state
    return states.flatten(0, 1).index_select(0, batch.predictor_N)


def head(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """The output embedding's weight (V, D) and bias (V,)."""
    output = model.get_output_embeddings()
    return output.weight, getattr(output, "bias", None)


def _check_path(path: str | Path) -> None:
    text = str(path)
    looks_local = text.startswith((".", "/", "~")) or text.count("/") > 1
    if looks_local and not Path(text).expanduser().is_dir():
        raise FileNotFoundError(
            f"model path {text}: no such folder, expected one with config.json, or a hub id"
        )
