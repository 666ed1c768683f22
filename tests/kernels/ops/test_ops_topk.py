"""topk_logprobs: values against float64, exact ids, ties to the lower id."""

from __future__ import annotations

import pytest
import torch

from smopd.kernels import dispatch
from smopd.kernels.reference import topk as reference
from smopd.ops import teacher_mixture, topk_logprobs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def expected_ids(logits: torch.Tensor, kappa: int) -> torch.Tensor:
    rows = logits.double().tolist()
    return torch.tensor(
        [sorted(range(len(row)), key=lambda i, row=row: (-row[i], i))[:kappa] for row in rows]
    )


def serve(backend: str):
    return reference.topk_logprobs if backend == "reference" else topk_logprobs


@pytest.mark.parametrize("backend", ["reference", "served"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("kappa", [0, 1, 16, 33])
def test_values_and_ids(backend: str, dtype: torch.dtype, kappa: int) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(40, 33)).to(dtype)
    tokens = torch.randint(0, 33, (40,))
    out = serve(backend)(logits, kappa, token_ids_N=tokens, temperature=0.7)
    truth = (logits.double() / 0.7).log_softmax(-1)
    ids = expected_ids(logits, kappa).reshape(40, kappa)
    assert out.ids_NS.dtype == torch.int32
    assert out.logps_NS.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(out.ids_NS.long(), ids)
    tolerance = 1e-12 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(out.logps_NS.double(), truth.gather(1, ids), rtol=0, atol=tolerance)
    torch.testing.assert_close(
        out.token_logp_N.double(), truth.gather(1, tokens[:, None])[:, 0], rtol=0, atol=tolerance
    )


@pytest.mark.parametrize("backend", ["reference", "served"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("levels", [1, 2, 3, 8])
def test_ties_go_to_the_lower_id(backend: str, dtype: torch.dtype, levels: int) -> None:
    torch.manual_seed(levels)
    logits = torch.randint(0, levels, (200, 57)).to(dtype)
    for kappa in (1, 5, 16, 56, 57):
        out = serve(backend)(logits, kappa)
        assert torch.equal(out.ids_NS.long(), expected_ids(logits, kappa))


@pytest.mark.parametrize("backend", ["reference", "served"])
def test_zeros_of_both_signs_are_one_tie(backend: str) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert serve(backend)(logits, 4).ids_NS.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("backend", ["reference", "served"])
def test_minus_inf_logits_are_picked_last_by_id(backend: str) -> None:
    logits = torch.full((1, 6), -torch.inf)
    logits[0, 4] = 3.0
    out = serve(backend)(logits, 3)
    assert out.ids_NS.tolist() == [[4, 0, 1]]
    assert out.logps_NS.tolist() == [[0.0, -torch.inf, -torch.inf]]


@pytest.mark.parametrize("backend", ["reference", "served"])
def test_huge_logits_and_large_vocabulary(backend: str) -> None:
    torch.manual_seed(1)
    logits = 1e4 * torch.randn(4, 151936)
    out = serve(backend)(logits, 16)
    ids = logits.topk(16).indices
    assert torch.equal(out.ids_NS.long(), ids)
    truth = logits.double().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(out.logps_NS.double(), truth, rtol=1e-6, atol=1e-6)
    assert out.token_logp_N is None


@pytest.mark.parametrize("backend", ["reference", "served"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
@pytest.mark.parametrize("n_teachers", [1, 3, 9])
@pytest.mark.parametrize("with_tokens", [False, True], ids=["", "tokens"])
def test_several_teachers_equal_each_alone(
    backend: str, dtype: torch.dtype, n_teachers: int, with_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "reference":
        monkeypatch.setenv(dispatch.ENV, "reference")
    torch.manual_seed(3)
    wide_MNV = (4 * torch.randn(n_teachers, 7, 80)).to(dtype)
    teachers = [one[:, :57] if m % 2 else one[:, :57].contiguous() for m, one in enumerate(wide_MNV)]
    tokens = torch.randint(0, 57, (7,)) if with_tokens else None
    together = topk_logprobs(teachers, 5, token_ids_N=tokens, temperature=0.7)
    assert together.ids_NS.shape == together.logps_NS.shape == (7, n_teachers, 5)
    for m, logits in enumerate(teachers):
        alone = topk_logprobs(logits, 5, token_ids_N=tokens, temperature=0.7)
        assert torch.equal(together.ids_NS[:, m], alone.ids_NS)
        assert torch.equal(together.logps_NS[:, m], alone.logps_NS)
        if with_tokens:
            assert torch.equal(together.token_logp_N[:, m], alone.token_logp_N)
    assert with_tokens or together.token_logp_N is None


@pytest.mark.parametrize("n_rows", [0, 5])
@pytest.mark.parametrize("backend", ["reference", "served"])
def test_several_teachers_go_into_their_mixture(
    backend: str, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "reference":
        monkeypatch.setenv(dispatch.ENV, "reference")
    torch.manual_seed(4)
    teachers = (torch.randn(n_rows, 40), torch.randn(n_rows, 40))
    top = topk_logprobs(teachers, 40, token_ids_N=torch.zeros(n_rows, dtype=torch.int64))
    assert top.token_logp_N.shape == (n_rows, 2)
    log_alpha = torch.tensor([0.3, 0.7]).log()
    mixture = teacher_mixture(top.ids_NS, top.logps_NS, log_alpha, 40, merge=True)
    shares = [a * t.double().softmax(-1) for a, t in zip((0.3, 0.7), teachers, strict=True)]
    truth = sum(shares).log().gather(-1, mixture.ids_NS.long())
    torch.testing.assert_close(mixture.logps_NS.double(), truth, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["reference", "served"])
def test_no_rows(backend: str) -> None:
    out = serve(backend)(torch.zeros(0, 9), 4, token_ids_N=torch.zeros(0, dtype=torch.int64))
    assert out.ids_NS.shape == (0, 4) and out.logps_NS.shape == (0, 4) and out.token_logp_N.shape == (0,)


def test_rows_do_not_depend_on_each_other_nor_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    logits = torch.randn(9, 101)
    whole = reference.topk_logprobs(logits, 7)
    monkeypatch.setattr("smopd.kernels.reference.rows.ROW_CHUNK_BYTES_CPU", 900)
    cut = reference.topk_logprobs(logits, 7)
    assert torch.equal(whole.ids_NS, cut.ids_NS) and torch.equal(whole.logps_NS, cut.logps_NS)


def test_logits_that_require_grad_give_detached_results() -> None:
    out = topk_logprobs(
        torch.randn(3, 8, requires_grad=True), 2, token_ids_N=torch.zeros(3, dtype=torch.int32)
    )
    assert not out.logps_NS.requires_grad and not out.token_logp_N.requires_grad
