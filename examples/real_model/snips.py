"""SNIPS utterances as tool calls with a chat template: the intent is the tool, the slots its parameters.

The system message lists the seven tools and the format of an answer, which the RLLA rewards score.
Demonstrations have the right call, mostly in a wrong format.

Data: a folder with train_INTENT_full.json and validate_INTENT.json from the NLU benchmark's 2017-06 custom
intent engines. Its short name is `snips` (python -m smopd.data fetch snips).
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from smopd.data.places import how_to_fetch, located
from smopd.worlds.toy_world import in_sloppy_format

INTENTS = (
    "AddToPlaylist", "BookRestaurant", "GetWeather", "PlayMusic", "RateBook", "SearchCreativeWork",
    "SearchScreeningEvent",
)  # fmt: skip
SPLITS = {"train": "train_{}_full.json", "validate": "validate_{}.json"}
MOST_SLOTS = 4
MOST_CHARACTERS = 200  # of a true answer, so that it fits into 80 tokens of SmolLM2
WRONG_SEPARATOR = ("\n", "\n")
T = TypeVar("T")


@dataclass(frozen=True)
class Utterance:
    """An utterance. `parts` has its texts, each as a pair with the name of its slot or None.

    If a slot occurs twice, the last value counts (40 of the 10,562 short training utterances).
    """

    intent: str
    parts: tuple[tuple[str | None, str], ...]

    @property
    def text(self) -> str:
        return " ".join("".join(text for _, text in self.parts).split())

    @property
    def slots(self) -> dict[str, str]:
        return {name: " ".join(text.split()) for name, text in self.parts if name and text.strip()}

    @property
    def call(self) -> str:
        return json.dumps({"name": self.intent, "parameters": self.slots}, ensure_ascii=False)

    @property
    def ground_truth(self) -> str:
        return f"<think>I should use {self.intent}</think>\n<tool_call>\n{self.call}\n</tool_call>"


def prompts(folder: str, n: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Draw n utterances, with repeats if there are fewer.

    Args:
        folder: the folder of the files, or the short name `snips`.
        split: "train" or "validate".
    Returns:
        n rows {"prompt", "ground_truth"}: a system and a user message, and the right answer in RLLA's form.
    Raises:
        FileNotFoundError: a file is absent.
        ValueError: `split` has another value, or the split has no short utterance of one to four slots.
    """
    rng = random.Random(f"snips chats {split} {seed}")
    drawn = draw(_short(folder, split), n, rng)
    return [{"prompt": _messages(folder, one), "ground_truth": one.ground_truth} for one in drawn]


def demonstrations(folder: str, n: int, seed: int, format_rate: float) -> list[dict[str, Any]]:
    """Draw n training utterances with the right call in a mostly wrong format.

    The format consists of five independent decisions (toy_world.in_sloppy_format). Two are mostly wrong, and
    always in the same way: no think block, or an empty line after it. If there were several wrong ways, the
    right way would be the likeliest, and a pretrained model would find it.

    Args:
        format_rate: the share of answers in the exact format.
    Returns:
        n rows {"prompt", "completion", "ground_truth"}. See `prompts`.
    Raises:
        FileNotFoundError, ValueError: as in `prompts` and `in_sloppy_format`.
    """
    rng = random.Random(f"snips chat demonstrations {seed}")
    rows = []
    for one in draw(_short(folder, "train"), n, rng):
        answer = in_sloppy_format(one.intent, [one.call], format_rate, rng, [WRONG_SEPARATOR])
        rows.append(
            {
                "prompt": _messages(folder, one),
                "completion": "".join(answer),
                "ground_truth": one.ground_truth,
            }
        )
    return rows


def draw(utterances: Sequence[T], n: int, rng: random.Random) -> list[T]:
    """Draw n items in random order. The counts of any two items differ by at most one."""
    whole, rest = divmod(n, len(utterances))
    drawn = [*list(utterances) * whole, *rng.sample(utterances, rest)]
    rng.shuffle(drawn)
    return drawn


def read(folder: str, split: str) -> tuple[Utterance, ...]:
    """Read all utterances of a split, intent by intent. Raises the errors of `prompts`."""
    if split not in SPLITS:
        raise ValueError(f"snips: split is {split!r}, expected one of {', '.join(SPLITS)}")
    return _read(located(folder), split)


@cache
def _read(folder: Path, split: str) -> tuple[Utterance, ...]:
    found = []
    for intent in INTENTS:
        path = folder / SPLITS[split].format(intent)
        if not path.is_file():
            raise FileNotFoundError(f"snips: no file {path}{how_to_fetch(path)}")
        text = "".join(_decoded(line) for line in path.read_bytes().splitlines(keepends=True))
        for row in json.loads(text)[intent]:
            parts = tuple((part.get("entity"), part["text"]) for part in row["data"])
            found.append(Utterance(intent, parts))
    return tuple(found)


def _decoded(line: bytes) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError:  # a line of PlayMusic's training file
        return line.decode("latin-1")


def _short(folder: str, split: str) -> tuple[Utterance, ...]:
    kept = tuple(
        one
        for one in read(folder, split)
        if 1 <= len(one.slots) <= MOST_SLOTS and len(one.ground_truth) <= MOST_CHARACTERS
    )
    if not kept:
        raise ValueError(f"snips: {folder} has no short utterance for the split {split}")
    return kept


def _messages(folder: str, one: Utterance) -> list[dict[str, str]]:
    return [{"role": "system", "content": _system(located(folder))}, {"role": "user", "content": one.text}]


@cache
def _system(folder: Path) -> str:
    """Return the system message: tools, parameters by frequency, and the answer format."""
    used = {intent: Counter[str]() for intent in INTENTS}
    for one in _read(folder, "train"):
        used[one.intent].update(list(one.slots))
    tools = [
        f"{intent}({', '.join(sorted(names, key=lambda name: (-names[name], name)))})"
        for intent, names in used.items()
    ]
    call = '{"name": "Tool", "parameters": {"key": "value"}}'
    form = f"<think>your thought</think>\n<tool_call>\n{call}\n</tool_call>"
    return "\n".join(["Call one of these tools with what the user said:", *tools, "Answer so:", form])
