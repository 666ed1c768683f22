"""Argument checks of the operations. Ids are checked only on a CPU, as a check on a GPU would synchronize."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import dispatch
from smopd.kernels.tokens import counted
from smopd.kernels.types import AdvantageOptions, LossSettings, LossTokens, is_int, loss_target, require

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)
WHITENINGS = ("responses", "tokens", None)
OPTIONAL = ("old_logp_N", "kl_weight_N", "ent_weight_N", "reverse_adv_N", "reverse_weight_N")


def _shape(sizes: Sequence[object]) -> str:
    return f"({', '.join(map(str, sizes))}{',' if len(sizes) == 1 else ''})"


def check_tensor(
    op: str,
    name: str,
    value: Any,
    sizes: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    *,
    like: tuple[str, Tensor] | None = None,
) -> None:
    """Check the shape, the dtype and, with `like`, the device. A string in `sizes` allows any size."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {name} is {type(value).__name__}, expected a tensor of shape {_shape(sizes)}")
    fits = len(value.shape) == len(sizes) and all(
        isinstance(size, str) or size == got for got, size in zip(value.shape, sizes, strict=True)
    )
    if not fits:
        match = "" if like is None else f" to match {like[0]} {tuple(like[1].shape)}"
        raise ValueError(f"{op}: {name} has shape {tuple(value.shape)}, expected {_shape(sizes)}{match}")
    if value.dtype not in dtypes:
        got, *known = (str(dtype).removeprefix("torch.") for dtype in (value.dtype, *dtypes))
        raise ValueError(f"{op}: {name} has dtype {got}, expected {' or '.join(known)}")
    if like is not None and value.device != like[1].device:
        raise ValueError(f"{op}: {name} is on {value.device}, expected {like[1].device} to match {like[0]}")


def check_logits(op: str, logits_NV: Any) -> None:
    check_tensor(op, "logits_NV", logits_NV, ("N", "V"), FLOATS)
    if logits_NV.shape[1] == 0:
        raise ValueError(f"{op}: logits_NV has shape {tuple(logits_NV.shape)}, expected V of at least 1")
    if logits_NV.shape[1] > 1 and logits_NV.stride(1) != 1:
        raise ValueError(f"{op}: logits_NV has stride {logits_NV.stride(1)} along V, expected 1")


def check_linear(op: str, hidden_ND: Any, weight_VD: Any, bias_V: Any, chunk_bytes: int | None) -> None:
    check_tensor(op, "hidden_ND", hidden_ND, ("N", "D"), FLOATS)
    like = ("hidden_ND", hidden_ND)
    check_tensor(op, "weight_VD", weight_VD, ("V", hidden_ND.shape[1]), (hidden_ND.dtype,), like=like)
    if bias_V is not None:
        sizes = (weight_VD.shape[0],)
        check_tensor(op, "bias_V", bias_V, sizes, (hidden_ND.dtype,), like=("weight_VD", weight_VD))
    require(op, "chunk_bytes", chunk_bytes, chunk_bytes is None or chunk_bytes >= 1, "at least 1")


def check_kappa(op: str, kappa: Any, n_vocab: int | None = None) -> None:
    require(op, "kappa", kappa, is_int(kappa) and kappa >= 0, "an integer of at least 0")
    if n_vocab is not None and kappa > n_vocab:
        raise ValueError(f"{op}: kappa is {kappa}, expected at most V = {n_vocab}")


def check_temperature(op: str, temperature: float) -> None:
    require(op, "temperature", temperature, 0 < temperature < math.inf, "a finite number above 0")


def check_token_ids(op: str, token_ids_N: Any, like: tuple[str, Tensor]) -> None:
    check_tensor(op, "token_ids_N", token_ids_N, (like[1].shape[0],), INTS, like=like)


def check_target(op: str, ids_NS: Any, logps_NS: Any, like: tuple[str, Tensor]) -> None:
    check_tensor(op, "target_ids_NS", ids_NS, (like[1].shape[0], "S"), INTS, like=like)
    check_tensor(op, "target_logps_NS", logps_NS, ids_NS.shape, FLOATS, like=("target_ids_NS", ids_NS))


def check_teachers(
    op: str,
    ids_NMS: Any,
    logps_NMS: Any,
    log_alpha: Any,
    like: tuple[str, Tensor] | None = None,
    prefix: str = "",
) -> None:
    n_rows: int | str = "N" if like is None else like[1].shape[0]
    name = f"{prefix}ids_NMS"
    check_tensor(op, name, ids_NMS, (n_rows, "M", "S"), INTS, like=like)
    check_tensor(op, f"{prefix}logps_NMS", logps_NMS, ids_NMS.shape, FLOATS, like=(name, ids_NMS))
    want = tuple(ids_NMS.shape[:2])
    expected = f"(M,), (N, M) or a shape that broadcasts to {want}"
    if not isinstance(log_alpha, Tensor):
        raise TypeError(f"{op}: log_alpha is {type(log_alpha).__name__}, expected a tensor, {expected}")
    shape = (1,) * (2 - log_alpha.dim()) + tuple(log_alpha.shape)
    if len(shape) != 2 or any(size not in (1, full) for size, full in zip(shape, want, strict=True)):
        match = f"to match {name} {tuple(ids_NMS.shape)}"
        raise ValueError(f"{op}: log_alpha has shape {tuple(log_alpha.shape)}, expected {expected}, {match}")
    check_tensor(op, "log_alpha", log_alpha, log_alpha.shape, FLOATS, like=(name, ids_NMS))


