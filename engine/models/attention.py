"""How packed rows attend: under a mask over whole rows, or a piece at a time.

The mask serves every layout and costs the square of the row. A piece is a prompt with its first response, or
one of the others, whose queries see all keys of the prompt that it shares and, causally, its own (`Piece`).
Pieces need plain causal attention, and are used only where they agree with sdpa on this device. On a CPU
rows of short units keep the mask: their squares cost less than a call a piece.

- On a CPU kernels/ops/attention.py computes a piece with itself and a unit with its prompt, in fp32.
- On a GPU torch's variable-length kernels (`torch.nn.attention.varlen`) take keys with the prompt before each
  piece's own; their causal mask is aligned at the bottom right.

A token that is sampled attends in a way of its own (`attend_token`).

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
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

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

Attend = Callable[[Tensor, Tensor, Tensor, Sequence[Piece], "float | None"], Tensor]
"""(T, H, d) queries, (T, K, d) keys and values, pieces, scale -> (T, H, d)."""


def choose(model: PreTrainedModel, wanted: str, device: torch.device, dtype: torch.dtype) -> str:
    """Sets how `model` attends, and says it in a few words for the log.

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
    AttentionInterface.register(PIECES, attend_pieces)
    AttentionMaskInterface.register(PIECES, AttentionMaskInterface()[MASKED])  # of calls without pieces
    model.set_attn_implementation(PIECES)
    return (
        f"a sequence at a time, from {SHORT} positions on"
        if device.type == "cpu"
        else "torch's variable-length kernels" + (" by FlashAttention 3" if flash_3 else "")
    )


def use_flash_3(device: torch.device) -> bool:
    """Has torch's own kernels computed by FlashAttention 3 where its package is installed, on sm_90.

    Source: torch.nn.attention.activate_flash_attention_impl (torch 2.11). It holds for the process.
    """
    here = torch.cuda.get_device_capability(device)[0] == 9 and find_spec("flash_attn_interface") is not None
    if here:
        attention.activate_flash_attention_impl("FA3")
    return here


def choose_together(models: Sequence[PreTrainedModel]) -> None:
    """Sets how frozen models that score the same batches attend, all in one way."""
    for wanted in ("auto", "sdpa"):
        for model in models:
            choose(model, wanted, model.device, model.dtype)
        if all(takes_pieces(model) for model in models):
            return


def takes_pieces(model: PreTrainedModel) -> bool:
    """Whether the pieces of a batch that tells them attend one at a time."""
    return model.config._attn_implementation == PIECES


def one_row_from(model: PreTrainedModel) -> int | None:
    """How long a batch's longest unit has to be for one row of pieces to serve `model` best; None: never."""
    if not takes_pieces(model):
        return None
    return SHORT if model.device.type == "cpu" else 0


def decoder_inputs(model: PreTrainedModel, batch: TokenBatch) -> dict[str, Any]:
    """What the decoder of `model` takes for `batch`, by its way to attend."""
    if not (takes_pieces(model) and batch.pieces):
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask(),
            "position_ids": batch.position_ids,
        }
    return {
        "input_ids": batch.input_ids.view(1, -1),
        "position_ids": batch.position_ids.view(1, -1),
        "attention_mask": batch.input_ids.new_ones(1, 1, 1, 1),  # none is made of the rows where one is given
        "pieces": batch.pieces,
    }


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
    """transformers' attention function: (1, H, T, d) queries, (1, K, T, d) keys, values; (1, T, H, d) back.

    Without pieces (a call that is not `decoder_inputs`') it is sdpa.
    """
    if pieces is None:
        sdpa = AttentionInterface()[MASKED]
        return sdpa(module, query, key, value, attention_mask, scaling=scaling, **others)
    query_THd, key_TKd, value_TKd = (x[0].transpose(0, 1) for x in (query, key, value))
    return _form(query.device)(query_THd, key_TKd, value_TKd, pieces, scaling)[None], None


