"""The evaluations' command: `python -m smopd.evaluate rlla --model PATH`, or `--responses FILE`.

Arguments and input files are checked before torch is imported. Every response is kept beside its scores.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from smopd.evals.rlla import RllaItem, RllaScores, load_rlla_items, score_responses
from smopd.files import write_atomically
from smopd.rewards.rlla import extract_response

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

GROUND_TRUTH = "ground-truth"
DATA_FOLDER_VARIABLE = "SMOPD_DATA"
DEFAULT_DATA_FOLDER = "../shared/data"
RLLA_TEST_FILE = "rlla/rlla_4k_test.parquet"
DATA_HINT = f"(default: {RLLA_TEST_FILE} in ${DATA_FOLDER_VARIABLE}, or in {DEFAULT_DATA_FOLDER})"


@dataclass(frozen=True)
class Response:
    """A response and whether it ended by itself; None where that is not known."""

    text: str
    finished: bool | None = None


@dataclass(frozen=True)
class Rlla:
    """Score a model, or saved responses, on the RLLA test items: accuracy (-3 to 3), format pass, their sum.

    Writes rlla.json (the scores) and rlla_items.jsonl (each response with its truth and rewards).
    """

    model: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A model's folder or hub id; one response to each item is sampled from it."""
    responses: Annotated[str | None, tyro.conf.arg(metavar="FILE|ground-truth")] = None
    """JSON lines with `response` (or `completion`), one for each item in order; or the items' own truth."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=DATA_HINT)] = None
    """The items: .parquet, .jsonl or .jsonl.gz."""
    output: Path = Path("runs/evaluate")
    """The folder to write into."""
    max_new_tokens: int = 1024
    """Longest response in tokens."""
    temperature: float = 0.0
    """Of the sampling; 0 is greedy, as in the paper."""
    seed: int = 0
    """Of the sampling."""

    @property
    def data_path(self) -> Path:
        folder = os.environ.get(DATA_FOLDER_VARIABLE, DEFAULT_DATA_FOLDER)
        return self.data or Path(folder) / RLLA_TEST_FILE


def read_inputs(command: Rlla) -> tuple[list[RllaItem], list[Response] | None]:
    """The items, and the responses where they are given rather than sampled.

    Raises:
        ValueError, FileNotFoundError: for every mistake in the arguments and the files.
    """
    if (command.model is None) == (command.responses is None):
        got = "none" if command.model is None else "both"
        raise ValueError(f"expected one of --model and --responses, got {got}")
    if command.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens is {command.max_new_tokens}, expected at least 1")
    if not 0.0 <= command.temperature < float("inf"):
        raise ValueError(f"--temperature is {command.temperature}, expected 0 or more")
    if command.output.exists() and not command.output.is_dir():
        raise ValueError(f"--output {command.output}: is no folder")
    items = load_rlla_items(command.data_path)
    if command.responses is None:
        model = str(command.model)
        if (model.startswith((".", "/", "~")) or model.count("/") > 1) and not Path(
            model
        ).expanduser().is_dir():
            raise FileNotFoundError(f"--model {model}: no such folder, expected one, or a hub id")
        return items, None
    if command.responses == GROUND_TRUTH:
        return items, [Response(item.ground_truth) for item in items]
    return items, read_responses(Path(command.responses), expected=len(items))


def evaluate_rlla(command: Rlla, items: Sequence[RllaItem], given: Sequence[Response]) -> RllaScores:
    """Score one response an item, write and show the result."""
    source: dict[str, Any] = {"data": str(command.data_path), "responses": command.responses}
    if command.model is not None:
        source = {
            "data": str(command.data_path),
            "model": command.model,
            "max_new_tokens": command.max_new_tokens,
            "temperature": command.temperature,
            "seed": command.seed,
            "truncated": sum(not response.finished for response in given),
        }
    scores = score_responses([response.text for response in given], [item.ground_truth for item in items])
    means = {
        "accuracy": scores.accuracy,
        "format_pass": scores.format_pass,
        "mean": scores.mean,
        "n": scores.n,
    }
    rows = [
        {
            "index": item.index,
            "response": response.text,
            "finished": response.finished,
            "ground_truth": item.ground_truth,
            "accuracy": accuracy,
            "format": form,
        }
        for item, response, accuracy, form in zip(
            items, given, scores.accuracies, scores.formats, strict=True
        )
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    write_atomically(command.output / "rlla_items.jsonl", lines.encode())
    write_atomically(
        command.output / "rlla.json", (json.dumps({**means, **source}, indent=2) + "\n").encode()
    )
    _show("RLLA", str(command.model or command.responses), means, source.get("truncated"))
    print(f"wrote {command.output / 'rlla.json'} and {command.output / 'rlla_items.jsonl'}")
    return scores


def load(model_path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on the GPU where there is one, and its tokenizer.

    Raises:
        ValueError, FileNotFoundError: there is no usable model, or its tokenizer has no chat template.
    """
    import torch

    from smopd.engine.models import load_model, load_tokenizer, stored_dtype

    tokenizer = load_tokenizer(model_path)
    if not tokenizer.chat_template:
        raise ValueError(
            f"--model {model_path}: its tokenizer has no chat template, expected one for the items"
        )
    if torch.cuda.is_available():
        return load_model(model_path, stored_dtype(model_path), "cuda"), tokenizer
    return load_model(model_path, torch.float32), tokenizer


