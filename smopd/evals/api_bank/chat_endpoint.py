"""One question to an OpenAI-compatible chat endpoint, asked again with back-off where that can help."""

from __future__ import annotations

import email.utils
import json
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from smopd.engine.remote.servers import BUSY

MAX_PAUSE_SECONDS = 60.0  # ours
CONNECT_SECONDS = 10.0  # ours
# Codes of errors by which endpoints say that a filter of theirs, not the request's form, is the reason.
FILTERED = ("content_filter", "data_inspection_failed", "DataInspectionFailed")


class NoAnswer(RuntimeError):
    """The endpoint gave none; says why the last attempt failed."""


@dataclass(frozen=True)
class ChatAnswer:
    """The first choice's text, and whether the endpoint says itself that the model or a filter refused."""

    text: str
    refused: bool = False


class ChatEndpoint:
    """A client that may be shared by threads; a context manager.

    Args:
        url: up to and with /v1.
        key: sent as bearer.
        timeout_seconds: of one attempt.
        retries: further attempts.
        backoff_seconds: before the first retry; doubled for each one after it, up to MAX_PAUSE_SECONDS.
    """

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        timeout_seconds: float,
        retries: int,
        backoff_seconds: float,
        connections: int,
    ):
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        self._client = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(timeout_seconds, connect=min(timeout_seconds, CONNECT_SECONDS)),
            limits=httpx.Limits(max_connections=connections),
        )
        self._url = url.rstrip("/") + "/chat/completions"
        self._retries, self._backoff_seconds = retries, backoff_seconds
        self.retried = 0
        self._lock = threading.Lock()

    def __enter__(self) -> ChatEndpoint:
        return self

    def __exit__(self, *error: object) -> None:
        self._client.close()

    def ask(self, request: Mapping[str, Any]) -> ChatAnswer:
        """The answer to a request.

        Raises:
            NoAnswer: it was refused as wrong, or every attempt failed.
        """
        body = json.dumps(request).encode()
        why, pause = "", 0.0
        for attempt in range(self._retries + 1):
            if attempt:
                with self._lock:
                    self.retried += 1
                backoff = self._backoff_seconds * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
                time.sleep(min(MAX_PAUSE_SECONDS, max(backoff, pause)))
            pause = 0.0
            try:
                reply = self._client.post(self._url, content=body)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__}: {error}".rstrip(": ")
                continue
            if reply.is_success:
                try:
                    return read_completion(reply.text)
                except ValueError as error:
                    why = f"no chat completion: {error}"
                    continue
            why = f"status {reply.status_code}: {reply.text[:200]}"
            if reply.status_code in BUSY or reply.status_code >= 500:
                pause = retry_after(reply.headers.get("retry-after"))
            elif any(f'"{code}"' in reply.text for code in FILTERED):
                return ChatAnswer(reply.text[:200], refused=True)
            else:
                break
        raise NoAnswer(why)


def is_endpoint(url: str) -> bool:
    """Whether requests can be sent to it: http or https, and a host."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def read_completion(body: str) -> ChatAnswer:
    """The answer in a chat completion; ValueError for anything else."""
    try:
        choice = json.loads(body)["choices"][0]
        message = choice["message"]
        refusal, content = message.get("refusal"), message.get("content")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}, got {body[:80]!r}") from None
    if isinstance(refusal, str) and refusal:
        return ChatAnswer(refusal, refused=True)
    text = content if isinstance(content, str) else ""
    return ChatAnswer(text, refused=choice.get("finish_reason") == "content_filter")


def retry_after(value: str | None) -> float:
    """The seconds that a Retry-After header asks for, itself seconds or a date; 0 without a readable one."""
    if value is None:
        return 0.0
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
