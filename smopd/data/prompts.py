"""Rows of a source to prompts and demonstrations as token ids. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np

from smopd.data.sources import Row, checked_row, load_rows
from smopd.engine.imports import import_function
from smopd.names import REWARD_ARGUMENTS, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Overlong: TypeAlias = Literal["drop", "truncate_left", "error"]
Content: TypeAlias = "str | tuple[Mapping[str, str], ...]"


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    index: the row's number in its source, from 0.
    token_ids: what the model is given, the chat template's generation prompt included.
    columns: the row's other columns, for the rewards.
    """

    index: int
    content: Content
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]


class Demonstration(NamedTuple):
    """A prompt and the answer to imitate; completion_ids ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True)
class RowSet(Sequence[T]):
    """What was made of one source's rows, in its order, and what became of the others."""

    items: tuple[T, ...]
    source: str
    rows: int
    mapped_out: int = 0
    dropped_overlong: int = 0
    truncated: int = 0

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.items[index]


PromptSet: TypeAlias = RowSet[Prompt]
DemonstrationSet: TypeAlias = RowSet[Demonstration]


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str = "prompt",
    map: str | None = None,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    kwargs: Mapping[str, Any] | None = None,
    reserved: Sequence[str] = REWARD_ARGUMENTS,
) -> PromptSet:
    """Read a source's rows and tokenise their prompts, with the tokenizer's chat template where it has one.

    Args:
        source, kwargs: as for `load_rows`.
        prompt_column: a text, which is one user message, or a list of chat messages {"role", "content"},
            which needs a chat template.
        map: import path of a function row -> row, or None to leave the row out.
        max_prompt_tokens: the longest prompt, template included; None is no limit.
        overlong: "drop" and count, "truncate_left" to the last max_prompt_tokens and count, or "error".
        reserved: what no other column may be called.
    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a prompt is absent, empty, of the wrong type or (overlong="error") too long; a column has
            a reserved name; the source has no rows, or none is left. Row numbers count from 0.
    """
    rows = load_rows(source, kwargs=kwargs)
    kept = _mapped(rows, source, map)
    contents = [row_content(row, prompt_column, source, index) for index, row in kept]
    columns = [{name: row[name] for name in row if name != prompt_column} for _, row in kept]
    for (index, _), own in zip(kept, columns, strict=True):
        if taken := [name for name in reserved if name in own]:
            raise ValueError(
                f"{source}: row {index}: column {taken[0]!r} has the name of an argument of every reward, "
                "expected another name (a map can rename it)"
            )
    prompts: list[Prompt] = []
    dropped = truncated = 0
    tokenized = tokenize_prompts(contents, tokenizer, source)
    for (index, _), content, own, ids in zip(kept, contents, columns, tokenized, strict=True):
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
        prompts.append(Prompt(index, content, tuple(ids), own))
    mapped_out = len(rows) - len(kept)
    if not prompts:
        raise ValueError(
            f"{source}: none of {len(rows)} rows is left: {mapped_out} left out by map, "
            f"{dropped} of more than {max_prompt_tokens} tokens"
        )
    return RowSet(tuple(prompts), source, len(rows), mapped_out, dropped, truncated)


