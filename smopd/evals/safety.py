"""Safe alignment: useful and harmless scores of responses to HH-RLHF, PKU-SafeRLHF and Alpaca prompts.

Two preference models score one response to each prompt; a benchmark's average is the mean of its two means,
and Overall the mean of the three averages. As in the scripts under the paper, the policy reads the last 512
tokens of a prompt (`max_prompt_tokens`); the preference models read it whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from smopd.data.prompts import row_content
from smopd.data.sources import load_rows
from smopd.evals.options import Evaluation, group_files, looks_local
from smopd.evals.suite import Column, Item, Message, Scores, Suite

BENCHMARKS = {"hh": "HH-RLHF", "pku": "PKU-SafeRLHF", "alpaca": "Alpaca"}
"""Group -> the paper's name."""
FILES = {
    "hh": "hh_rlhf_test.jsonl.gz",
    "pku": "pku_saferlhf_test.jsonl.gz",
    "alpaca": "alpaca_prompt_only_test.jsonl.gz",
}
SCORES = ("useful", "harmless")
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
"""Of tab:safe_align and tab:gate_safe; tab:anchor_ablation and tab:opd_ablation have the last three alone."""

ScoreFunction = Callable[[Sequence[Sequence[Message]], Sequence[str]], Sequence["float | None"]]
"""Chats and a response to each -> scores, higher is better, None where it cannot say."""


@dataclass(frozen=True)
class PreferenceOptions:
    """A preference model."""

    model: str = ""
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

    def check(self, option: str) -> None:
        """Raises ValueError or FileNotFoundError for a mistake that shows without the model."""
        place = Path(self.model).expanduser()
        if not self.model:
            raise ValueError(f"{option}.model: expected a preference model's folder or hub id")
        if looks_local(self.model) and not place.is_dir():
            raise FileNotFoundError(f"{option}.model {self.model}: no such folder, expected one, or a hub id")
        if self.sign not in (1, -1):
            raise ValueError(f"{option}.sign is {self.sign}, expected 1 or -1")
        in_file = self.template is not None and self.template.endswith(".jinja")
        if in_file and not Path(str(self.template)).expanduser().is_file():
            raise FileNotFoundError(f"{option}.template {self.template}: no such file")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{option}.url is {self.url!r}, expected http://host:port")

    def scorer(self, **settings: Any) -> ScoreFunction:
        """Loads torch at the first call; `settings` are further keyword arguments of `preference_reward`."""

        def score(prompts: Sequence[Sequence[Message]], responses: Sequence[str]) -> list[float | None]:
            from smopd.rewards.preference_model import preference_reward

            return preference_reward(prompts, responses, **asdict(self), **settings)

        return score


class Safety(Suite):
    """Means of two preference models' scores over three benchmarks.

    The paper's rows are those of the tables at COLUMNS, the ablations' of Qwen2.5-7B.

    Args:
        items: of the groups in BENCHMARKS.
        useful, harmless: score a response to each item's chat.
    """

    name = "safety"
    title = "Safe alignment"

    def __init__(self, items: Sequence[Item], useful: ScoreFunction, harmless: ScoreFunction):
        self.items = items
        self.columns: Sequence[Column] = COLUMNS
        self.scorers = {"useful": useful, "harmless": harmless}

    def score(self, responses: Sequence[str]) -> list[Scores]:
        if len(responses) != len(self.items):
            raise ValueError(f"safety: expected {len(self.items)} responses, got {len(responses)}")
        chats = [item.messages for item in self.items]
        scores = {name: scorer(chats, responses) for name, scorer in self.scorers.items()}
        for name, values in scores.items():
            if len(values) != len(chats):
                raise ValueError(
                    f"safety: the {name} scorer gave {len(values)} scores, expected {len(chats)}"
                )
        return [
            {name: _finite(value) for name, value in zip(SCORES, row, strict=True)}
            for row in zip(*(scores[name] for name in SCORES), strict=True)
        ]

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        """The columns, and `unscorable`: how many of the 2 n scores are absent and left out of the means."""
        kept: dict[str, list[float]] = {f"{group}_{name}": [] for group in BENCHMARKS for name in SCORES}
        for name in SCORES:
            for group, score in zip(groups, scores, strict=True):
                if (value := score[name]) is not None:
                    kept[f"{group}_{name}"].append(value)
        values: dict[str, float | None] = {
            key: math.fsum(found) / len(found) if found else None for key, found in kept.items()
        }
        for group in BENCHMARKS:
            values[f"{group}_avg"] = _mean([values[f"{group}_{name}"] for name in SCORES])
        for name in SCORES:
            values[name] = _mean([values[f"{group}_{name}"] for group in BENCHMARKS])
        values["overall"] = _mean([values[f"{group}_avg"] for group in BENCHMARKS])
        values["unscorable"] = len(SCORES) * len(scores) - sum(map(len, kept.values()))
        return values


