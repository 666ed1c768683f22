"""Rows of a source to prompts and demonstrations as token ids, each loss of a row counted.

Imports neither torch nor transformers: the tokenizer is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, overload

import numpy as np

from smopd.data.chats import Chat, Content, row_content, row_text, tokenize_prompts
from smopd.data.sources import Row, checked_row, import_function, load_rows
from smopd.names import REWARD_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

Overlong: TypeAlias = Literal["drop", "truncate_left", "error"]

OVERLONG_CHOICES = ("drop", "truncate_left", "error")
RESERVED_COLUMNS = REWARD_ARGUMENTS


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    index: the row's number in its source, from 0.
    content: the source's text, or its chat messages.
    token_ids: what the model is given, the chat template's generation prompt included.
    columns: the row's other columns, for the rewards.
    """

    index: int
    content: Content
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class PromptSet(Sequence[Prompt]):
    """Prompts of one source, in its order, and what became of its rows."""

    prompts: tuple[Prompt, ...]
    source: str
    rows: int
    mapped_out: int
    dropped_overlong: int
    truncated: int

    def __len__(self) -> int:
        return len(self.prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...
    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        return self.prompts[index]


class Demonstration(NamedTuple):
    """A prompt and the answer to imitate; completion_ids ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True)
class DemonstrationSet(Sequence[Demonstration]):
    """Demonstrations of one source, in its order, and what became of its rows."""

    demonstrations: tuple[Demonstration, ...]
    source: str
    rows: int
    mapped_out: int
    dropped_overlong: int

    def __len__(self) -> int:
        return len(self.demonstrations)

    @overload
    def __getitem__(self, index: int) -> Demonstration: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Demonstration]: ...
    def __getitem__(self, index: int | slice) -> Demonstration | Sequence[Demonstration]:
        return self.demonstrations[index]


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str = "prompt",
    map: str | None = None,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    split: str | None = None,
    limit: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    chat: Chat = "auto",
    system: str | None = None,
) -> PromptSet:
    """Read a source's rows and tokenise their prompts.

    Args:
        source, split, limit, kwargs: as for `load_rows`.
        prompt_column: a text, which is one user message, or a list of chat messages {"role", "content"}.
        map: import path of a function row -> row, or None to leave the row out.
        max_prompt_tokens: the longest prompt, template included; None is no limit.
        overlong: "drop" and count, "truncate_left" to the last max_prompt_tokens and count, or "error".
        chat: apply the tokenizer's chat template; "auto" where it has one. Without, a prompt must be a text.
        system: a system message to put before prompts that are texts.
    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a prompt is absent, empty, of the wrong type or (overlong="error") too long; a column has
            one of the RESERVED_COLUMNS' names; the source has no rows, or none is left. Row numbers in
            messages count from 0.
    """
    if overlong not in OVERLONG_CHOICES:
        raise ValueError(
            f"load_prompts: overlong is {overlong!r}, expected one of {', '.join(OVERLONG_CHOICES)}"
        )
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise ValueError(
            f"load_prompts: max_prompt_tokens is {max_prompt_tokens}, expected at least 1 or None"
        )
    rows = load_rows(source, split=split, limit=limit, kwargs=kwargs)
    kept = list(_mapped(rows, source, map))
    contents = [row_content(row, prompt_column, source, index) for index, row in kept]
    columns = [_reward_columns(row, prompt_column, source, index) for index, row in kept]
    prompts: list[Prompt] = []
    dropped = truncated = 0
    tokenized = tokenize_prompts(contents, tokenizer, chat, system, source)
    for (index, _), content, own_columns, ids in zip(kept, contents, columns, tokenized, strict=True):
        if max_prompt_tokens is not None and len(ids) > max_prompt_tokens:
            if overlong == "error":
                raise ValueError(
                    f"{source}: row {index}: the prompt has {len(ids)} tokens, "
                    f"expected at most max_prompt_tokens = {max_prompt_tokens}"
                )
            if overlong == "drop":
                dropped += 1
                continue
            truncated += 1
            ids = ids[-max_prompt_tokens:]
        prompts.append(Prompt(index, content, tuple(ids), own_columns))
    found = PromptSet(tuple(prompts), source, len(rows), len(rows) - len(kept), dropped, truncated)
    _require_some(len(found), found.rows, found.mapped_out, dropped, max_prompt_tokens, source)
    return found


def load_demonstrations(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
    map: str | None = None,
    max_tokens: int | None = None,
    split: str | None = None,
    limit: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    chat: Chat = "auto",
    system: str | None = None,
) -> DemonstrationSet:
    """Read a source's rows and tokenise their prompts and completions.

    Args:
        completion_column: the answer's text; the end-of-sequence token is added.
        max_tokens: of prompt and completion together; longer rows are dropped and counted. None is no limit.
        The others as for `load_prompts`.
    Raises:
        FileNotFoundError: there is no such source.
        ValueError: as `load_prompts`, for both columns, or the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("load_demonstrations: tokenizer has no eos_token, expected one to end completions")
    rows = load_rows(source, split=split, limit=limit, kwargs=kwargs)
    kept = list(_mapped(rows, source, map))
    contents = [row_content(row, prompt_column, source, index) for index, row in kept]
    completions = [row_text(row, completion_column, source, index) for index, row in kept]
    prompts = tokenize_prompts(contents, tokenizer, chat, system, source)
    answers = tokenizer(completions, add_special_tokens=False)["input_ids"] if completions else []
    found = [
        Demonstration(tuple(prompt), (*answer, tokenizer.eos_token_id))
        for prompt, answer in zip(prompts, answers, strict=True)
        if max_tokens is None or len(prompt) + len(answer) + 1 <= max_tokens
    ]
    dropped = len(kept) - len(found)
    _require_some(len(found), len(rows), len(rows) - len(kept), dropped, max_tokens, source)
    return DemonstrationSet(tuple(found), source, len(rows), len(rows) - len(kept), dropped)


def batch_indices(n: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The prompts of one step, from nothing but the step's number: a resumed run asks again.

    Epochs are permutations of range(n) seeded by (seed, epoch), laid end to end and cut into batches, so
    every prompt comes once an epoch and no batch is short.

    Args:
        n: the number of prompts.
        batch_size: prompts a step; may exceed n.
        step: from 0.
    Raises:
        ValueError: n or batch_size is below 1, or step or seed below 0.
    """
    for name, value, least in (
        ("n", n, 1),
        ("batch_size", batch_size, 1),
        ("step", step, 0),
        ("seed", seed, 0),
    ):
        if value < least:
            raise ValueError(f"batch_indices: {name} is {value}, expected at least {least}")
    first = step * batch_size
    last = first + batch_size
    indices: list[int] = []
    for epoch in range(first // n, (last - 1) // n + 1):
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(n)
        start = epoch * n
        indices += order[max(first - start, 0) : last - start].tolist()
    return indices


def _mapped(rows: list[Row], source: str, map_path: str | None) -> Iterator[tuple[int, Row]]:
    function = import_function(map_path) if map_path else None
    for index, row in enumerate(rows):
        mapped = function(row) if function else row
        if mapped is not None:
            yield index, checked_row(mapped, f"{source} (after {map_path})" if function else source, index)


def _reward_columns(row: Row, prompt_column: str, source: str, index: int) -> Row:
    columns = {name: value for name, value in row.items() if name != prompt_column}
    for name in RESERVED_COLUMNS:
        if name in columns:
            raise ValueError(
                f"{source}: row {index}: column {name!r} has the name of an argument of every reward, "
                "expected another name (a map can rename it)"
            )
    return columns


def _require_some(
    left: int, rows: int, mapped_out: int, overlong: int, max_tokens: int | None, source: str
) -> None:
    if left:
        return
    if not rows:
        raise ValueError(f"{source}: the data set is empty")
    causes = []
    if mapped_out:
        causes.append(f"{mapped_out} left out by map")
    if overlong:
        causes.append(f"{overlong} of more than {max_tokens} tokens")
    raise ValueError(f"{source}: none of {rows} rows is left: {', '.join(causes)}")
