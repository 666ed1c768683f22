"""How packed rows attend: under a mask over whole rows, or a sequence at a time by variable-length kernels.

The mask serves every layout. The kernels need rows of whole sequences, none of which shares its prompt; they
are torch's own (`torch.nn.attention.varlen`), and are used only where they agree with sdpa on this device.

Shapes: T positions of a packed batch, H heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from smopd.engine.types import TokenBatch

MASKED = "sdpa"
SEQUENCES = "smopd_sequences"  # the name among transformers' attention functions
PROBE_TOLERANCE = 3e-2  # ours: relative to the largest value, a few roundings of bfloat16


def choose(
    model: PreTrainedModel, wanted: str, device: torch.device, dtype: torch.dtype, *, share_prompts: bool
) -> str:
    """Sets how `model` attends, and says it in a few words for the log.

    Args:
        wanted: "auto", "sdpa" (the mask) or "flash" (a sequence at a time).
        dtype: that of the computation.
        share_prompts: whether a prompt stands once for several responses.
    Raises:
        ValueError: "flash" cannot serve here.
    """
    reason = None
    if wanted == "sdpa":
        reason = "as set"
    elif share_prompts:
        reason = "prompts are shared"
    elif wanted == "auto" and device.type == "cpu":
        reason = "on the CPU"
    elif device.type != "cpu":
        reason = kernel_fault(model, device, dtype)
    if wanted == "flash" and reason is not None:
        raise ValueError(f"attention: 'flash' cannot serve, {reason}; expected 'auto' or 'sdpa'")
    if reason is not None:
        model.set_attn_implementation(MASKED)
        return f"sdpa under a mask ({reason})"
    AttentionInterface.register(SEQUENCES, attend_sequences)
    model.set_attn_implementation(SEQUENCES)
    return "sdpa, a sequence at a time" if device.type == "cpu" else "torch's variable-length kernels"


def takes_sequences(model: PreTrainedModel) -> bool:
    """Whether sequences attend one at a time, so that padding between them would be computed for nothing."""
    return model.config._attn_implementation == SEQUENCES


def decoder_inputs(model: PreTrainedModel, batch: TokenBatch) -> dict[str, Any]:
    """What the decoder of `model` takes for `batch`, by its way to attend."""
    if not takes_sequences(model):
        return {
            "input_ids": batch.input_ids,
            "attention_mask": batch.attention_mask(),
            "position_ids": batch.position_ids,
        }
    return {
        "input_ids": batch.input_ids.view(1, -1),
        "position_ids": batch.position_ids.view(1, -1),
        "cu_seq_lens_q": batch.unit_starts,
        "max_length_q": batch.longest_unit,
    }


def attend_sequences(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: (1, H, T, d) queries, keys and values; (1, T, H, d) back."""
    query_THd, key_THd, value_THd = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = _by_loop if query.device.type == "cpu" else _by_kernel
    return attend(query_THd, key_THd, value_THd, cu_seq_lens_q, max_length_q, scaling)[None], None


def _by_loop(
    query_THd: Tensor, key_THd: Tensor, value_THd: Tensor, starts: Tensor, longest: int, scale: float | None
) -> Tensor:
    outputs = []
    for begin, end in pairwise(starts.tolist()):
        query, key, value = (x[begin:end].transpose(0, 1)[None] for x in (query_THd, key_THd, value_THd))
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _by_kernel(
    query_THd: Tensor, key_THd: Tensor, value_THd: Tensor, starts: Tensor, longest: int, scale: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    query, key, value = (x.contiguous() for x in (query_THd, key_THd, value_THd))
    causal: dict[str, Any] = {"window_size": (-1, 0), "enable_gqa": True}
    out = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scale, **causal)
    assert isinstance(out, Tensor)  # nothing else was asked for
    return out


def kernel_fault(model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve the model here; None where output and gradients agree with sdpa."""
    config = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    lengths = torch.tensor([0, 3, 4, 64], dtype=torch.int32, device=device)
    generator = torch.Generator(device).manual_seed(0)
    inputs = [
        torch.randn(64, n, size, generator=generator, device=device, dtype=dtype)
        for n in (heads, kv_heads, kv_heads)
    ]

    def results(attend: Callable[..., Tensor]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        with torch.enable_grad():
            out = attend(*leaves, lengths, 60, None)
            return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]

    try:
        found = results(_by_kernel)
    except (ImportError, RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        line = next(iter(str(error).splitlines()), "")
        return f"the variable-length kernels cannot run here: {type(error).__name__} {line[:120]}".rstrip()
    for mine, expected in zip(found, results(_by_loop), strict=True):
        error_ = float((mine.float() - expected.float()).abs().max() / expected.float().abs().max())
        if not error_ <= PROBE_TOLERANCE:
            return f"the variable-length kernels are {error_:.1e} off sdpa"
    return None
