"""`smopd evaluate SUITE --model PATH` or `--responses FILE`: score a model or responses on a benchmark."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from smopd.engine.files import write_atomically
from smopd.engine.imports import IMPORT_PATH, resolve
from smopd.evals.api_bank.suite import ApiBankEvaluation
from smopd.evals.bfcl.suite import Bfcl
from smopd.evals.responses import Response, given_responses, sampler, spread
from smopd.evals.rlla import RllaEvaluation
from smopd.evals.safety import SafetyEvaluation
from smopd.evals.suite import Column, Evaluation, Scores, Suite
from smopd.run.failures import one_line

SUITES: dict[str, type[Evaluation]] = {
    "api_bank": ApiBankEvaluation,
    "bfcl": Bfcl,
    "rlla": RllaEvaluation,
    "safety": SafetyEvaluation,
}
DRAWS = 2_000  # bootstrap samples (our choice)
SEED = 0  # our choice: fixed, so that the same scores give the same intervals
COVERAGE = 0.95
ROW = ("key", "group", "response", "finished", "truth", "prompt_cut")  # all other entries of a row are scores


def main(argv: list[str] | None = None) -> int:
    """Run the command. For an invalid argument or file, print one line on stderr and exit with status 2."""
    words = sys.argv[1:] if argv is None else argv
    with one_line("smopd.evaluate"):
        own = {word: outside(word) for word in words[:1] if IMPORT_PATH.fullmatch(word)}
    about = "Score a model, or saved responses; a suite of your own is package.module:Suite."
    command: Any = tyro.extras.subcommand_cli_from_dict(
        {**SUITES, **own}, prog="smopd evaluate", description=about, args=words
    )
    with one_line("smopd.evaluate"):
        command.check()
        whole = command.suite()
        if not whole.items:
            raise ValueError(f"{command.data_path}: no items")
        groups = [item.group for item in whole.items]
        suite = whole if command.limit is None else whole.only(spread(groups, command.limit))
        sample = None
        if command.responses is None:
            answered = suite
            command.prepare(suite)
            sample = sampler(command, suite.items)
        else:
            answered, responses = given_responses(command.responses, suite, whole.items)
            own = command.output / f"{suite.name}_items.jsonl"
            same = own.resolve() == Path(command.responses).expanduser().resolve()
            if same and len(responses) < len(own.read_bytes().splitlines()):
                raise ValueError(f"--output: a part would replace all responses of {own}; give another")
            command.prepare(answered)
        command.output.mkdir(parents=True, exist_ok=True)
    if sample is not None:
        responses = sample()
        write_items(command.output, suite, responses)  # saved even if scoring fails
    if left := len(suite.items) - len(answered.items):
        print(f"{left} of {len(suite.items)} items have no response and are skipped")
    evaluate(command, answered, responses, of=len(whole.items))
    return 0


def outside(path: str) -> type[Evaluation]:
    """Return the options for a suite class at an import path. The class is called with --data if given."""
    make = resolve(path, dict[str, Any]())

    @dataclass(frozen=True)
    class Outside(Evaluation):
        @property
        def data_path(self) -> Path:
            return self.data or Path(path)

        def suite(self) -> Suite:
            found = make() if self.data is None else make(self.data)
            if not isinstance(getattr(found, "items", None), Sequence):
                raise ValueError(f"{path} returned {found!r:.60}, expected a suite with a list of items")
            return found

    return Outside


def evaluate(command: Evaluation, suite: Suite, responses: Sequence[Response], *, of: int) -> None:
    """Score one response per item. Write and show the result. `of` is the number of items in the data."""
    scores = suite.score([response.text for response in responses])
    groups = [item.group for item in suite.items]
    summary = suite.summary(groups, scores)
    counts = {"n": len(responses)}
    ends = [response.finished for response in responses]
    if None not in ends:
        counts["truncated"] = ends.count(False)
    content: dict[str, Any] = {"suite": suite.name, **counts}
    content["bootstrap"] = {"draws": DRAWS, "seed": SEED, "coverage": COVERAGE}
    content["intervals"] = intervals(suite, groups, scores)
    content["data"] = str(command.data_path)
    cut = sum(response.prompt_cut for response in responses)
    if command.model is None:
        content["responses"] = command.responses
    else:
        names = ("model", "engine", "max_new_tokens", "max_prompt_tokens", "temperature", "seed")
        content |= {name: getattr(command, name) for name in names} | {"prompts_cut": cut}
    if len(responses) < of:
        content["subset"] = {"items": len(responses), "of": of}
    content |= command.settings(suite)
    if command.compare:
        content["paper"] = suite.paper()
    if clash := content.keys() & summary.keys():
        raise KeyError(f"{suite.name}: summary has the reserved names {sorted(clash)}")
    content |= summary
    items = write_items(command.output, suite, responses, scores)
    written = command.output / f"{suite.name}.json"
    write_atomically(written, (json.dumps(content, indent=2) + "\n").encode())
    show(suite, _title(command, suite, of), str(command.model or command.responses), content, counts)
    if cut:
        print(f"{cut} prompts were cut to their last {command.max_prompt_tokens} tokens")
    for note in command.notes(suite, summary):
        print(note)
    print(f"wrote {written} and {items}")


def _title(command: Evaluation, suite: Suite, of: int) -> str:
    """Return the suite's title, with the data file and the number of items if they are not the default."""
    title = suite.title
    if command.data is not None and command.data_path.is_file():
        title += f", {command.data_path.name}"
    return title if len(suite.items) == of else f"{title}, {len(suite.items)} of {of} items"


