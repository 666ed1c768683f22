"""The C++ kernels of smopd._C by the backend protocol."""

from __future__ import annotations

import functools
import importlib

import torch
from torch import Tensor

from smopd.kernels.types import TopK


@functools.cache
def unavailable() -> str | None:
    """None if smopd._C can be loaded, else why not."""
    try:
        importlib.import_module("smopd._C")
        torch.ops.smopd.topk_logprobs_cpu  # noqa: B018  (an attribute error says that it is not registered)
    except (ImportError, OSError, AttributeError) as error:
        return f"smopd._C cannot be loaded ({error})"
    return None


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    ids_NS, logps_NS, token_logp_N = torch.ops.smopd.topk_logprobs_cpu(
        logits_NV, kappa, token_ids_N, temperature
    )
    return TopK(ids_NS, logps_NS, None if token_ids_N is None else token_logp_N)
