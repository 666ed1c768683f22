"""Requests spread over servers that answer alike: retried with back-off, sent elsewhere when a server fails.

A server that stays unavailable is removed and named in the log; its requests go to the others.
`Servers.restore` brings it back once its health check succeeds.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Any, TypeVar

import httpx

from smopd.engine.errors import NoServer
from smopd.engine.remote.client import Client, Request, ServerUnavailable, run
from smopd.engine.settings import REQUEST_SECONDS

T = TypeVar("T")
A = TypeVar("A")
HEALTH_SECONDS = 5.0  # ours: deadline of a health check
MAX_BACKOFF_SECONDS = 30.0  # ours

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RetryPolicy:
    """How long a server is waited for."""

    deadline_seconds: float = REQUEST_SECONDS
    """Of one request, to the last byte of its answer; a server that misses it is removed."""
    retries: int = 5
    """Further attempts of one request at one server before the server is removed."""
    backoff_seconds: float = 0.5
    """Before the first retry; doubled for each later one, up to MAX_BACKOFF_SECONDS."""
    concurrency: int = 64
    """Requests in flight at one server."""


class Servers:
    """Servers by their URLs.

    Args:
        urls: `http://host:port`, at least one, all different.
    Raises:
        ValueError: none is given, or one twice.
    """

    def __init__(self, urls: Sequence[str], retry: RetryPolicy | None = None):
        self.urls = [url.rstrip("/") for url in urls]
        if not self.urls or len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls: got {list(urls)}, expected one or more different ones")
        self.retry = retry or RetryPolicy()
        self.removed: dict[str, str] = {}
        """Servers that are not asked now, and why."""
        self.bad_answers = 0
        """Unusable answers so far, of all servers."""
        self._rest: dict[str, float] = {}  # seconds for which a late server is left alone, and until when
        self._until: dict[str, float] = {}
        self._client = Client()

    @property
    def alive(self) -> list[str]:
        return [url for url in self.urls if url not in self.removed]

    def ask(self, url: str, request: Request, read: Callable[[httpx.Response], A]) -> A:
        """What `read` makes of one server's answer; the server is not removed.

        Raises:
            ServerUnavailable: every attempt failed.
        """
        return run(self._ask(url, request, read))

    def each(self, request: Request, read: Callable[[httpx.Response], A]) -> dict[str, A]:
        """What `read` makes of the answer of each server, all asked at once; those that fail are removed.

        Raises:
            NoServer: none answered.
        """

        async def one(url: str) -> None:
            try:
                answers[url] = await self._ask(url, request, read)
            except ServerUnavailable as error:
                self.remove(url, str(error))

        answers: dict[str, A] = {}
        run(_all(one, self.alive))
        if not answers:
            raise self.none_left()
        return answers

    def map(
        self,
        request: Callable[[str, T], Request],
        items: Sequence[T],
        read: Callable[[httpx.Response, T], A],
    ) -> list[A]:
        """What `read` makes of one answer an item, in order, from whichever server had room.

        Args:
            request: (url, item) -> the request; called again where the item goes to another server.
            read: (answer, item) -> a result. Where it raises, the server that gave the answer is removed.
        Raises:
            NoServer: all servers are removed; names each with its last error.
        """
        answers: dict[int, A] = {}
        waiting = deque(range(len(items)))

        async def work(url: str, changed: asyncio.Condition) -> None:
            while True:
                async with changed:
                    await changed.wait_for(lambda: waiting or finished(url))
                    if finished(url):
                        return
                    i = waiting.popleft()
                try:
                    item = items[i]
                    made = await asyncio.to_thread(request, url, item)
                    answers[i] = await self._ask(url, made, partial(_read, read, item))
                except ServerUnavailable as error:
                    waiting.append(i)
                    self.remove(url, str(error))
                async with changed:
                    changed.notify_all()

        def finished(url: str) -> bool:
            return len(answers) == len(items) or url in self.removed

        async def all_items() -> None:
            changed, each = asyncio.Condition(), min(self.retry.concurrency, len(items))
            workers = [asyncio.create_task(work(url, changed)) for url in self.alive for _ in range(each)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()

        run(all_items())
        if len(answers) < len(items):
            raise self.none_left()
        return [answers[i] for i in range(len(items))]

    async def _ask(self, url: str, request: Request, read: Callable[[httpx.Response], A]) -> A:
        policy = self.retry
        for attempt in range(policy.retries + 1):
            if attempt:
                pause = min(MAX_BACKOFF_SECONDS, policy.backoff_seconds * 2 ** (attempt - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            if url in self.removed:
                break
            try:
                return await self._client.ask(url, request, read, policy.deadline_seconds)
            except ServerUnavailable as error:
                self.bad_answers += error.cause == "bad answer"
                if error.cause == "late":
                    self._leave_alone(url, policy.deadline_seconds)
                if error.cause != "busy" or attempt == policy.retries:
                    raise
        raise ServerUnavailable(self.removed[url])

    def restore(self) -> list[str]:
        """The removed servers whose /health answers now, back in use; each is asked once.

        A server that missed a deadline is left alone for as long, and each further time for twice as long.
        """

        async def healthy(url: str) -> bool:
            fresh = Client()  # the connections to a server that failed may be dead
            try:
                await fresh.ask(url, Request("/health"), bool, HEALTH_SECONDS)
                return True
            except ServerUnavailable as error:
                if error.cause == "late":
                    self._leave_alone(url, HEALTH_SECONDS)
                log.info("%s is not restored: %s", url, error)
                return False
            finally:
                await fresh.close()

        due = [url for url in self.removed if monotonic() >= self._until.get(url, 0.0)]
        back = [url for url, well in zip(due, run(_all(healthy, due)), strict=True) if well]
        for url in back:
            log.warning("%s is restored", url)
            del self.removed[url]
        return back

    def remove(self, url: str, reason: str) -> None:
        if url not in self.removed:
            self.removed[url] = reason
            log.warning("%s is removed: %s; %d servers are left", url, reason, len(self.alive))

    def none_left(self) -> NoServer:
        """Each server with its last error."""
        return NoServer(
            "no server is left: " + "; ".join(f"{url}: {why}" for url, why in self.removed.items())
        )

    def _leave_alone(self, url: str, seconds: float) -> None:
        if monotonic() >= self._until.get(url, 0.0):  # the first of the requests that it left waiting
            self._rest[url] = 2 * self._rest.get(url, seconds / 2)
            self._until[url] = monotonic() + self._rest[url]


async def _all(ask: Callable[[str], Coroutine[Any, Any, A]], urls: Sequence[str]) -> list[A]:
    return await asyncio.gather(*map(ask, urls))


def _read(read: Callable[[httpx.Response, T], A], item: T, answer: httpx.Response) -> A:
    return read(answer, item)