def intervals(suite: Suite, groups: Sequence[str], scores: Sequence[Scores]) -> dict[str, list[float]]:
    """Return each column's percentile bootstrap interval. Items are resampled within their group."""
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        rows.setdefault(group, []).append(row)
    blocks = [np.array(block) for block in rows.values()]
    drawn_groups = [group for group, block in rows.items() for _ in block]
    generator = np.random.default_rng(SEED)
    values: dict[str, list[float]] = {column.key: [] for column in suite.columns}
    for _ in range(DRAWS):
        picked = np.concatenate([block[generator.integers(block.size, size=block.size)] for block in blocks])
        drawn = suite.summary(drawn_groups, [scores[row] for row in picked.tolist()])
        for key, kept in values.items():
            value = drawn.get(key)
            if value is not None and math.isfinite(value):
                kept.append(value)
    tails = [50 * (1 - COVERAGE), 50 * (1 + COVERAGE)]
    return {key: np.percentile(kept, tails).tolist() for key, kept in values.items() if kept}


def write_items(
    output: Path, suite: Suite, responses: Sequence[Response], scores: Sequence[Scores] | None = None
) -> Path:
    """Write every response, with its scores if given. Return the path of the file."""
    lines = []
    for i, (item, response) in enumerate(zip(suite.items, responses, strict=True)):
        row: dict[str, Any] = {"key": item.key, "group": item.group, "response": response.text}
        row |= {"finished": response.finished, "truth": item.truth}
        if response.prompt_cut:
            row["prompt_cut"] = True
        if scores is not None:
            if clash := set(ROW) & scores[i].keys():
                raise KeyError(f"{suite.name}: scores named {sorted(clash)}, expected names other than {ROW}")
            row |= scores[i]
        lines.append(json.dumps(row) + "\n")
    path = output / f"{suite.name}_items.jsonl"
    write_atomically(path, "".join(lines).encode())
    return path


def show(suite: Suite, title: str, label: str, content: Mapping[str, Any], counts: Mapping[str, int]) -> None:
    """Print a table with the paper's rows, if given, and one row of values with intervals and `counts`."""
    table = Table("responses", title=Text(title))
    for column in suite.columns:
        table.add_column(Text(column.heading), justify="right", no_wrap=True)
    for heading in counts:
        table.add_column(heading, justify="right")
    for name, row in content.get("paper", {}).items():
        cells = [_cell(column, row.get(column.key)) for column in suite.columns]
        table.add_row(Text(f"paper: {name}"), *cells)
    table.add_section()
    found = content["intervals"]
    cells = [_cell(column, content.get(column.key), found.get(column.key)) for column in suite.columns]
    table.add_row(Text(label), *cells, *map(str, counts.values()))
    console = Console()
    if not console.is_terminal:  # give the table its full width
        wide = Console(width=10_000)
        console = Console(width=max(console.width, wide.measure(table).maximum))
    console.print(table)


def _cell(column: Column, value: float | None, interval: Sequence[float] | None = None) -> Text:
    if value is None:
        return Text("-")
    text = f"{value * column.scale:.{column.digits}f}"
    if interval is not None:
        low, high = (f"{end * column.scale:.{column.digits}f}" for end in interval)
        text += f"\n[{low}, {high}]"
    return Text(text)


if __name__ == "__main__":
    sys.exit(main())
