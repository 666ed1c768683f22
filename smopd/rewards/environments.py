"""Environments, which answer a policy's responses in conversations, and the process that runs an environment.

This process stores the states of conversations. If an answer raises an exception or is late, only its own
conversation fails. If the process ends or stops replying, all conversations in it fail.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

from smopd.data.chat import Message
from smopd.engine.imports import import_function
from smopd.names import ENVIRONMENT_THREADS

ENVIRONMENTS = {
    "trl": "smopd.integrations.tools:TrlTools",
    "verifiers": "smopd.integrations.verifiers:Verifiers",
}
"""Built-in names of `rollout.environment`."""
MOST_THREADS = 1 << 12  # ours: leaves room for threads whose answers never return
MOST_BYTES = 1 << 20  # ours: a longer answer is an error
MOST_ERROR_CHARS = 2000  # ours: of a longer traceback, only the end is kept


class Environment(Protocol):
    """The class that `rollout.environment` names, instantiated once per rank with `environment_kwargs`.

    All methods may be `async def`. Conversations are answered in parallel. Methods that are not async run in
    threads, so they need a lock for data that conversations share. If there is a method `end(state)`, it is
    called for each conversation before the next batch and at the end, within one time limit for all.
    """

    def begin(self, row: Message) -> Any:
        """Return the state of a new conversation. `row` contains the data's columns and `prompt`."""
        ...

    def answer(self, state: Any, message: Message) -> Sequence[Message] | None:
        """Return chat messages that follow the policy's `message`, or None to end the conversation.

        If a response is wrong, for example if a call cannot be parsed, answer with a message that says so. An
        exception means that the environment itself failed. The conversation is then not scored.
        """
        ...


class Answer(NamedTuple):
    """An environment's reply. `messages` is None after `begin`, at the conversation's end, or on failure."""

    messages: list[dict[str, Any]] | None = None
    failure: str = ""
    """How the environment failed: one of FAILED in engine/types.py, or empty if it did not fail."""
    error: str = ""


class EnvironmentHost:
    """The environment at `path` and the states of its conversations, in a worker process."""

    def __init__(self, path: str, kwargs: Mapping[str, Any], seconds: float):
        self.environment = import_function(ENVIRONMENTS.get(path, path))(**kwargs)
        self.seconds = seconds
        self.states: dict[int, Any] = {}
        self.threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="environment")
        self.free = asyncio.Semaphore(ENVIRONMENT_THREADS)

    def reply(self, loop: asyncio.AbstractEventLoop, begin: bool, items: Mapping[int, Any]) -> list[Any]:
        """If `begin`, drop all conversations and begin one about each row. Otherwise, answer each message."""
        loop.set_default_executor(self.threads)
        if begin:
            loop.run_until_complete(self._end())
        of_one = self._begin if begin else self._answer
        return loop.run_until_complete(_all([self._limited(of_one, *item) for item in items.items()]))

    async def _limited(self, of_one: Callable[..., Any], number: int, item: Any) -> dict[str, Any]:
        try:
            return {"messages": await of_one(number, item)}
        except TooLong:
            return {"failure": "timeout", "error": f"did not return within {self.seconds:g} s"}
        except Exception as error:
            text = "".join(traceback.format_exception(error)).strip()
            return {"failure": "exception", "error": text[-MOST_ERROR_CHARS:]}

    async def _begin(self, number: int, row: Message) -> None:
        self.states[number] = await self._called(self.environment.begin, deepcopy(row))

    async def _answer(self, number: int, message: Message) -> list[Any] | None:
        found = await self._called(self.environment.answer, self.states[number], message)
        return None if found is None else checked(found)

    async def _end(self) -> None:
        if (end := getattr(self.environment, "end", None)) is not None and self.states:
            calls = [asyncio.ensure_future(self._called(end, state)) for state in self.states.values()]
            for late in (await asyncio.wait(calls, timeout=self.seconds))[1]:
                late.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            if failed := [each for each in ended if isinstance(each, Exception)]:
                traceback.print_exception(failed[0])
        self.states = {}

    async def _called(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await self._in_time(_guarded(function(*arguments)))
        async with self.free:  # the time limit begins with the call
            return await self._in_time(_guarded(asyncio.to_thread(function, *arguments)))

    async def _in_time(self, call: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(call)
        if (await asyncio.wait([task], timeout=self.seconds))[1]:
            task.cancel()
            raise TooLong
        return task.result()


class TooLong(Exception):
    """A call did not return in time."""


async def _all(calls: Sequence[Any]) -> list[Any]:
    return await asyncio.gather(*calls)


async def _guarded(call: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await call
    except (SystemExit, KeyboardInterrupt) as error:  # either would end the event loop
        raise RuntimeError(f"raised {type(error).__name__}") from error


def checked(found: Any) -> list[Any]:
    """Return an environment's messages as JSON values. Raise TypeError or ValueError for anything else."""
    messages: Sequence[Any] = found if isinstance(found, (list, tuple)) and found else [None]
    for each in messages:
        texts = [each.get(name) for name in ("role", "content")] if isinstance(each, Mapping) else [None]
        if not all(isinstance(text, str) for text in texts) or texts[0] == "assistant":
            expected = "None, or a list of chat messages with texts role (not assistant) and content"
            raise TypeError(f"answer returned {str(found)[:80]!r}, expected {expected}")
        "".join(map(str, texts)).encode()  # raises for half of a surrogate pair
    text = json.dumps([dict(each) for each in messages])
    if len(text) > MOST_BYTES:
        raise ValueError(f"answer returned {len(text)} bytes, expected at most {MOST_BYTES}")
    return json.loads(text)
