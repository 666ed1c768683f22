"""RLLA (ToolRL): the 80 test items, training items made of the SFT file, and the scores of responses.

The rows of the two public files differ. A test row has the chat as `prompt` and the truth in
`reward_model.ground_truth`; an SFT row has `instruction` (system), `input` (user) and `output`, which is long
reasoning and an answer. The truth of an SFT row is its answer behind the stock think of the test items.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from smopd.data.places import how_to_fetch, located
from smopd.data.sample import NOTE as SAMPLE_NOTE
from smopd.data.sample import path_of, stands_in
from smopd.evals.options import Evaluation
from smopd.evals.suite import MAIN_ROWS, Column, Item, Scores, paper_rows
from smopd.rewards.rlla import accuracy_reward, format_reward

# The thinks of the test items' truths.
TOOL_THINK = (
    "<think> I should use the appropriate tool with proper parameters to respond to the user's need. </think>"
)
RESPONSE_THINK = "<think> I should directly respond to the user's need. </think>"
TEST_FILES = ("rlla_4k_test.parquet", "rlla_4k_test.jsonl.gz")
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")
COLUMNS = (
    Column("accuracy", "Acc Reward"),
    Column("format_pass", "Format Pass (%)", scale=100, digits=2),
    Column("mean", "RLLA Mean"),
)
# Tables tab:acc_format, tab:acc_format_moderate and tab:gate_rlla: accuracy reward, format pass in %, mean.
PAPER_ROWS = (
    *MAIN_ROWS,
    "Qwen2.5-1.5B SMOPD (seq gate)",
    "Qwen2.5-1.5B SMOPD (token gate)",
    "Qwen2.5-3B Accuracy Teacher [0.7,0.3]",
    "Qwen2.5-3B Format Teacher [0.3,0.7]",
    "Qwen2.5-3B SMOPD (moderate)",
    "Qwen2.5-3B SMOPD (moderate, seq gate)",
    "Qwen2.5-3B SMOPD (moderate, token gate)",
)
PAPER_VALUES = (
    (1.737, 5.0, 1.787),
    (1.761, 8.8, 1.849),
    (1.776, 8.8, 1.864),
    (1.779, 1.2, 1.791),
    (1.771, 97.5, 2.746),
    (1.765, 97.5, 2.740),
    (1.783, 97.5, 2.758),
    (1.753, 97.5, 2.728),
    (1.732, 97.5, 2.707),
    (1.795, 95.0, 2.745),
    (1.740, 97.2, 2.712),
    (1.763, 97.5, 2.738),
    (1.741, 94.3, 2.684),
    (1.787, 90.3, 2.690),
    (1.763, 94.4, 2.707),
    (1.734, 97.5, 2.709),
    (1.782, 97.5, 2.757),
    (1.765, 96.9, 2.733),
    (1.755, 97.5, 2.730),
)


@dataclass(frozen=True)
class RllaItem:
    """One item: a chat, what a right response looks like, and its row in the file."""

    messages: tuple[dict[str, str], ...]
    ground_truth: str
    index: int


@dataclass(frozen=True)
class RllaScores:
    """Means over n responses; `mean` is the mean of accuracy + format, the paper's "RLLA Mean"."""

    accuracy: float
    format_pass: float
    mean: float
    n: int
    accuracies: tuple[float, ...]
    formats: tuple[float, ...]


class Rlla:
    """Serves `Suite`: both rewards at the paper's settings, and the means over all items.

    Raises:
        ValueError: there is no item, or a truth is malformed.
    """

    name = "rlla"
    title = "RLLA-4K test"

    def __init__(self, items: Sequence[RllaItem]):
        self.columns: Sequence[Column] = COLUMNS
        self.items: Sequence[Item] = [
            Item(str(item.index), "test", item.messages, item.ground_truth) for item in items
        ]
        score_responses(self.truths(), self.truths())

    def only(self, indices: Sequence[int]) -> Rlla:
        chosen = copy(self)
        chosen.items = [self.items[i] for i in indices]
        return chosen

    def score(self, responses: Sequence[str]) -> list[Scores]:
        scores = score_responses(responses, self.truths())
        return [
            {"accuracy": accuracy, "format": form, "mean": accuracy + form}
            for accuracy, form in zip(scores.accuracies, scores.formats, strict=True)
        ]

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        accuracy = sum(score["accuracy"] for score in scores) / len(scores)
        format_pass = sum(score["format"] for score in scores) / len(scores)
        return {"accuracy": accuracy, "format_pass": format_pass, "mean": accuracy + format_pass}

    def truths(self) -> list[str]:
        return [str(item.truth) for item in self.items]

    def paper(self) -> Mapping[str, Mapping[str, float]]:
        keys = [column.key for column in COLUMNS]
        return paper_rows(PAPER_ROWS, keys, PAPER_VALUES, [column.scale for column in COLUMNS])


@dataclass(frozen=True)
class RllaEvaluation(Evaluation):
    """Score a model, or saved responses, on the RLLA test items: accuracy (-3 to 3), format pass, their sum.

    Writes rlla.json (the scores) and rlla_items.jsonl (each response with its truth and rewards).
    """

    default_data: ClassVar[str] = "rlla/test"

    @property
    def data_path(self) -> Path:
        if self.is_sample:
            return path_of(self.default_data, sample=True)
        path = super().data_path
        return _test_file(path) if path.is_dir() else path

    @property
    def is_sample(self) -> bool:
        """Whether the items are the sample that comes with the package, for want of others."""
        return self.data is None and stands_in()

    def suite(self) -> Rlla:
        suite = Rlla(load_rlla_items(self.data_path))
        if self.is_sample:
            suite.title = f"SAMPLE of RLLA-4K test, {len(suite.items)} items"
        return suite

    def settings(self, suite: Any) -> dict[str, Any]:
        return {"sample": SAMPLE_NOTE} if self.is_sample else {}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        return [SAMPLE_NOTE] if self.is_sample else []


