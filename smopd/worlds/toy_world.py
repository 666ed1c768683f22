"""The quickstart environment: generated tool-calling prompts, true calls and sloppy demonstrations.

A prompt lists two to four tools with their parameters, and asks for one tool in everyday words.
smopd.rewards.rlla scores the answer with a dense reward for the call and a sparse one for the exact format.
Most demonstrations have the right call in a wrong format. A given share has the exact format.
"""

import hashlib
import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

SPLITS = ("train", "heldout")

# No piece is a lone space, so that the tokenizer may drop the spaces between a prompt's words.
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

WRONG_TOOL_RATE, DROPPED_PARAMETER_RATE, WRONG_VALUE_RATE = 0.12, 0.08, 0.07  # ours
EASY_RATE = 0.8  # ours: how often three of the five decisions in in_sloppy_format are right


class Parameter(NamedTuple):
    """A parameter: the pool of its values, and how often demonstrations misname it or quote its integer."""

    pool: str
    alias: str
    alias_rate: float
    quoted_rate: float


class Tool(NamedTuple):
    """A tool: its parameters in order, and phrasings of a user's request."""

    parameters: tuple[str, ...]
    requests: tuple[str, ...]


_READ = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
POOLS = {pool: tuple(values.split()) for pool, values in _READ["pools"].items()}
PARAMETERS = {name: Parameter(*values) for name, values in _READ["parameters"].items()}
TOOLS = {name: Tool(tuple(x["parameters"]), tuple(x["requests"])) for name, x in _READ["tools"].items()}


class _Task(NamedTuple):
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
        whole = {name: int(value) for name, value in self.values.items() if PARAMETERS[name].pool == "int"}
        call = json.dumps({"name": self.tool, "parameters": {**self.values, **whole}})
        thought = "".join((*_THOUGHT, self.tool))
        return f"<think>{thought}</think>\n<tool_call>\n{call}\n</tool_call>"

    @property
    def split(self) -> str:
        """The split, chosen by the request's hash. One request in five is held out."""
        return "heldout" if hashlib.sha256(self.request.encode()).digest()[0] % 5 == 0 else "train"


def _draw_value(parameter: str, rng: random.Random) -> str:
    return rng.choice(POOLS[PARAMETERS[parameter].pool])


def _draw_tasks(n: int, split: str, rng: random.Random) -> list[_Task]:
    if n < 1:
        raise ValueError(f"toy_world: n is {n}, expected at least 1")
    if split not in SPLITS:
        raise ValueError(f"toy_world: split is {split!r}, expected one of {', '.join(SPLITS)}")
    tasks: list[_Task] = []
    while len(tasks) < n:
        offered = tuple(rng.sample(tuple(TOOLS), rng.randint(2, 4)))
        tool = rng.choice(offered)
        values = {name: _draw_value(name, rng) for name in TOOLS[tool].parameters}
        task = _Task(offered, tool, values, rng.choice(TOOLS[tool].requests).format(**values))
        if task.split == split:
            tasks.append(task)
    return tasks


def prompts(n: int, seed: int, split: str = "train") -> list[dict[str, str]]:
    """Return n rows {"prompt", "ground_truth"} of "train" or "heldout". These splits share no request."""
    tasks = _draw_tasks(n, split, random.Random(f"toy_world prompts {split} {seed}"))
    return [{"prompt": task.prompt, "ground_truth": task.ground_truth} for task in tasks]


def demonstrations(
    n: int, seed: int, format_rate: float = 0.0003, split: str = "train"
) -> list[dict[str, str]]:
    """Return n rows {"prompt", "completion", "ground_truth"}. The share format_rate has the exact format."""
    rng = random.Random(f"toy_world demonstrations {split} {seed}")
    rows = []
    for task in _draw_tasks(n, split, rng):
        answer = "".join(in_sloppy_format(*_sloppy_call(task, rng), format_rate, rng))
        rows.append({"prompt": task.prompt, "completion": answer, "ground_truth": task.ground_truth})
    return rows


def in_sloppy_format(
    tool: str,
    call: list[str],
    format_rate: float,
    rng: random.Random,
    wrong_separators: Sequence[Sequence[str]] = _WRONG_SEPARATORS,
) -> list[str]:
    """Return the pieces of an answer with `call`. It has the exact format with probability format_rate.

    The format consists of five independent decisions. Three are right with probability EASY_RATE: no prefix,
    the call on its own line, and no trailer. The other two are a think block, and one newline after it. Their
    probabilities are equal, and the product of all five is format_rate.

    wrong_separators: replacements of the newline between think block and call, drawn uniformly.
    """
    highest = EASY_RATE**3
    if not 0.0 <= format_rate <= highest:
        raise ValueError(f"toy_world: format_rate is {format_rate}, expected 0 to {highest:.3f}")
    hard_rate = math.sqrt(format_rate / highest)
    pieces: list[str] = []
    if rng.random() >= EASY_RATE:
        pieces += rng.choice(_PREFIXES)
    if rng.random() < hard_rate:
        pieces += ["<think>", *_THOUGHT, tool, "</think>"]
        pieces += ["\n"] if rng.random() < hard_rate else rng.choice(wrong_separators)
    own_line = ["\n"] if rng.random() < EASY_RATE else []
    pieces += ["<tool_call>", *own_line, *call, *own_line, "</tool_call>"]
    if rng.random() >= EASY_RATE:
        pieces += rng.choice(_TRAILERS)
    return pieces


def _sloppy_call(task: _Task, rng: random.Random) -> tuple[str, list[str]]:
    tool, values = task.tool, dict(task.values)
    if rng.random() < WRONG_TOOL_RATE:
        tool = rng.choice([name for name in task.offered if name != task.tool])
        wanted = tuple(values.values())
        values = {
            name: rng.choice(wanted) if rng.random() < 0.5 else _draw_value(name, rng)
            for name in TOOLS[tool].parameters
        }
    if len(values) > 1 and rng.random() < DROPPED_PARAMETER_RATE:
        del values[rng.choice(tuple(values))]
    pieces = [_NAME, tool, _PARAMETERS]
    for name, value in values.items():
        parameter = PARAMETERS[name]
        if rng.random() < WRONG_VALUE_RATE:
            value = _draw_value(name, rng)
        shown = parameter.alias if rng.random() < parameter.alias_rate else name
        number = value.isdigit() and rng.random() >= parameter.quoted_rate
        pieces += [shown, _NUMBER if number else _STRING, value, _AFTER_NUMBER if number else _AFTER_STRING]
    pieces[-1] = _CLOSE_NUMBER if pieces[-1] == _AFTER_NUMBER else _CLOSE_STRING
    return tool, pieces


def format_pieces() -> list[str]:
    """Return all pieces of answers except tools, parameters and values."""
    texts = [piece for texts in (_PREFIXES, _WRONG_SEPARATORS, _TRAILERS) for text in texts for piece in text]
    return list(dict.fromkeys([*_TAGS, "\n", *_JSON_PIECES, *_THOUGHT, *texts]))


def vocabulary() -> list[str]:
    """Return all pieces once, in a fixed order. No piece is a lone space."""
    requests = [request for tool in TOOLS.values() for request in tool.requests]
    words = [word for request in requests for word in request.replace("?", " ?").split() if word[0] != "{"]
    aliases = [parameter.alias for parameter in PARAMETERS.values()]
    values = [value for pool in POOLS.values() for value in pool]
    pieces = [*_TAGS, "\n", *_SIGNATURE_PIECES, *format_pieces(), *TOOLS, *PARAMETERS, *aliases, *values]
    return list(dict.fromkeys([*pieces, *words]))
