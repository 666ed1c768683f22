"""The process in which one reward function or environment runs.

    python -m smopd.rewards.worker READ WRITE PARENT HOST FUNCTION BYTES

READ and WRITE are inherited pipe ends (multiprocessing.connection). BYTES limits the address space, unless it
is 0. A request begins with a number of 8 bytes. The reply repeats it, so that late replies are recognized.
Requests are pickled, because columns may contain dates, bytes or arrays. The first request has the arguments
of the class HOSTS[HOST], except the path. Each later request has the arguments of its method `reply`, except
the loop. A reply is JSON, `{"values": [...]}` or `{"error": ...}`, with `"hopeless": true` if no call can
succeed. Replies are not pickled, because the parent must not unpickle data from a worker.

The function runs in a child process. This process only waits. When the parent is gone, it kills everything
that the function started. A thread could not do that if the function never releases the interpreter lock.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import resource
import signal
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from select import poll
from typing import Any

from smopd.engine.errors import UserCodeError
from smopd.engine.process import adopt_orphans, die_with_parent, kill_below
from smopd.names import IDS_COLUMN
from smopd.rewards.environments import EnvironmentHost
from smopd.rewards.forms import FACTORY, BadSignature, CompletionForm, RewardFunction

NUMBER = struct.Struct("<Q")
MAX_ERROR_CHARS = 4000  # ours: of a longer traceback, only the end is kept
SIGNAL_EXIT_CODE = 128  # plus the signal's number, as shells do
PARENT_CHECK_MS = 1000  # ours


def main(argv: list[str]) -> None:
    """Load the function and reply to requests until the parent closes the pipe or dies."""
    read_fd, write_fd, parent_pid, kind, path = int(argv[0]), int(argv[1]), int(argv[2]), argv[3], argv[4]
    if memory_bytes := int(argv[5]):
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for fd in (read_fd, write_fd):
        os.set_inheritable(fd, False)
    _fork(parent_pid, read_fd, write_fd)
    host: RewardHost | EnvironmentHost | None = None
    loop = asyncio.new_event_loop()  # kept between calls, as async clients are bound to it
    requests, replies = Connection(read_fd, writable=False), Connection(write_fd, readable=False)
    while True:
        try:
            message = requests.recv_bytes()
        except EOFError:
            return
        values: Sequence[Any] = []
        try:
            request = pickle.loads(message[NUMBER.size :])
            if host is None:
                host = HOSTS[kind](path, *request)
            else:
                values = host.reply(loop, *request)
            reply = json.dumps({"values": values})
        except BadSignature as error:
            reply = json.dumps({"error": str(error), "hopeless": True})
        except BaseException as error:
            own = error.__cause__ if isinstance(error, UserCodeError) else None
            text = "".join(traceback.format_exception(own or error))
            reply = json.dumps({"error": text.strip()[-MAX_ERROR_CHARS:]})
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # the function may have closed or replaced it
                stream.flush()
        replies.send_bytes(message[: NUMBER.size] + reply.encode())


class RewardHost:
    """The reward function at `path`, in a worker process."""

    def __init__(self, path: str, kwargs: Mapping[str, Any], completions: CompletionForm | None):
        self.function = RewardFunction.load(path, kwargs, completions)

    def reply(self, loop: asyncio.AbstractEventLoop, *request: Any) -> list[float | None]:
        """Return the scores for a call's arguments. If `request` is only column names, check them instead."""
        if len(request) == 1:
            self.function.require_columns(*request)
            return []
        prompts, completions, columns, conversations = request
        own = {name: copies(values) for name, values in columns.items() if name != IDS_COLUMN}
        result = self.function(copies(prompts), completions, {**columns, **own}, conversations)
        if inspect.isawaitable(result):
            result = loop.run_until_complete(asyncio.ensure_future(result, loop=loop))
        return numbers(result)


def copies(values: Sequence[Any]) -> list[Any]:
    """Return a copy of each value, because the responses to one prompt share them."""
    return [value if isinstance(value, str) else pickle.loads(pickle.dumps(value, 5)) for value in values]


HOSTS: dict[str, Any] = {"reward": RewardHost, "environment": EnvironmentHost}


def numbers(result: Any) -> list[float | None]:
    """Convert a function's result to floats and None. A value that is not a number becomes NaN."""
    if hasattr(result, "tolist"):  # arrays and tensors
        result = result.tolist()
    elif inspect.isgenerator(result):
        result = list(result)
    for value in (result, *result) if isinstance(result, (list, tuple)) else (result,):
        if callable(value):
            raise BadSignature(f"returned a {type(value).__name__}, expected scores: {FACTORY}")
    if not isinstance(result, (list, tuple)):
        raise TypeError(f"returned {type(result).__name__}, expected a list of float or None")
    return [None if value is None else _number(value) for value in result]


def _number(value: Any) -> float:
    with suppress(Exception):
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    return math.nan


def _fork(parent_pid: int, read_fd: int, write_fd: int) -> None:
    """Fork, and return in the child. This process waits, and kills everything when its own parent is gone."""
    supervisor = os.getpid()
    adopt_orphans()  # to find processes that have left the process group
    worker = os.fork()
    if worker == 0:
        die_with_parent(supervisor)
        return
    os.close(write_fd)  # otherwise, the parent would not notice when the child closes it

    def end_with_parent() -> None:
        hangup = poll()
        hangup.register(read_fd, 0)
        # Another child of the parent may keep the pipe open after the parent has died.
        while not hangup.poll(PARENT_CHECK_MS) and os.getppid() == parent_pid:
            continue
        kill_below(supervisor)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    ended, status = os.waitpid(-1, 0)
    while ended != worker:  # it was an adopted orphan
        ended, status = os.waitpid(-1, 0)
    code = os.waitstatus_to_exitcode(status)
    kill_below(supervisor)
    os._exit(code if code >= 0 else SIGNAL_EXIT_CODE - code)


if __name__ == "__main__":
    main(sys.argv[1:])
