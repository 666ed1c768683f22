"""smopd._C's topk_logprobs on the CPU against float64 and against the reference, with hostile rows."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from smopd.kernels.reference import topk as reference
from tests.kernels import cases, float64

if importlib.util.find_spec("smopd._C") is None:
    pytest.skip("smopd._C is not built", allow_module_level=True)
importlib.import_module("smopd._C")
pytestmark = pytest.mark.usefixtures("poisoned_memory")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INF = math.inf
ATOL = 2e-6  # ours; ten times tighter than the 2e-5 that the operations are held to


def topk(
    logits_NV: Tensor, kappa: int, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ops.smopd.topk_logprobs_cpu(logits_NV, kappa, token_ids_N, temperature)


def truth(logits_NV: Tensor, kappa: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """ids, their log-probabilities and all log-probabilities in float64; a stable sort keeps the lower id."""
    wide_NV = logits_NV.double()
    ids_NS = wide_NV.sort(dim=-1, descending=True, stable=True).indices[:, :kappa]
    logps_NV = (wide_NV / temperature).log_softmax(-1)
    return ids_NS, logps_NV.gather(-1, ids_NS), logps_NV


def rows_of(kind: str, n_rows: int, n_vocab: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_vocab)
    logits_NV = 3 * torch.randn(n_rows, n_vocab, generator=generator)
    if kind == "ties":
        return logits_NV.round()
    if kind == "masked":
        hidden_NV = torch.rand(n_rows, n_vocab, generator=generator) < 0.95
        hidden_NV[:, n_vocab // 2] = False
        return logits_NV.masked_fill(hidden_NV, -INF)
    if kind == "wide":
        return 1000 * logits_NV
    if kind == "ascending":
        return logits_NV.sort(dim=-1).values
    if kind == "constant":
        return torch.full((n_rows, n_vocab), -7.25)
    return logits_NV


@pytest.mark.parametrize("kind", ["normal", "ties", "masked", "wide", "ascending", "constant"])
@pytest.mark.parametrize("n_vocab", [1, 2, 31, 32, 33, 210, 2047, 2048, 2049, 5000], ids="V{}".format)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_float64(dtype: torch.dtype, n_vocab: int, kind: str) -> None:
    logits_NV = rows_of(kind, 5, n_vocab).to(dtype)
    token_ids_N = torch.arange(5) * 7919 % n_vocab
    for kappa in {0, 1, min(16, n_vocab), min(32, n_vocab), min(128, n_vocab), n_vocab}:
        for temperature in (1.0, 0.7):
            ids_NS, logps_NS, token_logp_N = topk(logits_NV, kappa, token_ids_N, temperature)
            true_ids_NS, true_logps_NS, true_logps_NV = truth(logits_NV, kappa, temperature)
            assert ids_NS.dtype == torch.int32 and logps_NS.dtype == torch.float32
            assert torch.equal(ids_NS.long(), true_ids_NS)
            torch.testing.assert_close(logps_NS.double(), true_logps_NS, rtol=1e-6, atol=ATOL)
            true_token_N = true_logps_NV.gather(-1, token_ids_N[:, None])[:, 0]
            torch.testing.assert_close(token_logp_N.double(), true_token_N, rtol=1e-6, atol=ATOL)


@pytest.mark.parametrize("case", [*cases.SMALL, *cases.FULL], ids=str)
def test_equals_float64_at_the_shared_cases(case: cases.Case) -> None:
    """All rows at once; what is compared are rows from the first to the last."""
    logits_NV = rows_of("normal", case.N, case.V).to(case.torch_dtype)
    token_ids_N = torch.arange(case.N) * 7919 % case.V
    results = topk(logits_NV, case.kappa, token_ids_N, 0.7)
    rows = float64.some_rows(case.N, 41)
    ids_NS, logps_NS, token_logp_N = (result[rows] for result in results)
    true_ids_NS, true_logps_NS, true_logps_NV = truth(logits_NV[rows], case.kappa, 0.7)
    assert torch.equal(ids_NS.long(), true_ids_NS)
    torch.testing.assert_close(logps_NS.double(), true_logps_NS, rtol=1e-6, atol=ATOL)
    true_token_N = true_logps_NV.gather(-1, token_ids_N[rows, None])[:, 0]
    torch.testing.assert_close(token_logp_N.double(), true_token_N, rtol=1e-6, atol=ATOL)
    assert all(bool(result.isfinite().all()) for result in results)
    assert bool((results[0] < case.V).all())


HOSTILE = {
    "nan": [1.0, math.nan, 2.0, 0.0],
    "nan and -inf": [-INF, math.nan, -INF, -INF],
    "nan and +inf": [INF, math.nan, 0.0, 0.0],
    "all nan": [math.nan] * 4,
    "all -inf": [-INF] * 4,
    "one +inf": [0.0, INF, 1.0, -INF],
    "one finite": [-INF, -INF, -3.0, -INF],
    "subnormal": [1.0e-40, 0.0, 2.0e-40, -1.0e-40],
}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_rows_match_the_reference(case: str, temperature: float) -> None:
    """The hostile row between two plain ones, at both ends of a row longer than a block."""
    logits_NV = rows_of("normal", 3, 3000)
    for columns in (slice(0, 4), slice(2996, 3000)):
        hostile_NV = logits_NV.clone()
        if case.startswith(("all", "nan and -inf", "one finite")):
            hostile_NV[1] = -INF if "-inf" in case or "finite" in case else math.nan
        hostile_NV[1, columns] = torch.tensor(HOSTILE[case])
        token_ids_N = torch.tensor([0, columns.start + 1, 2999])
        ids_NS, logps_NS, token_logp_N = topk(hostile_NV, 8, token_ids_N, temperature)
        expected = reference.topk_logprobs(hostile_NV, 8, token_ids_N=token_ids_N, temperature=temperature)
        torch.testing.assert_close(logps_NS, expected.logps_NS, rtol=2e-6, atol=ATOL, equal_nan=True)
        torch.testing.assert_close(token_logp_N, expected.token_logp_N, rtol=2e-6, atol=ATOL, equal_nan=True)
        plain = [0, 2] if "nan" in case else [0, 1, 2]
        assert torch.equal(ids_NS[plain], expected.ids_NS[plain])
        if "nan" in case:
            assert logps_NS[1].isnan().all() and token_logp_N[1].isnan()
            assert len(set(ids_NS[1].tolist())) == 8


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_largest_floats_do_not_overflow(temperature: float) -> None:
    logits_NV = rows_of("normal", 1, 3000)
    logits_NV[0, 2996:] = torch.tensor([3.0e38, -3.0e38, 3.0e38, 0.0])
    ids_NS, logps_NS, _ = topk(logits_NV, 2, None, temperature)
    assert ids_NS.tolist() == [[2996, 2998]]
    torch.testing.assert_close(logps_NS, torch.full((1, 2), -math.log(2.0)), rtol=0.0, atol=ATOL)


def test_nan_comes_first_at_its_lowest_id() -> None:
    ids_NS, _, _ = topk(torch.tensor([[1.0, math.nan, INF, math.nan, 5.0]]), 5)
    assert ids_NS.tolist() == [[1, 3, 2, 4, 0]]


def test_zeros_of_both_signs_are_one_value() -> None:
    ids_NS, logps_NS, _ = topk(torch.tensor([[-0.0, 0.0, -1.0, -0.0, 0.0]]), 4)
    assert ids_NS.tolist() == [[0, 1, 3, 4]]
    assert logps_NS.unique().numel() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_half_precision_value_is_converted(dtype: torch.dtype) -> None:
    """All 65536 bit patterns (float32: the same values), one row each beside a zero."""
    bits_N = torch.arange(-(2**15), 2**15).to(torch.int16)
    values_N = bits_N.view(torch.float16 if dtype == torch.float32 else dtype).to(dtype)
    values_N = values_N[values_N.isfinite()]
    logits_NV = torch.stack([values_N, torch.zeros_like(values_N)], -1)
    ids_NS, logps_NS, _ = topk(logits_NV, 2)
    true_ids_NS, true_logps_NS, _ = truth(logits_NV, 2)
    assert torch.equal(ids_NS.long(), true_ids_NS)
    torch.testing.assert_close(logps_NS.double(), true_logps_NS, rtol=1e-6, atol=ATOL)


@pytest.mark.parametrize("n_vocab", [210, 70000], ids="V{}".format)
def test_result_depends_on_neither_threads_nor_other_rows(n_vocab: int) -> None:
    logits_NV = rows_of("normal", 37, n_vocab)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = topk(logits_NV, 16)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(x, y) for x, y in zip(alone, topk(logits_NV, 16), strict=True))
    finally:
        torch.set_num_threads(threads)
    for n in (0, 36):
        one = topk(logits_NV[n : n + 1], 16)
        assert torch.equal(one[0], alone[0][n : n + 1]) and torch.equal(one[1], alone[1][n : n + 1])


def test_rows_may_be_strided_and_ids_narrow() -> None:
    wide_NV = rows_of("normal", 6, 300)
    view_NV = wide_NV[::2, 17:250]
    token_ids_N = torch.tensor([0, 5, 1, 5, 232, 5], dtype=torch.int32)[::2]
    got = topk(view_NV, 16, token_ids_N)
    expected = topk(view_NV.contiguous(), 16, token_ids_N.long())
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_empty_shapes() -> None:
    ids_NS, logps_NS, token_logp_N = topk(torch.empty(0, 10), 4, torch.empty(0, dtype=torch.int64))
    assert ids_NS.shape == (0, 4) and logps_NS.shape == (0, 4) and token_logp_N.shape == (0,)
    ids_NS, _, token_logp_N = topk(torch.zeros(3, 10), 0)
    assert ids_NS.shape == (3, 0) and token_logp_N.shape == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.zeros(2, 8, dtype=torch.float64), 2), "logits is not float32, bfloat16 or float16"),
        ((torch.zeros(8), 2), r"logits has 1 dimensions, expected \(N, V\)"),
        ((torch.zeros(8, 2).T, 2), "stride 2 along V, expected 1"),
        ((torch.zeros(2, 8), 9), "kappa is 9, expected 0 to V = 8"),
        ((torch.zeros(2, 8), -1), "kappa is -1"),
        ((torch.zeros(2, 8), 2, None, 0.0), "temperature is 0, expected a positive number"),
        ((torch.zeros(2, 8), 2, torch.tensor([0, 8])), r"token_ids\[1\] is 8, expected 0 to V - 1 = 7"),
        ((torch.zeros(2, 8), 2, torch.tensor([0])), r"shape \(N,\) = \(2,\)"),
        ((torch.zeros(2, 8), 2, torch.zeros(2)), "neither int64 nor int32"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple, message: str) -> None:
    with pytest.raises(RuntimeError, match="topk_logprobs_cpu: .*" + message):
        topk(*arguments)


def test_operator_schema() -> None:
    torch.library.opcheck(
        torch.ops.smopd.topk_logprobs_cpu.default,
        (rows_of("normal", 3, 50), 4, torch.tensor([1, 2, 3]), 0.9),
        test_utils=("test_schema",),
    )


def test_import_leaves_denormals_alone() -> None:
    """A library linked with -ffast-math would flush them in every thread that loads it."""
    code = (
        "import torch, smopd._C\n"
        "tiny = torch.full((100000,), 1e-40)\n"
        "torch.ops.smopd.topk_logprobs_cpu(torch.randn(64, 2000), 4, None, 1.0)\n"
        "assert 1e-310 * 0.5 > 0.0\n"
        "assert bool((tiny * 0.5 > 0).all())\n"
        "assert bool(torch.tensor(float('nan')).isnan()) and bool(torch.tensor(float('inf')).isinf())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
