"""RLLA (ToolRL): the 80 test items, training items made of the SFT file, and the scores of responses.

The rows of the two public files differ. A test row has the chat as `prompt` and the truth in
`reward_model.ground_truth`; an SFT row has `instruction` (system), `input` (user) and `output`, which is long
reasoning and an answer. The truth of an SFT row is its answer behind the stock think of the test items.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smopd.rewards.rlla import accuracy_reward, format_reward

# The thinks of the test items' truths.
TOOL_THINK = (
    "<think> I should use the appropriate tool with proper parameters to respond to the user's need. </think>"
)
RESPONSE_THINK = "<think> I should directly respond to the user's need. </think>"
SUFFIXES = (".parquet", ".jsonl", ".jsonl.gz")


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
        path: .parquet, .jsonl or .jsonl.gz.
        exclude: items whose chats are left out, such as the test split's from training items.
    Raises:
        FileNotFoundError, ValueError: no such file, another form, no item, or an unreadable row.
    """
    excluded = {_user_text(item.messages) for item in exclude}
    items = []
    for index, row in enumerate(_rows(Path(path).expanduser())):
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


def training_rows(path: str, exclude: str | None = None) -> list[dict[str, Any]]:
    """A prompt source: the items of `path` without those whose chats are in the file `exclude`.

    Rows have `prompt` (chat messages) and `ground_truth`.
    """
    items = load_rlla_items(path, exclude=load_rlla_items(exclude) if exclude is not None else ())
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


def _user_text(messages: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages if message["role"] != "system")


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"RLLA data {path}: no such file, expected one of {', '.join(SUFFIXES)}")
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
