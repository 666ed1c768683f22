"""Causal language models from a path or hub id, and the two halves that the fused operations need of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from smopd.engine.models.attention import decoder_inputs
from smopd.engine.types import TokenBatch

# What a model's family does to its logits after the head, by the name that its config gives it.
SCALES = ("logit_scale", "output_multiplier", "output_multiplier_scale", "lm_head_multiplier")
DIVISOR = "logits_scaling"
MULTIPLIES = ("hyperclovax",)  # where the divisor's name means a factor
CAPS = ("final_logit_softcapping", "logits_soft_cap")


class UnusableModel(ValueError):
    """A model that is there and cannot be trained or sampled; says which and why."""


def load_model(path: str | Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model at `path` (a folder, also with ~, or a hub id) in `dtype`, with sdpa attention.

    Raises:
        FileNotFoundError: there is no such folder or hub id, or no model in it.
        UnusableModel: it is damaged or incomplete, of an unknown architecture or no causal language model; or
            its attention is not causal over the whole context, so packed rows cannot be masked; or its logits
            are capped, so no linear head gives them.
    """
    place, config = _read_config(path)
    try:
        logit_scale(config.get_text_config())
    except ValueError as error:
        raise UnusableModel(f"model {path}: {error}") from error
    with load_errors(path):
        found: Any = AutoModelForCausalLM.from_pretrained(
            place, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    model: PreTrainedModel = found[0]
    if missing := sorted(found[1]["missing_keys"]):
        shown = ", ".join(missing[:3]) + (" and more" if len(missing) > 3 else "")
        raise UnusableModel(
            f"model {path}: its files lack {len(missing)} of the weights of a {type(model).__name__}: {shown}"
        )
    _require_full_attention(model.config, path)
    module: nn.Module = model  # transformers' own annotation of `to` takes no device
    module.to(device)
    return model.eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of the model at `path`.

    Raises:
        FileNotFoundError: there is no such folder or hub id, or no tokenizer in it.
        UnusableModel: it cannot be read.
    """
    place = _place(path)
    with load_errors(path):
        tokenizer = AutoTokenizer.from_pretrained(place)
    files = list(tokenizer.vocab_files_names.values())
    # transformers makes an empty tokenizer of the model's kind where there is none.
    if files and Path(place).is_dir() and not any((Path(place) / file).is_file() for file in files):
        raise FileNotFoundError(
            f"model {path}: has no tokenizer, expected one of {', '.join(files)} beside it"
        )
    return tokenizer


def stored_dtype(path: str | Path) -> torch.dtype:
    """The dtype in which the model at `path` is stored; exports keep it. Raises as `load_model`."""
    dtype = _read_config(path)[1].dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def describe(path: str | Path) -> tuple[PreTrainedConfig, tuple[int, ...]]:
    """The config of the model at `path`, and every id that ends a response, ascending; reads no weights.

    Raises:
        FileNotFoundError: as `load_model`.
        UnusableModel: neither its generation config nor its tokenizer has an end token.
    """
    place, config = _read_config(path)
    with load_errors(path):
        try:
            generation = GenerationConfig.from_pretrained(place)
        except OSError:  # older checkpoints have no generation_config.json
            generation = GenerationConfig.from_model_config(config)
    ends = generation.eos_token_id
    listed = ends if isinstance(ends, list) else [ends]
    found = {int(end) for end in [*listed, load_tokenizer(path).eos_token_id] if end is not None}
    if not found:
        raise UnusableModel(f"model {path}: neither its generation config nor its tokenizer has an eos token")
    return config, tuple(sorted(found))


def response_hidden(model: PreTrainedModel, batch: TokenBatch) -> Tensor:
    """(N, D) final hidden states that predict the batch's response tokens, times the scale of the logits."""
    states = model.get_decoder()(**decoder_inputs(model, batch), use_cache=False).last_hidden_state
    hidden_ND = states.flatten(0, 1).index_select(0, batch.predictor_N)
    scale = logit_scale(model.config.get_text_config())
    return hidden_ND if scale == 1 else hidden_ND * scale


def head(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """The output embedding's weight (V, D) and bias (V,)."""
    output = model.get_output_embeddings()
    return output.weight, getattr(output, "bias", None)


def cache_argument(model: PreTrainedModel) -> str:
    """The name under which `forward` takes the key-value cache: `cache` since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def checkpoint_activations(model: PreTrainedModel) -> None:
    """`gradient_checkpointing_enable`, which transformers 5.23 renamed, without reentry."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _read_config(path: str | Path) -> tuple[str, PreTrainedConfig]:
    """Where transformers finds the model at `path`, and its config."""
    place = _place(path)
    if Path(place).is_dir() and not (Path(place) / "config.json").is_file():
        raise FileNotFoundError(f"model {path}: this folder has no config.json, expected a saved model")
    with load_errors(path):
        return place, AutoConfig.from_pretrained(place)


def _place(path: str | Path) -> str:
    """`path` with ~ expanded: a folder that is there, or what can only be a hub id."""
    place = str(Path(path).expanduser()) if str(path).startswith("~") else str(path)
    if not Path(place).is_dir() and (place.startswith((".", "/")) or place.count("/") > 1):
        raise FileNotFoundError(f"model {path}: no such folder, expected one with config.json, or a hub id")
    return place


def _require_full_attention(config: Any, path: str | Path) -> None:
    kinds = set(getattr(config, "layer_types", None) or [])
    if kinds - {"full_attention"}:
        raise UnusableModel(f"model {path}: has {sorted(kinds)} layers, expected full_attention alone")
    # Older architectures name no layer types: a window, if there is one, is every layer's.
    window = None if kinds else getattr(config, "sliding_window", None)
    if window and window < config.max_position_embeddings:
        raise UnusableModel(
            f"model {path}: attends to the last {window} of up to {config.max_position_embeddings} tokens, "
            "expected full attention"
        )


@contextmanager
def load_errors(path: str | Path) -> Iterator[None]:
    """Rephrases what transformers raises for a place without a model in a line that names the place."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # of the operating system, not about the model
            raise
        raise FileNotFoundError(
            f"model {path}: cannot be loaded, expected a folder with a saved model, or a hub id that can be "
            f"reached ({_first_line(error)})"
        ) from error
    except UnpicklingError as error:  # nothing that it holds has run
        raise UnusableModel(
            f"model {path}: its pickled weights hold more than weights; expected safetensors"
        ) from error
    except Exception as error:  # of safetensors, torch or the configuration: all say what is wrong
        raise UnusableModel(f"model {path}: cannot be loaded ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(" .:")


def logit_scale(config: Any) -> float:
    """The factor of the logits of a language model with this (text) config.

    Raises:
        ValueError: it caps its logits, which no linear head can express.
    """
    for name in CAPS:
        if cap := getattr(config, name, None):
            raise ValueError(
                f"{config.model_type} has {name}={cap}, expected none: "
                "the fused operations take a linear head"
            )
    for name in SCALES:
        if getattr(config, name, None) is not None:
            return float(getattr(config, name))
    divisor = getattr(config, DIVISOR, None)
    if divisor is None:
        return 1.0
    return float(divisor) if config.model_type in MULTIPLIES else 1.0 / float(divisor)
