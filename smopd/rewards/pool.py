"""Reward functions in worker processes that can be killed: a bad one costs its own dimension, never the run.

Each reward runs in its own process and all are called at once. What cannot be scored is NaN and is counted by
its reason; a call that fails as a whole is made once more; one over its deadline is ended by killing the
worker with all that it started, and the next call starts a new one. POSIX only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import numpy as np

from smopd.engine.imports import IMPORT_PATH
from smopd.engine.process import kill_below
from smopd.names import STARTUP_SECONDS
from smopd.rewards.worker import NUMBER, SIGNAL_EXIT_CODE

log = logging.getLogger(__name__)
GRACE_SECONDS = 1.0  # ours: for a process that closed its pipe to end by itself
ATTEMPTS = 2  # ours: calls of a reward whose first one fails as a whole
LOG_BYTES = 16 << 20  # ours: of what rewards print, after which the file begins again
LARGEST_REPLY = 1 << 30  # ours, bytes


@dataclass(frozen=True)
class RewardSpec:
    """One reward dimension.

    name: how metrics and errors call it.
    function: `package.module:function`, called as `f(prompts, completions, **columns)`, sync or async.
    kwargs: further keyword arguments of each call; they win over columns of the same name.
    """

    name: str
    function: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerScores:
    """One reward's scores of R responses; the fields are those of RewardBatch."""

    values: list[float]
    failures: dict[str, int]
    error: str | None
    seconds: float


