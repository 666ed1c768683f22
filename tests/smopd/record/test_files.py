"""Logs that survive a kill: complete lines, truncation to a step, atomic replacement."""

import errno
import math
import os
from datetime import date
from pathlib import Path

import pytest
from torch.distributed.checkpoint import save

from smopd.engine.files import CannotWrite, DamagedFile, read_json, room_for, write_atomically
from smopd.record.files import JsonlLog


def test_log_writes_whole_finite_lines(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "new" / "metrics.jsonl")
    log.write({"step": 1, "a": math.nan, "b": [math.inf, {"c": -math.inf}], "text": "\ud800\u2028 ü"})
    log.write({"step": 1, "ok": True, "n": None, "day": date(2026, 1, 2)})
    raw = log.path.read_bytes()
    assert raw.count(b"\n") == 2 and b"NaN" not in raw and b"Infinity" not in raw
    first, second = log.read()
    assert first == {"step": 1, "a": None, "b": [None, {"c": None}], "text": "\ud800\u2028 ü"}
    assert second == {"step": 1, "ok": True, "n": None, "day": "2026-01-02"}
    for torn in (b'{"step": 3, "a', raw[:-1]):  # by a kill, or a full disk
        log.path.write_bytes(torn)
        log.write({"step": 3})
        assert log.read() == [first, {"step": 3}][torn != raw[:-1] :]


def test_cut_drops_later_steps_and_every_torn_end(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "m.jsonl")
    for step in (1, 1, 2, 3, 3):
        log.write({"step": step, "text": "long"})
    whole = log.path.read_bytes()
    log.cut(3)
    assert log.path.read_bytes() == whole
    for torn in range(1, len(whole) // 5):
        log.path.write_bytes(whole[:-torn])
        log.cut(3)
        assert [line["step"] for line in log.read()] == [1, 1, 2, 3]
    log.cut(1)
    assert [line["step"] for line in log.read()] == [1, 1]
    log.cut(0)
    assert log.read() == [] and list(tmp_path.iterdir()) == [log.path]


@pytest.mark.parametrize("line", ["{}", "null", '{"step": "1"}', '{"step": true}', "[" * 100_000])
def test_a_line_of_another_form_is_named(tmp_path: Path, line: str) -> None:
    log = JsonlLog(tmp_path / "log")
    log.write({"step": 1})
    with log.path.open("a") as file:
        file.write(line + "\n")
    for use in (log.read, lambda: log.cut(1)):
        with pytest.raises(DamagedFile, match=r"log, line 2: "):
            use()


def test_a_field_of_another_type_is_named(tmp_path: Path) -> None:
    path = tmp_path / "done.json"
    path.write_text('{"steps": "4"}')
    with pytest.raises(DamagedFile, match=r"done\.json: is damaged \(steps is '4', expected int\)"):
        read_json(path, steps=int)
    assert read_json(path, steps=str) == {"steps": "4"}


def test_a_refused_write_is_named_and_changes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.html"
    write_atomically(path, b"old")

    def fail(descriptor: int) -> None:  # as a FUSE mount whose daemon has died
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(os, "fsync", fail)
    for write in (lambda: write_atomically(path, b"new"), lambda: save({}, checkpoint_id=tmp_path / "new")):
        with pytest.raises(CannotWrite, match=r"html: cannot be .*\(Transport endpoint"), room_for(path):
            write()
    assert path.read_bytes() == b"old" and sorted(tmp_path.iterdir()) == [tmp_path / "new", path]