def generate_responses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    chats: Sequence[Sequence[dict[str, str]]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
) -> list[Response]:
    """One response to each chat."""
    from smopd.engine.local import LocalRollout
    from smopd.engine.models import end_token_ids
    from smopd.engine.types import Sampling

    texts = tokenizer.apply_chat_template(
        [list(chat) for chat in chats], tokenize=False, add_generation_prompt=True
    )
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    engine = LocalRollout(model, end_token_ids(model, tokenizer))
    sampling = Sampling(n=1, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
    rollouts = engine.generate(prompts, range(len(prompts)), sampling)
    responses = [rollout.response_ids.tolist() for rollout in rollouts]
    decoded = tokenizer.batch_decode(responses, skip_special_tokens=True)
    return [Response(text, rollout.finished) for text, rollout in zip(decoded, rollouts, strict=True)]


def read_responses(path: Path, *, expected: int) -> list[Response]:
    """The responses of a file of JSON lines; decoded chats are cut to the response.

    Raises:
        FileNotFoundError, ValueError: no such file, an unreadable line, or another number of responses.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--responses {path}: no such file; expected JSON lines, or {GROUND_TRUTH!r}")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        text = row.get("response", row.get("completion")) if isinstance(row, dict) else None
        if not isinstance(text, str):
            keys = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"{path}: line {number}: expected a text as `response` or `completion`, got {keys}"
            )
        found.append(Response(extract_response(text)))
    if len(found) != expected:
        raise ValueError(f"{path}: expected {expected} responses, got {len(found)}")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; a mistake in the arguments or files is one line on standard error and exit code 2."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"rlla": Rlla},
        prog="python -m smopd.evaluate",
        description="Score a model, or saved responses.",
        args=argv,
    )
    try:
        items, given = read_inputs(command)
        policy = load(str(command.model)) if given is None else None
    except (ValueError, FileNotFoundError) as error:
        print(f"smopd.evaluate: {error}", file=sys.stderr)
        sys.exit(2)
    if policy is not None:
        given = generate_responses(
            *policy,
            [item.messages for item in items],
            max_new_tokens=command.max_new_tokens,
            temperature=command.temperature,
            seed=command.seed,
        )
    evaluate_rlla(command, items, given or [])


def _show(title: str, source: str, means: Mapping[str, float], truncated: int | None) -> None:
    table = Table(title=title)
    table.add_column("responses")
    cells = [
        f"{means['accuracy']:.4f}",
        f"{means['format_pass']:.4f}",
        f"{means['mean']:.4f}",
        str(means["n"]),
    ]
    columns = ["accuracy", "format pass", "mean", "n"]
    if truncated is not None:
        columns.append("truncated")
        cells.append(str(truncated))
    for column in columns:
        table.add_column(column, justify="right")
    table.add_row(source, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
