"""Requests spread over servers that answer alike: retried with back-off, asked elsewhere when a server dies.

Every request must be idempotent. A server that stays away is taken out and named in the log; what it was
asked goes to the others. It comes back with `readmit`.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import monotonic, sleep
from typing import Any, TypeVar

import httpx
from safetensors import SafetensorError

from smopd.engine.errors import NoServer
from smopd.engine.remote.client import Client, TooLarge, authorization

T = TypeVar("T")
A = TypeVar("A")
BUSY = (408, 425, 429, 500, 502, 503, 504)
LARGEST_ANSWER = 1 << 30  # ours, in bytes: 16,384 tokens of kappa 4,096 are half of it
NOT_AN_ANSWER = (ValueError, LookupError, TypeError, AttributeError, SafetensorError)
"""What reading an answer of another form raises."""

log = logging.getLogger(__name__)


class Refused(ValueError):
    """A server answered that the request itself is wrong."""


class ServerUnavailable(Exception):
    """A server is of no use now: it did not answer within its patience, or `ask` says so of its answer."""


@dataclass(frozen=True)
class RetryPolicy:
    """How long a server is waited for."""

    deadline_seconds: float = 600.0
    """Of one request, to the last byte of its answer; a server that lets it pass is taken out."""
    retries: int = 5
    """Further attempts of one request at one server before the server is taken out."""
    backoff_seconds: float = 0.5
    """Before the first retry; doubled for each one after it, up to half a minute."""
    concurrency: int = 64
    """Requests in flight at one server."""


def _read(read: Callable[[httpx.Response, T], A], item: T, answer: httpx.Response) -> A:
    return read(answer, item)


def _as_it_is(answer: httpx.Response) -> Any:
    return answer


class Servers:
    """Servers by their URLs, each with a pool of connections.

    An answer that is late, too large or of another form is its server's fault: the server is taken out.

    Args:
        urls: `http://host:port`, at least one, all different.
    Raises:
        ValueError: none is given, or one twice.
    """

    def __init__(self, urls: Sequence[str], patience: RetryPolicy | None = None):
        self.urls = [url.rstrip("/") for url in urls]
        if not self.urls or len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls: got {list(urls)}, expected one or more different ones")
        self.patience = patience or RetryPolicy()
        self.out: dict[str, str] = {}
        """Servers that are taken out, and why."""
        self.bad_answers = 0
        """Of another form than what was asked for, from all servers so far."""
        self._rest: dict[str, float] = {}  # seconds that one which hung is left alone, and until when
        self._until: dict[str, float] = {}
        seconds, concurrency = self.patience.deadline_seconds, self.patience.concurrency
        self._clients = {url: Client(url, seconds, concurrency, LARGEST_ANSWER) for url in self.urls}

    @property
    def alive(self) -> list[str]:
        return [url for url in self.urls if url not in self.out]

    def map(
        self, ask: Callable[..., httpx.Response], items: Sequence[T], read: Callable[[httpx.Response, T], A]
    ) -> list[A]:
        """What `read` makes of one answer an item, in order, from whichever server had room.

        Args:
            ask: (client, item=) sends one item's request; may be called again for it, at another server too.
            read: (answer, item) takes the answer; where it raises ServerUnavailable or what an answer of
                another form raises, the server that gave it is taken out.
        Raises:
            NoServer: all servers are out; names each with its last error.
            Refused: every server says that a request is wrong, or is out for another reason.
        """
        answers: dict[int, A] = {}
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(len(items)):
            waiting.put(i)
        refused: list[Refused] = []
        failed: list[BaseException] = []
        changed = threading.Condition()

        def over(url: str) -> bool:
            return len(answers) == len(items) or bool(failed) or url in self.out

        def work(url: str) -> None:
            while True:
                with changed:
                    while waiting.empty() and not over(url):
                        changed.wait()
                    if over(url):
                        return
                    i = waiting.get()
                try:
                    item = items[i]
                    answer = self.patiently(url, partial(ask, item=item), read=partial(_read, read, item))
                except Exception as error:
                    with changed:
                        waiting.put(i)
                        if isinstance(error, Refused):
                            refused.append(error)
                        if isinstance(error, (Refused, ServerUnavailable)):
                            self.take_out(url, str(error))
                        else:
                            failed.append(error)
                        changed.notify_all()
                    return
                with changed:
                    answers[i] = answer
                    if len(answers) == len(items):
                        changed.notify_all()

        workers = [url for url in self.alive for _ in range(min(self.patience.concurrency, len(items)))]
        if workers:
            with ThreadPoolExecutor(len(workers), thread_name_prefix="servers") as pool:
                try:
                    list(pool.map(work, workers))
                except BaseException as error:  # of a signal, in this thread
                    with changed:
                        failed.append(error)
                        changed.notify_all()
                    raise
        if failed:
            raise failed[0]
        if len(answers) < len(items):
            raise refused[0] if refused else self.none_left()
        return [answers[i] for i in range(len(items))]

    def each(
        self,
        ask: Callable[[Client], httpx.Response],
        allowed: Sequence[int] = (),
        read: Callable[[httpx.Response], A] = _as_it_is,
    ) -> dict[str, A]:
        """What `read` makes of the answers of all servers that are not out, asked at once.

        One that stays away is taken out.

        Args:
            ask, read: as in `map`.
            allowed: statuses that are answers too.
        Raises:
            NoServer: none answered.
            Refused: a server says that the request is wrong.
        """

        answers: dict[str, A] = {}

        def of(url: str) -> None:
            try:
                answers[url] = self.patiently(url, ask, allowed, read)
            except ServerUnavailable as error:
                self.take_out(url, str(error))

        asked = self.alive
        with ThreadPoolExecutor(max(1, len(asked)), thread_name_prefix="servers") as pool:
            list(pool.map(of, asked))
        if not answers:
            raise self.none_left()
        return {url: answers[url] for url in asked if url in answers}

    def readmit(self, path: str = "/health") -> list[str]:
        """Servers that were out and answer again; asked once, without patience.

        One that let a deadline pass is left alone for as long, and each further time for twice as long.
        """
        back = []  # each is asked on a new connection: the kept ones may be dead
        for url in list(self.out):
            if monotonic() < self._until.get(url, 0.0):
                continue
            try:
                if httpx.get(url + path, timeout=5.0, headers=authorization()).is_success:
                    back.append(url)
            except httpx.HTTPError:
                continue
        for url in back:
            log.warning("%s answers again and is used again", url)
            del self.out[url]
        return back

    def take_out(self, url: str, why: str) -> None:
        if url not in self.out:
            self.out[url] = why
            log.warning("%s is taken out: %s; %d servers are left", url, why, len(self.alive))

    def none_left(self) -> NoServer:
        """Each server with its last error."""
        return NoServer("no server is left: " + "; ".join(f"{url}: {why}" for url, why in self.out.items()))

    def patiently(
        self,
        url: str,
        ask: Callable[[Client], httpx.Response],
        allowed: Sequence[int] = (),
        read: Callable[[httpx.Response], A] = _as_it_is,
    ) -> A:
        """What `read` makes of one server's answer.

        Raises:
            ServerUnavailable: it did not come within its patience, or is no answer to what was asked.
            Refused: the server says that the request is wrong.
        """
        why = ""
        for attempt in range(self.patience.retries + 1):
            if attempt:
                pause = min(30.0, self.patience.backoff_seconds * 2 ** (attempt - 1))
                sleep(pause * random.uniform(0.5, 1.0))
            if url in self.out:
                break
            try:
                answer = ask(self._clients[url])
            except httpx.ReadTimeout as error:
                self._hung(url)
                raise ServerUnavailable(f"no answer in {self.patience.deadline_seconds:g} s") from error
            except httpx.TransportError as error:
                why = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            except TooLarge as error:
                raise self._bad(error) from error
            if answer.is_success or answer.status_code in allowed:
                try:
                    return read(answer)
                except NOT_AN_ANSWER as error:
                    raise self._bad(error) from error
            why = f"status {answer.status_code}: {answer.text[:200]}"
            if answer.status_code not in BUSY:
                raise Refused(f"{url}{answer.request.url.path}: {why}")
        raise ServerUnavailable(why or self.out.get(url, ""))

    def _bad(self, error: Exception) -> ServerUnavailable:
        self.bad_answers += 1
        return ServerUnavailable(f"gave a bad answer ({type(error).__name__}: {error})")

    def _hung(self, url: str) -> None:
        if monotonic() >= self._until.get(url, 0.0):  # the first of the requests that it left waiting
            self._rest[url] = 2 * self._rest.get(url, self.patience.deadline_seconds / 2)
            self._until[url] = monotonic() + self._rest[url]
