"""The choice of a backend and its log line."""

from __future__ import annotations

import logging

import pytest
import torch

from smopd import ops
from smopd.kernels import dispatch

LOGITS = torch.zeros(5, 11)
REWARDS = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))


def messages(calls, caplog: pytest.LogCaptureFixture) -> list[str]:
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="smopd"):
        for call in calls:
            call()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.skipif(dispatch.cpp_unavailable() is not None, reason="smopd._C is not built")
@pytest.mark.parametrize("forced", ["", "cpp", "reference"])
@pytest.mark.parametrize("turned", [False, True])
def test_one_line_for_all_operations(turned: bool, forced: str, caplog, monkeypatch) -> None:
    monkeypatch.setenv(dispatch.ENV, forced)
    calls = [lambda: ops.topk_logprobs(LOGITS, 2), lambda: ops.gdpo_advantages(*REWARDS)]
    lines = messages(2 * (calls[::-1] if turned else calls), caplog)
    assert lines == [f"the fused operations on cpu are served by the {forced or 'cpp'} backend"]


def test_a_missing_build_is_logged(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.delenv(dispatch.ENV, raising=False)
    monkeypatch.setattr(dispatch, "cpp_unavailable", lambda: "not built")
    (line,) = messages([lambda: ops.topk_logprobs(LOGITS, 2)], caplog)
    assert line == "topk_logprobs on cpu is served by the reference backend: not built"


@pytest.mark.parametrize(
    ("forced", "dtype", "error", "message"),
    [
        ("triton", torch.float32, RuntimeError, "triton cannot serve this call: the tensor is on cpu"),
        ("cpp", torch.float64, RuntimeError, r"the dtype is torch\.float64"),
        ("numpy", torch.float32, ValueError, "SMOPD_BACKEND is 'numpy', expected one of"),
    ],
)
def test_a_forced_backend_serves_or_raises(forced: str, dtype, error, message: str, monkeypatch) -> None:
    monkeypatch.setenv(dispatch.ENV, forced)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(error, match=message):
        ops.topk_logprobs(LOGITS.to(dtype), 2)
