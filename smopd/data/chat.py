"""Convert chats to text with the tokenizer's chat template, and sampled tokens back to text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from smopd.engine.types import Rollout

Message: TypeAlias = "Mapping[str, Any]"
Content: TypeAlias = "str | tuple[Message, ...]"


def read_messages(value: Sequence[Any]) -> tuple[Message, ...]:
    """Validate chat messages, and return them without the None fields that Arrow adds.

    Raises:
        ValueError: a message has no role, its content is neither a string nor a list of text parts, or the
            last message is empty. A message with tool calls needs no content.
    """
    messages = []
    for number, given in enumerate(value):
        if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
            raise ValueError(f"message {number} is {str(given)[:60]!r}, expected an object with a role")
        message = {name: field for name, field in given.items() if field is not None}
        if message.get("tool_calls"):
            message.setdefault("content", None)
        elif not isinstance(message.get("content"), (str, list, tuple)):
            raise ValueError(f"message {number} is {str(given)[:60]!r}, expected texts role and content")
        for part in _parts(message):
            if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
                raise ValueError(f"message {number} has the part {str(part)[:60]!r}, expected parts of text")
        messages.append(message)
    if not messages or not (text_of(messages[-1]).strip() or messages[-1].get("tool_calls")):
        raise ValueError("the last message is empty, expected a text")
    return tuple(messages)


def read_tools(value: Any) -> list[Any] | None:
    """Return a row's tools as a list of JSON schemas, or None if there are none. JSON text is parsed."""
    with suppress(ValueError, RecursionError):
        tools = json.loads(value) if isinstance(value, str) and value.strip() else value
        if not tools:
            return None
        if isinstance(tools, (list, tuple)):
            tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools]
            if all(isinstance(tool, Mapping) for tool in tools):
                return tools
    raise ValueError(f"tools is {str(value)[:60]!r}, expected a list of JSON schemas, or its JSON text")


def text_of(message: Message) -> str:
    """Return a message's text, with parts joined by newlines."""
    content = message.get("content")
    return content if isinstance(content, str) else "\n".join(part["text"] for part in _parts(message))


def render(
    tokenizer: PreTrainedTokenizerBase,
    content: Content,
    tools: Sequence[Any] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a prompt up to where the response begins.

    If the last message is the assistant's, the response continues it. Otherwise, the text ends with the
    generation prompt.

    Args:
        options: further arguments of the chat template.
    Raises:
        ValueError: the chat needs a template and there is none, or the template fails.
    """
    if not tokenizer.chat_template:
        if not isinstance(content, str):
            raise ValueError("the prompt is chat messages, and the tokenizer has no chat template")
        return content
    chat = [{"role": "user", "content": content}] if isinstance(content, str) else [*map(dict, content)]
    continued = chat[-1]["role"] == "assistant"
    last = text_of(chat[-1]).split("\n") if chat[-1]["role"] == "user" else []
    shown, failure = [], None
    for form in _forms(chat):
        try:
            text: str = tokenizer.apply_chat_template(
                form,
                tools=tools,
                tokenize=False,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                **(options or {}),
            )
        except Exception as error:  # the template is code from the model, run in a sandbox
            failure = failure or error
            continue
        if any(str(part) in text for message in form for part in _parts(message)):
            continue  # the template prints parts as Python objects
        if all(line.strip() in text for line in last):
            return text
        shown += [text] if text else []
    if not shown:
        why = "it prints nothing, or parts as Python objects"
        if failure:
            why = f"{type(failure).__name__}: {failure}"
        raise ValueError(f"the tokenizer's chat template fails ({why})") from failure
    return shown[0]


def template_options(defaults: Mapping[str, Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template. A row's own arguments override `defaults`, as in TRL."""
    own = columns.get("chat_template_kwargs") or {}
    with suppress(ValueError, RecursionError):
        own = json.loads(own) if isinstance(own, str) else own
    if not isinstance(own, Mapping):
        raise ValueError(f"chat_template_kwargs is {str(own)[:60]!r}, expected an object, or its JSON text")
    return {**defaults, **own}


def response_start(
    tokenizer: PreTrainedTokenizerBase, content: Content, options: Mapping[str, Any] | None = None
) -> str:
    """Return the part of a response that its prompt already contains.

    This is an assistant message that ends the chat, or a tag such as `<think>` that the template opens. If
    the template also closes the tag, because thinking is turned off, it is not part of the response.
    """
    if not isinstance(content, str) and content[-1]["role"] == "assistant":
        return text_of(content[-1])
    return _template_start(tokenizer, tokenizer.chat_template, json.dumps(options or {}, default=str))


@lru_cache(maxsize=64)
def _template_start(tokenizer: PreTrainedTokenizerBase, template: str | None, options: str) -> str:
    """Return the text, such as `<think>`, that the chat template adds after the header of a response."""
    if not template:
        return ""
    asked, mark, further = {"role": "user", "content": "Q"}, "ANSWER", json.loads(options)
    try:
        prompt = render(tokenizer, (asked,), options=further)
        history = render(tokenizer, (asked, {"role": "assistant", "content": mark}, asked), options=further)
    except ValueError:  # the template refuses one of these chats
        return ""
    header, found, _ = history.partition(mark)
    start = prompt.removeprefix(header) if found and prompt.startswith(header) else ""
    return "" if "</" in start else start


def response_texts(
    tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[Rollout], *, special_tokens: bool = True
) -> list[str]:
    """Decode responses without their end tokens. With `special_tokens=False`, drop all special tokens."""
    special, ids = set(tokenizer.all_special_ids), []
    for rollout in rollouts:
        row = rollout.response_ids.tolist()
        ended = rollout.finished and row[-1:] and row[-1] in special
        ids.append(row[:-1] if ended else row)
    return tokenizer.batch_decode(ids, skip_special_tokens=not special_tokens) if ids else []


def _parts(message: Message) -> Sequence[Any]:
    content = message.get("content")
    return content if isinstance(content, (list, tuple)) else ()


def _forms(chat: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the chat as given, then with parts joined to texts or, if it has none, with texts as parts."""
    yield chat
    has_parts = any(_parts(message) for message in chat)
    other = []
    for message in chat:
        text = text_of(message)
        content = text if has_parts else [{"type": "text", "text": text}]
        other.append({**message, "content": content} if message.get("content") else message)
    yield other
