"""The process in which one reward function or environment runs.

    python -m smopd.rewards.worker READ WRITE PARENT HOST FUNCTION BYTES

READ and WRITE are inherited pipe ends (multiprocessing.connection). BYTES limits the address space; 0: no
limit. A message begins with a number of 8 bytes, which a reply repeats, so that late replies are recognized.
Requests are pickled, because columns may hold dates, bytes or arrays. HOSTS[HOST] is a class. The first
request has its arguments after the path, each later request has the arguments of its method `reply` after the
loop. Replies are JSON, because the parent must not unpickle what a worker wrote: `{"values": [...]}` or
`{"error": ...}`, with `"hopeless": true` if no call can succeed.

The function runs in a child process. This process only waits, and kills everything the function started
when the parent is gone. A thread could not do that: a function may never release the interpreter lock.
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
from copy import deepcopy
from multiprocessing.connection import Connection
from select import poll
from typing import Any

from smopd.engine.errors import UserCodeError
from smopd.engine.process import adopt_orphans, die_with_parent, kill_below
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
    """Scores responses with the reward function at `path`."""

    def __init__(self, path: str, kwargs: Mapping[str, Any], completions: CompletionForm | None):
        self.function = RewardFunction.load(path, kwargs, completions)

    def reply(self, loop: asyncio.AbstractEventLoop, *request: Any) -> list[float | None]:
        """Return the scores for a call's arguments. If `request` is only column names, check them instead."""
        if len(request) == 1:
            self.function.require_columns(*request)
            return []
        prompts, completions, columns, conversations = request
        own = {name: list(map(deepcopy, values)) for name, values in columns.items()}  # a group shares them
        result = self.function(list(map(deepcopy, prompts)), completions, own, conversations)
        if inspect.isawaitable(result):
            result = loop.run_until_complete(asyncio.ensure_future(result, loop=loop))
        return numbers(result)


HOSTS: dict[str, Any] = {"reward": RewardHost, "environment": EnvironmentHost}


def numbers(result: Any) -> list[float | None]:
    """Convert a function's result to floats and None, with NaN for anything but a finite number."""
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
    number = math.nan
    if not isinstance(value, (str, bytes)):
        with suppress(Exception):
            number = float(value)
    return number if math.isfinite(number) else math.nan


def _fork(parent_pid: int, read_fd: int, write_fd: int) -> None:
    """Return in a child process. This process waits for it, and kills everything once the parent is gone."""
    supervisor = os.getpid()
    adopt_orphans()  # so that processes that left the process group can be found
    worker = os.fork()
    if worker == 0:
        die_with_parent(supervisor)
        return
    os.close(write_fd)  # otherwise the parent would not see the child close its end

    def end_with_parent() -> None:
        hangup = poll()
        hangup.register(read_fd, 0)
        # Another child of the parent may hold the pipe open after the parent died.
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
