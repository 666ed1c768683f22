"""The progress line in both its forms: what it shows of a step, and how much of it."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from smopd.record import progress
from smopd.record.progress import Progress, say

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


@pytest.mark.parametrize("steps", [1, 2, 11, 25, 1000])
@pytest.mark.parametrize("start", [0, 7])
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
        line = console.render_lines(shown._bars.get_renderable(), pad=False)
        shown.say("a message")
    assert len(line) == 1
    text = "".join(segment.text for segment in line[0])
    assert "3/10" in text and "left" in text and len(text) <= width
    assert ("…" in text) == (width < 90)
    assert "a message" in terminal.getvalue()


def test_what_a_terminal_would_obey_is_not_said(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b]0;title\x07b\x9b2Jc\td")
    with Progress("run", 1, 0, True) as shown:
        shown.update(1, {"reward/\x1b[2Jname/mean": 1.0})
    out = capsys.readouterr().out
    assert "a\ufffd]0;title\ufffdb\ufffd2Jc" in out and "\ufffd[2Jname" in out
    assert not set(out) & {"\x1b", "\x07", "\x9b"}
