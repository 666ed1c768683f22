"""Processes under limits, side by side within a stage, each killed with its children.

What a job prints goes to a log line by line as it comes, each line behind the job's name; the end of it is
shown as well where the job went wrong.
"""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

UNTIL = "SMOPD_TEST_UNTIL"  # tests/conftest.py
LAST_TEST_SECONDS = 20.0  # before a job's limit
POLL_SECONDS = 0.05
REAP_SECONDS = 5.0  # a killed process that a driver holds may not go at once
DRAIN_SECONDS = 2.0  # for the last lines of a job that has ended
SHOWN_LINES, SHOWN_CHARACTERS = 15, 300  # of a job that went wrong
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
WELL, WRONG, NOT_HERE, NOT_BEGUN = "well", "wrong", "not here", "not begun"


@dataclass(frozen=True)
class Job:
    """A process of its own.

    Attributes:
        stage: jobs of one stage run side by side.
        expected: seconds, an estimate.
        limit: seconds after which it is killed.
        nothing: exit statuses that say that there was nothing to do here.
        absent: why it is not for here, or None.
    """

    stage: int
    name: str
    command: tuple[str, ...]
    expected: float
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    nothing: tuple[int, ...] = ()
    absent: str | None = None

    @property
    def line(self) -> str:
        """The command as a shell takes it, its Python by name alone."""
        words = [Path(word).name if word == sys.executable else word for word in self.command]
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), shlex.join(words)])


@dataclass(frozen=True)
class Result:
    """How a job ended; state: WELL, WRONG, NOT_HERE or NOT_BEGUN."""

    state: str
    words: str
    seconds: float = 0.0


def stages(jobs: Sequence[Job]) -> list[list[Job]]:
    """The jobs of each stage, in order."""
    return [list(group) for _, group in itertools.groupby(jobs, lambda job: job.stage)]


def expected_seconds(jobs: Sequence[Job]) -> float:
    here = [job for job in jobs if job.absent is None]
    return sum(max(job.expected for job in stage) for stage in stages(here))


def most_seconds(jobs: Sequence[Job], total: float) -> float:
    """Of a run in which everything hangs."""
    return min(total, sum(max(job.limit for job in stage) for stage in stages(jobs))) + REAP_SECONDS


def show(jobs: Sequence[Job], total: float) -> None:
    """Prints what run_jobs would do, in its order."""
    print("stage  expected s  limit s  job")
    for job in jobs:
        print(f"{job.stage:5}  {job.expected:10.0f}  {job.limit:7.0f}  {job.name}\n{'':26}{job.line}")
        if job.absent:
            print(f"{'':26}(not here: {job.absent})")
    print("The jobs of a stage run side by side, the stages one after the other.")
    print(f"expected: {expected_seconds(jobs):.0f} s in all; at most {most_seconds(jobs, total):.0f} s")


class Log:
    """Lines of several jobs, in a file (or nowhere) as they come."""

    def __init__(self, path: Path | None = None) -> None:
        self._file = None if path is None else path.open("a", encoding="utf-8", errors="replace")
        self._lock = threading.Lock()

    def write(self, name: str, line: str) -> None:
        if self._file is not None:
            with self._lock:
                self._file.write(f"[{name}] {line}\n")
                self._file.flush()

    def say(self, line: str) -> None:
        """To the terminal as well."""
        print(line, flush=True)
        self.write("make gpu", line)


def run_jobs(
    jobs: Sequence[Job], total: float, folder: Path, log: Log, after_stage: Callable[[], None] = lambda: None
) -> dict[str, Result]:
    """Runs the jobs in folder; nothing is begun when total seconds have gone. after_stage: called after each.

    An exception, SIGTERM and SIGHUP end this call and every process that it began.
    """
    began = time.monotonic()
    results: dict[str, Result] = {}
    with _signals_raise():
        for stage in stages(jobs):
            names = ", ".join(job.name for job in stage)
            log.say(f"{time.monotonic() - began:4.0f} s  {names}")
            _run_stage(stage, began + total, folder, log, results)
            after_stage()
    return results


def _run_stage(stage: Sequence[Job], ends: float, folder: Path, log: Log, results: dict[str, Result]) -> None:
    running: list[_Running] = []
    try:
        for job in stage:
            why_not = _not_begun(job, ends)
            if why_not is None:
                running.append(_Running(job, ends, folder, log))
            else:
                _tell(job, why_not, results, log)
        while running:
            done = [one for one in running if one.ended or time.monotonic() >= one.ends]
            for one in done:
                one.kill()
            for one in done:
                running.remove(one)
                _tell(one.job, one.reap(ends), results, log, one.last_lines())
            if running:
                time.sleep(POLL_SECONDS)
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        for one in running:
            one.kill()
        for one in running:
            one.reap(ends)
        for number in SIGNALS:
            signal.signal(number, _exit)


def _not_begun(job: Job, ends: float) -> Result | None:
    if job.absent is not None:
        return Result(NOT_HERE, job.absent)
    if time.monotonic() >= ends:
        return Result(NOT_BEGUN, "the time for all jobs was over")
    return None


class _Running:
    """A job's process, the first of a group of its own."""

    def __init__(self, job: Job, ends: float, folder: Path, log: Log) -> None:
        self.job = job
        self.begun = time.monotonic()
        self.ends = min(self.begun + job.limit, ends)
        self.log = log
        self.last: deque[str] = deque(maxlen=SHOWN_LINES)
        until = time.time() + self.ends - self.begun - LAST_TEST_SECONDS
        self.process = subprocess.Popen(
            job.command,
            cwd=folder,
            env={**os.environ, "PYTHONUNBUFFERED": "1", UNTIL: str(until), **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # A daemon: a process that does not go away would hold the pipe's other end.
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace").rstrip("\n")
                self.last.append(text)
                self.log.write(self.job.name, text)

    def last_lines(self) -> list[str]:
        self.reader.join(DRAIN_SECONDS)
        return list(self.last)

    @property
    def ended(self) -> bool:
        """The process is left unreaped: until reap() no other has its number, which is its group's too."""
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.process.pid, flags) is not None

    def kill(self) -> None:
        """Kills what is left of the group."""
        self.seconds = time.monotonic() - self.begun
        self.in_time = self.ended
        os.killpg(self.process.pid, signal.SIGKILL)

    def reap(self, ends: float) -> Result:
        """How the process ended; it is not waited for beyond REAP_SECONDS after ends."""
        after = f"after {self.seconds:.0f} s"
        try:
            wait = min(time.monotonic(), ends) + REAP_SECONDS - time.monotonic()
            status = self.process.wait(max(0.0, wait))
        except subprocess.TimeoutExpired:
            return Result(WRONG, f"it was killed {after}, and does not go away", self.seconds)
        if not self.in_time:
            why = "when the time for all jobs was over" if self.begun + self.job.limit > ends else "its limit"
            return Result(WRONG, f"it had not ended {after}, {why}, and was killed", self.seconds)
        state = WELL if status == 0 else NOT_HERE if status in self.job.nothing else WRONG
        return Result(state, f"exit status {status} {after}", self.seconds)


def _tell(job: Job, result: Result, results: dict[str, Result], log: Log, lines: Sequence[str] = ()) -> None:
    results[job.name] = result
    log.say(f"---- {job.name}: {result.state}, {result.words}")
    if result.state == WRONG:
        for line in lines:  # the log has them already
            print(f"     {line[:SHOWN_CHARACTERS]}", flush=True)


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


@contextmanager
def _signals_raise() -> Iterator[None]:
    before = {number: signal.signal(number, _exit) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
