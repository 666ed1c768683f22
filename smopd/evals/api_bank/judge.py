"""The judge of API-Bank: the paper's prompt about each call that failed the exact match, and its verdicts.

Answers are kept on disk under a hash of the whole request, so that no request is sent twice. A request that
got no answer has no verdict: it is counted as failed and sent again the next time.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro

from smopd.engine.files import write_atomically
from smopd.evals.api_bank.chat_endpoint import INSTALL, ChatAnswer, NoAnswer, ask, client
from smopd.evals.suite import PAPER

if TYPE_CHECKING:
    from openai import OpenAI

Kind = Literal["yes", "no", "other_format", "refusal", "failed"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PAPER_JUDGE = "qwen3.7-plus"
GIVE_UP_AFTER = 32  # ours: failures in a row after which the rest are not asked
NO_CALL = "(no tool call)"

PROMPT = (PAPER / "judge_prompt.txt").read_text(encoding="utf-8").rstrip("\n")  # verbatim

_PLACEHOLDER = re.compile(r"\{(dialogue|gold|pred)\}")
# Emphasis, and the brackets of the prompt's own placeholder, are let pass.
_JUDGMENT = re.compile(r"[ \t*]*Judgment[ \t*]*:(.*)", re.IGNORECASE)
# ours: how models decline
_REFUSAL = re.compile(
    r"\bI(?:'m| am) (?:sorry|unable|not able)|\bI (?:can(?:no|')t|won't|will not|must decline)"
    r"|\b(?:cannot|can't|unable to) (?:assist|help|comply|fulfill)|\bAs an AI\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class JudgeSettings:
    """The endpoint that judges what failed the exact match."""

    url: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Of an OpenAI-compatible endpoint, up to and with /v1; without one nothing is judged."""
    model: str = PAPER_JUDGE
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
    cache: Annotated[Path | None, tyro.conf.arg(metavar="PATH")] = None
    """The folder of answers; by default judge_cache in the output's folder."""

    def check(self) -> None:
        """Raises ValueError for a mistake."""
        if self.url is None:
            if self != JudgeSettings():
                raise ValueError("--judge.url is missing, expected an endpoint for the judge's other options")
            return
        if not re.match(r"https?://[^/]", self.url):
            raise ValueError(f"--judge.url is {self.url!r}, expected http://... or https://...")
        if importlib.util.find_spec("openai") is None:
            raise ValueError(f"--judge.url: needs the package openai, expected `{INSTALL}`")
        key = self.key()
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ValueError(
                f"--judge.key-variable {self.key_variable}: expected an environment variable that holds a key"
            )
        for name, least in (("turns", 1), ("max_tokens", 1), ("concurrency", 1), ("retries", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                option = name.replace("_", "-")
                raise ValueError(f"--judge.{option} is {value}, expected at least {least}")
        if not self.timeout_seconds > 0:
            raise ValueError(f"--judge.timeout-seconds is {self.timeout_seconds}, expected above 0")
        if self.cache is not None and self.cache.exists() and not self.cache.is_dir():
            raise ValueError(f"--judge.cache {self.cache}: is no folder")
        self.extra_fields()

    def key(self) -> str | None:
        """The endpoint's key; "" where the environment has none, None where none is wanted."""
        return None if self.key_variable is None else os.environ.get(self.key_variable, "")

    def extra_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self.extra)
        except ValueError as error:
            raise ValueError(f"--judge.extra: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"--judge.extra is {self.extra!r}, expected a JSON object")
        return fields


@dataclass(frozen=True)
class Question:
    """The three texts that fill the prompt; calls are one JSON object a line."""

    dialogue: str
    gold: str
    predicted: str


@dataclass(frozen=True)
class Verdict:
    """What the judge said, or why there is no answer."""

    kind: Kind
    text: str


class Judge:
    """Asks an endpoint, each request once.

    Args:
        settings: with a URL.
        cache: the folder of answers.
    """

    def __init__(self, settings: JudgeSettings, cache: Path):
        settings.check()
        self.settings = settings
        self.cache = settings.cache or cache
        self.asked = self.cached = self.sent = 0  # questions, and HTTP requests with the repeated ones
        self._extra = settings.extra_fields()
        self._failures_in_a_row = 0
        self._lock = threading.Lock()

    def verdicts(self, questions: Sequence[Question]) -> list[Verdict]:
        """One for each question, in order; equal questions are asked once."""
        settings = self.settings
        requests = [self.request(question) for question in questions]
        by_key = {request_key(request): request for request in requests}
        endpoint = client(
            str(settings.url),
            settings.key(),
            timeout_seconds=settings.timeout_seconds,
            retries=settings.retries,
            sent=self._count,
        )
        with endpoint, ThreadPoolExecutor(settings.concurrency, thread_name_prefix="judge") as pool:
            found = pool.map(lambda pair: self._verdict(endpoint, *pair), by_key.items())
            verdicts = dict(zip(by_key, found, strict=True))
        return [verdicts[request_key(request)] for request in requests]

    def request(self, question: Question) -> dict[str, Any]:
        """What is sent for a question."""
        dialogue = last_turns(question.dialogue, self.settings.turns)
        texts = {"dialogue": dialogue, "gold": question.gold, "pred": question.predicted or NO_CALL}
        prompt = _PLACEHOLDER.sub(lambda match: texts[match[1]], PROMPT)
        prompt = prompt.encode(errors="backslashreplace").decode()  # half of a UTF-16 pair cannot be sent
        request: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
        }
        if self.settings.max_tokens is not None:
            request["max_tokens"] = self.settings.max_tokens
        return request | self._extra

    def _count(self, _: object) -> None:
        with self._lock:
            self.sent += 1

    def _verdict(self, endpoint: OpenAI, key: str, request: dict[str, Any]) -> Verdict:
        path = self.cache / f"{key}.json"
        answer = _kept(path)
        with self._lock:
            if answer is not None:
                self.cached += 1
                return verdict(answer)
            if self._failures_in_a_row >= GIVE_UP_AFTER:
                return Verdict("failed", f"not asked: {GIVE_UP_AFTER} requests in a row had failed")
            self.asked += 1
        try:
            answer = ask(endpoint, request)
        except NoAnswer as error:
            with self._lock:
                self._failures_in_a_row += 1
            return Verdict("failed", str(error))
        with self._lock:
            self._failures_in_a_row = 0
        kept = {"request": request, "answer": asdict(answer)}
        write_atomically(path, (json.dumps(kept, indent=1) + "\n").encode())
        return verdict(answer)


def verdict(answer: ChatAnswer) -> Verdict:
    """The verdict in an answer: its one `Judgment:` line, at the end. Thoughts up to </think> are ignored."""
    text = answer.text.rpartition("</think>")[2].strip()
    if answer.refused:
        return Verdict("refusal", text)
    lines = [_JUDGMENT.match(line) for line in text.split("\n")]
    found = [line for line in lines if line is not None]
    if len(found) == 1 and lines[-1] is not None:
        judgment = found[0][1].lstrip(" \t*<").rstrip(" \t*>.").lower()
        if judgment in ("yes", "no"):
            return Verdict("yes" if judgment == "yes" else "no", text)
    declined = not found and _REFUSAL.search(text.replace("\N{RIGHT SINGLE QUOTATION MARK}", "'"))
    return Verdict("refusal" if declined else "other_format", text)


def last_turns(dialogue: str, turns: int | None) -> str:
    """The dialogue from its last `turns`-th user turn on."""
    starts = [match.start() for match in re.finditer("<user>", dialogue)]
    return dialogue if turns is None or turns >= len(starts) else dialogue[starts[-turns] :]


def request_key(request: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()


def _kept(path: Path) -> ChatAnswer | None:
    """The answer in a file of the cache; None where there is none that can be read."""
    try:
        return ChatAnswer(**json.loads(path.read_text(encoding="utf-8"))["answer"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
