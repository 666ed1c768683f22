"""Rows of a source to prompts and demonstrations as token ids, each loss of a row counted.

Imports neither torch nor transformers: the tokenizer is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
Chat: TypeAlias = "bool | Literal['auto']"


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
    chat: Chat = "auto",
) -> PromptSet:
    """Read a source's rows and tokenise their prompts.

    Args:
        source, kwargs: as for `load_rows`.
        prompt_column: a text, which is one user message, or a list of chat messages {"role", "content"}.
        map: import path of a function row -> row, or None to leave the row out.
        max_prompt_tokens: the longest prompt, template included; None is no limit.
        overlong: "drop" and count, "truncate_left" to the last max_prompt_tokens and count, or "error".
        chat: apply the tokenizer's chat template; "auto" where it has one. Without, a prompt must be a text.
    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a prompt is absent, empty, of the wrong type or (overlong="error") too long; a column has
            the name of an argument of every reward; the source has no rows, or none is left. Row numbers in
            messages count from 0.
    """
    rows = load_rows(source, kwargs=kwargs)
    kept = list(_mapped(rows, source, map))
    contents = [row_content(row, prompt_column, source, index) for index, row in kept]
    columns = [_reward_columns(row, prompt_column, source, index) for index, row in kept]
    prompts: list[Prompt] = []
    dropped = truncated = 0
    tokenized = tokenize_prompts(contents, tokenizer, chat, source)
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
    found = RowSet(tuple(prompts), source, len(rows), len(rows) - len(kept), dropped, truncated)
    return _some(found, max_prompt_tokens)


def load_demonstrations(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str = "prompt",
    completion_column: str = "completion",
    map: str | None = None,
    max_tokens: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    chat: Chat = "auto",
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
    rows = load_rows(source, kwargs=kwargs)
    kept = list(_mapped(rows, source, map))
    contents = [row_content(row, prompt_column, source, index) for index, row in kept]
    completions = [_text(row, completion_column, source, index) for index, row in kept]
    prompts = tokenize_prompts(contents, tokenizer, chat, source)
    answers = tokenizer(completions, add_special_tokens=False)["input_ids"] if completions else []
    found = [
        Demonstration(tuple(prompt), (*answer, tokenizer.eos_token_id))
        for prompt, answer in zip(prompts, answers, strict=True)
        if max_tokens is None or len(prompt) + len(answer) + 1 <= max_tokens
    ]
    left_out = len(rows) - len(kept), len(kept) - len(found)
    return _some(RowSet(tuple(found), source, len(rows), *left_out), max_tokens)


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


def row_content(row: Row, column: str, source: str, index: int) -> Content:
    """The row's prompt: a text, or chat messages.

    Raises:
        ValueError: there is no such column, or it is empty or of another type; names source and row.
    """
    value, where = row.get(column), f"{source}: row {index}: column {column!r}"
    if not isinstance(value, (list, tuple)):
        return _text(row, column, source, index, "a text or a list of chat messages")
    for number, message in enumerate(value):
        fields = (
            [message.get(field) for field in ("role", "content")] if isinstance(message, Mapping) else [0]
        )
        if not all(isinstance(field, str) for field in fields):
            raise ValueError(
                f"{where}: message {number} is {str(message)[:60]!r}, expected texts role and content"
            )
        _whole("".join(map(str, fields)), f"{where}: message {number}")
    if not value or not value[-1]["content"].strip():
        raise ValueError(f"{where}: the last message is empty, expected a text")
    return tuple(value)


def tokenize_prompts(
    contents: Sequence[Content],
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    source: str,
) -> list[list[int]]:
    """Token ids of each prompt; the arguments are those of `load_prompts`.

    Raises:
        ValueError: a template is needed and absent, not applied to chat messages, or it fails.
    """
    templated = bool(getattr(tokenizer, "chat_template", None))
    if chat is True and not templated:
        raise ValueError(f"{source}: chat is true, and the tokenizer has no chat template")
    if not contents:
        return []
    if chat is False or not templated:
        if not all(isinstance(content, str) for content in contents):
            raise ValueError(f"{source}: prompts are chat messages, and no chat template is applied")
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


def _mapped(rows: list[Row], source: str, map_path: str | None) -> Iterator[tuple[int, Row]]:
    function = import_function(map_path) if map_path else None
    for index, row in enumerate(rows):
        mapped = function(row) if function else row
        if mapped is not None:
            yield index, checked_row(mapped, f"{source} (after {map_path})" if function else source, index)


def _reward_columns(row: Row, prompt_column: str, source: str, index: int) -> Row:
    columns = {name: value for name, value in row.items() if name != prompt_column}
    for name in REWARD_ARGUMENTS:
        if name in columns:
            raise ValueError(
                f"{source}: row {index}: column {name!r} has the name of an argument of every reward, "
                "expected another name (a map can rename it)"
            )
    return columns


def _text(row: Row, column: str, source: str, index: int, expected: str = "a text") -> str:
    if column not in row:
        raise ValueError(
            f"{source}: row {index} has no column {column!r}{nearest(column, row)}; "
            f"it has {', '.join(map(repr, row)) or 'none'}"
        )
    value = row[column]
    if isinstance(value, str) and value.strip():
        return _whole(value, f"{source}: row {index}: column {column!r}")
    got = repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
    raise ValueError(f"{source}: row {index}: column {column!r} is {got}, expected {expected}")


def _whole(text: str, where: str) -> str:
    """The text; ValueError where half of a UTF-16 pair stands in it, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has {text[error.start]!r} at {error.start}, half of a pair, expected whole characters"
        ) from error
    return text


def _some(found: RowSet[T], most_tokens: int | None) -> RowSet[T]:
    """The set; ValueError where it is empty, with the reasons."""
    if found:
        return found
    if not found.rows:
        raise ValueError(f"{found.source}: the data set is empty")
    causes = [f"{found.mapped_out} left out by map"] * bool(found.mapped_out)
    causes += [f"{found.dropped_overlong} of more than {most_tokens} tokens"] * bool(found.dropped_overlong)
    raise ValueError(f"{found.source}: none of {found.rows} rows is left: {', '.join(causes)}")
