"""The row functions of every backend on whatever logits and targets come, infinities and NaN too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.harness.accuracy import CANCELLATION
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import KlOptions, LossSettings, LossTokens, SparseTarget
from tests.kernels import backends, float64
from tests.kernels.cases import DTYPES, HALF

INF, NAN = math.inf, math.nan
# Ordinary, tied, where exp overflows and underflows, subnormal, and no numbers at all.
LOGITS = [0.0, -0.0, 1.0, 1.0, -2.5, 7.25, 30.0, 88.8, -104.0, 3e4, -3e4, 1e-40, INF, -INF, NAN]
LOGPS = [math.log(0.5), math.log(0.25), -3.0, -20.0, 0.0, -INF, NAN]
EXAMPLES, INTERPRETED, COMPILED = 150, 4, 30  # the interpreter takes a second a row, a new shape a compile
SUBNORMAL = 2.0**-126 / CANCELLATION  # a probability below the smallest normal number may be 0
LEAST_LOGP = 104.0  # the size of the least in fp32
RATIO_AT_AN_EDGE = 1e-4

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN through the interpreter's numpy


@st.composite
def logits_rows(draw: st.DrawFn, backend: str) -> Tensor:
    n_rows, n_vocab = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    # The interpreter has no fused multiply-add: beside 3e4 its fp32 has no such digits.
    known = [x for x in LOGITS if not (backends.interpreted(backend) and abs(x) == 3e4)]
    value = st.sampled_from(LOGITS[:7] if draw(st.booleans()) else known)
    rows = [draw(st.lists(value, min_size=n_vocab, max_size=n_vocab)) for _ in range(n_rows)]
    return torch.tensor(rows).to(DTYPES[draw(st.sampled_from(HALF))])


@st.composite
def targets(draw: st.DrawFn, n_rows: int, n_vocab: int) -> SparseTarget:
    """Repeats, empty slots, masses above 1."""
    shape = (n_rows, draw(st.integers(0, 4)))

    def drawn(strategy: st.SearchStrategy) -> Tensor:
        count = math.prod(shape)
        return torch.tensor(draw(st.lists(strategy, min_size=count, max_size=count))).reshape(shape)

    return SparseTarget(drawn(st.integers(0, n_vocab - 1)).long(), drawn(st.sampled_from(LOGPS)).float())


def hold(backend: str, check: Callable[[st.DataObject], None]) -> None:
    """check(data) on this backend's number of examples."""
    backends.need(backend)
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    of_triton = INTERPRETED if backends.interpreted(backend) else COMPILED
    examples = of_triton if backend == "triton" else EXAMPLES
    options = settings(max_examples=examples, deadline=None, suppress_health_check=quiet)
    if backend == "triton":
        options = settings(options, phases=[Phase.generate], derandomize=True)  # shrinking takes minutes
    options(given(st.data())(check))()


@backends.each("topk_logprobs")
def test_top_kappa(backend: str) -> None:
    def check(data: st.DataObject) -> None:
        logits_NV = data.draw(logits_rows(backend))
        n_rows, n_vocab = logits_NV.shape
        kappa, temperature = data.draw(st.integers(0, n_vocab)), data.draw(st.sampled_from([1.0, 0.7]))
        tokens_N = torch.arange(n_rows) * data.draw(st.integers(0, 12)) % n_vocab
        options = {"token_ids_N": tokens_N, "temperature": temperature}
        got = backends.call(backend, "topk_logprobs", logits_NV, kappa, **options)
        true = reference.topk_logprobs(logits_NV.double(), kappa, **options)
        close = dict(float64.TERM)
        if backend == "reference":
            close["atol"] += 2.0**-23 * 3e4 / temperature  # x / T - lse is rounded there
        torch.testing.assert_close(got.logps_NS.double(), true.logps_NS, **close)
        torch.testing.assert_close(got.token_logp_N.double(), true.token_logp_N, **close)
        plain_N = ~logits_NV.isnan().any(-1)
        assert torch.equal(got.ids_NS[plain_N], true.ids_NS[plain_N])
        assert all(len(set(row)) == kappa for row in got.ids_NS.tolist())

    hold(backend, check)


@backends.each("forward_kl_rows", but=("reference",))
def test_forward_kl(backend: str) -> None:
    def check(data: st.DataObject) -> None:
        logits_NV = data.draw(logits_rows(backend))
        n_rows, n_vocab = logits_NV.shape
        options = KlOptions(tail=data.draw(st.booleans()), temperature=data.draw(st.sampled_from([1.0, 0.7])))
        arguments = (logits_NV, torch.arange(n_rows) % n_vocab, data.draw(targets(n_rows, n_vocab)), options)
        slopes = {"dlogp_N": torch.ones(n_rows), "dkl_N": torch.full((n_rows,), 0.5)}
        true = float64.defined_kl(*arguments, **slopes)
        logp_N, kl_N, *kept = backends.call(backend, "forward_kl_rows", *arguments)
        float64.check_term(logp_N, true.logp_N, "logp")
        float64.check_term(kl_N, true.kl_N, "kl")
        grad_NV = backends.call(backend, "forward_kl_gradient", *arguments, *slopes.values(), *kept)
        float64.check_gradient(grad_NV, true, backend, flushed=SUBNORMAL)

    hold(backend, check)


@backends.each("loss_rows", but=("reference",))
def test_loss(backend: str) -> None:
    def check(data: st.DataObject) -> None:
        logits_NV = data.draw(logits_rows(backend))
        n_rows, n_vocab = logits_NV.shape
        target = data.draw(targets(n_rows, n_vocab))
        weight = st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n_rows, max_size=n_rows)
        weights = {
            name: torch.tensor(data.draw(weight)) for name in ("pg_weight_N", "kl_weight_N", "ent_weight_N")
        }
        tokens = LossTokens(
            token_ids_N=torch.arange(n_rows) % n_vocab,
            adv_N=torch.tensor([1.0, -2.0, 0.0])[:n_rows],
            old_logp_N=torch.tensor([-1.0, -0.1, -40.0])[:n_rows],
            target_ids_NS=target.ids_NS,
            target_logps_NS=target.logps_NS,
            **weights,
        )
        entropy_coef = data.draw(st.sampled_from([0.0, 0.1]))
        setting = LossSettings(tail=data.draw(st.booleans()), entropy_coef=entropy_coef, dual_clip=3.0)
        setting = replace(setting, kl_temperature=data.draw(st.sampled_from([1.0, 0.8])))
        true = float64.defined_loss(logits_NV, tokens, setting)
        ratio_N = (
            true.terms.logp_N - tokens.old_logp_N.double()
        ).exp()  # at an edge it may fall on either side
        for edge in (1.0 - setting.clip_low, 1.0 + setting.clip_high):
            assume(not bool(((ratio_N - edge).abs() < RATIO_AT_AN_EDGE).any()))
        grad_NV = torch.full_like(logits_NV, NAN)
        if backends.device(backend) == "cpu":
            terms = backends.call(backend, "loss_rows", logits_NV, tokens, setting, grad_NV)
        else:
            there = grad_NV.cuda()
            terms = backends.call(backend, "loss_rows", logits_NV, tokens, setting, there)
            grad_NV = there.cpu()
        float64.check_terms(terms, true.terms)
        flushed = SUBNORMAL * (1.0 + LEAST_LOGP * setting.entropy_coef)  # the entropy weighs it by its logp
        float64.check_gradient(grad_NV, true, backend, flushed=flushed)

    hold(backend, check)
