"""A chunk of rows in plain PyTorch: softmax, what the objective reads from it, its gradient in the logits.

The closed forms are written once, here; forward KL and loss are made of them. A row never depends on another.

Shapes: N tokens, V vocabulary, S support entries (kappa), P pooled candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from smopd.kernels.terms import LOGP_FLOOR, TAIL_FLOOR, Target, support_terms
from smopd.kernels.tokens import weighted
from smopd.kernels.types import compute_dtype

ROW_CHUNK_BYTES = 64 << 20  # widened logits in work at a time
ROW_CHUNK_BYTES_CPU = 4 << 20  # stays in cache there, and is not mapped and faulted in anew each time


def row_chunks(logits_NV: Tensor) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive blocks of rows that are worked on at a time."""
    limit = ROW_CHUNK_BYTES_CPU if logits_NV.device.type == "cpu" else ROW_CHUNK_BYTES
    step = rows_per_chunk(logits_NV.shape[1], logits_NV.dtype, limit)
    for start in range(0, logits_NV.shape[0], step):
        yield start, min(start + step, logits_NV.shape[0])


def rows_per_chunk(n_vocab: int, dtype: torch.dtype, chunk_bytes: int) -> int:
    """How many rows of logits, widened, fit into chunk_bytes; at least one."""
    return max(1, chunk_bytes // (n_vocab * compute_dtype(dtype).itemsize))


def widen(logits_NV: Tensor, temperature: float = 1.0) -> Tensor:
    """Logits over the temperature in the compute dtype; the input itself where nothing is to be done."""
    wide_NV = logits_NV.to(compute_dtype(logits_NV.dtype))
    return wide_NV if temperature == 1.0 else wide_NV / temperature


def log_softmax(logits_NV: Tensor) -> Tensor:
    """As torch's, which on a CPU loses 3e-5 in fp32 over 150,000 tokens: its running sum is not pairwise."""
    logq_NV = logits_NV - logits_NV.amax(-1, keepdim=True)
    return logq_NV.sub_(logq_NV.exp().sum(-1, keepdim=True).log_())


def merge_sorted(ids_NP: Tensor, logps_NP: Tensor) -> tuple[Tensor, Tensor]:
    """Logsumexp over runs of equal ids (ascending). The merged entries come first; the rest is 0, -inf."""
    segment_NP = torch.zeros_like(ids_NP)
    segment_NP[:, 1:] = (ids_NP[:, 1:] != ids_NP[:, :-1]).cumsum(-1)
    empty_NP = torch.full_like(logps_NP, -torch.inf)
    peak_NP = empty_NP.scatter_reduce(-1, segment_NP, logps_NP, "amax")
    shift_NP = torch.where(peak_NP == -torch.inf, 0.0, peak_NP)
    mass_NP = _run_sums((logps_NP - shift_NP.gather(-1, segment_NP)).exp(), segment_NP)
    merged_ids_NP = torch.zeros_like(ids_NP).scatter(-1, segment_NP, ids_NP)
    return merged_ids_NP, mass_NP.log() + shift_NP


def _run_sums(values_NP: Tensor, segment_NP: Tensor) -> Tensor:
    """Sums over runs of equal segments (ascending from 0), each at its segment's place; 0 in the others.

    By doubling, in one order: a scatter_add on a GPU has none.
    """
    n_places = values_NP.shape[-1]
    distance = 1
    while distance < n_places:
        same_NP = segment_NP[:, distance:] == segment_NP[:, :-distance]
        before_NP = torch.where(same_NP, values_NP[:, :-distance], 0.0)
        values_NP = torch.cat([values_NP[:, :distance], values_NP[:, distance:] + before_NP], -1)
        distance *= 2
    last_NP = torch.ones_like(segment_NP, dtype=torch.bool)
    last_NP[:, :-1] = segment_NP[:, 1:] != segment_NP[:, :-1]
    places_NP = torch.where(last_NP, segment_NP, n_places)  # one more, where all that is no run's end goes
    sums_NP = torch.nn.functional.pad(torch.zeros_like(values_NP), (0, 1)).scatter(-1, places_NP, values_NP)
    return sums_NP[:, :-1]


def prepare_target(
    ids_NS: Tensor, logps_NS: Tensor, dtype: torch.dtype, *, merge: bool, distinct: bool = False
) -> Target:
    """merge: join repeats by logsumexp, as the tail bucket needs. distinct: there are none."""
    logps_NS = logps_NS.detach().to(dtype)
    live_NS = logps_NS > -torch.inf
    ids_NS = ids_NS.long().masked_fill(~live_NS, 0)
    if ids_NS.shape[-1] == 0:
        empty_N = logps_NS.sum(-1)
        return Target(ids_NS, logps_NS, logps_NS, live_NS, empty_N.bool(), empty_N, torch.ones_like(empty_N))
    nan_N = logps_NS.isnan().any(-1)
    logps_NS = logps_NS.masked_fill(~live_NS, -torch.inf)
    tail_q_N = _mass_off(logps_NS)
    # Empty slots take the id of the best slot: a write there changes nothing that is not written anyway.
    best_N1 = ids_NS.gather(-1, logps_NS.argmax(-1, keepdim=True))
    ids_NS = torch.where(live_NS, ids_NS, best_N1)
    if not distinct:
        ids_NS, order_NS = ids_NS.sort(dim=-1, stable=True)
        logps_NS = logps_NS.gather(-1, order_NS)
    if distinct:
        first_NS = live_NS
    elif merge:
        merged_ids_NS, logps_NS = merge_sorted(ids_NS, logps_NS)
        first_NS = logps_NS > -torch.inf
        ids_NS = torch.where(first_NS, merged_ids_NS, best_N1)
    else:
        first_NS = torch.ones_like(live_NS)
        first_NS[:, 1:] = ids_NS[:, 1:] != ids_NS[:, :-1]
        first_NS &= live_NS.any(-1, keepdim=True)
    q_NS = logps_NS.exp()
    mass_N = q_NS.sum(-1).masked_fill(nan_N, torch.nan)
    return Target(ids_NS, logps_NS, q_NS, first_NS, live_NS.any(-1), mass_N, tail_q_N)


def _mass_off(logps_NS: Tensor) -> Tensor:
    """1 - Q, a difference that fp32 would leave few digits of; 0 below the floor."""
    wide = logps_NS.dtype if logps_NS.device.type == "mps" else torch.float64  # which MPS has not
    tail_q_N = -torch.expm1(logps_NS.to(wide).logsumexp(-1).clamp(max=0.0))
    return torch.where(tail_q_N < TAIL_FLOOR, 0.0, tail_q_N).to(logps_NS.dtype)


@dataclass(frozen=True)
class Rows:
    """A chunk's rows after their softmax at one temperature.

    Without tail, logq_NV is the log-softmax (spent, unless entropy_gradient was asked). With tail it holds
    -inf at the support, so that dense_NV, the softmax of what is left, times off_mass_N, the student's mass
    off the support, keeps its relative accuracy.
    """

    temperature: float
    logq_NV: Tensor
    dense_NV: Tensor | None
    off_mass_N: Tensor | None
    token_ids_N1: Tensor
    logp_N: Tensor
    entropy_N: Tensor | None
    target: Target | None
    student_logps_NS: Tensor | None
    tail_q_N: Tensor | None
    kl_N: Tensor | None
    student_mass_N: Tensor | None


def rows_forward(
    logits_NV: Tensor,
    token_ids_N: Tensor,
    target: Target | None,
    *,
    temperature: float,
    tail: bool,
    entropy: bool = False,
    entropy_gradient: bool = False,
    gradient: bool = False,
) -> Rows:
    """Softmax of each row and what the objective reads from it. gradient: keep what rows_gradient needs."""
    logq_NV = log_softmax(widen(logits_NV, temperature))
    token_ids_N1 = token_ids_N[:, None].long()
    logp_N = logq_NV.gather(-1, token_ids_N1)[:, 0]
    student_logps_NS = tail_q_N = kl_N = student_mass_N = off_mass_N = dense_NV = entropy_N = None
    if target is not None:
        student_logps_NS = logq_NV.gather(-1, target.ids_NS)
    off_logp_N = None
    if target is not None and tail and student_logps_NS is not None:
        hole_NS = torch.where(target.live_N[:, None], -torch.inf, student_logps_NS)
        logq_NV.scatter_(-1, target.ids_NS, hole_NS)
        off_logp_N = logq_NV.logsumexp(-1)
        off_mass_N = off_logp_N.exp()
        if entropy or gradient:
            dense_NV = (logq_NV - torch.where(off_logp_N == -torch.inf, 0.0, off_logp_N)[:, None]).exp_()
    elif entropy or gradient:
        dense_NV = logq_NV.exp()
    if target is not None and student_logps_NS is not None:
        kl_N, student_mass_N, tail_q_N = support_terms(target, student_logps_NS, off_logp_N)
    if entropy and dense_NV is not None:
        logq_NV.clamp_(min=LOGP_FLOOR)
        product_NV = logq_NV * dense_NV if entropy_gradient else logq_NV.mul_(dense_NV)
        entropy_N = -product_NV.sum(-1)
        if off_mass_N is not None and target is not None and student_logps_NS is not None:
            inside_NS = student_logps_NS.exp() * student_logps_NS.clamp(min=LOGP_FLOOR)
            entropy_N = off_mass_N * entropy_N - torch.where(target.first_NS, inside_NS, 0.0).sum(-1)
    return Rows(
        temperature,
        logq_NV,
        dense_NV,
        off_mass_N,
        token_ids_N1,
        logp_N,
        entropy_N,
        target,
        student_logps_NS,
        tail_q_N,
        kl_N,
        student_mass_N,
    )


def rows_gradient(
    rows: Rows, dlogp_N: Tensor | None, dkl_N: Tensor | None, dentropy_N: Tensor | None
) -> Tensor:
    """Gradient of sum(dlogp logp + dkl kl + dentropy entropy) in the logits. Consumes the rows' buffers.

    dlogits_v = (1/T) [dkl (W p_v - q_v - q_r p_v / p_r off the support) + dlogp ([v = y] - p_v)
                       - dentropy p_v (log p_v + H)],   W = Q, and Q + q_r with the tail bucket.
    """
    grad_NV, target, tail_q_N = rows.dense_NV, rows.target, rows.tail_q_N
    if grad_NV is None:
        raise RuntimeError("rows_gradient: rows_forward ran with gradient=False")
    slope_N = torch.zeros_like(rows.logp_N)  # coefficient of p_v
    if dlogp_N is not None:
        slope_N = slope_N - dlogp_N
    if dkl_N is not None and target is not None:
        mass_N = target.mass_N if tail_q_N is None else target.mass_N + tail_q_N
        slope_N = slope_N + weighted(dkl_N, mass_N)
    off_N = slope_N
    if rows.off_mass_N is not None:
        off_N = slope_N * rows.off_mass_N
        if dkl_N is not None and tail_q_N is not None:
            off_N = off_N - weighted(dkl_N, tail_q_N)
    if dentropy_N is None or rows.entropy_N is None:
        grad_NV = grad_NV.mul_(off_N[:, None])
    else:
        scale_N = dentropy_N if rows.off_mass_N is None else dentropy_N * rows.off_mass_N
        curve_NV = rows.logq_NV.add_(rows.entropy_N[:, None]).mul_(-scale_N[:, None])
        grad_NV = grad_NV.mul_(curve_NV.add_(off_N[:, None]))
    if target is not None and rows.student_logps_NS is not None:
        if rows.off_mass_N is not None:
            inside_NS = slope_N[:, None].expand_as(target.q_NS)
            if dentropy_N is not None and rows.entropy_N is not None:
                log_p_NS = rows.student_logps_NS.clamp(min=LOGP_FLOOR)
                inside_NS = inside_NS - dentropy_N[:, None] * (log_p_NS + rows.entropy_N[:, None])
            inside_NS = inside_NS * rows.student_logps_NS.exp()
            dense_NS = grad_NV.gather(-1, target.ids_NS)
            grad_NV.scatter_(-1, target.ids_NS, torch.where(target.live_N[:, None], inside_NS, dense_NS))
        if dkl_N is not None:
            grad_NV.scatter_add_(-1, target.ids_NS, -dkl_N[:, None] * target.q_NS)
    if dlogp_N is not None:
        grad_NV.scatter_add_(-1, rows.token_ids_N1, dlogp_N[:, None])
    return grad_NV if rows.temperature == 1.0 else grad_NV.div_(rows.temperature)