def load_demonstrations(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    completion_column: str = "completion",
    **options: Any,
) -> DemonstrationSet:
    """Read a source's rows and tokenise their prompts and completions.

    Args:
        completion_column: the answer's text; the end-of-sequence token is added.
        options: of `load_prompts`.
    Raises:
        FileNotFoundError, ValueError: as `load_prompts`, for both columns; or the tokenizer has no
            end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("load_demonstrations: tokenizer has no eos_token, expected one to end completions")
    prompts = load_prompts(source, tokenizer, reserved=(), **options)
    completions = [_text(prompt.columns, completion_column, source, prompt.index) for prompt in prompts]
    answers = tokenizer(completions, add_special_tokens=False)["input_ids"]
    found = [
        Demonstration(prompt.token_ids, (*answer, tokenizer.eos_token_id))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    return RowSet(tuple(found), source, prompts.rows, prompts.mapped_out, prompts.dropped_overlong)


def batch_indices(n: int, batch_size: int, step: int, seed: int) -> list[int]:
    """The prompts of one step (from 0), from nothing but the step's number: a resumed run asks again.

    Epochs are permutations of range(n) seeded by (seed, epoch), laid end to end and cut into batches, so
    every prompt comes once an epoch and no batch is short.
    """
    first = step * batch_size
    last = first + batch_size
    indices: list[int] = []
    for epoch in range(first // n, (last - 1) // n + 1):
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(n)
        start = epoch * n
        indices += order[max(first - start, 0) : last - start].tolist()
    return indices


def row_content(row: Row, column: str, source: str, index: int) -> Content:
    """The row's prompt: a text, or chat messages; ValueError names source, row and what is wrong."""
    value, where = row.get(column), f"{source}: row {index}: column {column!r}"
    if not isinstance(value, (list, tuple)):
        return _text(row, column, source, index, "a text or a list of chat messages")
    for number, message in enumerate(value):
        found = message if isinstance(message, Mapping) else {}
        if not all(isinstance(found.get(field), str) for field in ("role", "content")):
            raise ValueError(
                f"{where}: message {number} is {str(message)[:60]!r}, expected texts role and content"
            )
        _whole(found["role"] + found["content"], f"{where}: message {number}")
    if not value or not value[-1]["content"].strip():
        raise ValueError(f"{where}: the last message is empty, expected a text")
    return tuple(value)


def tokenize_prompts(
    contents: Sequence[Content], tokenizer: PreTrainedTokenizerBase, source: str
) -> list[list[int]]:
    """Token ids of each prompt; ValueError where a chat template is needed and absent, or fails."""
    if not tokenizer.chat_template:
        if not all(isinstance(content, str) for content in contents):
            raise ValueError(f"{source}: prompts are chat messages, and the tokenizer has no chat template")
        return tokenizer(list(contents))["input_ids"]
    chats = [
        [{"role": "user", "content": content}] if isinstance(content, str) else [*map(dict, content)]
        for content in contents
    ]
    try:
        texts = tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the template is the model's code, in a sandbox
        raise ValueError(
            f"{source}: the tokenizer's chat template fails ({type(error).__name__}: {error})"
        ) from error
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _mapped(rows: list[Row], source: str, map_path: str | None) -> list[tuple[int, Row]]:
    """The rows that `map` keeps, with their numbers; ValueError where there is none."""
    if not rows:
        raise ValueError(f"{source}: the data set is empty")
    if map_path is None:
        return list(enumerate(rows))
    function, where = import_function(map_path), f"{source} (after {map_path})"
    mapped = [(index, function(row)) for index, row in enumerate(rows)]
    kept = [(index, checked_row(row, where, index)) for index, row in mapped if row is not None]
    if not kept:
        raise ValueError(f"{source}: none of {len(rows)} rows is left: {len(rows)} left out by map")
    return kept


def _text(row: Mapping[str, Any], column: str, source: str, index: int, expected: str = "a text") -> str:
    if column not in row:
        there = ", ".join(map(repr, row)) or "none"
        raise ValueError(
            f"{source}: row {index} has no column {column!r}{nearest(column, row)}; it has {there}"
        )
    value, where = row[column], f"{source}: row {index}: column {column!r}"
    if isinstance(value, str) and value.strip():
        return _whole(value, where)
    got = repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
    raise ValueError(f"{where} is {got}, expected {expected}")


def _whole(text: str, where: str) -> str:
    """The text; ValueError where half of a UTF-16 pair stands in it, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has {text[error.start]!r} at {error.start}, half of a pair, expected whole characters"
        ) from error
    return text
