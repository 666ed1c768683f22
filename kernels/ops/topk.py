"""The kappa most likely tokens of each row of logits.

Shapes: N packed response tokens, V vocabulary, M teachers, S support entries (kappa).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, dispatch
from smopd.kernels.ops.library import empty_column, operator
from smopd.kernels.types import TopK


def topk_logprobs(
    logits_NV: Tensor | Sequence[Tensor],
    kappa: int,
    *,
    token_ids_N: Tensor | None = None,
    temperature: float = 1.0,
) -> TopK:
    """The kappa most likely tokens of each row with their log-probabilities over the whole vocabulary.

    Equals

        logq_NV = (logits_NV.float() / temperature).log_softmax(-1)
        logps_NS, ids_NS = logq_NV.topk(kappa)      # but with ties to the lower id, always
        token_logp_N = logq_NV.gather(-1, token_ids_N[:, None])[:, 0]

    Of several teachers' logits of the same tokens the result is as teacher_mixture takes it. Not
    differentiable.

    Args:
        logits_NV: (N, V), unit stride along V; or a sequence of M of them, one a teacher, of one shape, dtype
            and device.
        kappa: 0 to V.
        token_ids_N: (N,) int32 or int64 in [0, V), or None.
        temperature: above 0.
    Returns:
        TopK: ids (N, kappa) int32 by descending log-probability, logps (N, kappa), token_logp (N,) or None;
            of a sequence (N, M, kappa) and (N, M).
    Raises:
        TypeError, ValueError: an argument is not as above.
    """
    op = "topk_logprobs"
    teachers = None
    if isinstance(logits_NV, Sequence):
        teachers = tuple(logits_NV)
        checks.check_teachers_logits(op, teachers)
        like = ("logits_NV[0]", teachers[0])
    else:
        checks.check_logits(op, logits_NV)
        like = ("logits_NV", logits_NV)
    n_vocab = like[1].shape[1]
    checks.check_kappa(op, kappa, n_vocab)
    checks.check_temperature(op, temperature)
    if token_ids_N is not None:
        checks.check_token_ids(op, token_ids_N, like)
    if checks.debugging():
        for m, logits in enumerate(teachers or (like[1],)):
            name = "logits_NV" if teachers is None else f"logits_NV[{m}]"
            checks.debug_finite(op, name, logits, allow_minus_inf=True)
        checks.debug_ids(op, "token_ids_N", token_ids_N, n_vocab)
    options = (kappa, token_ids_N, float(temperature))
    if teachers is None:
        ids, logps, token_logp = _topk(like[1].detach(), *options)
    else:
        detached = [logits.detach() for logits in teachers]
        ids, logps, token_logp = _topk_teachers(detached, *options)
    return TopK(ids, logps, None if token_ids_N is None else token_logp)


# The operators. None has a gradient.


@operator(
    "topk_logprobs",
    "(Tensor logits, SymInt kappa, Tensor? token_ids, float temperature)"
    " -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def _topk(
    logits: Tensor, kappa: int, token_ids: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """token_logp is (0,) without token_ids."""
    checks.require_token_ids("topk_logprobs", token_ids, logits.shape[1])
    serve = dispatch.serving("topk_logprobs", logits, kappa=kappa)
    top = serve(logits, kappa, token_ids_N=token_ids, temperature=temperature)
    return top.ids_NS, top.logps_NS, empty_column(logits, 0) if top.token_logp_N is None else top.token_logp_N


@_topk.register_fake
def _(logits: Tensor, kappa: int, token_ids: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    n_rows = logits.shape[0]
    ids = empty_column(logits, n_rows, kappa, dtype=torch.int32)
    return ids, empty_column(logits, n_rows, kappa), empty_column(logits, 0 if token_ids is None else n_rows)


@operator(
    "topk_logprobs_teachers",
    "(Tensor[] logits, SymInt kappa, Tensor? token_ids, float temperature)"
    " -> (Tensor ids, Tensor logps, Tensor token_logp)",
)
def _topk_teachers(
    logits: Sequence[Tensor], kappa: int, token_ids: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """token_logp is (0, M) without token_ids."""
    columns = zip(*(_topk(one, kappa, token_ids, temperature) for one in logits), strict=True)
    ids, logps, token_logp = (torch.stack(column, 1) for column in columns)
    return ids, logps, token_logp


@_topk_teachers.register_fake
def _(logits: Sequence[Tensor], kappa: int, token_ids: Tensor | None, *_: Any) -> tuple[Tensor, ...]:
    first, shape = logits[0], (logits[0].shape[0], len(logits))
    ids = empty_column(first, *shape, kappa, dtype=torch.int32)
    rows = 0 if token_ids is None else shape[0]
    return ids, empty_column(first, *shape, kappa), empty_column(first, rows, shape[1])
