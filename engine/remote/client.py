"""One server's HTTP connections, with a deadline on the clock and a largest answer.

httpx limits each read, not a whole answer: a server that sends a byte now and then would never be late. Here
requests run on one event loop in a thread of its own, where asyncio ends what is late.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
from typing import Any

import httpx

KEPT_SECONDS = 2.0  # of an idle connection; vLLM's servers close theirs after 5
CONNECT_SECONDS = 10.0
TOKEN = "SMOPD_SERVER_TOKEN"
"""The environment variable with the token that servers want; vLLM's is its --api-key."""


def authorization() -> dict[str, str]:
    """The header of a request to a server."""
    token = os.environ.get(TOKEN, "")
    return {"authorization": f"Bearer {token}"} if token else {}


class TooLarge(Exception):
    """An answer has more bytes than its client takes."""


class Client:
    """May be used by several threads at once.

    Args:
        url: `http://host:port`.
        seconds: of one request, from its first byte to the last one of its answer.
        concurrency: connections at a time.
        largest: bytes of an answer.
    """

    def __init__(self, url: str, seconds: float, concurrency: int, largest: int):
        self.url, self.seconds, self.largest = url, seconds, largest
        self._client = httpx.AsyncClient(
            base_url=url,
            limits=httpx.Limits(max_connections=concurrency, keepalive_expiry=KEPT_SECONDS),
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            headers={"accept-encoding": "identity"} | authorization(),
        )

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """The whole answer.

        Args:
            options: of httpx's `request`.
        Raises:
            httpx.ReadTimeout: it is late.
            httpx.TransportError: the connection failed.
            TooLarge: it has more than `largest` bytes.
        """
        answer = asyncio.wait_for(self._answer(method, path, options), self.seconds)
        try:
            return asyncio.run_coroutine_threadsafe(answer, _loop()).result()
        except asyncio.TimeoutError as error:
            raise httpx.ReadTimeout(f"no answer in {self.seconds:g} s") from error

    async def _answer(self, method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        async with self._client.stream(method, path, **options) as response:
            content = bytearray()
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > self.largest:
                    raise TooLarge(f"an answer of more than {self.largest} bytes")
        headers = {"content-type": response.headers.get("content-type", "")}
        return httpx.Response(
            response.status_code, headers=headers, content=bytes(content), request=response.request
        )


_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:  # connections belong to the loop that made them: there may be one alone
        return _started()


@functools.cache
def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="http", daemon=True).start()
    return loop
