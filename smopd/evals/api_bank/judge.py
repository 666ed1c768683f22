"""The judge of API-Bank. It receives the paper's prompt for each response that matches no answer exactly.

Its answers are cached on disk under a hash of the whole request. A request without an answer counts as
failed, and the next run sends it again.
"""

import hashlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import tyro

from smopd.engine.files import write_atomically
from smopd.evals.suite import PAPER, require_at_least

Kind = Literal["yes", "no", "other_format", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GIVE_UP_AFTER = 32  # ours: consecutive failures before the remaining requests are skipped
NO_CALL = "(no tool call)"
INSTALL = "pip install 'smopd[judge]'"
# Error codes by which endpoints report that a content filter refused the request.
FILTERED = ("content_filter", "data_inspection_failed", "DataInspectionFailed")

PROMPT = (PAPER / "judge_prompt.txt").read_text(encoding="utf-8").rstrip("\n")  # verbatim

_PLACEHOLDER = re.compile(r"\{(dialogue|gold|pred)\}")
# Emphasis is allowed here. `judgment` also removes the angle brackets of the prompt's placeholder.
_JUDGMENT = re.compile(r"[ \t*]*Judgment[ \t*]*:(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class JudgeSettings:
    """The endpoint that judges responses that match no answer exactly."""

    url: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """URL of an OpenAI-compatible endpoint, including /v1. Without a URL, nothing is judged."""
    model: str = "qwen3.7-plus"
    """Name of the model at the endpoint. The default is the paper's judge."""
    key_variable: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """Name of the environment variable with the API key."""
    max_tokens: int | None = 1024
    """Maximum answer length in tokens."""
    concurrency: int = 8
    """Maximum number of concurrent requests."""
    timeout_seconds: float = 120.0
    """Timeout of one request."""
    retries: int = 5
    """Number of retries with back-off after a timeout, connection error, or status 408, 409, 429 or 5xx."""

    def check(self) -> None:
        """Raise ValueError for a bad option."""
        if self.url is None:
            if self != JudgeSettings():
                raise ValueError("--judge.url is missing, but other --judge options are set")
            return
        if not re.match(r"https?://[^/]", self.url):
            raise ValueError(f"--judge.url is {self.url!r}, expected http://... or https://...")
        if importlib.util.find_spec("openai") is None:
            raise ValueError(f"--judge.url: needs the package openai, install it with `{INSTALL}`")
        if self.key_variable and not os.environ.get(self.key_variable):
            raise ValueError(f"--judge.key-variable {self.key_variable}: no such environment variable")
        require_at_least(self, "--judge.", max_tokens=1, concurrency=1, retries=0, timeout_seconds=1)


class Verdict(NamedTuple):
    """A verdict. `text` is the judge's answer, or the reason if `kind` is failed."""

    kind: Kind
    text: str


class Judge:
    """Sends each request to the judge once, and stores the answers in the folder `cache`."""

    def __init__(self, settings: JudgeSettings, cache: Path):
        self.settings = settings
        self.cache = cache
        self.asked = self.cached = 0
        self._failures_in_a_row = 0
        self._lock = threading.Lock()

    def request(self, dialogue: str, gold: str, predicted: str) -> dict[str, Any]:
        """Build the request for one response. `gold` and `predicted` have one call per line, as JSON."""
        settings = self.settings
        texts = {"dialogue": dialogue, "gold": gold, "pred": predicted or NO_CALL}
        prompt = _PLACEHOLDER.sub(lambda match: texts[match[1]], PROMPT)
        prompt = prompt.encode(errors="backslashreplace").decode()  # a lone UTF-16 surrogate cannot be sent
        messages = [{"role": "user", "content": prompt}]
        request = {"model": settings.model, "messages": messages, "temperature": 0.0}
        if settings.max_tokens is not None:
            request["max_tokens"] = settings.max_tokens
        return request

    def verdicts(self, requests: Sequence[dict[str, Any]]) -> list[Verdict]:
        """Return one verdict per request, in order. Equal requests are sent once."""
        from openai import OpenAI

        settings = self.settings
        texts = [json.dumps(request, sort_keys=True) for request in requests]
        key = os.environ[settings.key_variable] if settings.key_variable else "none"
        client = OpenAI(
            base_url=settings.url, api_key=key, timeout=settings.timeout_seconds, max_retries=settings.retries
        )
        different = list(dict.fromkeys(texts))
        with client, ThreadPoolExecutor(settings.concurrency, thread_name_prefix="judge") as pool:
            found = pool.map(lambda text: self._verdict(client, text), different)
            verdicts = dict(zip(different, found, strict=True))
        return [verdicts[text] for text in texts]

    def _verdict(self, client: Any, request: str) -> Verdict:
        path = self.cache / f"{hashlib.sha256(request.encode()).hexdigest()}.json"
        text: str | None = None
        with suppress(OSError, ValueError, KeyError, TypeError):  # an unreadable file is ignored
            kept = json.loads(path.read_text(encoding="utf-8"))["answer"]
            text = kept if isinstance(kept, str) else None
        with self._lock:
            if text is not None:
                self.cached += 1
                return Verdict(judgment(text), text)
            if self._failures_in_a_row >= GIVE_UP_AFTER:
                return Verdict("failed", f"skipped after {GIVE_UP_AFTER} consecutive failures")
            self.asked += 1
        text, why_not = ask(client, json.loads(request))
        with self._lock:
            self._failures_in_a_row = self._failures_in_a_row + 1 if text is None else 0
        if text is None:
            return Verdict("failed", why_not)
        kept = {"request": json.loads(request), "answer": text}
        write_atomically(path, (json.dumps(kept, indent=1) + "\n").encode())
        return Verdict(judgment(text), text)


def ask(client: Any, request: dict[str, Any]) -> tuple[str | None, str]:
    """Send a chat completion request. Return (answer or refusal, ""), or (None, reason) if it failed."""
    from openai import APIError, APIStatusError

    try:
        create = client.chat.completions.create
        completion = create(model=request["model"], messages=request["messages"], extra_body=request)
        message = completion.choices[0].message
        text = message.content or message.refusal
    except APIStatusError as error:
        body = error.response.text
        if error.status_code < 500 and any(f'"{code}"' in body for code in FILTERED):
            return body[:200], ""
        return None, f"status {error.status_code}: {body[:200]}"
    except APIError as error:
        return None, f"{type(error).__name__}: {error}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return None, f"no chat completion: {type(error).__name__}: {str(error)[:200]}"
    return text if isinstance(text, str) else "", ""


def judgment(answer: str) -> Literal["yes", "no", "other_format"]:
    """Parse the last line, which must be the only `Judgment:` line. Text up to </think> is ignored."""
    lines = answer.rpartition("</think>")[2].strip().split("\n")
    found = [match for match in map(_JUDGMENT.match, lines) if match is not None]
    if len(found) == 1 and _JUDGMENT.match(lines[-1]):
        match found[0][1].lstrip(" \t*<").rstrip(" \t*>.").lower():
            case "yes" | "no" as verdict:
                return verdict
    return "other_format"
