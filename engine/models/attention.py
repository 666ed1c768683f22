"""How packed rows attend: under a mask over whole rows, whose cost is their square, or a piece at a time.

Shapes: T positions of a packed batch, S pieces, H heads, K key-value heads, G = H / K, d head dimension.
"""

from __future__ import annotations

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

from smopd.engine.models.sizes import numbers_of
from smopd.engine.types import Piece, TokenBatch
from smopd.kernels.ops.attention import by_halves

MASKED = "sdpa"
SHORT = 256
"""Under so many positions a unit attends faster under a mask on a CPU (ours; docs/architecture.md)."""
PIECES = "smopd_pieces"  # the name among transformers' attention functions
TOKENS = "smopd_token"
PROBE_TOLERANCE = 3e-2  # ours: relative to the largest value, a few roundings of bfloat16
PROBE = (  # two units and one without responses
    Piece(0, 7),
    Piece(7, 8, 0, 3),
    Piece(8, 27, 0, 3),
    Piece(27, 28),
    Piece(28, 60),
    Piece(60, 64, 28, 50),
)
GROUPED = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters else {}
"""Tells torch that keys have fewer heads than queries; torch 2.11 takes that unasked."""

Attend = Callable[[Tensor, Tensor, Tensor, Sequence[Piece], "float | None"], Tensor]
"""(T, H, d) queries, (T, K, d) keys and values, pieces, scale -> (T, H, d)."""


def choose(model: PreTrainedModel, wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Sets how `model` attends; returns a description for the log.

    Args:
        wanted: "auto", "sdpa" (the mask) or "flash" (a piece at a time).
        dtype: that of the computation.
    Raises:
        ValueError: "flash" cannot serve here.
    """
    flash_3 = wanted != "sdpa" and own_way(model) is None and device.type == "cuda" and use_flash_3(device)
    reason = "as set" if wanted == "sdpa" else own_way(model) or fault(model, device, dtype)
    if flash_3 and reason is not None:
        attention.restore_flash_attention_impl()
        flash_3, reason = False, fault(model, device, dtype)
    if wanted == "flash" and reason is not None:
        raise ValueError(f"attention: 'flash' cannot serve, {reason}; expected 'auto' or 'sdpa'")
    if reason is not None:
        model.set_attn_implementation(MASKED)
        return f"sdpa under a mask ({reason})"
    _set(model, PIECES, attend_pieces)
    if device.type == "cpu":
        return f"a sequence at a time, from {SHORT} positions on"
    return "torch's variable-length kernels" + (" by FlashAttention 3" if flash_3 else "")


def use_flash_3(device: torch.device) -> bool:
    """Has torch's kernels computed by FlashAttention 3 on sm_90 if `flash_attn_interface` is installed.

    Source: torch.nn.attention.activate_flash_attention_impl (torch 2.11). It holds for the process.
    """
    here = torch.cuda.get_device_capability(device)[0] == 9 and find_spec("flash_attn_interface") is not None
    if here:
        attention.activate_flash_attention_impl("FA3")
    return here


def _set(model: PreTrainedModel, name: str, attend: Callable[..., tuple[Tensor, None]]) -> None:
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, AttentionMaskInterface()[MASKED])
    model.set_attn_implementation(name)


def choose_together(models: Sequence[PreTrainedModel]) -> None:
    """Sets one way to attend for frozen models that score the same batches."""
    for wanted in ("auto", "sdpa"):
        for model in models:
            choose(model, wanted, model.device, model.dtype)
        if all(takes_pieces(model) for model in models):
            return


def takes_pieces(model: PreTrainedModel) -> bool:
    """Whether the pieces of a batch of one row attend one at a time."""
    return model.config._attn_implementation == PIECES


def one_row_from(model: PreTrainedModel) -> int | None:
    """`pack`'s argument that suits how `model` attends."""
    if not takes_pieces(model):
        return None
    return SHORT if model.device.type == "cpu" else 0


def decoder_inputs(model: PreTrainedModel, batch: TokenBatch) -> dict[str, Any]:
    """What the decoder of `model` takes for `batch`, by its way to attend."""
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
    if takes_pieces(model) and batch.one_row:
        unused_mask = batch.input_ids.new_ones(1, 1, 1, 1)  # without one transformers makes one of the rows
        return inputs | {"attention_mask": unused_mask, "pieces": batch.pieces}
    mask = mask_of(batch.pieces, batch.input_ids.shape, batch.input_ids.device)
    return inputs | {"attention_mask": mask}


def mask_of(pieces: Sequence[Piece], shape: tuple[int, ...], device: torch.device) -> Tensor:
    """(rows, 1, L, L) bool, True where a position may look, for rows of this (rows, L) shape."""
    spans_S4 = torch.tensor(pieces)
    spans_T4 = spans_S4.repeat_interleave(spans_S4[:, 1] - spans_S4[:, 0], 0).to(device)
    begin, _, prompt_begin, prompt_end = spans_T4.view(*shape, 1, 4).unbind(-1)
    place = torch.arange(len(spans_T4), device=device).view(shape)
    query, key = place[:, :, None], place[:, None, :]
    own = (begin <= key) & (key <= query)
    return (own | (prompt_begin <= key) & (key < prompt_end))[:, None]


@torch.compiler.disable  # the pieces are other ones in each batch
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
    """transformers' attention function: (1, H, T, d) queries, (1, K, T, d) keys, values -> (1, T, H, d).

    sdpa in calls without pieces.
    """
    if pieces is None:
        sdpa = AttentionInterface()[MASKED]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **others)
    query_THd, key_TKd, value_TKd = (x[0].transpose(0, 1) for x in (query, key, value))
    return _form(query.device)(query_THd, key_TKd, value_TKd, pieces, scaling)[None], None


