"""The vocabulary operations on whatever logits and targets come: top-kappa, forward KL, loss, by hypothesis.

Each backend's kernel against the definition in float64 on the same rounded logits; infinities and NaN alike.
The Triton kernels run in the interpreter and, under -m gpu, natively.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from bench.harness.accuracy import CANCELLATION
from smopd.kernels import dispatch
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import KlOptions, LossSettings, LossTokens, SparseTarget
from tests.kernels import float64
from tests.kernels.cases import DTYPES
from tests.kernels.cpp import cpp_rows

INF, NAN = math.inf, math.nan
# Ordinary, tied, where exp overflows and underflows, subnormal, and no numbers at all.
LOGITS = [0.0, -0.0, 1.0, 1.0, -2.5, 7.25, 30.0, 88.8, -104.0, 3e4, -3e4, 1e-40, INF, -INF, NAN]
LOGPS = [math.log(0.5), math.log(0.25), -3.0, -20.0, 0.0, -INF, NAN]
GPU = "triton natively"
EXAMPLES = {"cpp": 150, "triton": 4, GPU: 150}  # the interpreter takes a second a row
SUBNORMAL = 2.0**-126 / CANCELLATION  # a probability below the smallest normal number may be 0
LEAST_LOGP = 104.0  # the size of the least in fp32

# NaN through the interpreter's numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def moved(value: Any, device: str) -> Any:
    """Tensors, and those in dicts, tuples and dataclasses, on device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: moved(entry, device) for name, entry in value.items()}
    if isinstance(value, tuple):
        return tuple(moved(entry, device) for entry in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: moved(getattr(value, f.name), device) for f in fields(value)})
    return value


def kernel(backend: str, op: str) -> Callable[..., Any]:
    """The backend's function on the backend's device, for tensors of the CPU; those that it wrote too."""
    name, device = ("triton", "cuda") if backend == GPU else (backend, "cpu")
    serve = getattr(importlib.import_module(f"smopd.kernels.{dispatch.MODULES[name][op]}"), op)

    def call(*arguments: Any, **options: Any) -> Any:
        there = moved(arguments, device)
        results = moved(serve(*there, **moved(options, device)), "cpu")
        for here, written in zip(arguments, there, strict=True):
            if isinstance(here, Tensor):
                here.copy_(written)
        return results

    return call