class RewardWorker:
    """One reward function in a process of its own, started at need and again after it was killed or died."""

    def __init__(
        self,
        reward: RewardSpec,
        *,
        deadline_seconds: float,
        startup_seconds: float,
        log_path: Path | None,
        memory_bytes: int = 0,
    ) -> None:
        if not IMPORT_PATH.fullmatch(reward.function):
            raise ValueError(
                f"reward {reward.name!r}: function is {reward.function!r}, expected package.module:function"
            )
        if reserved := {"prompts", "completions"} & reward.kwargs.keys():
            raise ValueError(f"reward {reward.name!r}: kwargs may not hold {sorted(reserved)}")
        self.reward = reward
        self._deadline_seconds = deadline_seconds
        self._startup_seconds = startup_seconds
        self._log_path = log_path
        self._memory_bytes = memory_bytes
        self._number = 0  # of the newest request
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: Connection
        self._replies: Connection
        self._starts = 0
        self._closed = False

    @property
    def restarts(self) -> int:
        """How often the process was started again."""
        return max(0, self._starts - 1)

    def start(self) -> None:
        """Start the process and load the function, where that is not done yet.

        Raises:
            RewardError: the function could not be loaded, or not in `startup_seconds`.
        """
        if self._process is not None:
            # Between calls the reply pipe is readable only when the worker closed it.
            if self._process.poll() is None and not self._replies.poll():
                return
            self._kill()  # it died between two calls
        self._starts += 1
        self._spawn()
        try:
            if self._closed:
                raise EOFError
            reply = self._exchange(pickle.dumps(dict(self.reward.kwargs), 5), self._startup_seconds)
            if "ready" in reply:
                return
            error = reply.get("error", "malformed reply")
        except TimeoutError:
            error = f"not loaded after {self._startup_seconds:g} s"
        except (EOFError, OSError):
            error = f"the worker ended with {self._kill(GRACE_SECONDS)}"
        self._kill()
        raise RewardError(
            f"reward {self.reward.name!r}: cannot load {self.reward.function!r}, "
            f"expected package.module:function: {error}"
        )

    def _spawn(self) -> None:
        child_reads, self._requests = Pipe(duplex=False)
        self._replies, child_writes = Pipe(duplex=False)
        ends = (child_reads.fileno(), child_writes.fileno())
        arguments = (*ends, os.getpid(), self.reward.function, self._memory_bytes)
        with contextlib.ExitStack() as stack:
            for end in (child_reads, child_writes):
                stack.callback(end.close)
            log_file = stack.enter_context(self._log_path.open("ab")) if self._log_path else None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "smopd.rewards.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=log_file or 2,
                stderr=log_file or 2,
                pass_fds=ends,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )

    def score(self, request: bytes, responses: int) -> WorkerScores:
        """Score a pickled request, again where all of it failed; never raises for what the function did."""
        begin = time.monotonic()
        scores = self._score(request, responses)
        for _ in range(ATTEMPTS - 1):
            if self._closed or not any(scores.failures[kind] for kind in WHOLE):
                break
            log.warning("reward %s is called again: %s", self.reward.name, scores.error)
            scores = self._score(request, responses)
        self._limit_log()
        return replace(scores, seconds=time.monotonic() - begin)

    def _limit_log(self) -> None:
        with contextlib.suppress(OSError):
            if self._log_path is not None and self._log_path.stat().st_size > LOG_BYTES:
                os.truncate(self._log_path, 0)

    def _score(self, request: bytes, responses: int) -> WorkerScores:
        begin = time.monotonic()
        values, kinds, error = [float("nan")] * responses, dict.fromkeys(FAILURE_KINDS, 0), None
        try:
            self.start()
            reply = self._exchange(request, self._deadline_seconds)
        except RewardError as load_error:
            kinds["exception"], error = responses, str(load_error)
        except TimeoutError:
            self._kill()
            kinds["timeout"] = responses
            error = (
                f"{self.reward.function} did not return within {self._deadline_seconds:g} s and was killed"
            )
        except (EOFError, OSError):
            kinds["worker_died"] = responses
            error = (
                f"the worker of {self.reward.function} ended with {self._kill(GRACE_SECONDS)} during the call"
            )
        else:
            if "error" in reply:
                kinds["exception"], error = responses, reply["error"]
            elif "length" in reply:
                kinds["length"] = responses
                error = f"{self.reward.function} returned {reply['length']} values, expected {responses}"
            else:
                values = [float("nan") if value is None else float(value) for value in reply["values"]]
                kinds["none"] = sum(value is None for value in reply["values"])
                kinds["nonfinite"] = sum(value != value for value in values) - kinds["none"]
                if count := kinds["nonfinite"]:
                    error = f"{self.reward.function} returned {count} values that are no finite number"
        return WorkerScores(values, kinds, error, time.monotonic() - begin)

    def interrupt(self) -> None:
        """Kill the process and start none again; a call in another thread then ends."""
        self._closed = True
        self._end_processes()

    def close(self) -> None:
        """Kill the process with its children and free its pipes."""
        self.interrupt()
        self._kill()

    def _exchange(self, frame: bytes, seconds: float) -> dict[str, Any]:
        """Send a frame, return the reply. TimeoutError after `seconds`, EOFError or OSError where it died."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self._end_processes()

        self._number += 1
        number = NUMBER.pack(self._number)
        timer = threading.Timer(seconds, end)
        timer.start()
        try:
            self._requests.send_bytes(number + frame)
            while True:  # an answer of another number is of a process that an earlier call left behind
                reply = self._replies.recv_bytes(LARGEST_REPLY)
                if reply.startswith(number):
                    return _reply(reply[NUMBER.size :])
        except (EOFError, OSError):
            if late.is_set():
                raise TimeoutError from None
            raise
        finally:
            timer.cancel()

    def _end_processes(self) -> None:
        """Kill the process, what it started, and its group."""
        if (process := self._process) is not None:
            kill_below(process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone already
                os.killpg(process.pid, signal.SIGKILL)

    def _kill(self, grace_seconds: float = 0.0) -> str:
        """End the process group, after a grace for its own end, and say how the process ended."""
        if self._process is None:
            return "no process"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self._end_processes()
        code = self._process.wait()
        self._process = None
        self._requests.close()
        self._replies.close()
        by_signal = -code if code < 0 else code - SIGNAL_EXIT_CODE
        return f"signal {by_signal}" if by_signal > 0 else f"exit code {code}"


def _reply(content: bytes) -> dict[str, Any]:
    """A worker's answer. OSError where it is none: the function may have written into the pipe."""
    try:
        reply = json.loads(content)
        (kind,) = reply
        if kind == "values":
            fit = all(value is None or type(value) in (int, float) for value in reply[kind])
        else:
            fit = isinstance(reply[kind], {"ready": bool, "length": int, "error": str}[kind])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise OSError("malformed reply") from error
    if not fit:
        raise OSError("malformed reply")
    return reply


WHOLE = ("exception", "timeout", "length", "worker_died")
"""Kinds of failure that leave a whole call without a score."""
FAILURE_KINDS = (*WHOLE, "nonfinite", "none")


class RewardError(RuntimeError):
    """A reward that cannot be loaded, or that left too many responses without a score."""


@dataclass(frozen=True)
class RewardBatch:
    """The scores of R responses in K dimensions.

    names: the K rewards.
    values_RK: (R, K) float64, NaN where a response could not be scored.
    failures: for each reward the number of unscorable responses by kind, every kind of FAILURE_KINDS present;
        their sum is the number of NaN in the reward's column. `none` counts a function's own None.
    last_errors: for each reward that failed in this batch its error, with the end of the traceback.
    seconds: how long each reward took, a restart of its worker included.
    restarts: for each reward how often its worker was started again since the pool was made.
    """

    names: tuple[str, ...]
    values_RK: np.ndarray
    failures: Mapping[str, Mapping[str, int]]
    last_errors: Mapping[str, str]
    seconds: Mapping[str, float]
    restarts: Mapping[str, int]

    def check_share(self, max_unscorable_share: float) -> None:
        """Raise RewardError where a dimension left more than this share of the batch without a score."""
        responses = len(self.values_RK)
        for name in self.names:
            error = self.last_errors.get(name)
            check_share(name, self.failures[name], responses, max_unscorable_share, last_error=error)


