"""Attention over packed rows, under one mask or by pieces. Pieces avoid a cost quadratic in row length.

Shapes: T positions of a packed batch, S pieces, H heads, K key-value heads, G = H / K, d head dimension.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import attention, functional
from torch.nn.attention import varlen
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from smopd.engine.models.loading import decoder_of
from smopd.engine.types import Attends, Piece, TokenBatch
from smopd.kernels.ops.attention import by_halves

PIECES = "smopd_pieces"  # names of our functions in transformers' attention registry
TOKENS = "smopd_token"
PACKED_LAYERS = {"full_attention", "sliding_attention"}  # layer types of transformers that our masks support
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
"""An option that torch >= 2.12 needs if keys have fewer heads than queries."""


def set_attention(model: PreTrainedModel, attends: Attends) -> None:
    """Select the attention function of `model`: `attend_pieces` for pieces, else transformers' own."""
    if attends == "pieces":
        hopper = model.device.type == "cuda" and torch.cuda.get_device_capability(model.device)[0] == 9
        if hopper and find_spec("flash_attn_interface") is not None:  # untested
            attention.activate_flash_attention_impl("FA3")
        _register(PIECES, attend_pieces)
        model.set_attn_implementation(PIECES)
    else:  # eager if transformers' sdpa does not support the model
        by_sdpa = model._supports_sdpa and not _needs_eager(model)
        model.set_attn_implementation("sdpa" if by_sdpa else "eager")


def _needs_eager(model: PreTrainedModel) -> str | None:
    if cap := getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        return f"the model caps its attention scores at {cap}"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "the model has attention sinks"
    return None


def _register(name: str, attend: Callable[..., tuple[Tensor, None]]) -> None:
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])


def why_not_pieces(model: PreTrainedModel, dtype: torch.dtype | None = None) -> str | None:
    """Return why `model` cannot attend by pieces in `dtype`, or None if it can."""
    if model.device.type == "cuda" and dtype == torch.float32:
        return "torch's variable-length kernels take no fp32"
    if reason := why_not_packed(model) or _needs_eager(model):
        return reason
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    if (window := window_of(config)) and "sliding_attention" in kinds:
        return f"layers of the model attend to the last {window} tokens"
    if getattr(config, "v_head_dim", None):
        return "the head size of the model's values differs"
    return None if model._supports_attention_backend else "the model's attention is not replaceable"


def why_not_packed(model: PreTrainedModel) -> str | None:
    """Return why a mask cannot separate packed sequences in `model`, or None if it can."""
    config = model.config.get_text_config()
    if others := sorted(set(getattr(config, "layer_types", None) or []) - PACKED_LAYERS):
        return f"the model has {others} layers"
    if model._is_stateful or any(isinstance(m, torch.nn.Conv1d) for m in decoder_of(model).modules()):
        return "the model has recurrent or convolutional layers"
    return None


def window_of(config: Any) -> int | None:
    """Return a text config's sliding window. Return None if there is none or it covers the whole context."""
    window = getattr(config, "sliding_window", None)
    return window if window and window < getattr(config, "max_position_embeddings", window + 1) else None


def rope_boundary(config: Any) -> int | None:
    """Return the length above which a sequence changes its whole batch's rotary embedding, or None."""
    rope = getattr(config, "rope_parameters", None) or {}
    boundaries = []
    for each in [rope] if "rope_type" in rope else rope.values():
        if each.get("rope_type") == "longrope":
            boundaries.append(each["original_max_position_embeddings"])
        elif each.get("rope_type") == "dynamic":
            boundaries.append(config.max_position_embeddings)
    return min(boundaries, default=None)


def reset_rope(model: PreTrainedModel) -> None:
    """Reset dynamic rotary embeddings, for which transformers stores the longest length so far."""
    if rope_boundary(model.config.get_text_config()) is None:
        return
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # in Gemma 3, a dict from layer type to RoPE type
        if not isinstance(kinds, dict):
            kinds = {"": kinds}
        for prefix in (f"{name}_" if name else "" for name, kind in kinds.items() if kind == "dynamic"):
            setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)
            original = getattr(module, f"{prefix}original_inv_freq")
            module.register_buffer(f"{prefix}inv_freq", original, persistent=False)


def decoder_inputs(model: PreTrainedModel, batch: TokenBatch) -> dict[str, Any]:
    if batch.attends == "plain":  # one sequence per row, padded at the end: causal layers need no mask
        return {"input_ids": batch.input_ids}
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    if batch.attends == "pieces":
        unused_mask = batch.input_ids.new_ones(1, 1, 1, 1)  # keeps transformers from building a mask
        return inputs | {"attention_mask": unused_mask, "pieces": batch.pieces}
    mask = mask_of(batch.pieces, batch.input_ids.shape, batch.input_ids.device)
    return inputs | {"attention_mask": layer_masks(model, mask, batch.position_ids, batch.position_ids)}


