"""Signals: recorded while postponed, raised otherwise; two at once count as one."""

import os
import signal
import sys

import pytest

from smopd.engine.process import SAME_SECONDS
from smopd.record.progress import say_error
from smopd.step.stop import Stop, Stopped
from tests.ranks import on_ranks


@pytest.fixture
def hangup():
    """SIGHUP as a terminal's child has it, and back."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("number", "status"), [(15, 143), (2, 130), (1, 129), (10, 138)])
def test_a_signal_is_raised_where_it_is_not_postponed(hangup, number, status):
    before = signal.getsignal(number)
    with Stop(), pytest.raises(Stopped, match=f"stopped by {signal.Signals(number).name}") as stopped:
        signal.raise_signal(number)
    assert stopped.value.status == status
    with Stop() as stop:  # or while the command ends
        signal.raise_signal(number)
    assert stop.number == number and signal.getsignal(number) is before


def test_under_nohup_a_hangup_stops_nothing(hangup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Stop() as stop:
        signal.raise_signal(signal.SIGHUP)
        assert stop.number == 0


def test_a_postponed_signal_is_noted_and_answered_at_the_end():
    done = []
    with Stop() as stop, pytest.raises(Stopped, match="stopped by SIGINT"), stop.postponed():
        assert stop.asked() == 0
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # the launcher sends it too
        done.append(stop.asked())
    assert done == [signal.SIGINT]


def test_a_signal_waits_for_the_outermost_context():
    done = []
    with Stop() as stop, pytest.raises(Stopped), stop.postponed():
        with stop.postponed():
            signal.raise_signal(signal.SIGTERM)
        done.append(stop.asked())
    assert done == [signal.SIGTERM]


def test_a_signal_is_noted_when_standard_error_is_gone(monkeypatch):
    """The reader of a pipe may have ended, or the terminal."""
    kept, full = os.dup(2), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, 2)
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", closefd=False))
    try:
        with Stop() as stop, pytest.raises(Stopped), stop.postponed():
            signal.raise_signal(signal.SIGTERM)
            assert stop.asked() == signal.SIGTERM
        os.dup2(full, 2)
        say_error("stopped")
        sys.stderr.flush()  # as at the exit, whose status would change
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(full)


AGAIN = f"""
import signal, time
from smopd.step.stop import Stop
with Stop() as stop, stop.postponed():
    signal.raise_signal(signal.SIGTERM)
    time.sleep({SAME_SECONDS} + 0.2)
    signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.slow
def test_the_same_signal_again_ends_the_process_at_once(tmp_path):
    (tmp_path / "again.py").write_text(AGAIN)
    assert on_ranks(1, str(tmp_path / "again.py")).returncode == -signal.SIGTERM
