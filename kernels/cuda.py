"""The CUDA backend: loss_rows in smopd._C_cuda, with the row kept on chip over two thread blocks.

It has never run on a GPU, so it is no operation's default: it serves where SMOPD_BACKEND=cuda asks for it, on
GPUs of compute capability 9.0. Arguments are taken as checked, without autograd. The source is in csrc/cuda,
the definition in reference_loss.py.

Shapes: N tokens, V vocabulary, S support entries (kappa).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import reference
from smopd.kernels.types import Candidates, LossSettings, LossTokens, Mixture, TokenTerms, loss_target

MAX_VOCAB = 212976  # what the shared memory of two blocks holds
MAX_SUPPORT = 128
CAPABILITY = (9, 0)


@functools.cache
def unavailable() -> str | None:
    """None if smopd._C_cuda can be loaded, else why not."""
    if torch.version.cuda is None:
        return "torch was built without CUDA"
    try:
        importlib.import_module("smopd._C_cuda")
        torch.ops.smopd.loss_rows_cuda  # noqa: B018  (an attribute error says that it is not registered)
    except (ImportError, OSError, AttributeError) as error:
        return f"smopd._C_cuda cannot be loaded ({error}); SMOPD_BUILD_CUDA=1 builds it"
    return None


def unserved(
    op: str, tensor: Tensor, *, n_support: int = 0, n_vocab: int | None = None, **_: Any
) -> str | None:
    """Why the kernel cannot serve a call; None: it can. n_vocab: where the tensor is not the logits."""
    n_vocab = tensor.shape[1] if n_vocab is None else n_vocab
    if op != "loss_rows":
        return "there is no cuda kernel for it"
    if tensor.device.type != "cuda":
        return f"the tensor is on {tensor.device}, expected a CUDA device"
    if tensor.dtype != torch.bfloat16:
        return f"the dtype is {tensor.dtype}, expected torch.bfloat16"
    if n_vocab > MAX_VOCAB:
        return f"V is {n_vocab}, expected at most {MAX_VOCAB}"
    if n_support > MAX_SUPPORT:
        return f"the target has {n_support} entries, expected at most {MAX_SUPPORT}"
    why_not = unavailable()
    if why_not is None and torch.cuda.get_device_capability(tensor.device) != CAPABILITY:
        capability = torch.cuda.get_device_capability(tensor.device)
        return f"the GPU has compute capability {capability}, expected {CAPABILITY}"
    return why_not


def loss_rows(
    logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, grad_NV: Tensor | None
) -> TokenTerms:
    """The terms of each token; the loss's gradient goes to grad_NV if given, which may be the logits.

    Teachers' candidates are united first, by the Triton or the reference teacher_mixture.
    """
    ids_NS = logps_NS = None
    target = loss_target(tokens, settings)
    if target is not None:
        united = _united(target) if isinstance(target, Candidates) else target
        ids_NS, logps_NS = united.ids_NS.int().contiguous(), _fp32(united.logps_NS)
    terms = torch.ops.smopd.loss_rows_cuda(
        logits_NV.detach(),
        tokens.token_ids_N.int().contiguous(),
        _fp32(tokens.adv_N),
        _fp32(tokens.pg_weight_N),
        _fp32(tokens.old_logp_N),
        _fp32(tokens.kl_weight_N),
        _fp32(tokens.ent_weight_N),
        ids_NS,
        logps_NS,
        _fp32(tokens.reverse_adv_N),
        _fp32(tokens.reverse_weight_N),
        settings.clip_low,
        settings.clip_high,
        settings.dual_clip,
        settings.opd_coef,
        settings.entropy_coef,
        settings.tail,
        settings.temperature,
        settings.kl_temperature,
        settings.reverse_kl_surrogate == "ppo",
        None if grad_NV is None else grad_NV.detach(),
    )
    return TokenTerms(*terms)


def _fp32(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().float().contiguous()


def _united(target: Candidates) -> Mixture:
    union = (target.ids_NMS, target.logps_NMS, target.log_alpha, target.kappa)
    if importlib.util.find_spec("triton") is not None:
        triton_mixture = importlib.import_module("smopd.kernels.triton_mixture")
        n_pooled = target.ids_NMS.shape[1] * target.ids_NMS.shape[2]
        if triton_mixture.unserved("teacher_mixture", target.logps_NMS, n_pooled=n_pooled) is None:
            return triton_mixture.teacher_mixture(*union, merge=target.merge)
    return reference.teacher_mixture(*union, merge=target.merge)
