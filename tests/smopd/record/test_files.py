"""Files that survive a kill: whole lines, cuts back to a step, and replacement that is never half done."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from smopd.engine.files import write_atomically
from smopd.record import files
from smopd.record.files import DamagedLog, JsonlLog


def test_log_writes_whole_finite_lines(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "new" / "metrics.jsonl")
    log.write(
        {"step": 1, "a": math.nan, "b": [math.inf, {"c": -math.inf}], "text": "\ud800\u2028 ü", "n": None}
    )
    log.write({"step": 1, "ok": True})
    raw = log.path.read_bytes()
    assert raw.count(b"\n") == 2 and b"NaN" not in raw and b"Infinity" not in raw
    first, second = log.read()
    assert first == {"step": 1, "a": None, "b": [None, {"c": None}], "text": "\ud800\u2028 ü", "n": None}
    assert second == {"step": 1, "ok": True}


@pytest.mark.parametrize("step", [None, 1.0, "1", True])
def test_log_wants_an_integer_step(tmp_path: Path, step: object) -> None:
    with pytest.raises(ValueError, match="expected an integer"):
        JsonlLog(tmp_path / "m.jsonl").write({"step": step})


def test_cut_drops_later_steps(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "m.jsonl")
    for step in (1, 1, 2, 3, 3):
        log.write({"step": step})
    whole = log.path.read_bytes()
    assert log.cut(3) == 0 and log.path.read_bytes() == whole
    assert log.cut(2) == 2
    assert [line["step"] for line in log.read()] == [1, 1, 2]
    assert log.cut(0) == 3 and log.read() == []
    assert list(tmp_path.iterdir()) == [log.path]


def test_every_torn_end_is_dropped(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "m.jsonl")
    log.write({"step": 1, "text": "one"})
    length = len(log.path.read_bytes())
    log.write({"step": 2, "text": "two"})
    whole = log.path.read_bytes()
    for end in range(length + 1, len(whole)):
        log.path.write_bytes(whole[:end])
        assert log.cut(9) == 1
        assert log.path.read_bytes() == whole[:length]


def test_an_atomic_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "m.jsonl")
    log.write({"step": 1, "a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan")})
    assert json.loads(log.path.read_text()) == {"step": 1, "a": 0.5, "b": 3, "c": None}


@pytest.mark.parametrize("line", ["{}", "3", "null", '{"step": "1"}', '{"step": true}', "[" * 100_000])
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    log = JsonlLog(tmp_path / "log")
    log.write({"step": 1})
    with log.path.open("a") as file:
        file.write(line + "\n")
    for use in (log.read, lambda: log.cut(1)):
        with pytest.raises(DamagedLog, match=r"log, line 2: "):
            use()
