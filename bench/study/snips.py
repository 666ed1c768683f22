"""SNIPS utterances as tool calls: the intent is the tool, and the slots are its parameters.

Demonstrations use the sloppy format of the toy world. Only utterances of frequent words with one to four
slots are kept, so that a model can learn them from scratch. Each word is a token, and "_" joins the words of
a value. examples.real_model.snips makes data with all words, for a pretrained model.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from examples.real_model.snips import INTENTS, draw, read
from smopd.worlds.models import world_model
from smopd.worlds.toy_world import format_pieces, in_sloppy_format

LEAST_COUNT = 8  # minimum count of a word in the training utterances
MOST_SLOTS = 4
WRONG_INTENT_RATE, DROPPED_SLOT_RATE, SHORT_VALUE_RATE = 0.10, 0.10, 0.10


@dataclass(frozen=True)
class Utterance:
    intent: str
    words: tuple[str, ...]
    slots: tuple[tuple[str, tuple[str, ...]], ...]  # name and words

    @property
    def prompt(self) -> str:
        return " ".join(self.words)

    @property
    def ground_truth(self) -> str:
        parameters = {name: "_".join(words) for name, words in self.slots}
        call = json.dumps({"name": self.intent, "parameters": parameters})
        return f"<think>I should use {self.intent}</think>\n<tool_call>\n{call}\n</tool_call>"


def prompts(folder: str, n: int, seed: int, split: str) -> list[dict[str, str]]:
    """Draw n utterances as rows {"prompt", "ground_truth"}. They repeat if there are fewer than n."""
    rng = random.Random(f"snips prompts {split} {seed}")
    drawn = draw(_utterances(folder, split), n, rng)
    return [{"prompt": one.prompt, "ground_truth": one.ground_truth} for one in drawn]


def demonstrations(folder: str, n: int, seed: int, format_rate: float) -> list[dict[str, str]]:
    """Draw n training utterances as rows {"prompt", "completion", "ground_truth"} with sloppy completions."""
    rng = random.Random(f"snips demonstrations {seed}")
    rows = []
    for one in draw(_utterances(folder, "train"), n, rng):
        intent, call = _sloppy_call(one, rng)
        completion = "".join(in_sloppy_format(intent, call, format_rate, rng))
        rows.append({"prompt": one.prompt, "completion": completion, "ground_truth": one.ground_truth})
    return rows


def model(
    seed: int, *, folder: str, hidden_size: int = 128, layers: int = 2, heads: int = 4
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a small Qwen2 model with random weights, and a tokenizer of the kept words."""
    words = [word for word, count in sorted(_counts(folder).items()) if count >= LEAST_COUNT]
    names = sorted({name for one in _utterances(folder, "train") for name, _ in one.slots})
    pieces = list(dict.fromkeys([*format_pieces(), *INTENTS, *names, "_", *words]))
    return world_model(seed, pieces=pieces, hidden_size=hidden_size, layers=layers, heads=heads)


def _sloppy_call(one: Utterance, rng: random.Random) -> tuple[str, list[str]]:
    """Return the called intent and the pieces of the call's JSON."""
    intent, slots = one.intent, list(one.slots)
    if rng.random() < WRONG_INTENT_RATE:
        intent = rng.choice([other for other in INTENTS if other != intent])
    if len(slots) > 1 and rng.random() < DROPPED_SLOT_RATE:
        del slots[rng.randrange(len(slots))]
    pieces = ['{"name": "', intent, '", "parameters": {"']
    for name, words in slots:
        if len(words) > 1 and rng.random() < SHORT_VALUE_RATE:
            words = words[:1]
        value = [piece for word in words for piece in ("_", word)][1:]
        pieces += [name, '": "', *value, '", "']
    pieces[-1] = '"}}'
    return intent, pieces


@cache
def _utterances(folder: str, split: str) -> tuple[Utterance, ...]:
    """Return the utterances whose words are all frequent in the training files."""
    counts = _counts(folder)
    kept = [
        one
        for one in _read(folder, split)
        if 1 <= len(one.slots) <= MOST_SLOTS and all(counts[word] >= LEAST_COUNT for word in one.words)
    ]
    return tuple(kept)


@cache
def _counts(folder: str) -> Counter[str]:
    return Counter(word for one in _read(folder, "train") for word in one.words)


@cache
def _read(folder: str, split: str) -> tuple[Utterance, ...]:
    found = []
    for one in read(folder, split):
        parts = [(name, _words(text)) for name, text in one.parts]
        slots = {name: words for name, words in parts if name and words}
        words = tuple(word for _, part in parts for word in part)
        found.append(Utterance(one.intent, words, tuple(slots.items())))
    return tuple(found)


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9']+", text.lower()))
