"""linear_topk_logprobs: the most likely tokens of a linear head, by chunks of rows and by shards.

Under tp_group each rank takes the top-kappa of its own logits. A row's best logit and that entry's local
log-probability tell the shard's log-sum-exp as (max, log of the sum); kappa ids and logits a rank are
gathered and merged in rank order, so ties go to the lower id and every rank has the same bits.

Shapes: N tokens, D hidden, V vocabulary (this rank's part), S support entries (kappa), R ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from smopd.kernels import checks, id_checks, reference
from smopd.kernels.linear_gemm import logits_into
from smopd.kernels.linear_job import chunk_budget, row_blocks
from smopd.kernels.linear_shards import Shard, shard_of
from smopd.kernels.linear_sums import places_in
from smopd.kernels.types import TopK, compute_dtype


def linear_topk_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    kappa: int,
    *,
    token_ids_N: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: Any = None,
    shard_sizes: Sequence[int] | None = None,
    chunk_bytes: int | None = None,
    topk_logprobs: Callable[..., TopK] = reference.topk_logprobs,
) -> TopK:
    """topk_logprobs: the backend's, which serves a chunk's logits."""
    op = "linear_topk_logprobs"
    shard = shard_of(op, weight_VD, tp_group, shard_sizes)
    checks.check_kappa(op, kappa, shard.n_vocab)
    id_checks.check_token_ids(op, token_ids_N, shard.n_vocab)
    n_rows, dtype = hidden_ND.shape[0], compute_dtype(hidden_ND.dtype)
    n_kept = kappa if tp_group is None else min(max(kappa, 1), weight_VD.shape[0])
    ids_NS = hidden_ND.new_empty(n_rows, n_kept, dtype=torch.int32)
    logps_NS = hidden_ND.new_empty(n_rows, n_kept, dtype=dtype)
    token_N = None if token_ids_N is None else hidden_ND.new_empty(n_rows, dtype=dtype)
    logits_NS = None if tp_group is None else torch.empty_like(logps_NS)
    budget = chunk_budget(hidden_ND, chunk_bytes, recompute=False)
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        blocks, buffer_NV = row_blocks(n_rows, hidden_ND, weight_VD.shape[0], budget)
        for start, stop in blocks:
            chunk_NV, tokens = buffer_NV[: stop - start], None
            logits_into(chunk_NV, hidden_ND[start:stop], weight_VD, bias_V)
            if tp_group is None and token_ids_N is not None:
                tokens = token_ids_N[start:stop]
            top = topk_logprobs(chunk_NV, n_kept, token_ids_N=tokens, temperature=temperature)
            ids_NS[start:stop], logps_NS[start:stop] = top.ids_NS, top.logps_NS
            if token_N is not None and top.token_logp_N is not None:
                token_N[start:stop] = top.token_logp_N
            if logits_NS is not None:
                logits_NS[start:stop] = chunk_NV.gather(1, top.ids_NS.long())
            if tp_group is not None and token_N is not None and token_ids_N is not None:
                inside_N, places_N = places_in(token_ids_N[start:stop].long(), shard.start, len(weight_VD))
                places_N1 = places_N[:, None].clamp(max=len(weight_VD) - 1)
                token_N[start:stop] = (
                    chunk_NV.gather(1, places_N1)[:, 0].to(dtype).masked_fill(~inside_N, 0.0)
                )
        if logits_NS is None:
            return TopK(ids_NS, logps_NS, token_N)
        return _over_shards(shard, kappa, ids_NS, logits_NS, logps_NS, token_N, temperature)


def _over_shards(
    shard: Shard,
    kappa: int,
    ids_NS: Tensor,
    logits_NS: Tensor,
    logps_NS: Tensor,
    token_N: Tensor | None,
    temperature: float,
) -> TopK:
    """logps_NS: normalised over this rank's logits; token_N: its logit, 0 where another rank has it."""
    widest = min(max(kappa, 1), max(shard.sizes))
    pad = (0, widest - ids_NS.shape[1])
    scaled_NS = torch.nn.functional.pad(logits_NS / temperature, pad, value=-torch.inf)
    columns = [scaled_NS, -logps_NS[:, :1]]
    if token_N is not None:
        columns.append(token_N[:, None] / temperature)
    gathered_RNC = shard.gather(torch.cat(columns, 1))
    ids_RNS = shard.gather(torch.nn.functional.pad(ids_NS + shard.start, pad))

    peak_RN = gathered_RNC[..., 0]
    peak_N = peak_RN.amax(0)
    base_N = torch.where(peak_N == -torch.inf, 0.0, peak_N)
    total_RN = torch.where(peak_RN == -torch.inf, 0.0, (gathered_RNC[..., widest] + peak_RN - base_N).exp())
    total_N = torch.where(peak_N == torch.inf, 1.0, total_RN.sum(0))
    log_total_N1 = total_N.log()[:, None]

    # Without the padding, which would win against -inf of a later rank.
    kept = [rank * widest + i for rank, size in enumerate(shard.sizes) for i in range(min(widest, size))]
    scaled_NP = gathered_RNC[..., :widest].transpose(0, 1).flatten(1)[:, kept]
    best_NP, order_NP = scaled_NP.sort(dim=-1, descending=True, stable=True)
    top_ids_NS = ids_RNS.transpose(0, 1).flatten(1)[:, kept].gather(1, order_NP[:, :kappa])
    top_logps_NS = best_NP[:, :kappa] - base_N[:, None] - log_total_N1
    if token_N is None:
        return TopK(top_ids_NS, top_logps_NS)
    token_N = gathered_RNC[..., -1].sum(0)  # one summand that is not 0
    return TopK(top_ids_NS, top_logps_NS, token_N - base_N - log_total_N1[:, 0])
