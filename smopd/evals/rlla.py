"""RLLA (ToolRL): the 80 test items, the training items of the SFT file, and the scores of responses.

The `output` of an SFT row is long reasoning followed by an answer. The truth of the row is a short think
block, as in the test items, followed by this answer.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from smopd.data.sources import load_rows
from smopd.evals.suite import Column, Evaluation, Item, Message, Scores, Suite
from smopd.rewards.rlla import accuracy_reward, format_reward

# The think blocks of the test items' truths.
TOOL_THINK = (
    "<think> I should use the appropriate tool with proper parameters to respond to the user's need. </think>"
)
RESPONSE_THINK = "<think> I should directly respond to the user's need. </think>"
TEST_FILE = "rlla_4k_test.parquet"
COLUMNS = (
    Column("accuracy", "Acc Reward"),
    Column("format_pass", "Format Pass (%)", scale=100, digits=2),
    Column("mean", "RLLA Mean"),
)


class Rlla(Suite):
    """The two RLLA rewards at the paper's settings, averaged over the items."""

    name = "rlla"
    title = "RLLA-4K test"
    columns: Sequence[Column] = COLUMNS

    def __init__(self, items: Sequence[Item]):
        self.items = items
        self.score(self.truths())  # raises if a truth is malformed

    def score(self, responses: Sequence[str]) -> list[Scores]:
        prompts, truths = [item.messages for item in self.items], self.truths()
        accuracies = accuracy_reward(prompts, responses, ground_truth=truths)
        formats = format_reward(prompts, responses, ground_truth=truths)
        pairs = zip(accuracies, formats, strict=True)
        return [{"accuracy": accuracy, "format": form, "mean": accuracy + form} for accuracy, form in pairs]

    def summary(self, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, float | None]:
        accuracy = sum(score["accuracy"] for score in scores) / len(scores)
        format_pass = sum(score["format"] for score in scores) / len(scores)
        return {"accuracy": accuracy, "format_pass": format_pass, "mean": accuracy + format_pass}

    def truths(self) -> list[str]:
        return [str(item.truth) for item in self.items]


@dataclass(frozen=True)
class RllaEvaluation(Evaluation):
    """Score a model, or saved responses, on the RLLA test items by accuracy (-3 to 3), format and their sum.

    Writes rlla.json (the scores) and rlla_items.jsonl (each response with its truth and rewards).
    """

    default_data: ClassVar[str] = "rlla/test"

    @property
    def data_path(self) -> Path:
        path = super().data_path
        return path / TEST_FILE if path.is_dir() else path

    def suite(self) -> Rlla:
        return Rlla(load_rlla_items(self.data_path))


def load_rlla_items(path: str | Path, *, exclude: Iterable[Item] = ()) -> list[Item]:
    """Load the items of a test or SFT file in order. The key of an item is its row number.

    path: a file or a short name, such as `rlla/test`. exclude: items whose chats are left out.
    """
    excluded = {_user_text(item.messages) for item in exclude}
    items = []
    for index, row in enumerate(load_rows(str(path))):
        try:
            mapped = sft_row(row) if "output" in row else test_row(row)
        except ValueError as error:
            raise ValueError(f"{path}: row {index}: {error}") from None
        if mapped is not None and _user_text(mapped["prompt"]) not in excluded:
            items.append(Item(str(index), "test", tuple(mapped["prompt"]), mapped["ground_truth"]))
    return items


def training_rows(path: str, exclude: str | None = None) -> list[dict[str, Any]]:
    """Return a file's rows as `prompt` and `ground_truth`. Chats of the file `exclude` are left out."""
    items = load_rlla_items(path, exclude=() if exclude is None else load_rlla_items(exclude))
    return [{"prompt": list(item.messages), "ground_truth": item.truth} for item in items]


def test_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return `prompt` (chat messages) and `ground_truth` of a row of the test or training split."""
    try:
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in row["prompt"]]
        truth = row["reward_model"]["ground_truth"]
    except (KeyError, TypeError) as error:
        expected = "`prompt` (messages with role and content) and `reward_model.ground_truth`"
        raise ValueError(f"expected {expected}, got {sorted(row)}: {error!r}") from None
    if not messages or not isinstance(truth, str):
        raise ValueError(f"prompt has {len(messages)} messages, ground_truth is {type(truth).__name__}")
    return {"prompt": messages, "ground_truth": truth}


def sft_row(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return `prompt` and `ground_truth` of an SFT row, or None if no answer follows a think block."""
    missing = [name for name in ("instruction", "input", "output") if not isinstance(row.get(name), str)]
    if missing:
        raise ValueError(f"expected the texts instruction, input and output, got no text as {missing}")
    _, think_end, answer = row["output"].rpartition("</think>")
    answer = answer.strip()
    if not think_end or not answer.startswith(("<tool_call>", "<response>")):
        return None
    think = TOOL_THINK if answer.startswith("<tool_call>") else RESPONSE_THINK
    messages = [{"role": "system", "content": row["instruction"]}, {"role": "user", "content": row["input"]}]
    return {"prompt": messages, "ground_truth": f"{think}\n{answer}"}


def _user_text(messages: Iterable[Message]) -> tuple[str, ...]:
    return tuple(message["content"] for message in messages if message["role"] != "system")
