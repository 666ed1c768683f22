"""Prompts and demonstrations, tokenized on access. Neither torch nor transformers is imported here."""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from smopd.data.chat import Content, read_messages, read_tools, render, response_start, template_options
from smopd.data.sources import Row, checked_row, open_rows
from smopd.engine.imports import resolve
from smopd.engine.process import STOP_SIGNALS, die_with_parent
from smopd.names import REWARD_ARGUMENTS, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
T = TypeVar("T")
Overlong: TypeAlias = Literal["drop", "truncate_left", "error"]

CHARS_PER_TOKEN = 64  # ours: a text with more characters per allowed token counts as too long
ASCII = "".join(map(chr, range(128)))
CHUNK_ROWS = 1024  # ours: rows tokenized at once
WORKER_ROWS = 50_000  # ours: reading fewer rows takes less time than starting a process
MAX_WORKERS = 16  # ours: one process cannot hash faster than so many workers read
_forked: list[Callable[[range], Checked]] = []
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # an object's address, which differs between processes


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    index: the row's number in its source, from 0.
    token_ids: input of the model, including the template's generation prompt.
    columns: the row's other columns, for the rewards.
    response_start: text of the response that the prompt already contains, such as `<think>`.
    """

    index: int
    content: Content
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any]
    response_start: str = ""


class Demonstration(NamedTuple):
    """A prompt and the response to imitate. `completion_ids` ends with the end-of-sequence token."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True)
class RowSet(Sequence[T]):
    """The prompts or demonstrations of a source, in order, and the number of rows left out.

    make: function that returns the item at an index. It is called at each access.
    columns: names of the columns that at least one row has.
    digest: SHA-256 of the prompts, as text, and of their columns, or empty if it was not computed.
    """

    size: int
    make: Callable[[int], T]
    rows: int
    mapped_out: int = 0
    dropped_overlong: int = 0
    truncated: int = 0
    columns: tuple[str, ...] = ()
    digest: str = ""

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        return self.make(index)


PromptSet: TypeAlias = RowSet[Prompt]
DemonstrationSet: TypeAlias = RowSet[Demonstration]


class Checked(NamedTuple):
    """Result of a check. `counts`: rows mapped out, dropped, truncated. `content`: what the digest covers."""

    kept: array[int]
    counts: tuple[int, int, int]
    columns: tuple[str, ...]
    content: bytes