def need(backend: str) -> None:
    if backend == "cpp" and dispatch.cpp_unavailable() is not None:
        pytest.skip("smopd._C is not built")
    if backend != "cpp":
        pytest.importorskip("triton", reason="triton is not installed")
    if backend == "triton" and (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1"):
        pytest.skip("Triton's interpreter is for machines without a GPU")


@st.composite
def logits_rows(draw) -> Tensor:
    n_rows, n_vocab = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    ordinary = draw(st.booleans())
    value = st.sampled_from(LOGITS[:7]) if ordinary else st.sampled_from(LOGITS)
    rows = draw(
        st.lists(st.lists(value, min_size=n_vocab, max_size=n_vocab), min_size=n_rows, max_size=n_rows)
    )
    return torch.tensor(rows).to(DTYPES[draw(st.sampled_from(list(DTYPES)))])


@st.composite
def targets(draw, n_rows: int, n_vocab: int) -> SparseTarget:
    """Repeats, empty slots, masses above 1."""
    n_support = draw(st.integers(0, 4))
    shape = (n_rows, n_support)
    n_slots = n_rows * n_support

    def drawn(strategy: st.SearchStrategy) -> Tensor:
        return torch.tensor(draw(st.lists(strategy, min_size=n_slots, max_size=n_slots))).reshape(shape)

    return SparseTarget(drawn(st.integers(0, n_vocab - 1)).long(), drawn(st.sampled_from(LOGPS)).float())


def each_backend(test: Callable) -> Callable:
    backends = [pytest.param(name, marks=[pytest.mark.gpu] if name == GPU else []) for name in EXAMPLES]
    return pytest.mark.parametrize("backend", backends)(test)


def hold(backend: str, check: Callable[..., None]) -> None:
    """check(data) on this backend's number of examples."""
    need(backend)
    quiet = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    options = settings(max_examples=EXAMPLES[backend], deadline=None, suppress_health_check=quiet)
    if backend == "triton":
        options = settings(options, phases=[Phase.generate], derandomize=True)  # shrinking takes minutes
    options(given(st.data())(check))()


@each_backend
def test_top_kappa(backend: str) -> None:
    serve = kernel(backend, "topk_logprobs")

    def check(data: st.DataObject) -> None:
        logits_NV = data.draw(logits_rows())
        n_rows, n_vocab = logits_NV.shape
        kappa, temperature = data.draw(st.integers(0, n_vocab)), data.draw(st.sampled_from([1.0, 0.7]))
        token_ids_N = torch.tensor(
            data.draw(st.lists(st.integers(0, n_vocab - 1), min_size=n_rows, max_size=n_rows))
        )
        options = {"token_ids_N": token_ids_N, "temperature": temperature}
        got = serve(logits_NV, kappa, **options)
        true = reference.topk_logprobs(logits_NV.double(), kappa, **options)
        close = {"rtol": 2e-6, "atol": cpp_rows.TERM_TOLERANCE, "equal_nan": True}
        torch.testing.assert_close(got.logps_NS.double(), true.logps_NS, **close)
        torch.testing.assert_close(got.token_logp_N.double(), true.token_logp_N, **close)
        plain_N = ~logits_NV.isnan().any(-1)
        assert torch.equal(got.ids_NS[plain_N], true.ids_NS[plain_N])
        assert all(len(set(row)) == kappa for row in got.ids_NS.tolist())

    hold(backend, check)


@each_backend
def test_forward_kl(backend: str) -> None:
    rows, gradient = (kernel(backend, f"forward_kl_{name}") for name in ("rows", "gradient"))

    def check(data: st.DataObject) -> None:
        logits_NV = data.draw(logits_rows())
        n_rows, n_vocab = logits_NV.shape
        target = data.draw(targets(n_rows, n_vocab))
        wide = SparseTarget(target.ids_NS, target.logps_NS.double())
        token_ids_N = torch.arange(n_rows) % n_vocab
        tail, temperature = data.draw(st.booleans()), data.draw(st.sampled_from([1.0, 0.7]))
        options = KlOptions(tail=tail, temperature=temperature)
        true = reference.forward_kl_rows(logits_NV.double(), token_ids_N, wide, options)
        for value_N, true_N in zip(rows(logits_NV, token_ids_N, target, options), true, strict=True):
            torch.testing.assert_close(
                value_N.double(), true_N, rtol=2e-6, atol=cpp_rows.TERM_TOLERANCE, equal_nan=True
            )
        slopes = {"dlogp_N": torch.ones(n_rows), "dkl_N": torch.full((n_rows,), 0.5)}
        grad_NV = gradient(logits_NV, token_ids_N, target, options, **slopes)
        wide_slopes = {name: slope.double() for name, slope in slopes.items()}
        true_NV = reference.forward_kl_gradient(logits_NV.double(), token_ids_N, wide, options, **wide_slopes)
        magnitude_NV = cpp_rows.magnitude(
            logits_NV,
            token_ids_N,
            wide,
            tail=tail,
            temperatures=(temperature,) * 2,
            coef_N=torch.full((n_rows,), 1.5, dtype=torch.float64) / temperature,
            pull_N=torch.ones(n_rows, dtype=torch.float64) / temperature,
        )
        cpp_rows.assert_gradient(grad_NV, true_NV, magnitude_NV + SUBNORMAL)

    hold(backend, check)


@each_backend
def test_loss(backend: str) -> None:
    serve = kernel(backend, "loss_rows")

    def check(data: st.DataObject) -> None:
        logits_NV = data.draw(logits_rows())
        n_rows, n_vocab = logits_NV.shape
        target = data.draw(targets(n_rows, n_vocab))
        weights = [
            torch.tensor(
                data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=n_rows, max_size=n_rows))
            )
            for _ in range(3)
        ]
        tokens = LossTokens(
            token_ids_N=torch.arange(n_rows) % n_vocab,
            adv_N=torch.tensor([1.0, -2.0, 0.0])[:n_rows],
            pg_weight_N=weights[0],
            old_logp_N=torch.tensor([-1.0, -0.1, -40.0])[:n_rows],
            kl_weight_N=weights[1],
            ent_weight_N=weights[2],
            target_ids_NS=target.ids_NS,
            target_logps_NS=target.logps_NS,
        )
        setting = LossSettings(
            tail=data.draw(st.booleans()), entropy_coef=data.draw(st.sampled_from([0.0, 0.1])), dual_clip=3.0
        )
        setting = replace(setting, kl_temperature=data.draw(st.sampled_from([1.0, 0.8])))
        true_terms, true_NV = float64.true_loss(logits_NV, tokens, setting)
        # A ratio at a clip's edge may fall on either side.
        ratio_N = (true_terms.logp_N - tokens.old_logp_N.double()).exp()
        edges = (1.0 - setting.clip_low, 1.0 + setting.clip_high)
        assume(all(not bool(((ratio_N - edge).abs() < 1e-4).any()) for edge in edges))
        grad_NV = torch.full_like(logits_NV, NAN)
        terms = serve(logits_NV, tokens, setting, grad_NV)
        cpp_rows.assert_terms(terms, true_terms)
        magnitude_NV = cpp_rows.loss_magnitude(logits_NV, tokens, setting)
        flushed = SUBNORMAL * (1.0 + LEAST_LOGP * setting.entropy_coef)  # the entropy weighs it by its logp
        cpp_rows.assert_gradient(grad_NV, true_NV, magnitude_NV + flushed)

    hold(backend, check)


@each_backend
def test_a_small_tail(backend: str) -> None:
    """1 - Q is a difference: off the support the gradient is nothing but what is left of it."""
    need(backend)
    n_rows, n_vocab, n_support = 4, 40, 16
    logits_NV = torch.randn(n_rows, n_vocab, generator=torch.Generator().manual_seed(3))
    logits_NV[:, n_support:] -= 20.0
    logps_NS = logits_NV[:, :n_support].double().log_softmax(-1) + math.log1p(-3e-5)
    target = SparseTarget(torch.arange(n_support).expand(n_rows, -1), logps_NS.float())
    arguments = (torch.zeros(n_rows, dtype=torch.long), target)
    rest = (KlOptions(tail=True, temperature=1.0), None, torch.ones(n_rows))
    wide = SparseTarget(target.ids_NS, target.logps_NS.double())
    true_NV = reference.forward_kl_gradient(logits_NV.double(), arguments[0], wide, *rest)
    serves = {reference.forward_kl_gradient, kernel(backend, "forward_kl_gradient")}
    for gradient in serves:
        grad_NV = gradient(logits_NV, *arguments, *rest)[:, n_support:].double()
        torch.testing.assert_close(grad_NV, true_NV[:, n_support:], rtol=1e-5, atol=0.0)
