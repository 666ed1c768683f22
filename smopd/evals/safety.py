"""Safe alignment: two preference models score responses to HH-RLHF, PKU-SafeRLHF and Alpaca prompts.

Each preference model has a mean score on each benchmark. A benchmark's average is the mean of its two mean
scores, and `overall` is the mean of the three averages.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from smopd.data.prompts import row_content
from smopd.data.sources import load_rows
from smopd.evals.suite import Column, Evaluation, Item, Message, Scores, Suite, group_files, require_at_least

BENCHMARKS = {"hh": "HH-RLHF", "pku": "PKU-SafeRLHF", "alpaca": "Alpaca"}  # the paper's names
FILES = {"hh": "hh_rlhf_test.jsonl.gz", "pku": "pku_saferlhf_test.jsonl.gz"}
FILES["alpaca"] = "alpaca_prompt_only_test.jsonl.gz"
SCORES = ("useful", "harmless")
_HEADINGS = {
    f"{group}_{part}": f"{name} {heading}"
    for group, name in BENCHMARKS.items()
    for part, heading in {"useful": "U.", "harmless": "H.", "avg": "Avg"}.items()
}
_HEADINGS |= {"useful": "Useful", "harmless": "Harmless", "overall": "Overall Avg"}
# In the paper, tables safe_align and gate_safe have all columns, anchor_ablation and opd_ablation the last 3.
COLUMNS = tuple(Column(key, heading, digits=3) for key, heading in _HEADINGS.items())

ScoreFunction = Callable[[Sequence[Sequence[Message]], Sequence[str]], Sequence["float | None"]]
"""Maps chats, and one response to each chat, to scores. A higher score is better. None means no score."""


@dataclass(frozen=True)
class PreferenceOptions:
    """Options of one preference model."""

    model: str
    """A folder or hub id of a sequence classifier with one output. With `url`, only its tokenizer is used."""
    sign: Literal[1, -1] = 1
    """-1 if a lower output is better, as with a cost model."""
    template: str | None = None
    """A chat template to use instead of the model's: Jinja text or the path of a .jinja file."""
    url: str | None = None
    """URL of a server (`vllm serve MODEL --runner pooling`), or several URLs separated by commas."""
    truncation_side: Literal["left", "right"] = "left"
    """The side on which a chat longer than --max-tokens is cut. The paper's scripts cut on the right, which
    can remove the response."""

    def scorer(self, **settings: Any) -> ScoreFunction:
        from smopd.rewards.preference_model import preference_reward  # imports torch

        return partial(preference_reward, **asdict(self), **settings)


class Safety(Suite):
    """Mean scores of two preference models over three benchmarks."""

    name = "safety"
    title = "Safe alignment"
    columns: Sequence[Column] = COLUMNS

    def __init__(self, items: Sequence[Item], useful: ScoreFunction, harmless: ScoreFunction):
        self.items = items
        self.scorers = {"useful": useful, "harmless": harmless}

    def score(self, responses: Sequence[str]) -> list[Scores]:
        chats = [item.messages for item in self.items]
        columns = [self.scorers[name](chats, responses) for name in SCORES]

        def known(value: float | None) -> float | None:
            return value if value is not None and math.isfinite(value) else None

        return [dict(zip(SCORES, map(known, row), strict=True)) for row in zip(*columns, strict=True)]

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """Return the columns, which omit missing scores, and `unscorable`, the number of missing scores."""
        kept: dict[str, list[float]] = {f"{group}_{name}": [] for group in BENCHMARKS for name in SCORES}
        for group, score in zip(groups, scores, strict=True):
            for name in SCORES:
                if (value := score[name]) is not None:
                    kept[f"{group}_{name}"].append(value)
        values = {key: _mean(found) for key, found in kept.items()}
        for group in BENCHMARKS:
            values[f"{group}_avg"] = _mean([values[f"{group}_{name}"] for name in SCORES])
        for name in SCORES:
            values[name] = _mean([values[f"{group}_{name}"] for group in BENCHMARKS])
        values["overall"] = _mean([values[f"{group}_avg"] for group in BENCHMARKS])
        values["unscorable"] = len(SCORES) * len(scores) - sum(map(len, kept.values()))
        return values


@dataclass(frozen=True, kw_only=True)
class SafetyEvaluation(Evaluation):
    """Score a model, or saved responses, with a helpful and a harmless preference model.

    Writes safety.json (the scores) and safety_items.jsonl (each response with both scores).
    """

    default_data: ClassVar[str] = "safe"

    helpful: PreferenceOptions
    """The model that scores helpfulness. The paper uses Qwen2.5-7B-SafeRLHF-RM."""
    harmless: PreferenceOptions
    """The model that scores harmlessness. The paper uses Qwen2.5-7B-SafeRLHF-CM, where higher is better."""
    max_prompt_tokens: int | None = 512
    """Maximum prompt length of the policy in tokens, as in the paper's scripts. Longer prompts are cut on the
    left, and the result counts them. The preference models read the whole prompt."""
    max_tokens: int = 2048
    """Maximum length, in tokens, of a chat with its response for the preference models."""
    batch_tokens: int = 16_384
    """Maximum number of tokens to score at once, including padding. A longer chat is scored alone."""
    device: str | None = None
    """Device of the preference models, such as cuda:1. Default: the GPU if there is one."""

    def suite(self) -> Safety:
        require_at_least(self, max_tokens=1, batch_tokens=1)
        settings = {name: getattr(self, name) for name in ("max_tokens", "batch_tokens", "device")}
        helpful, harmless = self.helpful.scorer(**settings), self.harmless.scorer(**settings)
        return Safety(load_safety_items(self.data_path), helpful, harmless)

    def prepare(self, suite: Safety) -> None:
        """Load both preference models. Check their options by scoring one chat with each."""
        from smopd.engine.errors import NoServer

        for option, scorer in zip(("helpful", "harmless"), suite.scorers.values(), strict=True):
            try:
                scorer([({"role": "user", "content": "Hello?"},)], ["Hello."])
            except (ValueError, OSError, NoServer) as error:
                raise ValueError(f"--{option}: {error}") from None

    def settings(self, suite: Any) -> dict[str, Any]:
        models = {"helpful": asdict(self.helpful), "harmless": asdict(self.harmless)}
        return {"preference_models": models, "max_tokens": self.max_tokens}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        unscorable = summary["unscorable"]
        return [f"{unscorable:.0f} scores are missing and left out of the means"] if unscorable else []


def load_safety_items(data: str | Path) -> list[Item]:
    """Load the prompts of all three benchmarks from a folder, or of one benchmark from its file."""
    items = []
    for group, path in group_files(Path(data).expanduser(), FILES, "safety data").items():
        for index, row in enumerate(load_rows(str(path))):
            items.append(Item(f"{group}/{index}", group, prompt_messages(row, str(path), index)))
    return items


def prompt_messages(row: Mapping[str, Any], source: str, index: int) -> tuple[Message, ...]:
    """Return a row's `prompt`, which must be chat messages that end with the user's, or raise ValueError."""
    try:
        chat = row_content(dict(row), "prompt")
        if isinstance(chat, str) or chat[-1]["role"] != "user":
            got = "a text" if isinstance(chat, str) else f"a chat that ends with {chat[-1]['role']}"
            raise ValueError(f"prompt is {got}, expected messages that end with user")
    except ValueError as error:
        raise ValueError(f"{source}: row {index}: {error}") from None
    return tuple({"role": message["role"], "content": message["content"]} for message in chat)


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean, or None if `values` is empty or contains None."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) and known else None
