"""Which backend serves an operation on a tensor, said once in the log.

    reference   plain PyTorch, any device and dtype
    cpp         smopd._C on the CPU, where the package was built with a compiler
    triton      GPU kernels (none yet)

SMOPD_BACKEND=reference|cpp|triton forces one; an operation that it cannot serve raises.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import reference, reference_linear
from smopd.kernels.types import TopK

BACKENDS = ("reference", "cpp", "triton")
CPP_OPS = frozenset({"topk_logprobs", "linear_topk_logprobs"})
CPP_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENV = "SMOPD_BACKEND"

_log = logging.getLogger("smopd")


@functools.cache
def cpp_unavailable() -> str | None:
    """None if smopd._C can be loaded, else why not."""
    try:
        importlib.import_module("smopd._C")
        torch.ops.smopd.topk_logprobs_cpu  # noqa: B018  (an attribute error says that it is not registered)
    except (ImportError, OSError, AttributeError) as error:
        return f"smopd._C cannot be loaded ({error})"
    return None


def backend_for(op: str, tensor: Tensor) -> str:
    """The backend that serves op on this tensor's device and dtype.

    Raises:
        ValueError: SMOPD_BACKEND is none of BACKENDS.
        RuntimeError: SMOPD_BACKEND names a backend that cannot serve this call.
    """
    forced = os.environ.get(ENV, "")
    if forced and forced not in BACKENDS:
        raise ValueError(f"{ENV} is {forced!r}, expected one of {BACKENDS}")
    if forced == "reference":
        chosen = "reference"
    elif forced:
        why_not = _why_not(forced, op, tensor)
        if why_not is not None:
            raise RuntimeError(f"{op}: {ENV}={forced} cannot serve this call: {why_not}")
        chosen = forced
    else:
        chosen = "cpp" if _why_not("cpp", op, tensor) is None else "reference"
    _log_once(op, chosen, tensor.device.type)
    return chosen


def _why_not(backend: str, op: str, tensor: Tensor) -> str | None:
    if backend == "triton" or op not in CPP_OPS:
        return f"there is no {backend} kernel for it"
    if tensor.device.type != "cpu":
        return f"the tensor is on {tensor.device}, expected cpu"
    if tensor.dtype not in CPP_DTYPES:
        return f"the dtype is {tensor.dtype}, expected one of {CPP_DTYPES}"
    return cpp_unavailable()


@functools.cache
def _log_once(op: str, backend: str, device: str) -> None:
    _log.info("%s on %s is served by the %s backend", op, device, backend)


def _cpp_topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    ids_NS, logps_NS, token_logp_N = torch.ops.smopd.topk_logprobs_cpu(
        logits_NV.detach(), kappa, token_ids_N, temperature
    )
    return TopK(ids_NS, logps_NS, None if token_ids_N is None else token_logp_N)


def topk_logprobs(logits_NV: Tensor, kappa: int, **options: Any) -> TopK:
    backend = backend_for("topk_logprobs", logits_NV)
    serve = _cpp_topk_logprobs if backend == "cpp" else reference.topk_logprobs
    return serve(logits_NV, kappa, **options)


def linear_topk_logprobs(hidden_ND: Tensor, weight_VD: Tensor, kappa: int, **options: Any) -> TopK:
    backend = backend_for("linear_topk_logprobs", hidden_ND)
    rows = _cpp_topk_logprobs if backend == "cpp" else reference.topk_logprobs
    return reference_linear.linear_topk_logprobs(hidden_ND, weight_VD, kappa, rows=rows, **options)
