"""Servers that answer alike: requests are retried with back-off, and sent elsewhere when a server fails.

A request has a deadline for its whole answer, and the answer a largest size: httpx limits each read alone, so
a server that sends a byte now and then would never be late. Whatever goes wrong is a `ServerUnavailable`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from time import monotonic
from typing import Any, Literal, TypeVar

import httpx

from smopd.engine.errors import NoServer
from smopd.engine.settings import REQUEST_SECONDS

T = TypeVar("T")
A = TypeVar("A")

TOKEN = "SMOPD_SERVER_TOKEN"
"""The environment variable with the token that servers want; vLLM's is its --api-key."""
CONNECT_SECONDS = 10.0  # ours
KEEP_SECONDS = 2.0  # ours, of an idle connection; vLLM's servers close theirs after 5
MAX_ANSWER_BYTES = 1 << 30  # ours: 16,384 tokens of kappa 4,096 are half of it
MAX_STATUS_BYTES = 1 << 20  # ours: of an answer to a GET
MAX_REASON = 300  # ours: characters of what a server says that reach a log or a terminal
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""
HEALTH_SECONDS = 5.0  # ours: deadline of a health check
MAX_BACKOFF_SECONDS = 30.0  # ours

log = logging.getLogger(__name__)

Cause = Literal["busy", "late", "refused", "bad answer", "unfit"]


class ServerUnavailable(Exception):
    """A server gave no usable answer.

    Args:
        reason: unprintable characters in it are replaced, as a server may have written it.
        cause: "busy" may succeed when sent again; "refused" is a status that says that the request is wrong.
    """

    def __init__(self, reason: str, cause: Cause = "unfit"):
        super().__init__("".join(c if c.isprintable() else "\ufffd" for c in reason[:MAX_REASON]))
        self.cause = cause


@dataclass(frozen=True)
class Request:
    """A GET, or a POST where there is a body. Servers must be able to answer it twice.

    accept: statuses that are answers, besides those of success.
    """

    path: str
    json: Any = None
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    accept: tuple[int, ...] = ()

    @property
    def has_body(self) -> bool:
        return self.json is not None or self.content is not None


def http_client() -> httpx.AsyncClient:
    token = os.environ.get(TOKEN, "")
    return httpx.AsyncClient(
        limits=httpx.Limits(keepalive_expiry=KEEP_SECONDS),
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {}),
    )


async def ask(
    http: httpx.AsyncClient, url: str, request: Request, read: Callable[[httpx.Response], A], seconds: float
) -> A:
    """What `read` makes of the answer of the server at `url`.

    Args:
        read: runs in a thread; may raise anything about an answer of another form.
        seconds: from now to the answer's last byte.
    Raises:
        ServerUnavailable: whatever went wrong.
    """
    try:
        response = await asyncio.wait_for(_exchange(http, url, request), seconds)
        status = response.status_code
        if not response.is_success and status not in request.accept:
            said = response.content[:MAX_REASON].decode("utf-8", "replace")
            cause: Cause = "busy" if status in BUSY else "refused"
            raise ServerUnavailable(f"{request.path}: status {status}: {said}", cause)
        return await asyncio.to_thread(read, response)
    except ServerUnavailable:
        raise
    except asyncio.TimeoutError as error:
        raise ServerUnavailable(f"no answer in {seconds:g} s", "late") from error
    except Exception as error:
        name = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, httpx.TransportError):
            raise ServerUnavailable(name, "busy") from error
        raise ServerUnavailable(f"gave a bad answer ({name})", "bad answer") from error


async def _exchange(http: httpx.AsyncClient, url: str, request: Request) -> httpx.Response:
    body = {"json": request.json, "content": request.content, "params": request.params}
    method, limit = ("POST", MAX_ANSWER_BYTES) if request.has_body else ("GET", MAX_STATUS_BYTES)
    async with http.stream(method, url + request.path, **body) as response:
        content = bytearray()
        async for piece in response.aiter_raw():  # nothing is unpacked: a small answer stays small
            content += piece
            if len(content) > limit:
                raise ServerUnavailable(f"gave a bad answer (more than {limit} bytes)", "bad answer")
    return httpx.Response(response.status_code, content=bytes(content))


@dataclass(frozen=True)
class RetryPolicy:
    """How long a server is waited for.

    Attributes:
        deadline_seconds: of one request, to the last byte of its answer; a server that misses it is removed.
        retries: further attempts of one request at one server before the server is removed.
        backoff_seconds: before the first retry; doubled for each later one, up to MAX_BACKOFF_SECONDS.
        concurrency: requests in flight at one server.
    """

    deadline_seconds: float = REQUEST_SECONDS
    retries: int = 5
    backoff_seconds: float = 0.5
    concurrency: int = 64


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Runs in a thread of its own to the end of the process."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


