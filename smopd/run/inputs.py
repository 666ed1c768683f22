"""The data of a recipe, read before training."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Settings, Source
from smopd.data.prompts import DemonstrationSet, Overlong, PromptSet, load_demonstrations, load_prompts
from smopd.engine import distributed
from smopd.record.progress import say
from smopd.run.failures import UnusableInput, error_context

ROWS = ("data.train", "data.evaluation", "warm_start.source")


class Inputs(NamedTuple):
    train: PromptSet
    held_out: PromptSet | None
    demonstrations: DemonstrationSet | None

    @property
    def digests(self) -> dict[str, str]:
        """Setting of a source -> digest of the source's rows."""
        return {setting: rows.digest for setting, rows in zip(ROWS, self, strict=True) if rows is not None}

    @property
    def columns(self) -> list[str]:
        """The columns that rewards receive in both training and evaluation."""
        held_out = self.train if self.held_out is None else self.held_out
        return [name for name in self.train.columns if name in held_out.columns]


def read_inputs(settings: Settings, tokenizer: PreTrainedTokenizerBase, *, demonstrations: bool) -> Inputs:
    """Read all sources. Raise UnusableInput if one is absent, empty or invalid. This is a collective call."""
    data, warm = settings.data, settings.warm_start
    template: dict[str, Any] = {"prompt_column": data.prompt_column}
    template["chat_template_kwargs"] = data.chat_template_kwargs
    template["share"] = partial(distributed.on_rank0, of_host=True)

    def prompts(source: Source, longest: int, overlong: Overlong) -> PromptSet:
        own = {**dict(source), **template, "max_prompt_tokens": longest, "overlong": overlong}
        return load_prompts(tokenizer=tokenizer, **own)

    with error_context("data.train"):
        train = prompts(data.train, data.max_prompt_tokens, data.overlong)
    held_out = demonstrated = None
    if data.evaluation is not None:
        with error_context("data.evaluation"):
            longest = data.max_evaluation_tokens or data.max_prompt_tokens
            # never drop an evaluation prompt
            cut: Overlong = "error" if data.overlong == "drop" else data.overlong
            held_out = prompts(data.evaluation, longest, cut)
    if warm is not None and demonstrations:
        with error_context("warm_start.source"):
            demonstrated = load_demonstrations(
                tokenizer=tokenizer, completion_column=warm.completion_column, **dict(warm.source), **template
            )
    return Inputs(train, held_out, demonstrated)


def require_same(found: Mapping[str, Any], advice: str) -> None:
    """Raise UnusableInput if a rank's values differ from rank 0's values. This is a collective call."""
    first, *others = distributed.gather_objects(dict(found))
    for rank, other in enumerate(others, 1):
        for name in sorted({*first, *other}):
            if (was := first.get(name)) != (here := other.get(name)):
                raise UnusableInput(f"{name}: rank 0 has {was!r:.80}, rank {rank} has {here!r:.80}; {advice}")


def log_inputs(inputs: Inputs) -> None:
    """Print how many rows of each source are used."""
    names = ("training prompts", "held-out prompts", "demonstrations")
    for name, found in zip(names, inputs, strict=True):
        if found is not None:
            left_out = f"{found.dropped_overlong} too long, {found.mapped_out} dropped by map"
            say(f"{len(found)} {name} of {found.rows} rows ({left_out}, {found.truncated} truncated)")
