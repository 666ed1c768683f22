"""A row's prompt and answer, checked, and prompts to token ids through the chat template.

Imports neither torch nor transformers: the tokenizer is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from smopd.data.sources import Row
from smopd.names import nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Content: TypeAlias = "str | tuple[Mapping[str, str], ...]"
Chat: TypeAlias = "bool | Literal['auto']"


def row_content(row: Row, column: str, source: str, index: int) -> Content:
    """The row's prompt: a text, or chat messages.

    Raises:
        ValueError: there is no such column, or it is empty or of another type; names source and row.
    """
    value, where = _column(row, column, source, index), f"{source}: row {index}: column {column!r}"
    if isinstance(value, (list, tuple)) and value:
        return _checked_messages(value, where)
    if isinstance(value, str) and value.strip():
        return _whole(value, where)
    raise _unfit(value, column, source, index, "a text or a list of chat messages")


def row_text(row: Row, column: str, source: str, index: int) -> str:
    """The row's text in `column`; ValueError as for `row_content`."""
    value = _column(row, column, source, index)
    if isinstance(value, str) and value:
        return _whole(value, f"{source}: row {index}: column {column!r}")
    raise _unfit(value, column, source, index, "a text")


def tokenize_prompts(
    contents: Sequence[Content],
    tokenizer: PreTrainedTokenizerBase,
    chat: Chat,
    system: str | None,
    source: str,
) -> list[list[int]]:
    """Token ids of each prompt, with the template's generation prompt where `chat` applies it.

    Args:
        chat: "auto" applies the chat template where the tokenizer has one.
        system: a system message to put before prompts that are texts.
        source: for error messages.
    Raises:
        ValueError: a template is needed and absent, or not applied to chat messages.
    """
    templated = bool(getattr(tokenizer, "chat_template", None))
    if chat is True and not templated:
        raise ValueError(f"{source}: chat is true, and the tokenizer has no chat template")
    if not contents:
        return []
    if chat is False or not templated:
        if system is not None:
            raise ValueError(f"{source}: a system message needs the tokenizer's chat template")
        if not all(isinstance(content, str) for content in contents):
            raise ValueError(f"{source}: prompts are chat messages, and no chat template is applied")
        return tokenizer(list(contents))["input_ids"]
    conversations = [_messages(content, system) for content in contents]
    try:
        texts = tokenizer.apply_chat_template(conversations, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # the template is the model's code, in a sandbox
        raise ValueError(
            f"{source}: the tokenizer's chat template fails ({type(error).__name__}: {error})"
        ) from error
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _column(row: Row, column: str, source: str, index: int) -> Any:
    if column not in row:
        raise ValueError(
            f"{source}: row {index} has no column {column!r}{nearest(column, row)}; "
            f"it has {', '.join(map(repr, row)) or 'none'}"
        )
    return row[column]


def _unfit(value: Any, column: str, source: str, index: int, expected: str) -> ValueError:
    empty = value is None or isinstance(value, (str, list, tuple))
    got = repr(value) if empty and len(repr(value)) < 60 else f"a {type(value).__name__}"
    return ValueError(f"{source}: row {index}: column {column!r} is {got}, expected {expected}")


def _whole(text: str, where: str) -> str:
    """The text; ValueError where half of a UTF-16 pair stands in it, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{where} has {text[error.start]!r} at {error.start}, half of a pair, expected whole characters"
        ) from error
    return text


def _checked_messages(messages: Sequence[Any], where: str) -> tuple[Mapping[str, str], ...]:
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(field), str) for field in ("role", "content")
        ):
            raise ValueError(
                f"{where}: message {number} is {str(message)[:60]!r}, expected texts role and content"
            )
        _whole(message["role"] + message["content"], f"{where}: message {number}")
    if not messages[-1]["content"].strip():
        raise ValueError(f"{where}: the last message is empty, expected a text")
    return tuple(messages)


def _messages(content: Content, system: str | None) -> list[dict[str, str]]:
    if not isinstance(content, str):
        return [dict(message) for message in content]
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": content}]