def check_share(
    name: str,
    failures: Mapping[str, int],
    responses: int,
    max_unscorable_share: float,
    last_error: str | None = None,
) -> None:
    """Raise RewardError where reward `name` left more than this share of `responses` without a score.

    `failures` counts unscorable responses by kind, None included. Sum the counts over ranks first where there
    are several, so that all ranks stop together.
    """
    unscorable = sum(failures.values())
    if unscorable <= max_unscorable_share * responses:
        return
    kinds = ", ".join(f"{kind} {count}" for kind, count in failures.items() if count)
    raise RewardError(
        f"reward {name!r} left {unscorable} of {responses} responses without a score (share "
        f"{unscorable / responses:.3f}, limit {max_unscorable_share:g}): {kinds}. "
        f"Last error: {last_error or 'none'}"
    )


class RewardPool:
    """K rewards, each in its own worker, called at once. A context manager: leaving it kills the workers."""

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        *,
        deadline_seconds: float = 60.0,
        startup_seconds: float = STARTUP_SECONDS,
        log_path: Path | None = None,
        memory_bytes: int = 0,
    ) -> None:
        """Start nothing yet.

        Args:
            rewards: the K dimensions, with different names.
            deadline_seconds: longest time of one call of one reward.
            startup_seconds: longest time to start a worker and import its function.
            log_path: where what the functions print goes, up to LOG_BYTES and from the beginning then; None:
                the standard error of this process.
            memory_bytes: most address space of each worker; 0 is no limit.
        Raises:
            ValueError: no reward, a repeated name, a time that is not positive, or a malformed import path.
        """
        names = tuple(reward.name for reward in rewards)
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"RewardPool: rewards are named {list(names)}, expected one or more different names"
            )
        if deadline_seconds <= 0 or startup_seconds <= 0:
            raise ValueError(
                f"RewardPool: deadline_seconds is {deadline_seconds} and startup_seconds {startup_seconds}, "
                "expected more than 0"
            )
        self.names = names
        self._workers = [
            RewardWorker(
                reward,
                deadline_seconds=deadline_seconds,
                startup_seconds=startup_seconds,
                log_path=log_path,
                memory_bytes=memory_bytes,
            )
            for reward in rewards
        ]
        self._threads = ThreadPoolExecutor(len(names), thread_name_prefix="reward")

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def probe(self) -> None:
        """Start all workers and load their functions.

        Raises:
            RewardError: names every reward that cannot be loaded, with the reason.
        """
        starts = [self._threads.submit(worker.start) for worker in self._workers]
        errors = [str(error) for start in starts if isinstance(error := start.exception(), RewardError)]
        if errors:
            raise RewardError("\n".join(errors))
        for start in starts:
            start.result()

    def score(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> RewardBatch:
        """Score R completions with all K rewards.

        Args:
            prompts, completions: R each.
            columns: the data's other columns by name, R values each.
        Raises:
            ValueError: lengths differ, or a column is called `prompts` or `completions`.
        """
        responses = len(completions)
        for name, values in {"prompts": prompts, **columns}.items():
            if len(values) != responses:
                raise ValueError(
                    f"RewardPool.score: {name} has {len(values)} entries, "
                    f"expected {responses} to match completions"
                )
        if reserved := {"prompts", "completions"} & columns.keys():
            raise ValueError(f"RewardPool.score: columns may not hold {sorted(reserved)}")
        request = pickle.dumps((list(prompts), list(completions), dict(columns)), 5)
        scores = list(self._threads.map(lambda worker: worker.score(request, responses), self._workers))
        by_name = dict(zip(self.names, scores, strict=True))
        return RewardBatch(
            names=self.names,
            values_RK=np.array([score.values for score in scores], dtype=np.float64).T.copy(),
            failures={name: score.failures for name, score in by_name.items()},
            last_errors={name: score.error for name, score in by_name.items() if score.error is not None},
            seconds={name: score.seconds for name, score in by_name.items()},
            restarts={worker.reward.name: worker.restarts for worker in self._workers},
        )

    def close(self) -> None:
        """Kill the workers with their children. A closed pool scores nothing more."""
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