class Servers:
    """Servers by their URLs.

    One that stays unavailable is removed and named in the log; its requests go to the others. `restore`
    brings it back once its health check succeeds.

    Args:
        urls: `http://host:port`, at least one, all different.
    Attributes:
        removed: servers that are not asked now, and why.
        bad_answers: unusable answers so far, of all servers.
    Raises:
        ValueError: none is given, or one twice.
    """

    def __init__(self, urls: Sequence[str], retry: RetryPolicy | None = None):
        self.urls = [url.rstrip("/") for url in urls]
        if not self.urls or len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls: got {list(urls)}, expected one or more different ones")
        self.retry = retry or RetryPolicy()
        self.removed: dict[str, str] = {}
        self.bad_answers = 0
        self._rest: dict[str, float] = {}  # seconds for which a late server is left alone, and until when
        self._until: dict[str, float] = {}
        self._http = http_client()
        self._loop = _loop()  # connections belong to the loop that made them

    @property
    def alive(self) -> list[str]:
        return [url for url in self.urls if url not in self.removed]

    def ask(self, url: str, request: Request, read: Callable[[httpx.Response], A]) -> A:
        """What `read` makes of one server's answer; the server is not removed.

        Raises:
            ServerUnavailable: every attempt failed.
        """
        return self._run(self._ask(url, request, read))

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
        self._run_each(one, self.alive)
        if not answers:
            raise self.none_left()
        return answers

    def map(
        self,
        request: Callable[[str, T], Request],
        items: Sequence[T],
        read: Callable[[str, httpx.Response, T], A],
    ) -> list[A]:
        """What `read` makes of one answer an item, in order, from whichever server had room.

        Args:
            request: (url, item) -> the request; called again where the item goes to another server.
            read: (url, answer, item) -> a result. Where it raises, the server is removed.
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

                def read_one(answer: httpx.Response, item: T = items[i]) -> A:
                    return read(url, answer, item)

                try:
                    made = await asyncio.to_thread(request, url, items[i])
                    answers[i] = await self._ask(url, made, read_one)
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

        self._run(all_items())
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
                return await ask(self._http, url, request, read, policy.deadline_seconds)
            except ServerUnavailable as error:
                self.bad_answers += error.cause == "bad answer"
                if error.cause == "late":
                    self._leave_alone(url, policy.deadline_seconds)
                if error.cause != "busy" or attempt == policy.retries:
                    raise
        raise ServerUnavailable(self.removed[url])

    def restore(self) -> list[str]:
        """The removed servers whose /health answers now, back in use.

        A server that missed a deadline is left alone for as long, and each further time for twice as long.
        """

        async def check(url: str) -> None:
            try:
                async with http_client() as fresh:  # connections to a server that failed may be dead
                    await ask(fresh, url, Request("/health"), bool, HEALTH_SECONDS)
            except ServerUnavailable as error:
                if error.cause == "late":
                    self._leave_alone(url, HEALTH_SECONDS)
                log.info("%s is not restored: %s", url, error)
            else:
                log.warning("%s is restored", url)
                del self.removed[url]

        due = [url for url in self.removed if monotonic() >= self._until.get(url, 0.0)]
        self._run_each(check, due)
        return [url for url in due if url not in self.removed]

    def remove(self, url: str, reason: str) -> None:
        if url not in self.removed:
            self.removed[url] = reason
            log.warning("%s is removed: %s; %d servers are left", url, reason, len(self.alive))

    def none_left(self) -> NoServer:
        """Each server with its last error."""
        return NoServer(
            "no server is left: " + "; ".join(f"{url}: {why}" for url, why in self.removed.items())
        )

    def _run(self, coroutine: Coroutine[Any, Any, A]) -> A:
        """The coroutine's result; what interrupts the waiting thread cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _run_each(self, one: Callable[[str], Coroutine[Any, Any, None]], urls: Sequence[str]) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*map(one, urls))

        self._run(all_at_once())

    def _leave_alone(self, url: str, seconds: float) -> None:
        if monotonic() >= self._until.get(url, 0.0):  # the first of the requests that it left waiting
            self._rest[url] = 2 * self._rest.get(url, seconds / 2)
            self._until[url] = monotonic() + self._rest[url]