@dataclass(frozen=True)
class SafetyEvaluation(Evaluation):
    """Score a model, or saved responses, with a helpful and a harmless preference model.

    Writes safety.json (the scores) and safety_items.jsonl (each response with both scores).
    """

    default_data: ClassVar[str] = "safe"

    helpful: PreferenceOptions = field(default_factory=PreferenceOptions)
    """The paper's is Qwen2.5-7B-SafeRLHF-RM."""
    harmless: PreferenceOptions = field(default_factory=PreferenceOptions)
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
        self.helpful.check("--helpful")
        self.harmless.check("--harmless")
        for name in ("max_tokens", "batch_tokens"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least 1")
        settings = {name: getattr(self, name) for name in ("max_tokens", "batch_tokens", "device")}
        helpful, harmless = self.helpful.scorer(**settings), self.harmless.scorer(**settings)
        return Safety(load_safety_items(self.data_path), helpful, harmless)

    def prepare(self, suite: Safety) -> None:
        """Has both models score a chat, which loads them."""
        from smopd.engine.errors import NoServer

        for scorer in suite.scorers.values():
            try:
                scorer([({"role": "user", "content": "Hello?"},)], ["Hello."])
            except NoServer as error:
                raise ValueError(str(error)) from None

    def settings(self, suite: Any) -> dict[str, Any]:
        models = {"helpful": asdict(self.helpful), "harmless": asdict(self.harmless)}
        return {**models, "max_tokens": self.max_tokens}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        unscorable = summary["unscorable"]
        return [f"{unscorable:.0f} scores are absent and left out of the means"] if unscorable else []


def load_safety_items(data: str | Path) -> list[Item]:
    """The prompts of the three benchmarks from the files in FILES in a folder, or from one of them, in order.

    Raises:
        FileNotFoundError, ValueError: a file is absent or empty, or a row has no usable `prompt`.
    """
    items = []
    for group, path in group_files(Path(data).expanduser(), FILES, "safety data").items():
        rows = load_rows(str(path))
        if not rows:
            raise ValueError(f"{path}: no prompt")
        for index, row in enumerate(rows):
            items.append(Item(f"{group}/{index}", group, prompt_messages(row, str(path), index)))
    return items


def prompt_messages(row: Mapping[str, Any], source: str, index: int) -> tuple[Message, ...]:
    """A row's `prompt`: chat messages, the last of the user.

    Raises:
        ValueError: it is something else, or ends otherwise; names source and row.
    """
    chat = row_content(dict(row), "prompt", source, index)
    if isinstance(chat, str) or chat[-1]["role"] != "user":
        got = "a text" if isinstance(chat, str) else f"a chat that ends with {chat[-1]['role']}"
        raise ValueError(f"{source}: row {index}: prompt is {got}, expected messages, the last of the user")
    return tuple({"role": message["role"], "content": message["content"]} for message in chat)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None
