"""The progress line in both its forms, and the logs that survive a kill."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from smopd import progress
from smopd.progress import JsonlLog, Progress, say, write_atomically

METRICS = {
    "reward/accuracy/mean": 1.25,
    "reward/format/mean": 0.5,
    "reward/format/std": 9.0,
    "kl": 0.0123,
    "teacher_mass": 0.9712,
    "tokens_per_second": 4123.4,
}


def plain_lines(capsys: pytest.CaptureFixture[str], steps: int, start: int = 0) -> list[str]:
    with Progress("gdpo", steps, start, plain=True) as shown:
        for step in range(start + 1, steps + 1):
            shown.update(step, METRICS)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("steps", [1, 2, 9, 10, 11, 12, 13, 25, 80, 99, 101, 1000])
@pytest.mark.parametrize("start", [0, 1, 7])
def test_plain_lines_are_few_and_hold_the_first_and_last(
    steps: int, start: int, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = plain_lines(capsys, steps, start)
    if start >= steps:
        assert lines == []
        return
    assert 1 <= len(lines) <= 12
    assert f"{start + 1}/{steps}" in lines[0]
    assert f"{steps}/{steps}" in lines[-1]


def test_a_plain_line_has_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    line = plain_lines(capsys, 1)[0]
    assert line.rstrip() == "gdpo  1/1  accuracy 1.25  format 0.50  kl 0.012  mass 0.97  tok/s 4,123"


def test_missing_keys_nan_and_odd_values_break_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("x", 3, 0, True) as shown:
        shown.update(1, {})
        shown.update(2, {"kl": math.nan, "teacher_mass": None, "tokens_per_second": "fast"})
        shown.update(3, {"reward/a/mean": math.inf})
    out = capsys.readouterr().out
    assert "kl nan" in out and "mass" not in out and "tok/s" not in out and "a inf" in out


def test_an_evaluation_of_the_same_step_is_a_line_of_its_own_and_stays(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Progress("x", 2, 0, True) as shown:
        shown.update(1, METRICS)
        shown.update(1, {"greedy/format": 0.9})
        shown.update(2, METRICS)
    first, evaluated, second = capsys.readouterr().out.splitlines()
    assert "greedy" not in first and "accuracy" in first
    assert "greedy format 0.90" in evaluated and "accuracy" not in evaluated
    assert "greedy format 0.90" in second and "accuracy" in second


def test_no_terminal_means_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Progress("x", 1, 0, None) as shown:
        shown.update(1, METRICS)
    assert "\x1b[" not in capsys.readouterr().out


def test_messages_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    say("[bold]not markup[/bold] " + "x" * 300)
    assert capsys.readouterr().out == "[bold]not markup[/bold] " + "x" * 300 + "\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_live_line_is_one_line(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    console = Console(file=terminal, force_terminal=True, width=width)
    monkeypatch.setattr(progress, "console", lambda: console)
    with Progress("gdpo", 10) as shown:
        for step in (1, 2, 3):
            shown.update(step, METRICS)
        line = console.render_lines(shown._line(), pad=False)
        shown.say("a message")
    assert len(line) == 1
    text = "".join(segment.text for segment in line[0])
    assert "3/10" in text and "left" in text and len(text) <= width
    assert text.endswith("…") == (width < 90)
    assert "a message" in terminal.getvalue()


def test_the_pace_is_of_the_last_steps_and_not_of_steps_done_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with Progress("x", 50, 40, True) as shown:
        assert shown.seconds_left() is None
        for step in (41, 42):
            now[0] += 3.0
            shown.update(step, {})
        assert shown.seconds_left() == pytest.approx(24.0)


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


def test_cut_of_no_file_is_nothing(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "m.jsonl")
    assert log.cut(5) == 0 and log.read() == [] and not log.path.exists()


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


def test_a_damaged_middle_is_named_and_left_alone(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "m.jsonl")
    log.path.write_bytes(b'{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        log.cut(1)
    assert log.path.read_bytes().count(b"\n") == 3


def test_an_atomic_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    write_atomically(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(progress.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_of_other_libraries_are_numbers(tmp_path: Path) -> None:
    import numpy as np

    log = JsonlLog(tmp_path / "m.jsonl")
    log.write({"step": 1, "a": np.float32(0.5), "b": np.int64(3), "c": np.float64("nan")})
    assert json.loads(log.path.read_text()) == {"step": 1, "a": 0.5, "b": 3, "c": None}
