"""What every suite's command takes; a suite adds a dataclass of its own options that builds it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from smopd.data.places import VARIABLE, how_to_fetch, located, model_place
from smopd.evals.suite import Suite

GROUND_TRUTH = "ground-truth"
DATA_HINT = f"(default: the suite's own in ${VARIABLE} or the user's cache; python -m smopd.data)"


@dataclass(frozen=True)
class Evaluation:
    """Base of the suites' options. A subclass names its data, builds its suite and may say more of a run."""

    default_data: ClassVar[str]
    """Of `data`, a short name."""

    model: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A model's folder, short name or hub id; one response to each item is sampled from it."""
    responses: Annotated[str | None, tyro.conf.arg(metavar="FILE|ground-truth")] = None
    """JSON lines with `response` (or `completion`), one for each item in order, or in any order with the
    items' `key`, as SUITE_items.jsonl has them; or the items' own truth."""
    engine: Literal["local", "vllm"] = "local"
    """What samples from the model."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=DATA_HINT)] = None
    """The items: their folder or one of its files, or the short name of either."""
    limit: int | None = None
    """So many of the items alone, evenly spread, each group by its share: the same ones every time."""
    output: Path = Path("runs/evaluate")
    """The folder to write into."""
    max_new_tokens: int = 1024
    """Longest response in tokens."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens; of longer ones the end is kept, and they are counted. None is no limit."""
    temperature: float = 0.0
    """Of the sampling; 0 is greedy, as in the paper."""
    seed: int = 0
    """Of the sampling."""
    compare: bool = False
    """Show the paper's rows too."""

    @property
    def data_path(self) -> Path:
        """Where the items are; FileNotFoundError where a short name's are absent."""
        return located(self.data or self.default_data)

    @property
    def model_path(self) -> str:
        """Where the model is; FileNotFoundError where a short name's is absent."""
        return model_place(str(self.model))

    def suite(self) -> Suite:
        """The suite with its items.

        Raises:
            ValueError, FileNotFoundError: for every mistake in the suite's own options and its data.
        """
        raise NotImplementedError

    def prepare(self, suite: Any) -> None:
        """Loads what the scoring needs, before anything is sampled.

        Raises:
            ValueError, FileNotFoundError: it cannot be used.
        """

    def settings(self, suite: Any) -> dict[str, Any]:
        """More to keep of a run, by names of its own: settings of the suite, what scoring cost."""
        return {}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        """Lines to print below the table."""
        return []

    def check(self) -> None:
        """Raises ValueError or FileNotFoundError for a mistake in the options that all suites have."""
        if (self.model is None) == (self.responses is None):
            got = "none" if self.model is None else "both"
            raise ValueError(f"expected one of --model and --responses, got {got}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit is {self.limit}, expected at least 1, or None")
        if self.max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens is {self.max_new_tokens}, expected at least 1")
        if self.max_prompt_tokens is not None and self.max_prompt_tokens < 1:
            raise ValueError(f"--max-prompt-tokens is {self.max_prompt_tokens}, expected at least 1, or None")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature is {self.temperature}, expected 0 or more")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"--output {self.output}: is no folder")
        if self.model is None:
            return
        looks_local = self.model.startswith((".", "/", "~")) or self.model.count("/") > 1
        if looks_local and not Path(self.model).expanduser().is_dir():
            raise FileNotFoundError(f"--model {self.model}: no such folder, expected one, or a hub id")
        if self.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ValueError("--engine vllm: vllm is not installed, expected it, or --engine local")


def group_files(data: Path, names: Mapping[str, str], what: str) -> dict[str, Path]:
    """Group -> its file, of all groups in a folder, or of the one whose file is given.

    Args:
        names: group -> name of its file.
        what: for error messages, such as "API-Bank data".
    Raises:
        FileNotFoundError, ValueError: a file is absent, or is none of these.
    """
    if data.is_file():
        group = {name: group for group, name in names.items()}.get(data.name)
        if group is None:
            raise ValueError(f"{what} {data}: expected a folder, or one of {', '.join(names.values())}")
        return {group: data}
    found = {group: data / name for group, name in names.items()}
    for path in found.values():
        if not path.is_file():
            raise FileNotFoundError(
                f"{what} {path}: no such file, expected {', '.join(names.values())}{how_to_fetch(path)}"
            )
    return found