def choose_for_sampling(model: PreTrainedModel) -> None:
    """Where `model` attends by sdpa, it does by `attend_token` from now on."""
    if model.config._attn_implementation == MASKED and model._supports_attention_backend:
        _set(model, TOKENS, attend_token)


def attend_token(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """sdpa without the copies of keys and values that transformers makes under a mask until 5.23.

    (R, H, 1, d) queries, (R, K, T, d) keys and values, (R or 1, 1, 1, T) mask -> (R, 1, H, d), with the G
    heads of a key-value head as G queries of it. Calls of other shapes are sdpa's.
    """
    n_rows, n_heads, n_queries, _ = query.shape
    shared = attention_mask is not None and attention_mask.shape[1] == 1
    if n_queries != 1 or n_heads == key.shape[1] or not shared or options.get("position_bias") is not None:
        return AttentionInterface()[MASKED](module, query, key, value, attention_mask, **options)
    query_RKGd = query.view(n_rows, key.shape[1], -1, query.shape[-1])
    scale = options.get("scaling")
    out_RKGd = functional.scaled_dot_product_attention(query_RKGd, key, value, attention_mask, scale=scale)
    return out_RKGd.reshape(n_rows, 1, n_heads, -1), None


def _form(device: torch.device) -> Attend:
    return by_halves if device.type == "cpu" else by_kernel


def by_mask(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, pieces: Sequence[Piece], scale: float | None
) -> Tensor:
    """sdpa under the mask: what the others are held to."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_THd, key_TKd, value_TKd))
    mask = mask_of(pieces, (1, len(query_THd)), query_THd.device)
    out = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def by_kernel(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, pieces: Sequence[Piece], scale: float | None
) -> Tensor:
    """torch's variable-length kernels, whose causal mask is aligned at the bottom right; CUDA alone."""
    query = query_THd.contiguous()
    key, value = (_behind_prompts(x, pieces).contiguous() for x in (key_TKd, value_TKd))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), **GROUPED}
    out = varlen.varlen_attn(query, key, value, *_starts(tuple(pieces), query.device), **options)
    assert isinstance(out, Tensor)  # nothing else was asked for
    return out


def _behind_prompts(x_TKd: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The keys (or values) of all pieces, each with its prompt's before its own.

    Cut and joined, not indexed, so that the gradient of a prompt is summed in one order on GPUs too.
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


@lru_cache(maxsize=4)  # of the layers of a batch
def _starts(pieces: tuple[Piece, ...], device: torch.device) -> tuple[Tensor, Tensor, int, int]:
    """Of queries and of keys, (S + 1,) int32, and the longest piece by each."""
    n_keys = (piece.end - piece.begin + piece.prompt_end - piece.prompt_begin for piece in pieces)
    places = [piece.begin for piece in pieces] + [pieces[-1].end], list(accumulate(n_keys, initial=0))
    queries, keys = (torch.tensor(place, dtype=torch.int32, device=device) for place in places)
    longest, most_keys = (max(end - begin for begin, end in pairwise(place)) for place in places)
    return queries, keys, longest, most_keys


def own_way(model: PreTrainedModel) -> str | None:
    """Why pieces cannot serve the model: its layers are more than causal attention."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [])
    if others := sorted(kinds - {"full_attention"}):
        return f"the model has {others} layers"
    if not kinds and getattr(config, "sliding_window", None):
        return f"the model attends to the last {config.sliding_window} tokens"
    if cap := getattr(config, "attn_logit_softcapping", None):
        return f"the model caps its scores at {cap}"
    if any(hasattr(module, "sinks") for module in model.modules()):
        return "the model has attention sinks"
    if getattr(config, "v_head_dim", None):
        return "the model's values have a head size of their own"
    if not model._supports_attention_backend:
        return "the model's attention is its own code"
    return None


def fault(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why pieces cannot serve on the device; None where output and gradients agree with sdpa."""
    numbers = numbers_of(model)
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(PROBE[-1].end, n, numbers.head_dim, generator=generator, device=device, dtype=dtype)
        for n in (numbers.heads, numbers.kv_heads, numbers.kv_heads)
    ]

    def results(attend: Attend) -> list[Tensor]:
        query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = attend(query, key, value, PROBE, None)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    try:
        found = results(_form(device))
    except (AttributeError, ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        return f"torch's kernels cannot run here: {type(error).__name__} {str(error)[:120]!r}"
    for mine, expected in zip(found, results(by_mask), strict=True):
        off = float((mine.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not off <= PROBE_TOLERANCE:
            return f"torch's kernels are {off:.1e} off sdpa"
    return None
