"""HTTP servers of one model. A busy server is asked again. Requests of a removed server go to others.

A deadline covers the whole answer. httpx itself limits only each read, so a server that drips bytes would
never time out. The size of an answer is limited, too. Every failure raises `ServerUnavailable`.
"""

import asyncio
import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from time import monotonic
from typing import Any, Literal, TypeVar

import httpx

from smopd.engine.errors import NoServer
from smopd.engine.settings import REQUEST_SECONDS

T = TypeVar("T")
A = TypeVar("A")

TOKEN = "SMOPD_SERVER_TOKEN"
"""Environment variable for the servers' bearer token (vLLM's --api-key)."""
CONNECT_SECONDS = 10.0  # ours
KEEP_SECONDS = 2.0  # ours: lifetime of an idle connection; vLLM's servers close idle connections after 5
MAX_ANSWER_BYTES = 1 << 26  # ours: the JSON of 131,072 sampled tokens is about a third of this
MAX_GET_BYTES = 1 << 20  # ours: answers about health, models and teachers are far smaller
MAX_REASON = 300  # ours: maximum characters of a server's error message in the log
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""
HEALTH_SECONDS = 5.0  # ours: deadline of a health check
RETRIES = 5  # ours: retries of a request before a busy server is removed
CONCURRENCY = 64  # ours: requests in flight per server
BACKOFF_SECONDS = 0.5  # ours: longest pause before the first retry. It doubles with each retry
MAX_BACKOFF_SECONDS = 30.0  # ours: longest pause before any retry

log = logging.getLogger(__name__)

Cause = Literal["busy", "late", "refused", "bad answer", "unfit"]


class ServerUnavailable(Exception):
    """A server gave no usable answer.

    Args:
        reason: may quote the server. Unprintable characters are replaced.
        cause: "busy" means that a retry may succeed, "refused" that the server rejected the request itself.
    """

    def __init__(self, reason: str, cause: Cause = "unfit"):
        super().__init__("".join(c if c.isprintable() else "\ufffd" for c in reason[:MAX_REASON]))
        self.cause = cause


@dataclass(frozen=True)
class Request:
    """An idempotent HTTP request: a POST if it has a body, otherwise a GET.

    accept: error statuses that count as answers.
    most_bytes: maximum size of the answer. 0 means MAX_GET_BYTES for a GET, MAX_ANSWER_BYTES for a POST.
    """

    path: str
    json: Any = None
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    accept: tuple[int, ...] = ()
    most_bytes: int = 0


def http_client() -> httpx.AsyncClient:
    token = os.environ.get(TOKEN, "").strip()  # a token read from a file ends with a newline
    return httpx.AsyncClient(
        limits=httpx.Limits(keepalive_expiry=KEEP_SECONDS),
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {}),
    )


async def ask(
    http: httpx.AsyncClient, url: str, request: Request, read: Callable[[httpx.Response], A], seconds: float
) -> A:
    """Return `read(response)` for the server's response. Any failure raises ServerUnavailable.

    Args:
        read: is called in a thread. It may raise any exception if the answer is malformed.
        seconds: deadline for the last byte of the answer.
    """
    try:
        response = await asyncio.wait_for(_exchange(http, url, request), seconds)
        status = response.status_code
        if not response.is_success and status not in request.accept:
            message = response.content[:MAX_REASON].decode("utf-8", "replace")
            cause: Cause = "busy" if status in BUSY else "refused"
            raise ServerUnavailable(f"{request.path}: status {status}: {message}", cause)
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
    body = {"json": request.json, "content": request.content}
    gets = request.json is None and request.content is None
    method, limit = ("GET", MAX_GET_BYTES) if gets else ("POST", MAX_ANSWER_BYTES)
    limit = request.most_bytes or limit
    async with http.stream(method, url + request.path, **body, params=request.params) as response:
        content = bytearray()
        async for piece in response.aiter_raw():  # never decompressed, so that a small answer stays small
            content += piece
            if len(content) > limit:
                raise ServerUnavailable(f"gave a bad answer (more than {limit} bytes)", "bad answer")
    return httpx.Response(response.status_code, content=bytes(content))


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop that all clients share. It runs in a daemon thread."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop


