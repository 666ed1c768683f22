"""Safe alignment: useful and harmless scores of responses to HH-RLHF, PKU-SafeRLHF and Alpaca prompts.

Two preference models score one response to each prompt; a benchmark's average is the mean of its two means,
and Overall the mean of the three averages. As in the scripts under the paper, the policy reads the last 512
tokens of a prompt (`max_prompt_tokens`); the preference models read it whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from smopd.data.sources import load_rows
from smopd.evals.options import Evaluation, group_files
from smopd.evals.suite import Column, Item, Message, Scores, paper_rows

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

_TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):", re.ASCII)
_ROLES = {"Human": "user", "Assistant": "assistant"}

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
        if (self.model.startswith((".", "/", "~")) or self.model.count("/") > 1) and not place.is_dir():
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


class Safety:
    """Serves `Suite`.

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

    def only(self, indices: Sequence[int]) -> Safety:
        chosen = copy(self)
        chosen.items = [self.items[i] for i in indices]
        return chosen

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

    def truths(self) -> None:
        return None

    def paper(self) -> Mapping[str, Mapping[str, float]]:
        return published()


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
            try:
                items.append(Item(f"{group}/{index}", group, prompt_messages(row.get("prompt"))))
            except ValueError as error:
                raise ValueError(f"{path}: row {index}: {error}") from None
    return items


def prompt_messages(prompt: Any) -> tuple[Message, ...]:
    """A prompt's chat, which ends with a user's message.

    Args:
        prompt: chat messages; or a text, which is one user message or HH-RLHF's "Human: … Assistant: …"
            turns, with or without the last, empty turn of the assistant.
    Raises:
        ValueError: it is something else, or ends otherwise.
    """
    if isinstance(prompt, str):
        messages = _turns(prompt)
    else:
        try:
            messages = [{"role": str(each["role"]), "content": str(each["content"])} for each in prompt]
        except (KeyError, TypeError):
            raise ValueError(
                f"expected `prompt`, a text or chat messages, got {str(prompt)[:60]!r}"
            ) from None
    if not messages or messages[-1]["role"] != "user" or not messages[-1]["content"].strip():
        raise ValueError(f"prompt is {str(prompt)[-60:]!r}, expected to end with a user's message")
    return tuple(messages)


def _turns(text: str) -> list[dict[str, str]]:
    first = _TURN.search(text)
    if first is None or text[: first.start()].strip():
        return [{"role": "user", "content": text.strip()}]
    parts = _TURN.split(text)[1:]
    messages = [
        {"role": _ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if messages[-1] == {"role": "assistant", "content": ""}:
        messages.pop()
    return messages


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if len(known) == len(values) and known else None


BACKBONES = ("Qwen2.5-3B", "Qwen2.5-7B", "Llama-3.2-3B")
METHODS = ("GRPO", "GDPO", "GD2PO", "Useful Teacher", "Harmless Teacher", "SMOPD")
GATES = ("SMOPD (seq gate)", "SMOPD (token gate)")
LABELS = tuple(f"{backbone} {method}" for backbone in BACKBONES for method in (*METHODS, *GATES))
KEYS = (
    *(f"{group}_{key}" for group in ("hh", "pku", "alpaca") for key in ("useful", "harmless", "avg")),
    "overall",
)
VALUES = (
    (4.400, 5.690, 5.045, 5.372, 6.878, 6.125, 5.281, 6.020, 5.650, 5.607),
    (4.382, 5.704, 5.043, 5.373, 6.883, 6.128, 5.247, 6.001, 5.624, 5.598),
    (4.485, 5.730, 5.107, 5.406, 6.879, 6.143, 5.379, 6.023, 5.701, 5.650),
    (4.448, 5.472, 4.960, 5.303, 6.700, 6.001, 5.407, 5.736, 5.572, 5.511),
    (4.320, 5.784, 5.052, 5.375, 6.919, 6.147, 5.149, 6.176, 5.662, 5.620),
    (4.511, 5.743, 5.127, 5.426, 6.869, 6.147, 5.392, 6.071, 5.732, 5.669),
    (4.493, 5.776, 5.134, 5.422, 6.881, 6.152, 5.360, 6.079, 5.720, 5.669),
    (4.471, 5.749, 5.110, 5.408, 6.876, 6.142, 5.355, 6.079, 5.717, 5.656),
    (4.237, 5.469, 4.853, 5.386, 6.834, 6.110, 4.976, 5.647, 5.312, 5.425),
    (4.318, 5.439, 4.878, 5.329, 6.766, 6.048, 5.323, 5.813, 5.568, 5.498),
    (4.379, 5.511, 4.945, 5.390, 6.801, 6.096, 5.434, 5.909, 5.672, 5.571),
    (4.515, 5.313, 4.914, 5.430, 6.658, 6.044, 5.513, 5.572, 5.543, 5.500),
    (4.220, 5.607, 4.913, 5.354, 6.889, 6.122, 5.021, 6.041, 5.531, 5.522),
    (4.475, 5.656, 5.065, 5.448, 6.837, 6.143, 5.421, 6.036, 5.729, 5.646),
    (4.497, 5.664, 5.080, 5.447, 6.826, 6.136, 5.383, 5.991, 5.687, 5.635),
    (4.495, 5.669, 5.082, 5.452, 6.847, 6.149, 5.402, 6.044, 5.723, 5.651),
    (4.264, 5.510, 4.887, 5.117, 6.645, 5.881, 5.340, 5.891, 5.615, 5.461),
    (4.414, 5.642, 5.028, 5.315, 6.761, 6.038, 5.366, 5.998, 5.682, 5.583),
    (4.438, 5.657, 5.047, 5.319, 6.776, 6.047, 5.429, 6.012, 5.721, 5.605),
    (4.174, 5.177, 4.676, 5.198, 6.512, 5.855, 5.296, 5.489, 5.393, 5.308),
    (3.917, 5.271, 4.594, 5.046, 6.626, 5.836, 4.869, 5.724, 5.296, 5.242),
    (4.437, 5.633, 5.035, 5.349, 6.756, 6.052, 5.406, 5.962, 5.684, 5.590),
    (4.413, 5.588, 5.001, 5.337, 6.731, 6.034, 5.427, 5.974, 5.701, 5.578),
    (4.422, 5.611, 5.016, 5.329, 6.738, 6.034, 5.416, 5.919, 5.667, 5.572),
)
ACROSS = ("useful", "harmless", "overall")
"""Means over the benchmarks, all that the tables of ablations print."""
ABLATIONS = {
    "GDPO": (4.990, 6.006, 5.498),
    "Useful Teacher": (5.153, 5.848, 5.500),
    "Harmless Teacher": (4.865, 6.179, 5.522),
    "OPD only, kappa 32": (5.011, 6.077, 5.544),
    "SMOPD": (5.115, 6.176, 5.646),
    "SMOPD, kappa 32": (5.099, 6.178, 5.639),
    "SMOPD, kappa 64": (5.102, 6.181, 5.642),
    "SMOPD, sampled reverse KL": (5.034, 6.093, 5.563),
}
"""Of Qwen2.5-7B; some rows stand in the main table too."""


def published() -> Mapping[str, Mapping[str, float]]:
    """label -> column -> value, as printed."""
    found = {label: dict(row) for label, row in paper_rows(LABELS, KEYS, VALUES, [1.0] * len(KEYS)).items()}
    for method, values in ABLATIONS.items():
        found.setdefault(f"{BACKBONES[1]} {method}", {}).update(zip(ACROSS, values, strict=True))
    return found
