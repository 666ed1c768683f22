"""Inputs to compare every backend with float64; the truth of a case is computed once.

Letters: N rows, V vocabulary, M teachers, S entries of each, kappa.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smopd.kernels.reference import topk as reference
from smopd.kernels.types import LossSettings, LossTokens, SparseTarget, TokenTerms
from tests.kernels import backends, float64

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HALF = ("fp32", "bf16", "fp16")  # all backends have these
MOST_KNOWN = 3000  # most ids of a random teacher
NOWHERE = (2**31 - 1, -(10**6))  # ids of empty slots
SHAPES = ((1, 7, 1, 3), (13, 1271, 2, 16), (5, 5000, 4, 33))  # N, V, M, kappa
TARGETS = ("none", "given", "repeats", "pooled", "merged", "many")
LAYOUTS = ("dense", "aligned", "odd", "inside")


def random_logits(n_rows: int, n_vocab: int, dtype: str = "fp32", seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3.0 * torch.randn(n_rows, n_vocab, generator=generator)).to(DTYPES[dtype])


def random_teachers(
    n_rows: int, n_vocab: int, n_support: int, n_teachers: int = 2, seed: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (N, M, S), descending logps, log_alpha (N, M); many ids are shared, some slots are empty."""
    generator = torch.Generator().manual_seed(seed)
    n_known = min(n_vocab, MOST_KNOWN)
    common_NV = torch.randn(n_rows, 1, n_known, generator=generator)
    own_NMV = torch.randn(n_rows, n_teachers, n_known, generator=generator)
    logps_NMS, ids_NMS = (2.0 * common_NV + own_NMV).log_softmax(-1).topk(n_support, dim=-1)
    ids_NMS = n_vocab - 1 - (n_known - 1 - ids_NMS) * (n_vocab // n_known)
    log_alpha_NM = torch.rand(n_rows, n_teachers, generator=generator).add(0.1).log().log_softmax(-1)
    if n_support > 3:
        for n, nowhere in enumerate(NOWHERE):
            logps_NMS[n::4, n % n_teachers, -1 - n] = -torch.inf
            ids_NMS[n::4, n % n_teachers, -1 - n] = nowhere
    return ids_NMS, logps_NMS, log_alpha_NM


def target_of(
    kind: str, n_rows: int, n_vocab: int, n_support: int, n_teachers: int = 2
) -> SparseTarget | None:
    """Return a target of a kind of TARGETS. repeats: with repeated ids; many: of nine teachers."""
    if kind == "none":
        return None
    if kind == "many":
        n_teachers, n_support = 9, min(n_vocab, 17)
    teachers = random_teachers(n_rows, n_vocab, n_support, n_teachers)
    if kind in ("given", "repeats"):
        mixture = reference.teacher_mixture(*teachers, n_support, merge=kind == "given")
        empty_NS = mixture.logps_NS == -torch.inf
        return SparseTarget(mixture.ids_NS.masked_fill(empty_NS, NOWHERE[0]), mixture.logps_NS)
    return SparseTarget(*teachers, n_support, kind != "pooled")


def random_tokens(
    logits_NV: Tensor,
    target: SparseTarget | None,
    *,
    old: bool = True,
    reverse: bool = True,
    ids: torch.dtype = torch.int64,
    seed: int = 2,
) -> LossTokens:
    """Return tokens with random weights, some of them 0, and old log-probabilities near and far."""
    n_rows, n_vocab = logits_NV.shape
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(n_rows, generator=generator)

    token_ids_N = torch.randint(n_vocab, (n_rows,), generator=generator)
    given: dict[str, Tensor] = {}
    if target is not None and target.log_alpha is None:
        given = {"target_ids_NS": target.ids.to(ids), "target_logps_NS": target.logps}
    elif target is not None:
        given = {"teacher_ids_NMS": target.ids.to(ids), "teacher_logps_NMS": target.logps}
        given["log_alpha"] = target.log_alpha
    if target is not None and next(iter(given.values())).numel() > 0:
        first_N = next(iter(given.values())).flatten(1)[::3, 0].long()
        token_ids_N[::3] = torch.where(first_N.abs() < n_vocab, first_N, token_ids_N[::3])
    pieces = zip(logits_NV.split(16), token_ids_N.split(16), strict=True)
    logp_N = torch.cat([x.float().log_softmax(-1).gather(-1, own[:, None])[:, 0] for x, own in pieces])
    far_N = torch.where(torch.arange(n_rows) % 5 == 4, 30.0, 0.4)
    weights = [torch.rand(n_rows, generator=generator) + 0.1 for _ in range(4)]
    for place, weight_N in enumerate(weights):
        weight_N[place + 1 :: 7] = 0.0
        weight_N[6::11] = 0.0  # a token without any weight
    return LossTokens(
        token_ids_N=token_ids_N.to(ids),
        adv_N=normal(),
        pg_weight_N=weights[0],
        old_logp_N=logp_N + far_N * normal() if old else None,
        kl_weight_N=weights[1],
        ent_weight_N=weights[2],
        reverse_adv_N=normal() if reverse else None,
        reverse_weight_N=weights[3] if reverse and n_rows % 2 else None,
        **given,
    )


@dataclass
class LossCase:
    """Arguments of loss_rows on the CPU and the true result. Do not write to them."""

    logits_NV: Tensor
    tokens: LossTokens
    settings: LossSettings
    of: Callable[..., float64.Truth] = float64.true_loss

    @functools.cached_property
    def truth(self) -> float64.Truth:
        return self.of(self.logits_NV, self.tokens, self.settings)

    def at(self, rows: Tensor) -> LossCase:
        part = LossCase(self.logits_NV[rows], self.tokens.at(rows), self.settings, self.of)
        if "truth" in self.__dict__:
            part.__dict__["truth"] = self.truth.at(rows)
        return part

    def but(self, logits_NV: Tensor | None = None, **columns: Any) -> LossCase:
        """Replace logits or columns; they may hold infinities and NaN."""
        logits_NV = self.logits_NV if logits_NV is None else logits_NV
        return LossCase(logits_NV, replace(self.tokens, **columns), self.settings, float64.defined_loss)


@functools.lru_cache(maxsize=4)
def loss_case(
    shape: tuple[int, int, int, int] = SHAPES[1],
    dtype: str = "fp32",
    target: str = "merged",
    tail: bool = True,
    entropy: bool = False,
    temperatures: tuple[float, float] = (1.0, 1.0),
    dual: bool = False,
    reverse: str | None = "paper",
    old: bool = True,
    ids: torch.dtype = torch.int64,
    opd_coef: float = 0.7,
) -> LossCase:
    n_rows, n_vocab, n_teachers, kappa = shape
    logits_NV = random_logits(n_rows, n_vocab, dtype)
    given = target_of(target, n_rows, n_vocab, kappa, n_teachers)
    settings = LossSettings(
        merge=target != "pooled",
        tail=tail,
        kappa=kappa,
        entropy_coef=0.1 if entropy else 0.0,
        temperature=temperatures[0],
        kl_temperature=temperatures[1],
        opd_coef=opd_coef,
        clip_low=0.15,
        clip_high=0.3,
        dual_clip=1.5 if dual else None,
        reverse_kl_surrogate=reverse or "paper",
    )
    tokens = random_tokens(logits_NV, given, old=old, reverse=reverse is not None, ids=ids)
    if dtype == "fp64":
        tokens = float64.in_float64(tokens)
    return LossCase(logits_NV, tokens, settings)


def laid_out(rows_NV: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return the rows with a gap after each, and all of their memory.

    The row stride is aligned to 16 bytes except for "odd"; "inside" starts at an unaligned address.
    """
    n_rows, n_vocab = rows_NV.shape
    wide, first = -n_vocab % 16 + 16, 5 if kind == "inside" else 0
    gap = {"dense": 0, "aligned": wide, "odd": (n_vocab + 1) % 2 + 2, "inside": wide}[kind]
    memory = rows_NV.new_full((n_rows, n_vocab + gap), math.nan)
    inner = memory[:, first : first + n_vocab]
    return inner.copy_(rows_NV), memory


def run_loss(
    backend: str, case: LossCase, gradient: str = "own", layout: str = "dense"
) -> tuple[TokenTerms, Tensor | None]:
    """Run loss_rows with the gradient in its "own" buffer, "in place" or "none"; check stray writes."""
    backends.need(backend)
    where = backends.device(backend)
    logits_NV, memory = laid_out(case.logits_NV.to(where), layout)
    before_NV, grad_NV, own = logits_NV.clone(), None, None
    if gradient == "in place":
        grad_NV, own = logits_NV, memory
    elif gradient == "own":
        grad_NV, own = laid_out(torch.full_like(logits_NV, math.nan), layout)
    tokens = backends.moved(case.tokens, where)
    terms = backends.function(backend, "loss_rows")(logits_NV, tokens, case.settings, grad_NV)
    if gradient != "in place":
        assert backends.same(logits_NV, before_NV), "the logits were written"
    if own is not None and grad_NV is not None:
        first = grad_NV.storage_offset()
        around = (own[:, :first], own[:, first + grad_NV.shape[1] :])
        assert all(bool(part.isnan().all()) for part in around), "written outside the rows"
    return backends.moved(terms, "cpu"), None if grad_NV is None else grad_NV.cpu()


def check_loss(
    backend: str, case: LossCase, gradient: str = "own", layout: str = "dense", most: int | None = None
) -> tuple[TokenTerms, Tensor | None]:
    """Compare terms and gradient with the truth; the interpreter gets at most `most` rows."""
    case = few_rows(backend, case, most)
    terms, grad_NV = run_loss(backend, case, gradient, layout)
    float64.check_terms(terms, case.truth.terms)
    if grad_NV is not None:
        assert grad_NV.dtype == case.logits_NV.dtype
        float64.check_gradient(grad_NV, case.truth, backend)
    return terms, grad_NV


def few_rows(backend: str, case: LossCase, most: int | None = None) -> LossCase:
    """Select rows for the interpreter; the truth is computed once for all rows."""
    case.truth  # noqa: B018
    if not backends.interpreted(backend):
        return case
    return case.at(backends.rows_for(backend, len(case.logits_NV), most or backends.INTERPRETED_ROWS))
