"""Signals: noted while postponed, raised elsewhere; the same one sent by two senders at once is one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from smopd.engine.process import SAME_SECONDS
from smopd.step.stop import Stop, Stopped


def test_a_signal_is_raised_where_it_is_not_postponed():
    with Stop(), pytest.raises(Stopped, match="stopped by SIGTERM") as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.status == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_postponed_signal_is_noted_and_answered_at_the_end():
    done = []
    with Stop() as stop, pytest.raises(Stopped, match="stopped by SIGINT"), stop.postponed():
        assert stop.asked() == 0
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # by the launcher, within a moment
        done.append(stop.asked())
    assert done == [signal.SIGINT]


AGAIN = f"""
import signal, time
from smopd.step.stop import Stop
with Stop() as stop, stop.postponed():
    signal.raise_signal(signal.SIGTERM)
    time.sleep({SAME_SECONDS} + 0.2)
    signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.slow
def test_the_same_signal_again_ends_the_process_at_once():
    assert subprocess.run([sys.executable, "-c", AGAIN]).returncode == -signal.SIGTERM
