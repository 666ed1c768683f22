"""Questions to an OpenAI-compatible chat endpoint, by the package openai, which retries with back-off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openai import OpenAI

# Codes of errors by which endpoints say that a filter of theirs, not the request's form, is the reason.
FILTERED = ("content_filter", "data_inspection_failed", "DataInspectionFailed")
INSTALL = "pip install 'smopd[judge]'"


class NoAnswer(RuntimeError):
    """The endpoint gave none; says why the last attempt failed."""


@dataclass(frozen=True)
class ChatAnswer:
    """The first choice's text, and whether the endpoint says itself that the model or a filter refused."""

    text: str
    refused: bool = False


def client(
    url: str, key: str | None, *, timeout_seconds: float, retries: int, sent: Callable[[object], None]
) -> OpenAI:
    """A client that may be shared by threads; a context manager.

    Args:
        url: up to and with /v1.
        key: sent as bearer.
        timeout_seconds: of one attempt.
        retries: further attempts after no connection, a time-out, or status 408, 409, 429 or 5xx.
        sent: called with each HTTP request.
    """
    from openai import DefaultHttpxClient, OpenAI

    http_client = DefaultHttpxClient(event_hooks={"request": [sent]})
    return OpenAI(base_url=url, api_key=key or "none", timeout=timeout_seconds, max_retries=retries,
                  http_client=http_client)  # fmt: skip


def ask(client: OpenAI, request: Mapping[str, Any]) -> ChatAnswer:
    """The answer to a chat completion's request.

    Raises:
        NoAnswer: it was refused as wrong, every attempt failed, or the answer is no chat completion.
    """
    from openai import APIError, APIStatusError

    try:
        choice = client.chat.completions.create(
            model=request["model"], messages=request["messages"], extra_body=dict(request)
        ).choices[0]
        message, text = choice.message, choice.message.content
    except APIStatusError as error:
        said = error.response.text[:200]
        if error.status_code < 500 and any(f'"{code}"' in error.response.text for code in FILTERED):
            return ChatAnswer(said, refused=True)
        raise NoAnswer(f"status {error.status_code}: {said}") from None
    except APIError as error:
        raise NoAnswer(f"{type(error).__name__}: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise NoAnswer(f"no chat completion: {type(error).__name__}: {str(error)[:200]}") from None
    if message.refusal:
        return ChatAnswer(message.refusal, refused=True)
    return ChatAnswer(text if isinstance(text, str) else "", choice.finish_reason == "content_filter")
