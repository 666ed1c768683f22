"""The fused head in plain PyTorch: linear_topk_logprobs and linear_smopd_loss, by chunks of rows.

A chunk's logits are computed in the inputs' dtype, as the model's own head computes them, and widened by the
row operations; (N, V) is never held. The loss's gradients are made chunk by chunk with the loss.

With tp_group each rank holds a shard of the head's rows (in rank order, any sizes) and all hold the same
hidden
states: a chunk's logits are gathered, every rank does the same row work, and the ranks' shares of the hidden
states' gradient are summed.

Shapes: N tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from smopd.kernels.operators_loss import flat_stats, scaled_gradient
from smopd.kernels.reference import topk_logprobs
from smopd.kernels.reference_loss import join_terms, loss_rows, total_loss
from smopd.kernels.reference_rows import rows_per_chunk
from smopd.kernels.types import LossSettings, LossStats, LossTokens, TokenTerms, TopK, compute_dtype

CHUNK_BYTES = 256 << 20  # logits of a chunk in the compute dtype


@dataclass(frozen=True)
class _Head:
    """A head's local rows, and where they stand in the vocabulary."""

    weight_VD: Tensor
    bias_V: Tensor | None
    group: Any
    shard_sizes: tuple[int, ...]

    @property
    def n_vocab(self) -> int:
        return sum(self.shard_sizes)

    def logits(self, hidden_ND: Tensor, buffer: Tensor | None = None) -> Tensor:
        """(N, V); in the first rows of buffer if given and the head is whole."""
        if self.group is not None:
            return self._gathered(torch.nn.functional.linear(hidden_ND, self.weight_VD, self.bias_V))
        out = None if buffer is None else buffer[: hidden_ND.shape[0]]
        if self.bias_V is None:
            return torch.mm(hidden_ND, self.weight_VD.T, out=out)
        return torch.addmm(self.bias_V, hidden_ND, self.weight_VD.T, out=out)

    def _gathered(self, local_NV: Tensor) -> Tensor:
        widest = max(self.shard_sizes)
        padded_NV = torch.nn.functional.pad(local_NV, (0, widest - local_NV.shape[1])).contiguous()
        shards = [torch.empty_like(padded_NV) for _ in self.shard_sizes]
        dist.all_gather(shards, padded_NV, group=self.group)
        return torch.cat([shard[:, :size] for shard, size in zip(shards, self.shard_sizes, strict=True)], -1)

    def local(self, full_NV: Tensor) -> Tensor:
        if self.group is None:
            return full_NV
        rank = dist.get_rank(self.group)
        start = sum(self.shard_sizes[:rank])
        return full_NV[:, start : start + self.shard_sizes[rank]]


def _head(weight_VD: Tensor, bias_V: Tensor | None, group: Any) -> _Head:
    bias_V = None if bias_V is None else bias_V.detach()
    if group is None:
        return _Head(weight_VD.detach(), bias_V, None, (weight_VD.shape[0],))
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=weight_VD.device)
    sizes[dist.get_rank(group)] = weight_VD.shape[0]
    dist.all_reduce(sizes, group=group)
    return _Head(weight_VD.detach(), bias_V, group, tuple(sizes.tolist()))


