"""Choice of the backend: C++ (cpp) on a CPU, Triton on a GPU, else plain PyTorch (reference).

SMOPD_BACKEND=reference|cpp|triton forces a backend. A call that it does not support raises an error.
Operations that it does not implement still use the reference. On a CPU, triton needs TRITON_INTERPRET=1.
"""

import functools
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BACKENDS = ("reference", "cpp", "triton")
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ENV = "SMOPD_BACKEND"
SERVED = "the fused operations on %s are served by the %s backend"

MODULES: dict[str, dict[str, str]] = {
    "topk_logprobs": {"reference": "reference.topk", "cpp": "cpp", "triton": "triton.topk"},
    "teacher_mixture": {"reference": "reference.topk", "cpp": "cpp", "triton": "triton.mixture"},
    "loss_rows": {"reference": "reference.loss", "cpp": "cpp", "triton": "triton.loss"},
    "total_loss": {"reference": "reference.loss", "triton": "triton.totals"},
    "scale_": {"reference": "reference.loss", "triton": "triton.scale"},
    "draw": {"reference": "reference.topk", "triton": "triton.draw"},
    "advantages": {"reference": "reference.advantages", "triton": "triton.advantages"},
}
"""Operation -> backend -> the module in smopd.kernels that defines a function with the operation's name."""

_log = logging.getLogger("smopd")


def serving(op: str, tensor: Tensor, **facts: Any) -> Callable[..., Any]:
    """Return the function that computes `op` for this tensor's device and dtype.

    facts: other sizes that a backend may limit: n_vocab (if the tensor is not the logits), kappa, n_support
        (target entries) and n_pooled (candidates of all teachers).
    Raise ValueError for an unknown SMOPD_BACKEND, and RuntimeError if the forced backend rejects the call.
    """
    function = getattr(_module(MODULES[op][backend_for(op, tensor, **facts)]), op)
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return _on_device(tensor.device, function)
    return function


def definition(op: str) -> Callable[..., Any]:
    """Return the reference implementation of `op`."""
    return getattr(_module(MODULES[op]["reference"]), op)


def running_topk(tensor: Tensor, **facts: Any) -> Any:
    """Return the backend's class that computes topk_logprobs from pieces of the vocabulary, or None."""
    backend = backend_for("topk_logprobs", tensor, **facts)
    return getattr(_module(MODULES["topk_logprobs"][backend]), "RunningTopK", None)


def backend_for(op: str, tensor: Tensor, **facts: Any) -> str:
    """Return the name of the backend for `op`. The arguments are those of `serving`."""
    forced, device = os.environ.get(ENV, ""), tensor.device.type
    if forced and forced not in BACKENDS:
        raise ValueError(f"{ENV} is {forced!r}, expected one of {BACKENDS}")
    preferred = forced or ("cpp" if device == "cpu" else "triton")
    if preferred not in MODULES[op]:
        return "reference"
    why_not = None if preferred == "reference" else _why_not(preferred, op, tensor, facts)
    if why_not is None:
        _log_once(SERVED, device, preferred)
        return preferred
    if forced:
        raise RuntimeError(f"{op}: {ENV}={forced} cannot serve this call: {why_not}")
    level = logging.INFO if device == "cpu" else logging.WARNING
    _log_once(f"{op} on {device} is served by the reference backend: {why_not}", level=level)
    return "reference"


def _why_not(backend: str, op: str, tensor: Tensor, facts: dict[str, Any]) -> str | None:
    if tensor.dtype not in KERNEL_DTYPES:
        return f"the dtype is {tensor.dtype}, expected one of {KERNEL_DTYPES}"
    on_cpu = tensor.device.type == "cpu"
    if backend == "cpp":
        return _module("cpp").unavailable() if on_cpu else f"the tensor is on {tensor.device}, expected cpu"
    if on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
        return "the tensor is on cpu, expected a GPU, or TRITON_INTERPRET=1"
    if not on_cpu and (torch.version.hip or tensor.device.type != "cuda"):
        return "the kernels contain PTX, which only NVIDIA GPUs can run"
    if (why_not := _no_triton(on_cpu)) is not None:
        return why_not
    unserved = getattr(_module(MODULES[op][backend]), "unserved", None)
    return None if unserved is None else unserved(op, tensor, **facts)


def _on_device(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function` to make `device` current in each call. Triton launches on the current device."""

    @functools.wraps(function)
    def guarded(*arguments: Any, **options: Any) -> Any:
        with torch.cuda.device(device):
            return function(*arguments, **options)

    return guarded


@functools.cache
def _no_triton(on_cpu: bool) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    try:  # on a GPU, Triton needs a C compiler and Python's headers
        if not on_cpu:
            importlib.import_module("triton.runtime").driver.active.get_current_target()
    except Exception as error:
        return f"triton cannot start ({error})"
    return None


@functools.cache
def _module(name: str) -> Any:
    return importlib.import_module(f".{name}", __package__)


@functools.cache
def _log_once(message: str, *values: str, level: int = logging.INFO) -> None:
    _log.log(level, message, *values)
