"""python -m bench.harness.host_time: a row an operation, of the backend that serves and of the stub."""

from __future__ import annotations

import json

import pytest

from bench.harness import host_time
from smopd.kernels.ops import library


@pytest.mark.parametrize("arguments", [[], ["stub"]], ids=["served", "stub"])
def test_a_row_an_operation(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 2)
    before = library.watched
    host_time.main(arguments)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["call"] for row in rows] == list(host_time.calls())
    assert all(row["registered"] > 0 and row["plain"] > 0 for row in rows)
    assert library.watched is before