class Servers:
    """Interchangeable servers at `urls` (`http://host:port`).

    A failing server is removed, and its requests go to the other servers. `restore` brings it back.

    Attributes:
        removed: URL -> why this server was removed.
        bad_answers: number of malformed answers so far.
    """

    def __init__(self, urls: Sequence[str]):
        self.urls = [url.rstrip("/") for url in urls]
        if not self.urls or len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls: got {list(urls)}, expected one or more distinct URLs")
        self.removed: dict[str, str] = {}
        self.bad_answers = 0
        self._pause: dict[str, float] = {}  # seconds without health checks after a missed deadline
        self._paused_until: dict[str, float] = {}
        self._http = http_client()
        self._loop = _loop()  # a connection can only be used in the loop that made it

    @property
    def alive(self) -> list[str]:
        return [url for url in self.urls if url not in self.removed]

    def ask(self, url: str, request: Request, read: Callable[[httpx.Response], A]) -> A:
        """Return `read(response)` for one server. On failure, raise ServerUnavailable but keep the server."""
        return self._run(self._ask(url, request, read))[0]

    def each(self, request: Request, read: Callable[[httpx.Response], A]) -> dict[str, A]:
        """Ask every server, remove those that fail, and return results by URL. Raise NoServer if all fail."""

        async def one(url: str) -> None:
            try:
                answers[url] = await self._ask(url, request, read)
            except ServerUnavailable as error:
                self.remove(url, str(error))

        answers: dict[str, A] = {}
        self._run(*map(one, self.alive))
        if not answers:
            raise self.none_left()
        return answers

    def map(
        self,
        request: Callable[[str, T], Request],
        items: Sequence[T],
        read: Callable[[str, T, httpx.Response], A],
    ) -> list[A]:
        """Distribute one request per item over the servers, and return the results in order.

        Args:
            request: (url, item) -> request. It is called again if the item moves to another server.
            read: (url, item, response) -> result. If `read` raises an exception, the server is removed.
        Raises:
            NoServer: every server has been removed.
        """
        answers: dict[int, A] = {}
        waiting = deque(range(len(items)))

        async def work(url: str) -> None:
            while waiting and url not in self.removed:
                i = waiting.popleft()
                try:
                    made = await asyncio.to_thread(request, url, items[i])
                    answers[i] = await self._ask(url, made, partial(read, url, items[i]))
                except ServerUnavailable as error:
                    self.remove(url, str(error))
                    waiting.append(i)

        async def all_items() -> None:
            while waiting and self.alive:
                each = min(CONCURRENCY, len(waiting))
                workers = [asyncio.create_task(work(url)) for url in self.alive for _ in range(each)]
                try:
                    await asyncio.gather(*workers)
                finally:  # after an error, gather leaves the other workers running
                    for worker in workers:
                        worker.cancel()

        self._run(all_items())
        if len(answers) < len(items):
            raise self.none_left()
        return [answers[i] for i in range(len(items))]

    async def _ask(self, url: str, request: Request, read: Callable[[httpx.Response], A]) -> A:
        for attempt in range(RETRIES + 1):
            if attempt:
                pause = min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (attempt - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            if url in self.removed:
                break
            try:
                return await ask(self._http, url, request, read, REQUEST_SECONDS)
            except ServerUnavailable as error:
                self.bad_answers += error.cause == "bad answer"
                if error.cause == "late":
                    self._pause_checks(url, REQUEST_SECONDS)
                if error.cause != "busy" or attempt == RETRIES:
                    raise
        raise ServerUnavailable(self.removed[url])

    def restore(self) -> list[str]:
        """Restore the removed servers that answer /health, and return their URLs.

        After a server misses a deadline, it is not checked for as long as that deadline was. Each further
        miss doubles this pause.
        """

        async def check(url: str) -> None:
            try:
                async with http_client() as fresh:  # old connections to a failed server may be dead
                    await ask(fresh, url, Request("/health"), bool, HEALTH_SECONDS)
            except ServerUnavailable as error:
                if error.cause == "late":
                    self._pause_checks(url, HEALTH_SECONDS)
                log.info("%s is not restored: %s", url, error)
            else:
                log.warning("%s is restored", url)
                del self.removed[url]

        due = [url for url in self.removed if monotonic() >= self._paused_until.get(url, 0.0)]
        self._run(*map(check, due))
        return [url for url in due if url not in self.removed]

    def remove(self, url: str, reason: str) -> None:
        if url not in self.removed:
            self.removed[url] = reason
            log.warning("%s is removed: %s; %d servers are left", url, reason, len(self.alive))

    def none_left(self) -> NoServer:
        """Return an error that names each server with its last failure."""
        reasons = "; ".join(f"{url}: {reason}" for url, reason in self.removed.items())
        return NoServer(f"no server is left: {reasons}")

    def _run(self, *coroutines: Coroutine[Any, Any, A]) -> list[A]:
        """Run coroutines in the clients' loop. An interrupt of the calling thread cancels them."""

        async def gathered() -> list[A]:
            return await asyncio.gather(*coroutines)

        future = asyncio.run_coroutine_threadsafe(gathered(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _pause_checks(self, url: str, seconds: float) -> None:
        if monotonic() >= self._paused_until.get(url, 0.0):  # all requests in flight count as one miss
            self._pause[url] = 2 * self._pause.get(url, seconds / 2)
            self._paused_until[url] = monotonic() + self._pause[url]