@dataclass(frozen=True)
class Encoder:
    """Converts each row of a source into a prompt. The fields are arguments of `load_prompts`."""

    tokenizer: PreTrainedTokenizerBase
    source: str
    prompt_column: str
    max_prompt_tokens: int | None
    template_kwargs: Mapping[str, Any]
    overlong: Overlong = "drop"
    completion_column: str | None = None

    def check(self, rows: Sequence[Row | None], part: range) -> Checked:
        """Check the rows with indices in `part`. Raise ValueError as `load_prompts` does."""
        limit, kept, columns, content = self.max_prompt_tokens, array("q"), dict[str, None](), list[str]()
        read = ((index, rows[index]) for index in part)
        found = [(index, row) for index, row in read if row is not None]
        texts = [self.text(index, row) for index, row in found]
        dropped = truncated = 0
        for (index, row), text, count in zip(found, texts, self.counts(texts), strict=True):
            if limit is not None and count > limit:
                if self.overlong == "error":
                    least = "at least " * (len(text) > CHARS_PER_TOKEN * limit)
                    raise ValueError(
                        f"{self.source}: row {index}: the prompt has {least}{count} tokens, "
                        f"expected at most max_prompt_tokens = {limit}"
                    )
                if self.overlong == "drop":
                    dropped += 1
                    continue
                truncated += 1
            kept.append(index)
            columns |= dict.fromkeys(row)
            own = {name: _plain(row[name]) for name in row if name != self.prompt_column}
            content.append(_ADDRESS.sub("", repr((index, text, own))))
        joined = "".join(content).encode("utf-8", "surrogatepass")
        return Checked(kept, (len(part) - len(found), dropped, truncated), tuple(columns), joined)

    def text(self, index: int, row: Row) -> str:
        """Return the row's prompt as text. Raise ValueError, with source and row, if the row is invalid."""
        taken = [name for name in REWARD_ARGUMENTS if name in row and name != self.prompt_column]
        try:
            if self.completion_column is not None:
                _text(row, self.completion_column)
            elif taken:
                expected = "expected another name than an argument of rewards (a map can rename it)"
                raise ValueError(f"got the column {taken[0]!r}, {expected}")
            content, tools = row_content(row, self.prompt_column), read_tools(row.get("tools"))
            text = render(self.tokenizer, content, tools, template_options(self.template_kwargs, row))
            return _whole(text, self.prompt_column)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{self.source}: row {index}: {error}") from error

    def counts(self, texts: Sequence[str]) -> list[int]:
        """Return the token count of each text. It is estimated if it is surely within or over the limit."""
        limit = self.max_prompt_tokens
        if limit is None:
            return [0] * len(texts)
        found = [len(text) // CHARS_PER_TOKEN for text in texts]
        per_char = 1 if len(self.tokens([ASCII])[0]) <= len(ASCII) else 2  # 2: a capital may be two tokens
        open_ones = [
            i
            for i, text in enumerate(texts)
            if found[i] <= limit and not (text.isascii() and per_char * len(text) <= limit)
        ]
        if open_ones:
            for i, ids in zip(open_ones, self.tokens([texts[i] for i in open_ones]), strict=True):
                found[i] = len(ids)
        return found

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each prompt. Special tokens are added only if there is no chat template."""
        return self.tokenizer(list(texts), add_special_tokens=not self.tokenizer.chat_template)["input_ids"]

    def prompt(self, index: int, row: Row) -> Prompt:
        text, limit = self.text(index, row), self.max_prompt_tokens
        if limit is not None:
            text = text[-CHARS_PER_TOKEN * (limit + 1) :]
        ids = self.tokens([text])[0]
        content = row_content(row, self.prompt_column)
        start = response_start(self.tokenizer, content, template_options(self.template_kwargs, row))
        columns = {name: row[name] for name in row if name != self.prompt_column}
        return Prompt(index, content, tuple(ids if limit is None else ids[-limit:]), columns, start)


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompt_column: str = "prompt",
    map: str | None = None,
    max_prompt_tokens: int | None = None,
    overlong: Overlong = "drop",
    kwargs: Mapping[str, Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    completion_column: str | None = None,
    share: Callable[[Callable[[], Checked]], Checked] = lambda check: check(),
) -> PromptSet:
    """Check all rows of a source and return their prompts, which are tokenized on access.

    If a row has the columns `tools` or `chat_template_kwargs`, the chat template uses them.

    Args:
        source, kwargs: see `open_rows`.
        prompt_column: column with a text (used as one user message) or chat messages (a list or JSON text).
        map: import path of a function that returns a new row, or None to leave the row out. The new rows are
            kept in memory.
        max_prompt_tokens: maximum tokens, including the chat template, or None for no limit.
        overlong: what to do with longer prompts: "drop", "truncate_left" (keep the last tokens) or "error".
        chat_template_kwargs: further arguments of the chat template, such as {"enable_thinking": False}.
        completion_column: column with the responses of demonstrations, as text. Column names that are
            reserved for rewards are then allowed.
        share: runs the check of rows from files, for example on one rank of each host (see `on_rank0`).
    Raises:
        FileNotFoundError: there is no such source.
        ValueError: a row is invalid (or too long, with overlong="error"), a column has a reserved name, or no
            rows are left. Rows are numbered from 0.
    """
    options = chat_template_kwargs or {}
    encoder = Encoder(
        tokenizer, source, prompt_column, max_prompt_tokens, options, overlong, completion_column
    )
    rows: Sequence[Row | None] = open_rows(source, kwargs=kwargs)
    if map is not None:
        rows = _mapped(rows, source, map)
    check = partial(_check_all, encoder, rows)
    found = check() if isinstance(rows, list) else share(check)  # lists may differ between ranks
    if "tools" in found.columns and "tools" not in str(tokenizer.chat_template):
        log.warning("%s: rows have tools, which the tokenizer's chat template leaves out", source)

    def prompt(i: int) -> Prompt:
        return encoder.prompt(found.kept[i], rows[found.kept[i]] or {})

    names = tuple(name for name in found.columns if name != prompt_column)
    return RowSet(len(found.kept), prompt, len(rows), *found.counts, names, found.content.hex())


def _check_all(encoder: Encoder, rows: Sequence[Row | None]) -> Checked:
    """Check all rows. The result's `content` is the digest. Raise ValueError as `load_prompts` does."""
    kept, counts, columns, digest = array("q"), [0, 0, 0], dict[str, None](), hashlib.sha256()
    for checked in _in_chunks(partial(encoder.check, rows), len(rows)):
        kept.extend(checked.kept)
        counts = [*map(sum, zip(counts, checked.counts, strict=True))]
        columns |= dict.fromkeys(checked.columns)
        digest.update(checked.content)
    mapped_out, dropped, truncated = counts
    if not rows:
        raise ValueError(f"{encoder.source}: the data set is empty")
    if not kept:
        why = f"{mapped_out} left out by map"
        if dropped:
            why += f", {dropped} of more than {encoder.max_prompt_tokens} tokens"
        raise ValueError(f"{encoder.source}: no row of {len(rows)} is left: {why}")
    digest.update(repr(encoder.prompt(kept[0], rows[kept[0]] or {}).token_ids).encode())
    return Checked(kept, (mapped_out, dropped, truncated), tuple(columns), digest.digest())


def _in_chunks(check: Callable[[range], Checked], rows: int) -> Iterator[Checked]:
    """Yield the result for each CHUNK_ROWS rows, in order. Forked processes check many rows in parallel."""
    parts = [range(begin, min(begin + CHUNK_ROWS, rows)) for begin in range(0, rows, CHUNK_ROWS)]
    workers = min(os.cpu_count() or 1, rows // WORKER_ROWS, MAX_WORKERS)
    if workers < 2:
        yield from map(check, parts)
        return
    fork = multiprocessing.get_context("fork")  # so that `check` is not pickled
    with ProcessPoolExecutor(workers, fork, _begin_worker, (os.getpid(), check)) as pool:
        yield from pool.map(_check_forked, parts)


def _begin_worker(parent: int, check: Callable[[range], Checked]) -> None:
    _forked.append(check)
    for number in STOP_SIGNALS:  # the handlers of the parent must not run here
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)


def _check_forked(part: range) -> Checked:
    return _forked[0](part)


def load_demonstrations(
    source: str, tokenizer: PreTrainedTokenizerBase, *, completion_column: str = "completion", **options: Any
) -> DemonstrationSet:
    """Check all rows of a source and return their prompts with completions, tokenized on access.

    Args:
        completion_column: column with the response as text. The end-of-sequence token is appended.
        options: arguments of `load_prompts`.
    Raises:
        FileNotFoundError, ValueError: as in `load_prompts`, or the tokenizer has no end-of-sequence token.
    """
    if tokenizer.eos_token_id is None:
        raise ValueError("load_demonstrations: tokenizer has no eos_token, expected one to end completions")
    prompts = load_prompts(source, tokenizer, completion_column=completion_column, **options)

    def demonstration(i: int) -> Demonstration:
        prompt = prompts[i]
        ids = tokenizer(prompt.columns[completion_column], add_special_tokens=False)["input_ids"]
        return Demonstration(prompt.token_ids, (*ids, tokenizer.eos_token_id))

    return RowSet(**{**vars(prompts), "make": demonstration})


def batch_indices(n: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Return the indices of one step's prompts. They depend only on the arguments.

    Each epoch is a permutation of range(n), seeded by (seed, epoch). The epochs are concatenated and then cut
    into batches. Every prompt occurs once per epoch, and every batch has `batch_size` prompts.
    """
    first = step * batch_size
    last = first + batch_size
    indices: list[int] = []
    for epoch in range(first // n, (last - 1) // n + 1):
        order = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch]))).permutation(n)
        start = epoch * n
        indices += order[max(first - start, 0) : last - start].tolist()
    return indices


def row_content(row: Row, column: str) -> Content:
    """Return the row's prompt, which is a text or chat messages. Raise ValueError for anything else."""
    value = row.get(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _chat_in_json(value)
    if not isinstance(value, (list, tuple)):
        return _text(row, column, "a text or a list of chat messages")
    try:
        return read_messages(value)
    except ValueError as error:
        raise ValueError(f"column {column!r}: {error}") from None


def _chat_in_json(text: str) -> str | list[Any]:
    """Return the chat messages if `text` is JSON of chat messages, else `text`."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if found and all(isinstance(each, dict) and "role" in each for each in found) else text


def _mapped(rows: Sequence[Row | None], source: str, path: str) -> list[Row | None]:
    function, where = resolve(path, dict[str, Any]()), f"{source} (after {path})"
    found: list[Row | None] = []
    for index, row in enumerate(rows):
        made = function(row)
        # a copy, because the function may reuse the row or a list in it
        found.append(None if made is None else deepcopy(checked_row(made, where, index)))
    return found


def _plain(value: Any) -> Any:
    """Replace arrays and sets in `value` by lists: `repr` shortens arrays, and the order of sets varies."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    if type(value) is dict:
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(inner)) for inner in value)
    return value.tolist() if hasattr(value, "tolist") else value


def _text(row: Mapping[str, Any], column: str, expected: str = "a text") -> str:
    if column not in row:
        there = ", ".join(map(repr, row)) or "none"
        raise ValueError(f"no column {column!r}{nearest(column, row)}; there are {there}")
    value = row[column]
    if isinstance(value, str) and value.strip():
        return _whole(value, column)
    got = repr(value) if value is None or isinstance(value, str) else f"a {type(value).__name__}"
    raise ValueError(f"column {column!r} is {got}, expected {expected}")


def _whole(text: str, column: str) -> str:
    """Return the text. Raise ValueError if it has an unpaired surrogate, which tokenizers reject."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        got = f"column {column!r} has {text[error.start]!r} at {error.start}, half of a pair"
        raise ValueError(f"{got}, expected whole characters") from error
    return text
