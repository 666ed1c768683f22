"""The judge of API-Bank: the paper's prompt about each call that failed the exact match, and its verdicts.

Answers are kept on disk under a hash of the whole request, so that no request is sent twice. A request
without an answer counts as failed and is sent again the next time.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import tyro

from smopd.engine.files import write_atomically
from smopd.evals.suite import PAPER, require_at_least

if TYPE_CHECKING:
    from openai import OpenAI

Kind = Literal["yes", "no", "other_format", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
GIVE_UP_AFTER = 32  # ours: failures in a row after which the rest are not asked
NO_CALL = "(no tool call)"
INSTALL = "pip install 'smopd[judge]'"
# Codes of errors by which endpoints say that a filter of theirs, not the request's form, is the reason.
FILTERED = ("content_filter", "data_inspection_failed", "DataInspectionFailed")

PROMPT = (PAPER / "judge_prompt.txt").read_text(encoding="utf-8").rstrip("\n")  # verbatim

_PLACEHOLDER = re.compile(r"\{(dialogue|gold|pred)\}")
# Emphasis, and the brackets of the prompt's own placeholder, are let pass.
_JUDGMENT = re.compile(r"[ \t*]*Judgment[ \t*]*:(.*)", re.IGNORECASE)


@dataclass(frozen=True)
class JudgeSettings:
    """The endpoint that judges what failed the exact match."""

    url: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Of an OpenAI-compatible endpoint, up to and with /v1; without one nothing is judged."""
    model: str = "qwen3.7-plus"
    """The judge's name at the endpoint; the default is the paper's."""
    key_variable: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The environment variable that holds the endpoint's key."""
    turns: int | None = None
    """How many of the dialogue's last turns are shown; all by default."""
    max_tokens: int | None = 1024
    """Longest answer in tokens."""
    extra: str = "{}"
    """A JSON object of further fields of a request."""
    concurrency: int = 8
    """Requests in flight."""
    timeout_seconds: float = 120.0
    """Of one request."""
    retries: int = 5
    """Further attempts after a time-out, no connection, or status 408, 409, 429 or 5xx, with back-off."""

    def check(self) -> None:
        """Raises ValueError for a mistake in the options."""
        if self.url is None:
            if self != JudgeSettings():
                raise ValueError("--judge.url is missing, expected an endpoint for the judge's other options")
            return
        if not re.match(r"https?://[^/]", self.url):
            raise ValueError(f"--judge.url is {self.url!r}, expected http://... or https://...")
        if importlib.util.find_spec("openai") is None:
            raise ValueError(f"--judge.url: needs the package openai, expected `{INSTALL}`")
        if self.key_variable and not os.environ.get(self.key_variable):
            raise ValueError(
                f"--judge.key-variable {self.key_variable}: expected an environment variable that holds a key"
            )
        require_at_least(self, "--judge.", turns=1, max_tokens=1, concurrency=1, retries=0, timeout_seconds=1)
        try:
            fields = json.loads(self.extra)
        except ValueError as error:
            raise ValueError(f"--judge.extra: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"--judge.extra is {self.extra!r}, expected a JSON object")


class Verdict(NamedTuple):
    """What the judge said, or why there is no answer."""

    kind: Kind
    text: str


class Judge:
    """Asks an endpoint, each request once, and keeps the answers in the folder `cache`."""

    def __init__(self, settings: JudgeSettings, cache: Path):
        self.settings = settings
        self.cache = cache
        self.asked = self.cached = 0
        self._failures_in_a_row = 0
        self._lock = threading.Lock()

    def request(self, dialogue: str, gold: str, predicted: str) -> dict[str, Any]:
        """The question about a call; gold and predicted calls are one JSON object a line."""
        settings = self.settings
        starts = [match.start() for match in re.finditer("<user>", dialogue)]
        if settings.turns is not None and settings.turns < len(starts):
            dialogue = dialogue[starts[-settings.turns] :]
        texts = {"dialogue": dialogue, "gold": gold, "pred": predicted or NO_CALL}
        prompt = _PLACEHOLDER.sub(lambda match: texts[match[1]], PROMPT)
        prompt = prompt.encode(errors="backslashreplace").decode()  # half of a UTF-16 pair cannot be sent
        messages = [{"role": "user", "content": prompt}]
        request = {"model": settings.model, "messages": messages, "temperature": 0.0}
        if settings.max_tokens is not None:
            request["max_tokens"] = settings.max_tokens
        return request | json.loads(settings.extra)

    def verdicts(self, requests: Sequence[dict[str, Any]]) -> list[Verdict]:
        """One for each request, in order; equal ones are sent once."""
        from openai import OpenAI

        settings = self.settings
        texts = [json.dumps(request, sort_keys=True) for request in requests]
        client = OpenAI(
            base_url=settings.url,
            api_key=os.environ[settings.key_variable] if settings.key_variable else "none",
            timeout=settings.timeout_seconds,
            max_retries=settings.retries,
        )
        different = list(dict.fromkeys(texts))
        with client, ThreadPoolExecutor(settings.concurrency, thread_name_prefix="judge") as pool:
            found = pool.map(lambda text: self._verdict(client, text), different)
            verdicts = dict(zip(different, found, strict=True))
        return [verdicts[text] for text in texts]

    def _verdict(self, client: OpenAI, request: str) -> Verdict:
        path = self.cache / f"{hashlib.sha256(request.encode()).hexdigest()}.json"
        text = _kept(path)
        with self._lock:
            if text is not None:
                self.cached += 1
                return Verdict(judgment(text), text)
            if self._failures_in_a_row >= GIVE_UP_AFTER:
                return Verdict("failed", f"not asked: {GIVE_UP_AFTER} requests in a row had failed")
            self.asked += 1
        text, why_not = ask(client, json.loads(request))
        with self._lock:
            self._failures_in_a_row = self._failures_in_a_row + 1 if text is None else 0
        if text is None:
            return Verdict("failed", why_not)
        kept = {"request": json.loads(request), "answer": text}
        write_atomically(path, (json.dumps(kept, indent=1) + "\n").encode())
        return Verdict(judgment(text), text)


def ask(client: OpenAI, request: dict[str, Any]) -> tuple[str | None, str]:
    """The text that answers a chat completion's request, or None and why there is none.

    What a filter of the endpoint says is an answer.
    """
    from openai import APIError, APIStatusError

    try:
        completion = client.chat.completions.create(
            model=request["model"], messages=request["messages"], extra_body=request
        )
        message = completion.choices[0].message
        text = message.content or message.refusal
    except APIStatusError as error:
        said = error.response.text
        if error.status_code < 500 and any(f'"{code}"' in said for code in FILTERED):
            return said[:200], ""
        return None, f"status {error.status_code}: {said[:200]}"
    except APIError as error:
        return None, f"{type(error).__name__}: {error}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return None, f"no chat completion: {type(error).__name__}: {str(error)[:200]}"
    return text if isinstance(text, str) else "", ""


def judgment(answer: str) -> Literal["yes", "no", "other_format"]:
    """What the one `Judgment:` line at the end of an answer says. Thoughts up to </think> are ignored."""
    lines = answer.rpartition("</think>")[2].strip().split("\n")
    found = [match for match in map(_JUDGMENT.match, lines) if match is not None]
    if len(found) == 1 and _JUDGMENT.match(lines[-1]):
        said = found[0][1].lstrip(" \t*<").rstrip(" \t*>.").lower()
        if said in ("yes", "no"):
            return "yes" if said == "yes" else "no"
    return "other_format"


def _kept(path: Path) -> str | None:
    """The answer in a file of the cache; None where none can be read."""
    try:
        text = json.loads(path.read_text(encoding="utf-8"))["answer"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    text = text.get("text") if isinstance(text, dict) else text  # of 0.1
    return text if isinstance(text, str) else None
