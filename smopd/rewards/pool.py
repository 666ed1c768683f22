"""Reward functions in worker processes. A function that fails leaves only its own dimension unscored.

Each reward runs in its own process, in parallel with the others. A response that cannot be scored has the
score NaN and is counted by reason. A call that fails as a whole is repeated once. If a call exceeds its
deadline, its worker is killed with all child processes. The next call starts a new worker. This needs POSIX.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from smopd.config.settings import Reward
from smopd.engine.errors import Failure
from smopd.engine.process import kill_below
from smopd.names import STARTUP_SECONDS
from smopd.rewards.worker import NUMBER, SIGNAL_EXIT_CODE

log = logging.getLogger(__name__)
T = TypeVar("T")
GRACE_SECONDS = 1.0  # ours: time for a worker to exit after it has closed the pipe
ATTEMPTS = 2  # ours: a call that fails as a whole is repeated once
LOG_BYTES = 16 << 20  # ours: a larger log of rewards' output is emptied
LOG_SECONDS = 1.0  # ours: interval between checks of the log's size during a call
LARGEST_REPLY = 1 << 30  # ours, bytes
FAILURE_KINDS = ("exception", "timeout", "length", "worker_died", "nonfinite", "none", "environment")
"""Reasons for a missing score: a failed call (the first four), an unusable value, or a failed environment."""


class RewardError(Failure, RuntimeError):
    """A reward cannot be loaded, or has left too many responses unscored."""


class CallFailed(RewardError):
    """A call failed as a whole. `kind` is one of FAILURE_KINDS."""

    def __init__(self, kind: str, error: str):
        super().__init__(error)
        self.kind = kind


class Hopeless(CallFailed):
    """No call of this function can succeed."""


@dataclass(frozen=True)
class RewardBatch:
    """The scores of R responses in K dimensions.

    rewards_RK: float64, with NaN for each response that could not be scored.
    texts: the text of each response, as passed to the rewards.
    failures: number of unscorable responses by reward and kind. Every kind of FAILURE_KINDS is present, and
        the numbers of a call add up to the reward's NaNs. `none` counts values of None.
    last_errors: last error of each reward that failed in this batch, with the end of the traceback.
    restarts: worker restarts of each reward since the pool was created.
    """

    names: tuple[str, ...]
    rewards_RK: Tensor
    texts: Sequence[str]
    failures: Mapping[str, Mapping[str, int]]
    last_errors: Mapping[str, str]
    restarts: Mapping[str, int]


@dataclass
class Worker:
    """A user's function in its own process. Its host is created with the function's path and `arguments`."""

    host = ""
    """A key of worker.HOSTS."""
    name: str
    function: str
    arguments: tuple[Any, ...]
    deadline_seconds: float
    log_path: Path | None = None
    """None means this process's stderr."""
    memory_bytes: int = 0
    starts: int = 0
    _number: int = 0  # of the last request
    _closed: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _requests: Connection = field(init=False)
    _replies: Connection = field(init=False)

    def start(self) -> None:
        """Start the process and load the function, unless it is running. Raise CallFailed if that fails."""
        if self._process is not None:
            # Between calls, the reply pipe is readable only if the worker has closed it.
            if self._process.poll() is None and not self._replies.poll():
                return
            self.end()
        self.starts += 1
        try:
            self._spawn()
        except OSError as error:  # no memory, no process, no file
            raise CallFailed("worker_died", f"cannot start: {error}") from None
        try:
            self._call(pickle.dumps(self.arguments, 5), STARTUP_SECONDS, str)
        except CallFailed as failed:
            self.end()
            raise CallFailed("exception", f"{self.name}: cannot load {self.function!r}: {failed}") from None

    def _spawn(self) -> None:
        child_reads, self._requests = Pipe(duplex=False)
        self._replies, child_writes = Pipe(duplex=False)
        ends = (child_reads.fileno(), child_writes.fileno())
        arguments = (*ends, os.getpid(), self.host, self.function, self.memory_bytes)
        with child_reads, child_writes:
            if self.log_path:
                self.log_path.touch(0o600)  # functions may print secrets
            with self.log_path.open("ab") if self.log_path else contextlib.nullcontext(2) as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "smopd.rewards.worker", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=ends,
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )

    def limit_log(self) -> None:
        """Empty the log if it is larger than LOG_BYTES."""
        with contextlib.suppress(OSError):
            if self.log_path is not None and self.log_path.stat().st_size > LOG_BYTES:
                os.truncate(self.log_path, 0)

    def close(self) -> None:
        """Kill the process for good. A call in another thread then fails."""
        self._closed = True
        self._kill()

    def _call(self, frame: bytes, seconds: float, read: Callable[[Any], T]) -> list[T]:
        """Send `frame`, and return the values of the reply, each converted by `read`.

        Raise CallFailed if the call fails, for example because there is no reply within `seconds`.
        """
        late = threading.Event()

        def expire() -> None:
            late.set()
            self._kill()

        self._number += 1
        number = NUMBER.pack(self._number)
        timer = threading.Timer(seconds, expire)
        timer.start()
        try:
            if self._closed:
                raise EOFError
            self._requests.send_bytes(number + frame)
            while not self._replies.poll(LOG_SECONDS):
                self.limit_log()
            reply = self._replies.recv_bytes(LARGEST_REPLY)
            while not reply.startswith(number):  # from a process that an earlier call left behind
                reply = self._replies.recv_bytes(LARGEST_REPLY)
            return _values(reply[NUMBER.size :], read)
        except (EOFError, OSError):
            how = self.end(GRACE_SECONDS)
            if late.is_set():
                raise CallFailed("timeout", f"did not return within {seconds:g} s and was killed") from None
            raise CallFailed("worker_died", f"the worker ended with {how} during the call") from None
        finally:
            timer.cancel()

    def _kill(self) -> None:
        if (process := self._process) is not None:
            kill_below(process.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone already
                os.killpg(process.pid, signal.SIGKILL)

    def end(self, grace_seconds: float = 0.0) -> str:
        """Kill the process after a grace period, close its pipes, and return how it ended."""
        if self._process is None:
            return "no process"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        self._kill()
        code = self._process.wait()
        self._process = None
        self._requests.close()
        self._replies.close()
        by_signal = -code if code < 0 else code - SIGNAL_EXIT_CODE
        return f"signal {by_signal}" if by_signal > 0 else f"exit code {code}"


class RewardWorker(Worker):
    """The worker of one reward."""

    host = "reward"

    def require_columns(self, columns: Sequence[str]) -> None:
        """Raise CallFailed if the function has a required argument that is not in `columns`."""
        self.start()
        try:
            self._call(pickle.dumps((list(columns),)), self.deadline_seconds, str)
        except CallFailed as failed:
            raise CallFailed(failed.kind, f"{self.name}: {self.function} {failed}") from None

    def score(self, request: bytes, responses: int) -> tuple[list[float], dict[str, int], str | None]:
        """Score a pickled request, with one retry. Return scores, failures by kind, and the last error.

        Raise RewardError only if the function can never score.
        """
        values: list[float | None] = []
        kinds, error = dict.fromkeys(FAILURE_KINDS, 0), None
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self.start()
                values = self._call(request, self.deadline_seconds, lambda x: None if x is None else float(x))
                if len(values) != responses:
                    raise CallFailed("length", f"returned {len(values)} values, expected {responses}")
                error = None
                break
            except Hopeless as failed:
                raise RewardError(f"{self.name}: {self.function} {failed}") from None
            except CallFailed as failed:
                error = f"{self.function}: {failed}"
                if attempt == ATTEMPTS or self._closed:
                    kinds[failed.kind], values = responses, [math.nan] * responses
                    break
                log.warning("%s is called again: %s", self.name, error)
        if error is None:
            kinds["none"] = values.count(None)
            kinds["nonfinite"] = sum(value is not None and not math.isfinite(value) for value in values)
            if kinds["nonfinite"]:
                error = f"{self.function}: {kinds['nonfinite']} values are not finite numbers"
        self.limit_log()
        scores = [value if value is not None and math.isfinite(value) else math.nan for value in values]
        return scores, kinds, error


def _values(content: bytes, read: Callable[[Any], T]) -> list[T]:
    """Return a reply's values. Raise CallFailed if the function raised, OSError if the reply is malformed."""
    try:
        reply = json.loads(content)
        if isinstance(error := reply.get("error"), str):
            raise (Hopeless if reply.get("hopeless") else CallFailed)("exception", error)
        return [read(value) for value in reply["values"]]
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        raise OSError("malformed reply") from error


class RewardPool(contextlib.AbstractContextManager["RewardPool"]):
    """Context manager that runs K rewards in parallel, each in its own worker, and kills the workers on exit.

    Args:
        rewards: the K dimensions, with different names.
        deadline_seconds: time limit of one call of one reward.
        log_path: file for the functions' output, emptied above LOG_BYTES, or None for this process's stderr.
        memory_bytes: limit on the address space of each worker, or 0 for no limit.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        *,
        deadline_seconds: float = 60.0,
        log_path: Path | None = None,
        memory_bytes: int = 0,
    ) -> None:
        self.names = tuple(reward.name for reward in rewards)
        self._workers = []
        for reward in rewards:
            name, arguments = f"reward {reward.name!r}", (reward.kwargs, reward.completions)
            limits = (deadline_seconds, log_path, memory_bytes)
            self._workers.append(RewardWorker(name, reward.function, arguments, *limits))
        self._columns: tuple[str, ...] = ()
        self._threads = ThreadPoolExecutor(len(rewards), thread_name_prefix="reward")

    def probe(self) -> None:
        """Start all workers and load their functions. Raise RewardError with each that cannot be loaded."""
        self._each(RewardWorker.start)

    def require_columns(self, columns: Sequence[str]) -> None:
        """Raise RewardError if a required argument of a function is not in `columns`, the data's columns.

        In later calls, if no row of a batch has a column, a list of None is passed for it.
        """
        self._columns = tuple(columns)
        self._each(lambda worker: worker.require_columns(columns))

    def _each(self, action: Callable[[RewardWorker], None]) -> None:
        starts = [self._threads.submit(action, worker) for worker in self._workers]
        errors = [str(error) for start in starts if isinstance(error := start.exception(), RewardError)]
        if errors:
            raise RewardError("\n".join(errors))
        for start in starts:
            start.result()

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        conversations: Sequence[Any] | None = None,
    ) -> RewardBatch:
        """Score R completions with all K rewards. `columns` has R values per column of the data.

        conversations: the messages of each completion that is a conversation, and None for any other.
        """
        responses = len(completions)
        columns = {**dict.fromkeys(self._columns, [None] * responses), **columns}
        try:
            request = pickle.dumps((list(prompts), list(completions), columns, conversations), 5)
        except Exception as error:  # a map may make values that cannot be pickled
            raise RewardError(f"the columns of the data cannot be sent to rewards ({error})") from error
        scored = self._threads.map(lambda worker: worker.score(request, responses), self._workers)
        values, failures, errors = zip(*scored, strict=True)
        return RewardBatch(
            names=self.names,
            rewards_RK=torch.tensor(values, dtype=torch.float64).T.contiguous(),
            texts=completions,
            failures=dict(zip(self.names, failures, strict=True)),
            last_errors={name: error for name, error in zip(self.names, errors, strict=True) if error},
            restarts=dict(zip(self.names, (max(0, w.starts - 1) for w in self._workers), strict=True)),
        )

    def __exit__(self, *exception: object) -> None:
        """Kill the workers and their child processes. The pool cannot score any more."""
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.end()
