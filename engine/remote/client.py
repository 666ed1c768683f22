"""The HTTP client for every server that the engine talks to: teachers, rollouts, weights, preference models.

A request has a deadline for its whole answer, and the answer a largest size: httpx limits each read alone, so
a server that sends a byte now and then would never be late. Whatever goes wrong is a `ServerUnavailable`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import httpx

T = TypeVar("T")

TOKEN = "SMOPD_SERVER_TOKEN"
"""The environment variable with the token that servers want; vLLM's is its --api-key."""
CONNECT_SECONDS = 10.0  # ours
KEEP_SECONDS = 2.0  # ours, of an idle connection; vLLM's servers close theirs after 5
MAX_ANSWER_BYTES = 1 << 30  # ours: 16,384 tokens of kappa 4,096 are half of it
MAX_STATUS_BYTES = 1 << 20  # ours: of an answer to a GET
MAX_REASON = 300  # ours: characters of what a server says that reach a log or a terminal
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed."""

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
    """A GET, or a POST where there is a body. Servers must be able to answer it twice."""

    path: str
    json: Any = None
    content: bytes | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    accept: tuple[int, ...] = ()
    """Statuses that are answers, besides those of success."""

    @property
    def method(self) -> str:
        return "GET" if self.json is None and self.content is None else "POST"


class Client:
    """Asynchronous; its coroutines run by `run`."""

    def __init__(self) -> None:
        token = os.environ.get(TOKEN, "")
        self._http = httpx.AsyncClient(
            limits=httpx.Limits(keepalive_expiry=KEEP_SECONDS),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            headers={"accept-encoding": "identity"} | ({"authorization": f"Bearer {token}"} if token else {}),
        )

    async def ask(self, url: str, request: Request, read: Callable[[httpx.Response], T], seconds: float) -> T:
        """What `read` makes of the answer of the server at `url`.

        Args:
            read: runs in a thread; may raise anything about an answer of another form.
            seconds: from now to the answer's last byte.
        Raises:
            ServerUnavailable: whatever went wrong.
        """
        try:
            response = await asyncio.wait_for(self._exchange(url, request), seconds)
        except asyncio.TimeoutError as error:
            raise ServerUnavailable(f"no answer in {seconds:g} s", "late") from error
        except httpx.TransportError as error:
            raise ServerUnavailable(_named(error), "busy") from error
        except ServerUnavailable:
            raise
        except Exception as error:
            raise ServerUnavailable(_named(error), "bad answer") from error
        status = response.status_code
        if not response.is_success and status not in request.accept:
            said = response.content[:MAX_REASON].decode("utf-8", "replace")
            cause: Cause = "busy" if status in BUSY else "refused"
            raise ServerUnavailable(f"{request.path}: status {status}: {said}", cause)
        try:
            return await asyncio.to_thread(read, response)
        except ServerUnavailable:
            raise
        except Exception as error:
            raise ServerUnavailable(f"gave a bad answer ({_named(error)})", "bad answer") from error

    async def close(self) -> None:
        await self._http.aclose()

    async def _exchange(self, url: str, request: Request) -> httpx.Response:
        body = {"json": request.json, "content": request.content, "params": request.params}
        limit = MAX_STATUS_BYTES if request.method == "GET" else MAX_ANSWER_BYTES
        async with self._http.stream(request.method, url + request.path, **body) as response:
            content = bytearray()
            async for piece in response.aiter_raw():  # nothing is unpacked: a small answer stays small
                content += piece
                if len(content) > limit:
                    raise ServerUnavailable(f"gave a bad answer (more than {limit} bytes)", "bad answer")
        return httpx.Response(response.status_code, content=bytes(content))


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; what interrupts the waiting thread cancels it."""
    with _starting:  # connections belong to the loop that made them: there is one
        loop = _started_loop()
    future = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


_starting = threading.Lock()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop
