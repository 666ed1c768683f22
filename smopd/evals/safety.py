"""Safe alignment: two preference models score responses to HH-RLHF, PKU-SafeRLHF and Alpaca prompts.

A benchmark's average is the mean of its two means, Overall the mean of the three averages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from smopd.data.prompts import row_content
from smopd.data.sources import load_rows
from smopd.evals.suite import Column, Evaluation, Item, Message, Scores, Suite, group_files, require_at_least

BENCHMARKS = {"hh": "HH-RLHF", "pku": "PKU-SafeRLHF", "alpaca": "Alpaca"}  # the paper's names
FILES = {
    "hh": "hh_rlhf_test.jsonl.gz",
    "pku": "pku_saferlhf_test.jsonl.gz",
    "alpaca": "alpaca_prompt_only_test.jsonl.gz",
}
SCORES = ("useful", "harmless")
# Of tab:safe_align and tab:gate_safe; tab:anchor_ablation and tab:opd_ablation have the last three alone.
COLUMNS = (
    *(
        Column(f"{group}_{key}", f"{name} {heading}", digits=3)
        for group, name in BENCHMARKS.items()
        for key, heading in (("useful", "U."), ("harmless", "H."), ("avg", "Avg"))
    ),
    Column("useful", "Useful", digits=3),
    Column("harmless", "Harmless", digits=3),
    Column("overall", "Overall Avg", digits=3),
)

ScoreFunction = Callable[[Sequence[Sequence[Message]], Sequence[str]], Sequence["float | None"]]
"""Chats and a response to each -> scores, higher is better, None where it cannot say."""


@dataclass(frozen=True)
class PreferenceOptions:
    """A preference model."""

    model: str
    """A folder or hub id of a sequence classifier with one output; with `url` only its tokenizer."""
    sign: int = 1
    """-1 where the model's lower scores are better, as a cost model's are."""
    template: str | None = None
    """A chat template in place of the model's own: Jinja text, or the path of a .jinja file."""
    url: str | None = None
    """Of a `vllm serve MODEL --runner pooling`, or several with commas."""
    truncation_side: Literal["left", "right"] = "left"
    """Where a chat longer than --max-tokens is cut; right, as the scripts under the paper do, can cut the
    response away."""

    def scorer(self, **settings: Any) -> ScoreFunction:
        """`preference_reward` with these options and `settings`; loads torch at the first call."""

        def score(prompts: Sequence[Sequence[Message]], responses: Sequence[str]) -> list[float | None]:
            from smopd.rewards.preference_model import preference_reward

            return preference_reward(prompts, responses, **asdict(self), **settings)

        return score


class Safety(Suite):
    """Means of two preference models' scores over three benchmarks."""

    name = "safety"
    title = "Safe alignment"
    columns: Sequence[Column] = COLUMNS

    def __init__(self, items: Sequence[Item], useful: ScoreFunction, harmless: ScoreFunction):
        self.items = items
        self.scorers = {"useful": useful, "harmless": harmless}

    def score(self, responses: Sequence[str]) -> list[Scores]:
        chats = [item.messages for item in self.items]
        columns = [self.scorers[name](chats, responses) for name in SCORES]
        return [
            {
                name: value if value is not None and math.isfinite(value) else None
                for name, value in zip(SCORES, row, strict=True)
            }
            for row in zip(*columns, strict=True)
        ]

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """The columns, and `unscorable`: how many of the 2 n scores are absent and left out of the means."""
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
    """The paper's is Qwen2.5-7B-SafeRLHF-RM."""
    harmless: PreferenceOptions
    """The paper's is Qwen2.5-7B-SafeRLHF-CM, whose higher scores are better."""
    max_prompt_tokens: int | None = 512
    """Longest prompt of the policy in tokens, as in the scripts under the paper; of longer ones the end is
    kept, and they are counted. The preference models read the whole prompt."""
    max_tokens: int = 2048
    """Most tokens of a chat with its response that the preference models read."""
    batch_tokens: int = 16_384
    """Scored at once, padding counted."""
    device: str | None = None
    """Of the preference models, such as cuda:1; the GPU where there is one, otherwise the CPU."""

    def suite(self) -> Safety:
        require_at_least(self, max_tokens=1, batch_tokens=1)
        settings = {name: getattr(self, name) for name in ("max_tokens", "batch_tokens", "device")}
        helpful, harmless = self.helpful.scorer(**settings), self.harmless.scorer(**settings)
        return Safety(load_safety_items(self.data_path), helpful, harmless)

    def prepare(self, suite: Safety) -> None:
        """Has both models score a chat, which loads them and checks their options."""
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
        return [f"{unscorable:.0f} scores are absent and left out of the means"] if unscorable else []


def load_safety_items(data: str | Path) -> list[Item]:
    """The prompts of the three benchmarks: of the files in FILES in a folder, or of one of them."""
    items = []
    for group, path in group_files(Path(data).expanduser(), FILES, "safety data").items():
        for index, row in enumerate(load_rows(str(path))):
            items.append(Item(f"{group}/{index}", group, prompt_messages(row, str(path), index)))
    return items


def prompt_messages(row: Mapping[str, Any], source: str, index: int) -> tuple[Message, ...]:
    """A row's `prompt`: chat messages, the last of the user; ValueError names source and row."""
    chat = row_content(dict(row), "prompt", source, index)
    if isinstance(chat, str) or chat[-1]["role"] != "user":
        got = "a text" if isinstance(chat, str) else f"a chat that ends with {chat[-1]['role']}"
        raise ValueError(f"{source}: row {index}: prompt is {got}, expected messages, the last of the user")
    return tuple({"role": message["role"], "content": message["content"]} for message in chat)


def _mean(values: Sequence[float | None]) -> float | None:
    """None where there is no value, or one is None."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if len(known) == len(values) and known else None