def check_loss_tokens(op: str, tokens: LossTokens, settings: LossSettings, like: tuple[str, Tensor]) -> None:
    if not isinstance(tokens, LossTokens):
        raise TypeError(f"{op}: tokens is {type(tokens).__name__}, expected LossTokens")
    if not isinstance(settings, LossSettings):
        raise TypeError(f"{op}: settings is {type(settings).__name__}, expected LossSettings")
    check_token_ids(op, tokens.token_ids_N, like)
    for name in ("adv_N", "pg_weight_N", *OPTIONAL):
        value = getattr(tokens, name)
        if value is not None or name not in OPTIONAL:
            check_tensor(op, name, value, (like[1].shape[0],), FLOATS, like=like)
    has_target = tokens.target_ids_NS is not None or tokens.target_logps_NS is not None
    has_teachers = tokens.teacher_ids_NMS is not None or tokens.teacher_logps_NMS is not None
    if has_target and has_teachers:
        raise ValueError(f"{op}: got both a target and teachers, expected only target_* or only teacher_*")
    if has_target:
        check_target(op, tokens.target_ids_NS, tokens.target_logps_NS, like)
    if has_teachers:
        teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
        check_teachers(op, *teachers, like, prefix="teacher_")
    if (has_target or has_teachers) and tokens.kl_weight_N is None:
        raise ValueError(f"{op}: kl_weight_N is None with a target, expected (N,) (zeros: statistics only)")
    if tokens.reverse_adv_N is not None and tokens.kl_weight_N is None and tokens.reverse_weight_N is None:
        raise ValueError(f"{op}: reverse_weight_N and kl_weight_N are None with reverse_adv_N, expected one")
    if settings.entropy_coef != 0.0 and tokens.ent_weight_N is None:
        text = f"ent_weight_N is None with entropy_coef {settings.entropy_coef}"
        raise ValueError(f"{op}: {text}, expected (N,)")


def check_rewards(op: str, rewards_RK: Any, group_R: Any, options: AdvantageOptions) -> None:
    weights_K, lengths_R, whiten = options.weights_K, options.lengths_R, options.whiten
    check_tensor(op, "rewards_RK", rewards_RK, ("R", "K"), FLOATS)
    like = ("rewards_RK", rewards_RK)
    check_tensor(op, "group_R", group_R, (rewards_RK.shape[0],), (torch.int64,), like=like)
    if weights_K is not None:
        check_tensor(op, "weights_K", weights_K, (rewards_RK.shape[1],), FLOATS, like=like)
    if lengths_R is not None:
        check_tensor(op, "lengths_R", lengths_R, (rewards_RK.shape[0],), (*INTS, *FLOATS), like=like)
    snr, holds = options.snr_threshold, options.snr_threshold is None or options.snr_threshold > 0
    require(op, "snr_threshold", snr, holds, "None or a number above 0")
    require(op, "whiten", whiten, whiten in WHITENINGS, f"one of {WHITENINGS}")
    if whiten == "tokens" and lengths_R is None:
        raise ValueError(f"{op}: lengths_R is None with whiten='tokens', expected (R,) response lengths")
    holds = 0 <= options.norm_eps < math.inf
    require(op, "norm_eps", options.norm_eps, holds, "a finite number of at least 0")


def require_ids(op: str, name: str, ids: Tensor, n_vocab: int, live: Tensor | None = None) -> None:
    """Check that the ids are in [0, n_vocab). With the mask `live`, check only the ids where it is True."""
    bad = (ids < 0) | (ids >= n_vocab)
    bad = bad if live is None else bad & live
    if bool(bad.any()):
        first = int(ids[bad][0])
        raise ValueError(f"{op}: {name} holds {int(bad.sum())} ids outside [0, {n_vocab}), first {first}")


def require_token_ids(op: str, token_ids_N: Tensor | None, n_vocab: int) -> None:
    if token_ids_N is not None and token_ids_N.device.type == "cpu":
        require_ids(op, "token_ids_N", token_ids_N, n_vocab)


def require_loss_ids(op: str, tokens: LossTokens, settings: LossSettings, n_vocab: int) -> None:
    """Check the token and target ids of the tokens with a nonzero weight."""
    if tokens.token_ids_N.device.type != "cpu":
        return
    counted_N, target = counted(tokens), loss_target(tokens, settings)
    require_ids(op, "token_ids_N", tokens.token_ids_N, n_vocab, counted_N)
    if target is None or not bool(((target.ids < 0) | (target.ids >= n_vocab)).any()):
        return
    name, ids_NS, logps_NS = "target_ids_NS", target.ids, target.logps
    if target.log_alpha is not None:  # ids that the mixture drops may have any value
        candidates = (target.ids, target.logps, target.log_alpha, target.kappa)
        mixture = dispatch.definition("teacher_mixture")(*candidates, merge=target.merge)
        name, ids_NS, logps_NS = "teacher_ids_NMS", mixture.ids_NS, mixture.logps_NS
    require_ids(op, name, ids_NS, n_vocab, (logps_NS > -torch.inf) & counted_N[:, None])
