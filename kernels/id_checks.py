"""Ids that an operation will look up, checked before it writes anything.

On a CPU always, where looking is cheap; elsewhere it would synchronise, and SMOPD_DEBUG=1 looks (checks.py).
An id may be anything in an empty slot, among candidates that the union does not keep, and at a token whose
weights are all 0.

Shapes: N tokens, S support entries (kappa).
"""

from __future__ import annotations

import torch
from torch import Tensor

from smopd.kernels.checks import debug_ids
from smopd.kernels.reference.loss import counted
from smopd.kernels.reference.topk import teacher_mixture
from smopd.kernels.types import Candidates, LossSettings, LossTokens, SparseTarget, loss_target


def check_token_ids(
    op: str, token_ids_N: Tensor | None, n_vocab: int, counted_N: Tensor | None = None
) -> None:
    """Raises ValueError: an id is outside [0, n_vocab) at a token that counts."""
    if token_ids_N is not None and token_ids_N.device.type == "cpu":
        debug_ids(op, "token_ids_N", token_ids_N, n_vocab, counted_N)


def check_target_ids(
    op: str, target: SparseTarget | Candidates, n_vocab: int, counted_N: Tensor | None = None
) -> None:
    """Raises ValueError: an id that the forward KL uses is outside [0, n_vocab)."""
    all_ids = target.ids_NS if isinstance(target, SparseTarget) else target.ids_NMS
    if all_ids.device.type != "cpu" or not bool(((all_ids < 0) | (all_ids >= n_vocab)).any()):
        return
    name = "target_ids_NS"
    if isinstance(target, Candidates):
        name = "teacher_ids_NMS"
        union = (target.ids_NMS, target.logps_NMS, target.log_alpha, target.kappa)
        mixture = teacher_mixture(*union, merge=target.merge)
        target = SparseTarget(mixture.ids_NS, mixture.logps_NS)
    used_NS = target.logps_NS > -torch.inf
    debug_ids(
        op, name, target.ids_NS, n_vocab, used_NS if counted_N is None else used_NS & counted_N[:, None]
    )


def check_loss_ids(op: str, tokens: LossTokens, settings: LossSettings, n_vocab: int) -> None:
    """check_token_ids and check_target_ids of the tokens that count."""
    if tokens.token_ids_N.device.type != "cpu":
        return
    counted_N, target = counted(tokens), loss_target(tokens, settings)
    check_token_ids(op, tokens.token_ids_N, n_vocab, counted_N)
    if target is not None:
        check_target_ids(op, target, n_vocab, counted_N)
