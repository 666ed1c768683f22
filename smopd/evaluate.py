"""`smopd evaluate SUITE --model PATH`, or `--responses FILE`: score a model or responses on a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro

from smopd.engine.imports import IMPORT_PATH, import_function
from smopd.evals.api_bank.suite import ApiBankEvaluation
from smopd.evals.bfcl.suite import Bfcl
from smopd.evals.responses import Response, given_responses, sampler, spread
from smopd.evals.results import COVERAGE, DRAWS, SEED, intervals, show, write_items, write_json
from smopd.evals.rlla import RllaEvaluation
from smopd.evals.safety import SafetyEvaluation
from smopd.evals.suite import Evaluation, Suite
from smopd.record.progress import say_error
from smopd.run.failures import MISTAKES

SUITES: dict[str, type[Evaluation]] = {
    "api_bank": ApiBankEvaluation,
    "bfcl": Bfcl,
    "rlla": RllaEvaluation,
    "safety": SafetyEvaluation,
}


def main(argv: list[str] | None = None) -> int:
    """Run the command. Invalid arguments or files give one line on stderr and exit status 2."""
    words = sys.argv[1:] if argv is None else argv
    with user_errors():
        own = {word: outside(word) for word in words[:1] if IMPORT_PATH.fullmatch(word)}
    command: Any = tyro.extras.subcommand_cli_from_dict(
        {**SUITES, **own},
        prog="smopd evaluate",
        description="Score a model, or saved responses; a suite of your own is package.module:Suite.",
        args=words,
    )
    with user_errors():
        command.check()
        whole = command.suite()
        if not whole.items:
            raise ValueError(f"{command.data_path}: no items")
        suite = whole if command.limit is None else whole.only(spread(_groups(whole), command.limit))
        sample = None
        if command.responses is None:
            answered = suite
            command.prepare(suite)
            sample = sampler(command, suite.items)
        else:
            answered, responses = given_responses(command.responses, suite, whole.items)
            command.prepare(answered)
    if sample is not None:
        responses = sample()
        write_items(command.output, suite, responses)  # saved even if scoring fails
    if left := len(suite.items) - len(answered.items):
        print(f"{left} of {len(suite.items)} items have no response and are skipped")
    evaluate(command, answered, responses, of=len(whole.items))
    return 0


def outside(path: str) -> type[Evaluation]:
    """Return the options of the suite class at an import path, which is called with --data if given."""
    make = import_function(path)

    @dataclass(frozen=True)
    class Outside(Evaluation):
        @property
        def data_path(self) -> Path:
            return self.data or Path(path)

        def suite(self) -> Suite:
            return make() if self.data is None else make(self.data)

    return Outside


def evaluate(command: Evaluation, suite: Suite, responses: Sequence[Response], *, of: int) -> None:
    """Score one response per item, write and show the result; `of` is the number of items in the data."""
    scores = suite.score([response.text for response in responses])
    groups = _groups(suite)
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
    written = write_json(command.output / f"{suite.name}.json", content)
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


def _groups(suite: Suite) -> list[str]:
    return [item.group for item in suite.items]


@contextmanager
def user_errors() -> Iterator[None]:
    """Turn MISTAKES into one line on stderr and exit status 2."""
    try:
        yield
    except MISTAKES as error:
        say_error(f"smopd.evaluate: {error}")
        sys.exit(2)


if __name__ == "__main__":
    sys.exit(main())
