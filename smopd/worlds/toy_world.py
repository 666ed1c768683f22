"""A small tool-calling world: prompts, their true calls, and sloppy demonstrations of them, all from a seed.

A prompt lists two to four tools with their parameters and asks for one of them in everyday words. The answer
is scored by the RLLA rewards (smopd.rewards.rlla): accuracy of the call, dense, and the exact format, sparse.
The demonstrations are mostly right calls in a wrong format, so a model that imitates them has an accuracy to
improve and a format that it hits with a stated probability. Texts are made of few pieces: see `vocabulary`.
"""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from smopd.worlds.toy_tools import PARAMETERS, POOLS, TOOLS

TRAIN, HELDOUT = "train", "heldout"
SPLITS = (TRAIN, HELDOUT)

# No piece of a demonstration is a lone space, so a tokenizer may drop the spaces between a prompt's words.
_NAME, _PARAMETERS = '{"name": "', '", "parameters": {"'
_STRING, _NUMBER, _AFTER_STRING, _AFTER_NUMBER = '": "', '": ', '", "', ', "'
_CLOSE_STRING, _CLOSE_NUMBER = '"}}', "}}"
_JSON_PIECES = (
    _NAME, _PARAMETERS, _STRING, _NUMBER, _AFTER_STRING, _AFTER_NUMBER, _CLOSE_STRING, _CLOSE_NUMBER,
)  # fmt: skip
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_THOUGHT = ("I", " should", " use ")
_PREFIXES = (("Sure", "."), ("Okay", "."))
_WRONG_SEPARATORS: tuple[tuple[str, ...], ...] = (("\n", "\n"), (), (" Here", ":"))
_TRAILERS = ((" Done", "."), ("\n", "Anything", " else", "?"))
_SIGNATURE_PIECES = ("(", ")", ",", ";")


@dataclass(frozen=True)
class FormatRates:
    """How often each of the five independent decisions that make the exact format is taken rightly."""

    no_prefix: float
    think: float
    one_newline: float
    call_on_own_line: float
    no_trailer: float

    @property
    def exact(self) -> float:
        """The probability of the exact format."""
        return math.prod(
            (self.no_prefix, self.think, self.one_newline, self.call_on_own_line, self.no_trailer)
        )


_EASY_RATE = (
    0.8  # equal rates for all five would put each above one half, and greedy decoding would pass at once
)


def format_rates(format_rate: float) -> FormatRates:
    """Five rates whose product is `format_rate`: three at 0.8, and q for the think block and for its newline.

    Raises:
        ValueError: format_rate is outside [0, 0.512].
    """
    highest = _EASY_RATE**3
    if not 0.0 <= format_rate <= highest:
        raise ValueError(f"format_rates: format_rate is {format_rate}, expected 0 to {highest:.3f}")
    hard = math.sqrt(format_rate / highest)
    return FormatRates(_EASY_RATE, hard, hard, _EASY_RATE, _EASY_RATE)


WRONG_TOOL_RATE, DROPPED_PARAMETER_RATE, WRONG_VALUE_RATE = 0.12, 0.08, 0.07


@dataclass(frozen=True)
class _Task:
    offered: tuple[str, ...]
    tool: str
    values: Mapping[str, str]
    request: str

    @property
    def prompt(self) -> str:
        signatures = (f"{name}({', '.join(TOOLS[name].parameters)})" for name in self.offered)
        return "; ".join(signatures) + "\n" + self.request

    @property
    def ground_truth(self) -> str:
        parameters = {
            name: int(value) if PARAMETERS[name].pool == "int" else value
            for name, value in self.values.items()
        }
        call = json.dumps({"name": self.tool, "parameters": parameters})
        thought = "".join((*_THOUGHT, self.tool))
        return f"<think>{thought}</think>\n<tool_call>\n{call}\n</tool_call>"


def _draw_task(rng: random.Random) -> _Task:
    offered = tuple(rng.sample(tuple(TOOLS), rng.randint(2, 4)))
    tool = rng.choice(offered)
    values = {name: _draw_value(name, rng) for name in TOOLS[tool].parameters}
    return _Task(offered, tool, values, rng.choice(TOOLS[tool].requests).format(**values))


def _draw_value(parameter: str, rng: random.Random) -> str:
    return rng.choice(POOLS[PARAMETERS[parameter].pool])


def _split_of(task: _Task) -> str:
    """One request in five is held out, by its words: a held-out request is in no training prompt."""
    return HELDOUT if hashlib.sha256(task.request.encode()).digest()[0] % 5 == 0 else TRAIN


def _draw_tasks(n: int, split: str, rng: random.Random, who: str) -> list[_Task]:
    if n < 1:
        raise ValueError(f"{who}: n is {n}, expected at least 1")
    if split not in SPLITS:
        raise ValueError(f"{who}: split is {split!r}, expected one of {', '.join(SPLITS)}")
    tasks: list[_Task] = []
    while len(tasks) < n:
        task = _draw_task(rng)
        if _split_of(task) == split:
            tasks.append(task)
    return tasks


def prompts(n: int, seed: int, split: str = TRAIN) -> list[dict[str, str]]:
    """Draw n prompts with their true calls.

    Args:
        split: "train" or "heldout". The two never share a request, whatever the seeds.
    Returns:
        n rows {"prompt", "ground_truth"}: the user's message, and the right answer in RLLA's tool-call form.
    Raises:
        ValueError: n is below 1, or split is neither.
    """
    rng = random.Random(f"toy_world prompts {split} {seed}")
    return [
        {"prompt": task.prompt, "ground_truth": task.ground_truth}
        for task in _draw_tasks(n, split, rng, "prompts")
    ]