def mask_of(pieces: Sequence[Piece], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the (rows, 1, L, L) bool mask of (rows, L) positions. It is True where a query sees a key."""
    spans_S4 = torch.tensor([*pieces])
    spans_T4 = spans_S4.repeat_interleave(spans_S4[:, 1] - spans_S4[:, 0], 0).to(device)
    begin, _, prompt_begin, prompt_end = spans_T4.view(*shape, 1, 4).unbind(-1)
    place = torch.arange(len(spans_T4), device=device).view(shape)
    query, key = place[:, :, None], place[:, None, :]
    own = (begin <= key) & (key <= query)
    return (own | (prompt_begin <= key) & (key < prompt_end))[:, None]


def layer_masks(
    model: PreTrainedModel, mask: Tensor, query_RQ: Tensor, key_RK: Tensor
) -> Tensor | dict[str, Tensor]:
    """Return `mask` in the format of `model`: by layer type if some layers have windows, additive if eager.

    mask: (R or 1, 1, Q, K) bool. query_RQ, key_RK: positions of queries and keys in their sequences.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])

    def as_taken(mask: Tensor) -> Tensor:
        if config._attn_implementation != "eager":
            return mask
        dtype = model.dtype  # not a weight's dtype: accessing a weight is a collective call under ZeRO-3
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)

    window = window_of(config)
    if window is None or (kinds and "sliding_attention" not in kinds):
        return as_taken(mask)
    sliding = as_taken(mask & (query_RQ[:, None, :, None] - key_RK[:, None, None, :] < window))
    return {"full_attention": as_taken(mask), "sliding_attention": sliding} if kinds else sliding


@torch.compiler.disable  # each batch has other pieces and would be compiled again
def attend_pieces(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    pieces: Sequence[Piece] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention by pieces, or by sdpa if `pieces` is None. transformers calls this function.

    (1, H, T, d) queries, (1, K, T, d) keys and values -> (1, T, H, d).
    """
    if pieces is None:
        sdpa = AttentionInterface()["sdpa"]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **others)
    # The GPU kernels do not support fp32. On a GPU, only the self-check calls this function with fp32.
    dtype = torch.bfloat16 if query.is_cuda and query.dtype == torch.float32 else query.dtype
    query_THd, key_TKd, value_TKd = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    attend = by_kernel if query.is_cuda else by_halves
    return attend(query_THd, key_TKd, value_TKd, pieces, scaling)[None].to(query.dtype), None


def set_token_attention(model: PreTrainedModel) -> None:
    """Select `attend_token` if `model` uses sdpa and supports custom attention functions."""
    if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        _register(TOKENS, attend_token)
        model.set_attn_implementation(TOKENS)


def attend_token(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Call sdpa without the copies of keys and values that transformers < 5.24 makes under a mask.

    (R, H, 1, d) queries, (R, K, T, d) keys and values, (R or 1, 1, 1, T) mask -> (R, 1, H, d). The G query
    heads that share a key-value head are passed as G queries. transformers' sdpa computes other shapes.
    """
    n_rows, n_heads, n_queries, _ = query.shape
    shared = attention_mask is not None and attention_mask.shape[1] == 1
    if n_queries != 1 or n_heads == key.shape[1] or not shared or options.get("position_bias") is not None:
        return AttentionInterface()["sdpa"](module, query, key, value, attention_mask, **options)
    query_RKGd = query.view(n_rows, key.shape[1], -1, query.shape[-1])
    scale = options.get("scaling")
    out_RKGd = functional.scaled_dot_product_attention(query_RKGd, key, value, attention_mask, scale=scale)
    return out_RKGd.reshape(n_rows, 1, n_heads, -1), None


def by_kernel(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, pieces: Sequence[Piece], scale: float | None
) -> Tensor:
    """Call torch's variable-length GPU kernels, whose causal mask is aligned at the bottom right."""
    query = query_THd.contiguous()
    key, value = (_behind_prompts(x, pieces).contiguous() for x in (key_TKd, value_TKd))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), **GROUPED}
    out = varlen.varlen_attn(query, key, value, *_starts(tuple(pieces), query.device), **options)
    assert isinstance(out, Tensor)
    return out


def _behind_prompts(x_TKd: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Return the keys (or values) of all pieces. Those of a shared prompt precede each piece that uses it.

    Split and concatenate instead of indexing, so that backward sums a prompt's gradients in a fixed order.
    """
    if all(piece.prompt_begin == piece.prompt_end for piece in pieces):
        return x_TKd
    cuts = sorted({0, x_TKd.shape[0], *(place for piece in pieces for place in piece)})
    parts = x_TKd.split([end - begin for begin, end in pairwise(cuts)])
    at = {cut: i for i, cut in enumerate(cuts)}
    taken = []
    for piece in pieces:
        taken += parts[at[piece.prompt_begin] : at[piece.prompt_end]]
        taken += parts[at[piece.begin] : at[piece.end]]
    return torch.cat(taken)


@lru_cache(maxsize=4)  # all layers use the same result for a batch
def _starts(pieces: tuple[Piece, ...], device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Return the starts of queries and of keys, (S + 1,) int32, and the maximum count of each in a piece."""
    n_keys = (piece.end - piece.begin + piece.prompt_end - piece.prompt_begin for piece in pieces)
    places = [piece.begin for piece in pieces] + [pieces[-1].end], list(accumulate(n_keys, initial=0))
    queries, keys = (torch.tensor(place, dtype=torch.int32, device=device) for place in places)
    longest, most_keys = (max(end - begin for begin, end in pairwise(place)) for place in places)
    return queries, keys, longest, most_keys
