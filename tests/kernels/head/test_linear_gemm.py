"""The products of a linear head: against float64, in every dtype, widened in pieces, summed or not."""

from __future__ import annotations

import pytest
import torch

from smopd.kernels.head import gemm as linear_gemm

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float64: 1e-14, torch.float32: 5e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.fixture(params=[*DTYPES, "widened"], ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """widened: bfloat16 on a CPU without instructions for it, whichever CPU this is."""
    widened = request.param == "widened"
    monkeypatch.setattr(linear_gemm, "PIECE_BYTES", 1)  # pieces of 64 rows
    monkeypatch.setattr(linear_gemm, "cpu_multiplies_bf16", lambda: not widened)
    return torch.bfloat16 if widened else request.param


DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int, device: str) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=gen, dtype=torch.float64).to(device, dtype)


def check(got: torch.Tensor, want: torch.Tensor, terms: int) -> None:
    bound = ROUNDING[got.dtype] * want.abs() + 1e-6 * terms
    assert bool(((got.double() - want).abs() <= bound).all())


@DEVICES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_logits(dtype: torch.dtype, bias: bool, device: str) -> None:
    hidden, weight = matrix(5, 24, dtype, 0, device), matrix(151, 24, dtype, 1, device)
    bias_V = matrix(1, 151, dtype, 2, device)[0] if bias else None
    buffer = linear_gemm.logits_buffer(9, 151, hidden)
    assert buffer.shape == (9, 151) and buffer.stride(0) * buffer.element_size() % 128 == 0
    buffer.fill_(torch.nan)
    linear_gemm.logits_into(buffer[:5], hidden, weight, bias_V)
    want = hidden.double() @ weight.double().T
    check(buffer[:5], want if bias_V is None else want + bias_V.double(), 24)
    assert buffer[5:].isnan().all()


@DEVICES
@pytest.mark.parametrize("start", [None, 3.0], ids=["written", "added"])
@pytest.mark.parametrize("wide", [False, True], ids=["", "wide"])
def test_gradients(dtype: torch.dtype, wide: bool, start: float | None, device: str) -> None:
    dlogits = linear_gemm.logits_buffer(5, 151, matrix(1, 1, dtype, 0, device))
    dlogits.copy_(matrix(5, 151, dtype, 3, device))
    hidden, weight = matrix(5, 24, dtype, 0, device), matrix(151, 24, dtype, 1, device)
    if start is not None and not wide and dtype in (torch.bfloat16, torch.float16):
        pytest.skip("nothing is summed in half precision")
    out_dtype = torch.promote_types(dtype, torch.float32) if wide else dtype
    fill = torch.nan if start is None else start
    dhidden = torch.full((5, 24), fill, dtype=out_dtype, device=device)
    dweight = torch.full((151, 24), fill, dtype=out_dtype, device=device)
    linear_gemm.weight_gradient_into(dweight, dlogits, hidden, accumulate=start is not None)
    if start is None and not wide:
        linear_gemm.hidden_gradient_into(dhidden, dlogits, weight)
        check(dhidden, dlogits.double() @ weight.double(), 151)
    check(dweight, dlogits.double().T @ hidden.double() + (start or 0.0), 5)