def choose_for_sampling(model: PreTrainedModel) -> None:
    """Where `model` attends by sdpa, it does by `attend_token` from now on."""
    if model.config._attn_implementation == MASKED and model._supports_attention_backend:
        AttentionInterface.register(TOKENS, attend_token)
        AttentionMaskInterface.register(TOKENS, AttentionMaskInterface()[MASKED])
        model.set_attn_implementation(TOKENS)


def attend_token(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """sdpa without copies of keys and values, which transformers 5.19 makes under a mask and 5.23 does not.

    The G query heads of a key-value head are G queries of it, where a row has one. Of (R, H, 1, d) queries,
    (R, K, T, d) keys and values and an (R or 1, 1, 1, T) mask, (R, 1, H, d). Calls of other shapes are
    sdpa's; there is no dropout, as in sampling.
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


def by_loop(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, pieces: Sequence[Piece], scale: float | None
) -> Tensor:
    """An sdpa call a piece: what the others are held to."""
    keys, values = (_behind_prompts(x, pieces) for x in (key_TKd, value_TKd))
    outputs = []
    for piece, (begin, end) in zip(pieces, pairwise(_key_starts(pieces)), strict=True):
        query, key, value = (
            x.transpose(0, 1)[None]
            for x in (query_THd[piece.begin : piece.end], keys[begin:end], values[begin:end])
        )
        n_queries, n_keys = query.shape[2], key.shape[2]
        mask = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device)
        mask = mask.tril(n_keys - n_queries)
        out = functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def by_kernel(
    query_THd: Tensor, key_TKd: Tensor, value_TKd: Tensor, pieces: Sequence[Piece], scale: float | None
) -> Tensor:
    """torch's variable-length kernels; CUDA alone."""
    from torch.nn.attention.varlen import varlen_attn

    query = query_THd.contiguous()
    key, value = (_behind_prompts(x, pieces).contiguous() for x in (key_TKd, value_TKd))
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0), **_grouped()}
    out = varlen_attn(query, key, value, *_starts(tuple(pieces), query.device), **options)
    assert isinstance(out, Tensor)  # nothing else was asked for
    return out


@lru_cache(maxsize=1)
def _grouped() -> dict[str, bool]:
    """How torch is told that keys have fewer heads than queries; torch 2.11 takes that unasked."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _key_starts(pieces: Sequence[Piece]) -> list[int]:
    """Where each piece's keys begin, the shared prompt before its own, and where the last ones end."""
    lengths = (piece.end - piece.begin + piece.prompt_end - piece.prompt_begin for piece in pieces)
    return list(accumulate(lengths, initial=0))


def _behind_prompts(x_TKd: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """The keys (or values) of all pieces, each with its prompt's before its own.

    Cut and joined, not indexed: the gradient of a prompt is then summed in one order, on GPUs too.
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
    places = [piece.begin for piece in pieces] + [pieces[-1].end], _key_starts(pieces)
    queries, keys = (torch.tensor(place, dtype=torch.int32, device=device) for place in places)
    longest, most_keys = (max(end - begin for begin, end in pairwise(place)) for place in places)
    return queries, keys, longest, most_keys


def own_way(model: PreTrainedModel) -> str | None:
    """Why pieces cannot serve the model's layers, which is that they are not causal attention alone."""
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
    """Why pieces cannot serve on the device; None where output and gradients agree with sdpa a piece."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(PROBE[-1].end, n, size, generator=generator, device=device, dtype=dtype)
        for n in (heads, kv_heads, kv_heads)
    ]

    def results(attend: Attend) -> list[Tensor]:
        query, key, value = leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = attend(query, key, value, PROBE, None)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    try:
        found = results(_form(device))
    except (AttributeError, ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        line = next(iter(str(error).splitlines()), "")
        return f"torch's kernels cannot run here: {type(error).__name__} {line[:120]}".rstrip()
    for mine, expected in zip(found, results(by_loop), strict=True):
        error_ = float((mine.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not error_ <= PROBE_TOLERANCE:
            return f"torch's kernels are {error_:.1e} off sdpa"
    return None
