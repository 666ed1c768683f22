"""The microbenchmarks' command at tiny sizes: every row, a refused one, and a backend that is not there."""

from __future__ import annotations

import json
import os

import pytest
import torch

from bench import topk_logprobs
from bench.__main__ import main
from smopd.kernels.dispatch import ENV, cpp_unavailable


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topk_logprobs, "CASES", [(9, 40, torch.float32), (2, 40, torch.bfloat16)])
    monkeypatch.setattr(topk_logprobs, "SECONDS", 0.001)


def rows(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_the_benchmarks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.split()[0] == "topk_logprobs" and "beside torch.topk" in line


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topk"]) == 2
    assert "no benchmark 'topk', expected one of ['topk_logprobs']" in capsys.readouterr().err


@pytest.mark.skipif(cpp_unavailable() is not None, reason="smopd._C is not built")
def test_every_case_has_a_row_a_provider(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV, "reference")
    assert main(["topk_logprobs"]) == 0
    assert os.environ[ENV] == "reference"
    found = rows(capsys)
    assert [(row["case"], row["provider"]) for row in found] == [
        (case, provider)
        for case in ("N9-V40-float32", "N2-V40-bfloat16")
        for provider in ("read", "eager", "reference", "cpp")
    ]
    for row in found:
        assert 0 < row["p20_ms"] <= row["ms"] <= row["p80_ms"]
        assert row["cpu"] and row["threads"] >= 1 and row["torch"] == torch.__version__
    assert [row["times_eager"] for row in found if row["provider"] == "eager"] == [1.0, 1.0]
    assert all(row["of_ceiling"] > 0 for row in found if row["provider"] != "read")


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda ids, logps: (ids, logps + 1e-3), r"off by up to 0.001 nats"),
        (lambda ids, logps: (ids, logps * float("nan")), r"off by up to nan nats"),
        (lambda ids, logps: (ids.flip(-1), logps), r"ids differ from a float64 sort"),
    ],
)
def test_a_wrong_result_is_refused_and_the_rest_goes_on(
    wrong, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = topk_logprobs.ours
    providers = {"eager": (topk_logprobs.eager, None), "reference": (lambda x: wrong(*ours(x)), "reference")}
    monkeypatch.setattr(topk_logprobs, "PROVIDERS", {**providers, "cpp": (ours, "reference")})
    monkeypatch.setattr(topk_logprobs, "cpp_unavailable", lambda: None)
    assert main(["topk_logprobs"]) == 1
    found = rows(capsys)
    assert len(found) == 8
    refused = [row for row in found if "refused" in row]
    assert [row["provider"] for row in refused] == ["reference"] * 2
    assert all(reason in row["refused"] and "ms" not in row for row in refused)


def test_an_absent_backend_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topk_logprobs, "cpp_unavailable", lambda: "smopd._C cannot be loaded (no such file)")
    assert main(["topk_logprobs"]) == 0
    first, *others = rows(capsys)
    assert first == {"provider": "cpp", "left_out": "smopd._C cannot be loaded (no such file)"}
    assert [row["provider"] for row in others] == ["read", "eager", "reference"] * 2
