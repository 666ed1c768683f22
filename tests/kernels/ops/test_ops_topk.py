"""topk_logprobs of several teachers, and what the public function adds to a backend's."""

from __future__ import annotations

import pytest
import torch

from smopd.kernels import dispatch
from smopd.ops import teacher_mixture, topk_logprobs

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


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


def test_logits_that_require_grad_give_detached_results() -> None:
    out = topk_logprobs(
        torch.randn(3, 8, requires_grad=True), 2, token_ids_N=torch.zeros(3, dtype=torch.int32)
    )
    assert not out.logps_NS.requires_grad and not out.token_logp_N.requires_grad