def _chunks(hidden_ND: Tensor, n_vocab: int, chunk_bytes: int) -> list[tuple[int, int]]:
    n_rows = hidden_ND.shape[0]
    step = rows_per_chunk(n_vocab, hidden_ND.dtype, chunk_bytes)
    return [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


def linear_topk_logprobs(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    kappa: int,
    *,
    token_ids_N: Tensor | None = None,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    tp_group: Any = None,
    chunk_bytes: int = CHUNK_BYTES,
    rows: Callable[..., TopK] = topk_logprobs,
) -> TopK:
    """rows: the operation that serves a chunk's logits."""
    head = _head(weight_VD, bias_V, tp_group)
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        # One empty chunk for N = 0, so that the result has its shapes and dtypes.
        chunks = _chunks(hidden_ND, head.n_vocab, chunk_bytes) or [(0, 0)]
        parts = [
            rows(
                head.logits(hidden_ND[start:stop]),
                kappa,
                token_ids_N=None if token_ids_N is None else token_ids_N[start:stop],
                temperature=temperature,
            )
            for start, stop in chunks
        ]
    token_logps = [part.token_logp_N for part in parts if part.token_logp_N is not None]
    return TopK(
        torch.cat([part.ids_NS for part in parts]),
        torch.cat([part.logps_NS for part in parts]),
        torch.cat(token_logps) if token_logps else None,
    )


@dataclass(frozen=True)
class _Job:
    """What the loss needs beside the three differentiable tensors. need: gradient of hidden, weight, bias."""

    tokens: LossTokens
    settings: LossSettings
    chunk_bytes: int
    group: Any
    need: tuple[bool, bool, bool]


def _run(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: _Job, *, gradient: bool
) -> tuple[list[TokenTerms], tuple[Tensor | None, Tensor | None, Tensor | None]]:
    """All chunks: the tokens' terms and, if asked, the needed gradients for an upstream gradient of 1."""
    head = _head(weight_VD, bias_V, job.group)
    hidden_ND = hidden_ND.detach()
    wide = compute_dtype(hidden_ND.dtype)
    need_hidden, need_weight, need_bias = (gradient and needed for needed in job.need)
    dhidden_ND = torch.empty_like(hidden_ND) if need_hidden else None
    dweight_VD = torch.zeros_like(head.weight_VD, dtype=wide) if need_weight else None
    dbias_V = None
    if need_bias and head.bias_V is not None:
        dbias_V = torch.zeros_like(head.bias_V, dtype=wide)
    parts: list[TokenTerms] = []
    chunks = _chunks(hidden_ND, head.n_vocab, job.chunk_bytes)
    buffer = None
    if chunks and job.group is None:
        buffer = torch.empty(chunks[0][1], head.n_vocab, dtype=hidden_ND.dtype, device=hidden_ND.device)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        for start, stop in chunks:
            hidden_chunk_ND = hidden_ND[start:stop]
            logits_NV = head.logits(hidden_chunk_ND, buffer)
            chunk_tokens = job.tokens.rows(start, stop)
            # The chunk is ours: its gradient is written over it.
            parts.append(loss_rows(logits_NV, chunk_tokens, job.settings, logits_NV if gradient else None))
            if not gradient:
                continue
            dlogits_NV = head.local(logits_NV)
            if dbias_V is not None:
                dbias_V += dlogits_NV.sum(0, dtype=wide)
            if dhidden_ND is not None:
                share_ND = dlogits_NV @ head.weight_VD
                if job.group is not None:
                    share_ND = share_ND.to(wide)
                    dist.all_reduce(share_ND, group=job.group)
                dhidden_ND[start:stop] = share_ND
            if dweight_VD is not None:
                _add_outer(dweight_VD, dlogits_NV, hidden_chunk_ND)
    return parts, (dhidden_ND, dweight_VD, dbias_V)


def _add_outer(total_VD: Tensor, dlogits_NV: Tensor, hidden_ND: Tensor) -> None:
    """total += dlogits^T hidden, accumulated in total's dtype."""
    if dlogits_NV.dtype == total_VD.dtype:
        total_VD.addmm_(dlogits_NV.T, hidden_ND)
    elif dlogits_NV.is_cuda:
        total_VD += torch.mm(dlogits_NV.T, hidden_ND, out_dtype=total_VD.dtype)
    else:
        total_VD.addmm_(dlogits_NV.T.to(total_VD.dtype), hidden_ND.to(total_VD.dtype))


class _LinearLoss(torch.autograd.Function):
    """Gradients made in forward and scaled in backward, or, with recompute, both passes made again there."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, job: _Job, recompute: bool
    ) -> tuple[Tensor, ...]:
        parts, grads = _run(hidden_ND, weight_VD, bias_V, job, gradient=not recompute)
        loss, stats = total_loss(join_terms(parts, hidden_ND), job.tokens, job.settings)
        ctx.job, ctx.recompute = job, recompute
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (hidden_ND, weight_VD, bias_V)]
        saved = (hidden_ND, weight_VD, bias_V) if recompute else grads
        ctx.save_for_backward(*saved)
        ctx.mark_non_differentiable(*flat_stats(stats))
        return loss, *flat_stats(stats)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.saved_tensors
        if ctx.recompute:
            hidden_ND, weight_VD, bias_V = grads
            grads = _run(hidden_ND, weight_VD, bias_V, ctx.job, gradient=True)[1]
        scaled = [
            None if grad is None else scaled_gradient(grad, dloss).to(dtype)
            for grad, dtype in zip(grads, ctx.dtypes, strict=True)
        ]
        return *scaled, None, None


def linear_smopd_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    *,
    bias_V: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    recompute: bool = False,
    tp_group: Any = None,
) -> tuple[Tensor, LossStats]:
    inputs = (hidden_ND, weight_VD, bias_V)
    enabled = torch.is_grad_enabled()
    need = [enabled and tensor is not None and tensor.requires_grad for tensor in inputs]
    job = _Job(tokens, settings, chunk_bytes, tp_group, (need[0], need[1], need[2]))
    if not any(need):
        parts, _ = _run(*inputs, job, gradient=False)
        return total_loss(join_terms(parts, hidden_ND), tokens, settings)
    loss, *flat = _LinearLoss.apply(*inputs, job, recompute)
    return loss, LossStats(*flat)