def demonstrations(
    n: int, seed: int, format_rate: float = 0.0003, noise: float = 1.0, split: str = TRAIN
) -> list[dict[str, str]]:
    """Draw n prompts, each with a sloppy answer to imitate.

    Args:
        format_rate: the share of answers in the exact format; see `format_rates`.
        noise: 0 to 1, scales the rates of wrong tools, dropped parameters, wrong values, systematic errors.
    Returns:
        n rows {"prompt", "completion", "ground_truth"}.
    Raises:
        ValueError: n, format_rate, noise or split is out of range.
    """
    if not 0.0 <= noise <= 1.0:
        raise ValueError(f"demonstrations: noise is {noise}, expected 0 to 1")
    rates = format_rates(format_rate)
    rng = random.Random(f"toy_world demonstrations {split} {seed}")
    return [
        {
            "prompt": task.prompt,
            "completion": "".join(in_sloppy_format(*_sloppy_call(task, noise, rng), rates, rng)),
            "ground_truth": task.ground_truth,
        }
        for task in _draw_tasks(n, split, rng, "demonstrations")
    ]


def _happens(rate: float, rng: random.Random) -> bool:
    return rng.random() < rate


def in_sloppy_format(
    tool: str,
    call: list[str],
    rates: FormatRates,
    rng: random.Random,
    wrong_separators: Sequence[Sequence[str]] = _WRONG_SEPARATORS,
) -> list[str]:
    """The pieces of an answer that makes `call`, each decision of the format taken rightly at its rate.

    wrong_separators: what stands, each as often, between a think block and the call for the one newline.
    """
    pieces: list[str] = []
    if not _happens(rates.no_prefix, rng):
        pieces += rng.choice(_PREFIXES)
    if _happens(rates.think, rng):
        pieces += ["<think>", *_THOUGHT, tool, "</think>"]
        pieces += ["\n"] if _happens(rates.one_newline, rng) else rng.choice(wrong_separators)
    own_line = ["\n"] if _happens(rates.call_on_own_line, rng) else []
    pieces += ["<tool_call>", *own_line, *call, *own_line, "</tool_call>"]
    if not _happens(rates.no_trailer, rng):
        pieces += rng.choice(_TRAILERS)
    return pieces


def _sloppy_call(task: _Task, noise: float, rng: random.Random) -> tuple[str, list[str]]:
    """The tool that is called, and the pieces of the call's JSON."""
    tool, values = task.tool, dict(task.values)
    if _happens(WRONG_TOOL_RATE * noise, rng):
        tool = rng.choice([name for name in task.offered if name != task.tool])
        heard = tuple(values.values())
        values = {
            name: rng.choice(heard) if _happens(0.5, rng) else _draw_value(name, rng)
            for name in TOOLS[tool].parameters
        }
    if len(values) > 1 and _happens(DROPPED_PARAMETER_RATE * noise, rng):
        del values[rng.choice(tuple(values))]
    pieces = [_NAME, tool, _PARAMETERS]
    for name, value in values.items():
        parameter = PARAMETERS[name]
        if _happens(WRONG_VALUE_RATE * noise, rng):
            value = _draw_value(name, rng)
        shown = parameter.alias if _happens(parameter.alias_rate * noise, rng) else name
        number = value.isdigit() and not _happens(parameter.quoted_rate * noise, rng)
        pieces += [shown, _NUMBER if number else _STRING, value, _AFTER_NUMBER if number else _AFTER_STRING]
    pieces[-1] = {_AFTER_NUMBER: _CLOSE_NUMBER, _AFTER_STRING: _CLOSE_STRING}[pieces[-1]]
    return tool, pieces


def format_pieces() -> list[str]:
    """The pieces that an answer is made of beside the tool, its parameters and their values."""
    texts = [piece for texts in (_PREFIXES, _WRONG_SEPARATORS, _TRAILERS) for text in texts for piece in text]
    return list(dict.fromkeys([*_TAGS, "\n", *_JSON_PIECES, *_THOUGHT, *texts]))


def vocabulary() -> list[str]:
    """Every piece that the world's texts are made of, each once, in a fixed order.

    Prompts are pieces with spaces between words; completions are pieces joined by nothing. Some pieces have
    spaces inside, none is a lone space.
    """
    words = [word for tool in TOOLS.values() for request in tool.requests for word in _request_words(request)]
    groups: Sequence[Sequence[str]] = (
        _TAGS,
        ("\n",),
        _SIGNATURE_PIECES,
        _JSON_PIECES,
        _THOUGHT,
        [piece for texts in (_PREFIXES, _WRONG_SEPARATORS, _TRAILERS) for text in texts for piece in text],
        tuple(TOOLS),
        tuple(PARAMETERS),
        [parameter.alias for parameter in PARAMETERS.values()],
        [value for pool in POOLS.values() for value in pool],
        words,
    )
    return list(dict.fromkeys(piece for group in groups for piece in group))


def _request_words(request: str) -> list[str]:
    words = request.replace("?", " ?").split()
    return [word for word in words if not word.startswith("{")]