def score_responses(responses: Sequence[str], ground_truths: Sequence[str]) -> RllaScores:
    """Score one response an item with both rewards at the paper's settings.

    Raises:
        ValueError: no response, another number of responses than of truths, or a malformed truth.
    """
    n = len(ground_truths)
    if n == 0 or len(responses) != n:
        raise ValueError(f"score_responses: expected {n or 'one or more'} responses, got {len(responses)}")
    accuracies = accuracy_reward([None] * n, responses, ground_truth=ground_truths)
    formats = format_reward([None] * n, responses, ground_truth=ground_truths)
    accuracy, format_pass = sum(accuracies) / n, sum(formats) / n
    return RllaScores(accuracy, format_pass, accuracy + format_pass, n, tuple(accuracies), tuple(formats))


def load_rlla_items(path: str | Path, *, exclude: Iterable[RllaItem] = ()) -> list[RllaItem]:
    """The items of a file in either row form, in the file's order.

    Args:
        path: .parquet, .jsonl or .jsonl.gz, or the short name of one (`rlla/test`).
        exclude: items whose chats are left out, such as the test split's from training items.
    Raises:
        FileNotFoundError, ValueError: no such file, another form, no item, or an unreadable row.
    """
    excluded = {_user_text(item.messages) for item in exclude}
    items = []
    for index, row in enumerate(_rows(located(path))):
        try:
            mapped = sft_row(row) if "output" in row else test_row(row)
        except ValueError as error:
            raise ValueError(f"{path}: row {index}: {error}") from None
        if mapped is None or _user_text(mapped["prompt"]) in excluded:
            continue
        items.append(RllaItem(tuple(mapped["prompt"]), mapped["ground_truth"], index))
    if not items:
        raise ValueError(f"{path}: no RLLA item left")
    return items


def training_rows(path: str, exclude: str | None = None, *, sample: bool = False) -> list[dict[str, Any]]:
    """A prompt source: the items of `path` without those whose chats are in the file `exclude`.

    Args:
        path, exclude: files, or short names (`rlla/sft`, `rlla/test`).
        sample: take what comes with the package in place of short names; see smopd.data.sample.
    Returns:
        Rows with `prompt` (chat messages) and `ground_truth`.
    """
    left_out = () if exclude is None else load_rlla_items(path_of(exclude, sample=sample))
    return _prompt_rows(load_rlla_items(path_of(path, sample=sample), exclude=left_out))


def evaluation_rows(path: str, *, sample: bool = False) -> list[dict[str, Any]]:
    """A prompt source: all items of `path`; arguments and rows as of `training_rows`."""
    return _prompt_rows(load_rlla_items(path_of(path, sample=sample)))


def _prompt_rows(items: Iterable[RllaItem]) -> list[dict[str, Any]]:
    return [{"prompt": list(item.messages), "ground_truth": item.ground_truth} for item in items]


def test_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the test (or training) split -> `prompt` (chat messages) and `ground_truth`."""
    try:
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in row["prompt"]]
        truth = row["reward_model"]["ground_truth"]
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"expected `prompt` (messages with role and content) and `reward_model.ground_truth`, "
            f"got {sorted(row)}: {error!r}"
        ) from None
    if not messages or not isinstance(truth, str):
        raise ValueError(f"prompt has {len(messages)} messages, ground_truth is {type(truth).__name__}")
    return {"prompt": messages, "ground_truth": truth}


def sft_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """A row of the SFT file -> `prompt` and `ground_truth`; None where no answer follows a think."""
    missing = [name for name in ("instruction", "input", "output") if not isinstance(row.get(name), str)]
    if missing:
        raise ValueError(f"expected the texts instruction, input and output, got no text as {missing}")
    _, think_end, answer = row["output"].rpartition("</think>")
    answer = answer.strip()
    if not think_end or not answer.startswith(("<tool_call>", "<response>")):
        return None
    think = TOOL_THINK if answer.startswith("<tool_call>") else RESPONSE_THINK
    messages = [
        {"role": "system", "content": row["instruction"]},
        {"role": "user", "content": row["input"]},
    ]
    return {"prompt": messages, "ground_truth": f"{think}\n{answer}"}


def _test_file(folder: Path) -> Path:
    """The test split in a folder."""
    files = [folder / name for name in TEST_FILES]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"RLLA data {folder}: expected {' or '.join(TEST_FILES)} in it{how_to_fetch(files[0])}"
        )
    return found


def _user_text(messages: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages if message["role"] != "system")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(
            f"RLLA data {path}: no such file, expected one of {', '.join(SUFFIXES)}{how_to_fetch(path)}"
        )
    if path.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(path).to_pylist()
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}: line {number}: {error}") from None
                if not isinstance(row, dict):
                    raise ValueError(f"{path}: line {number}: expected an object, got {type(row).__name__}")
                yield row
    else:
        raise ValueError(f"RLLA data {path}: expected one of {', '.join(SUFFIXES)}")
