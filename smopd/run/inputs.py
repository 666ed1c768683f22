"""All inputs of a recipe, read before anything is trained, with a line on what was left out of each."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Settings, Source
from smopd.data.places import is_short_name, located
from smopd.data.prompts import DemonstrationSet, Overlong, PromptSet, load_demonstrations, load_prompts
from smopd.record.progress import say
from smopd.run.failures import error_context

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object in memory, another one in each process


@dataclass(frozen=True)
class Inputs:
    train: PromptSet
    held_out: PromptSet | None
    demonstrations: DemonstrationSet | None


def read_inputs(settings: Settings, tokenizer: PreTrainedTokenizerBase, *, demonstrations: bool) -> Inputs:
    """Reads the recipe's sources.

    Args:
        demonstrations: whether the warm start is still to be done.
    Raises:
        UnusableInput: a source is missing, empty or malformed; names the setting, the row and the column.
    """
    data, warm = settings.data, settings.warm_start
    with error_context("data.train"):
        train = prompt_set(settings, data.train, tokenizer, data.overlong, data.max_prompt_tokens)
    held_out = None
    if data.evaluation is not None:
        with error_context("data.evaluation"):
            cut: Overlong = "truncate_left" if data.overlong == "truncate_left" else "error"
            longest = data.max_evaluation_tokens or data.max_prompt_tokens
            held_out = prompt_set(settings, data.evaluation, tokenizer, cut, longest)
    demonstrated = None
    if warm is not None and demonstrations:
        with error_context("warm_start.source"):
            demonstrated = load_demonstrations(
                warm.source.source,
                tokenizer,
                prompt_column=data.prompt_column,
                completion_column=warm.completion_column,
                map=warm.source.map,
                limit=warm.source.limit,
                kwargs=warm.source.kwargs,
                system=data.system,
            )
    return Inputs(train, held_out, demonstrated)


def digests(settings: Settings, inputs: Inputs) -> dict[str, str]:
    """SHA-256 by setting: of each source's rows as they are used, of the file of each reward's function."""
    found = {}
    sources: dict[str, Iterable | None] = {"data.train": inputs.train, "data.evaluation": inputs.held_out}
    sources["warm_start.source"] = inputs.demonstrations
    for setting, rows in sources.items():
        if rows is not None:
            digest = hashlib.sha256()
            for row in rows:
                text = _ADDRESS.sub("", repr(row))
                digest.update(text.encode("utf-8", "surrogatepass"))
            found[setting] = digest.hexdigest()
    for reward in settings.rewards:
        file = _file_of(reward.function.partition(":")[0])
        if file is not None:
            found[f"rewards.{reward.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _file_of(module: str) -> Path | None:
    """Where a module stands, without importing what is above it: a reward's code runs in its worker alone."""
    name, path, spec = "", None, None
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def require_data(settings: Settings) -> None:
    """Raises UnusableInput where what a short name of the recipe stands for is absent."""
    data, warm = settings.data, settings.warm_start
    sources = {"data.train": data.train, "data.evaluation": data.evaluation}
    sources["warm_start.source"] = warm.source if warm else None
    for setting, source in sources.items():
        if source is not None and is_short_name(source.source):
            with error_context(setting):
                located(source.source)


def prompt_set(
    settings: Settings,
    source: Source,
    tokenizer: PreTrainedTokenizerBase,
    overlong: Overlong,
    max_prompt_tokens: int,
) -> PromptSet:
    return load_prompts(
        source.source,
        tokenizer,
        prompt_column=settings.data.prompt_column,
        map=source.map,
        max_prompt_tokens=max_prompt_tokens,
        overlong=overlong,
        limit=source.limit,
        kwargs=source.kwargs,
        system=settings.data.system,
    )


def log_inputs(inputs: Inputs) -> None:
    """One line a source: how much of it is used, and what became of the rest."""
    for name, prompts in {"training prompts": inputs.train, "held-out prompts": inputs.held_out}.items():
        if prompts is not None:
            say(
                f"{len(prompts)} {name} of {prompts.rows} rows ({prompts.dropped_overlong} too long, "
                f"{prompts.truncated} truncated, {prompts.mapped_out} mapped out)"
            )
    shown = inputs.demonstrations
    if shown is not None:
        say(
            f"{len(shown)} demonstrations of {shown.rows} rows ({shown.dropped_overlong} too long, "
            f"{shown.mapped_out} mapped out)"
        )
