"""A world of two turns: the policy calls a tool, a service answers, and the policy reports the result.

The prompts and tools are the quickstart's. The result of a call is a number that no prompt shows, so that the
task needs the service's answer. The model is trained from scratch.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from smopd.rewards.rlla import accuracy_reward, format_reward
from smopd.worlds import toy_world
from smopd.worlds.models import world_model

RESULT, RESPONSE = ("<result>", "</result>"), ("<response>", "</response>")
ERROR = "unknown"
RESULTS = 40  # ours: all numbers of the quickstart's vocabulary
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
LOOSE_RATE, WRONG_RATE, ERROR_RATE = 0.7, 0.3, 0.2  # ours: see `demonstrations`


def model(seed: int, **sizes: Any) -> tuple[Any, Any]:
    """Make the quickstart's model, with additional tokens for results and reports."""
    return world_model(seed, pieces=[*toy_world.vocabulary(), *RESULT, *RESPONSE, ERROR], **sizes)


def result_of(text: str) -> str | None:
    """Return the service's result of the first call in a response, or None if there is no call."""
    found = CALL.search(text)
    if found is None:
        return None
    try:
        call = json.loads(found[1])
        parameters = {
            name: str(call["parameters"][name]) for name in toy_world.TOOLS[call["name"]].parameters
        }
    except (ValueError, LookupError, TypeError):
        return ERROR
    key = json.dumps([call["name"], parameters]).encode()
    return str(1 + hashlib.sha256(key).digest()[0] % RESULTS)


class Service:
    """The environment. It answers calls, and a response without a call ends the conversation."""

    def begin(self, row: Mapping[str, Any]) -> None:
        return None

    def answer(self, state: None, message: Mapping[str, Any]) -> list[dict[str, str]] | None:
        result = result_of(message["content"])
        return None if result is None else [{"role": "user", "content": result.join(RESULT)}]


def task(completions: Sequence[Any], *, ground_truth: Sequence[str], **columns: Any) -> list[float]:
    """Return up to 0.5 for the call, plus 0.5 if the last response reports the right result."""
    spoken = [_responses(messages) for messages in completions]
    calls = accuracy_reward(
        [""] * len(spoken),
        [responses[0] for responses in spoken],
        ground_truth=ground_truth,
        score_range=(0.0, 0.5),
    )
    return [
        call + 0.5 * (len(responses) > 1 and str(result_of(truth)) in re.findall(r"\d+", responses[-1]))
        for call, responses, truth in zip(calls, spoken, ground_truth, strict=True)
    ]


def form(completions: Sequence[Any], *, ground_truth: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 if every call has the exact form of RLLA and the last response is only a report, else 0."""
    report = re.compile(r"\S+".join(RESPONSE))
    scores = []
    for messages, truth in zip(completions, ground_truth, strict=True):
        *calls, last = _responses(messages)
        exact = format_reward([""] * len(calls), calls, ground_truth=[truth] * len(calls))
        scores.append(float(bool(calls) and all(exact) and report.fullmatch(last) is not None))
    return scores


def _responses(messages: Sequence[Mapping[str, str]]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "assistant"]


def demonstrations(n: int, seed: int, format_rate: float) -> list[dict[str, Any]]:
    """Return n sloppy calls to imitate, and for each a chat with a random result and a sloppy report.

    A report may have a loose form or a wrong number, and the result may be an error.
    """
    rng = random.Random(f"tools demonstrations {seed}")
    rows: list[dict[str, Any]] = []
    for row in toy_world.demonstrations(n, seed, format_rate):
        result = ERROR if rng.random() < ERROR_RATE else str(rng.randint(1, RESULTS))
        chat = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
            {"role": "user", "content": result.join(RESULT)},
        ]
        shown = str(rng.randint(1, RESULTS)) if rng.random() < WRONG_RATE else result
        report = f"Done.{shown}" if rng.random() < LOOSE_RATE else shown.join(RESPONSE)
        rows += [row, {"prompt": chat, "completion": report, "ground_truth": row["ground_truth"]}]
    return rows
