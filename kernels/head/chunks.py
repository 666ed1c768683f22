"""What one call of a linear form works on: which tokens, and how many of them or of the vocabulary at a time.

Shapes: N tokens, D hidden, V vocabulary (this rank's part).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from smopd.kernels import checks
from smopd.kernels.head.gemm import logits_buffer, padded_width
from smopd.kernels.head.shards import Shard
from smopd.kernels.head.tiles import TileLoss
from smopd.kernels.tokens import STATS_FIELDS, TERMS, coefficients, counted, idle, total_loss
from smopd.kernels.types import LossSettings, LossTokens, TokenTerms, compute_dtype

# On an accelerator. 1.25 GiB holds 4,096 rows of 152,064 in bf16: 8,192 tokens are two chunks.
CHUNK_BYTES, RECOMPUTE_BYTES = 5 << 28, 256 << 20
# 160 MiB on a CPU: the peak at N = 2048, D = 512, V = 151936 in fp32 stays under a tenth of eager's.
CHUNK_BYTES_CPU, RECOMPUTE_BYTES_CPU = 160 << 20, 32 << 20
ROW_UNIT, ROW_UNIT_CPU = 128, 16  # rows of a chunk are a multiple of this where the budget allows it
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight, bias


def chunk_budget(hidden_ND: Tensor, chunk_bytes: int | None, *, recompute: bool) -> int:
    if chunk_bytes is not None:
        return chunk_bytes
    if hidden_ND.device.type == "cpu":
        return RECOMPUTE_BYTES_CPU if recompute else CHUNK_BYTES_CPU
    return RECOMPUTE_BYTES if recompute else CHUNK_BYTES


def steps(n_items: int, most: int, unit: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of as few blocks of at most `most` items as it takes, nearly equal.

    In multiples of unit where these fit and leave no last block of less than half a step.
    """
    n_blocks = -(-n_items // max(most, 1))
    for block in range(n_blocks):
        step = -(-n_items // (n_blocks * unit)) * unit
        if step <= most and n_items - (n_blocks - 1) * step >= step // 2:
            yield block * step, min((block + 1) * step, n_items)
        else:
            yield block * n_items // n_blocks, (block + 1) * n_items // n_blocks


def gpu_steps(n_rows: int, most: int) -> list[tuple[int, int]]:
    """As few blocks of at most `most` rows as it takes, all of as many ROW_UNITs but for the last one.

    So columns start at 16 bytes. On an H200 equal chunks beat those that fill cuBLAS's waves of tiles best
    (docs/kernels.md).
    """
    if most < ROW_UNIT:
        return list(steps(n_rows, most, 1))
    n_blocks = max(-(-n_rows // (most // ROW_UNIT * ROW_UNIT)), 1)
    step = max(-(-n_rows // (n_blocks * ROW_UNIT)), 1) * ROW_UNIT
    return [(start, min(start + step, n_rows)) for start in range(0, n_rows, step)]


def row_blocks(
    n_rows: int,
    hidden_ND: Tensor,
    n_vocab: int,
    chunk_bytes: int,
    *,
    widest: int | None = None,
) -> tuple[list[tuple[int, int]], Tensor]:
    """Blocks of rows whose logits fit into chunk_bytes (one row at least), and a buffer for the largest.

    All ranks of a group cut alike: by the largest n_vocab of any, widest.
    """
    itemsize = hidden_ND.element_size()
    most = max(chunk_bytes // (padded_width(widest or n_vocab, itemsize) * itemsize), 1)
    on_cpu = hidden_ND.device.type == "cpu"
    blocks = list(steps(n_rows, most, ROW_UNIT_CPU)) if on_cpu else gpu_steps(n_rows, most)
    most = max((stop - start for start, stop in blocks), default=0)
    return blocks, logits_buffer(most, n_vocab, hidden_ND)


@dataclass(frozen=True, eq=False)
class LinearOptions:
    """linear_smopd_loss's options, said there."""

    chunk_bytes: int | None = None
    recompute: bool = False
    tp_group: Any = None
    shard_sizes: Sequence[int] | None = None
    main_grad_VD: Tensor | None = None
    compact: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Serving:
    """A backend's functions for a chunk's logits, a gradient, and (recompute, tp_group) the tiles."""

    scale_: Callable[..., None]  # kernels.ops.loss
    loss_rows: Callable[..., TokenTerms] | None = None
    tile_loss: type[TileLoss] | None = None


@dataclass(frozen=True)
class Job:
    """What the loss needs beside the three differentiable tensors.

    tokens: those that are worked on; live: their places among all of them, or None: all.
    quiet_N: of the tokens worked on those without any gradient, or None: not asked, as there is none.
    """

    all_tokens: LossTokens
    tokens: LossTokens
    live: Tensor | None
    quiet_N: Tensor | None
    settings: LossSettings
    options: LinearOptions
    shard: Shard
    serve: Serving

    @property
    def n_rows(self) -> int:
        return self.tokens.token_ids_N.shape[0]

    def hidden(self, hidden_ND: Tensor, start: int, stop: int) -> Tensor:
        return hidden_ND[start:stop] if self.live is None else hidden_ND[self.live[start:stop]]

    def heard(self, hidden_ND: Tensor, start: int) -> Tensor:
        """A chunk of hidden states for the weight's gradient: 0 * inf would be NaN."""
        if self.quiet_N is None:
            return hidden_ND
        return hidden_ND.masked_fill(self.quiet_N[start : start + hidden_ND.shape[0], None], 0.0)

    def spread(self, terms: TokenTerms) -> TokenTerms:
        """The terms of all tokens: 0 for those that were not worked on."""
        if self.live is None:
            return terms
        shape = self.all_tokens.token_ids_N.shape
        columns = (getattr(terms, name) for name in TERMS)
        return TokenTerms(*(column.new_zeros(shape).index_copy_(0, self.live, column) for column in columns))


def _select(tokens: LossTokens, index: Tensor) -> LossTokens:
    """The tokens at these places."""
    n_tokens = tokens.token_ids_N.shape[0]

    def pick(name: str) -> Any:
        value = getattr(tokens, name)
        shared = name == "log_alpha" and (value is None or value.dim() < 2 or value.shape[0] != n_tokens)
        return value if value is None or shared else value[index]

    return LossTokens(**{field.name: pick(field.name) for field in fields(LossTokens)})


def make_job(
    hidden_ND: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    options: LinearOptions,
    shard: Shard,
    serve: Serving,
) -> Job:
    """The tokens that count nowhere are taken out first, if options.compact; None: on a CPU."""
    checks.require_loss_ids("linear_smopd_loss", tokens, settings, shard.n_vocab)
    on_cpu = hidden_ND.device.type == "cpu"  # elsewhere asking how many there are costs a synchronisation
    live, worked_on = None, tokens
    if on_cpu if options.compact is None else options.compact:
        counted_N = counted(tokens)
        live = None if on_cpu and bool(counted_N.all()) else counted_N.nonzero()[:, 0]
        worked_on = tokens if live is None else _select(tokens, live)
    idle_N = idle(coefficients(worked_on, settings, compute_dtype(hidden_ND.dtype)))
    quiet_N = None if on_cpu and not bool(idle_N.any()) else idle_N
    return Job(tokens, worked_on, live, quiet_N, settings, options, shard, serve)


def outputs(ctx: Any, terms: TokenTerms, job: Job) -> tuple[Tensor, ...]:
    """What an autograd.Function returns: the loss and the statistics, which are not differentiable."""
    loss, stats = total_loss(terms, job.all_tokens, job.settings)
    flat = [getattr(stats, name) for name in STATS_FIELDS]
    ctx.mark_non_differentiable(*flat)
    ctx.set_materialize_grads(False)
    return loss, *flat
