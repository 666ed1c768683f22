"""Preference models as rewards: one sequence classifier per dimension, with its own chat template.

    rewards:
      - {name: helpful,  function: "smopd.rewards.preference_model:preference_reward", kwargs: {model: PATH}}
      - {name: harmless, function: "smopd.rewards.preference_model:preference_reward", kwargs: {model: PATH}}

Each reward worker loads its model in the first call, which must end within `scoring.deadline_seconds`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from jinja2 import TemplateError
from pydantic import ConfigDict, Field, PositiveInt, validate_call
from transformers import PreTrainedTokenizerBase

from smopd.data.chat import text_of
from smopd.engine.models.loading import load_tokenizer
from smopd.engine.preference import LocalPreferenceModel, RemotePreferenceModel

MAX_TOKENS = 2048  # the official scripts' reward_model.max_length
BATCH_TOKENS = 16_384  # ours
TEMPLATE_SUFFIX = ".jinja"

log = logging.getLogger(__name__)
Chat = list[dict[str, Any]]


@validate_call(config=ConfigDict(strict=True))
def preference_reward(
    prompts: Any,
    completions: Any,
    *,
    model: Annotated[str, Field(min_length=1)],
    sign: Literal[1, -1] = 1,
    template: str | None = None,
    batch_tokens: PositiveInt = BATCH_TOKENS,
    max_tokens: PositiveInt = MAX_TOKENS,
    truncation_side: Literal["left", "right"] = "left",
    device: str | None = None,
    url: str | None = None,
    **columns: Any,
) -> list[float | None]:
    """Return `sign` times the raw fp32 score of each prompt with its completion.

    The completion is the last assistant message of the chat. The score is the head's value at the last token.
    If a chat has more than `max_tokens` tokens, it is truncated, and the log counts such chats. The score is
    None if the template refuses the chat or renders no token.

    Args:
        prompts: each is a text, used as one user message, or chat messages.
        model: folder or hub id of a sequence classifier with one output. `url` needs only its tokenizer.
        sign: 1 if higher scores are better, -1 if lower scores are better (the Beaver cost models).
        template: chat template that replaces the tokenizer's: Jinja text, or the path of a .jinja file.
        batch_tokens: maximum tokens per forward pass, with padding. Equal chats have exactly equal scores.
        truncation_side: "left" keeps the end of a long chat (ours), "right" its beginning (the paper's).
        device: for example "cuda:1". None means this rank's GPU if there is one, else the CPU.
        url: `http://host:port` of `vllm serve MODEL --runner pooling`, or several URLs, separated by commas.
    Raises:
        ValueError, FileNotFoundError, NoServer: an argument, the model or the server is unusable.
    """
    pairs = zip(prompts, completions, strict=True)
    chats = [_chat(prompt, text, i) for i, (prompt, text) in enumerate(pairs)]
    scorer = _scorer(model, device, url)
    if max_tokens > scorer.max_tokens:
        expected = f"at most {scorer.max_tokens}, the limit of {url or model}"
        raise ValueError(f"preference_reward: max_tokens is {max_tokens}, expected {expected}")
    sequences = _encode(chats, _tokenizer(model, template), max_tokens, model, truncation_side)
    kept = [i for i, sequence in enumerate(sequences) if sequence]
    values: list[float | None] = [None] * len(chats)
    for i, value in zip(kept, scorer.score([sequences[i] for i in kept], batch_tokens), strict=True):
        values[i] = sign * value
    return values


def _chat(prompt: Any, completion: str, index: int) -> Chat:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        got = f"prompts[{index}] is {str(prompt)[:60]!r}"
        raise ValueError(f"preference_reward: {got}, expected a text or chat messages")
    started = messages[-1]["role"] == "assistant"  # the completion begins with this message
    shown = [dict(message) for message in messages[: len(messages) - started]]
    for message in shown:
        if isinstance(message.get("content"), (list, tuple)):  # not every template supports parts
            message["content"] = text_of(message)
    return [*shown, {"role": "assistant", "content": completion}]


def _encode(
    chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, max_tokens: int, model: str, side: str
) -> list[list[int]]:
    """Return the token ids of each chat, truncated on `side`, or no ids if the template refuses the chat."""
    texts, refusals = [], []
    for chat in chats:
        try:
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
        except TemplateError as error:
            texts.append("")
            refusals.append(str(error))
    if refusals and len(refusals) == len(chats):
        raise ValueError(f"preference_reward: the template of {model} refuses every chat: {refusals[0]}")
    if refusals:
        counts = len(refusals), len(chats)
        log.warning("%s: its template refuses %d of %d chats: %s", model, *counts, refusals[0])
    sequences = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    cut = slice(-max_tokens, None) if side == "left" else slice(max_tokens)
    if overlong := sum(len(sequence) > max_tokens for sequence in sequences):
        kept = "last" if side == "left" else "first"
        log.warning("%s: %d chats are cut to the %s %d tokens", model, overlong, kept, max_tokens)
    return [sequence[cut] for sequence in sequences]


@cache
def _scorer(model: str, device: str | None, url: str | None) -> LocalPreferenceModel | RemotePreferenceModel:
    return LocalPreferenceModel(model, device) if url is None else RemotePreferenceModel(url.split(","))


@cache
def _tokenizer(model: str, template: str | None) -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(model)
    if template is not None and template.endswith(TEMPLATE_SUFFIX):
        path = Path(template).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"preference_reward: template {template}: no such file")
        template = path.read_text(encoding="utf-8")
    if template is not None:
        tokenizer.chat_template = template
    if not tokenizer.chat_template:
        text = f"the tokenizer of {model} has no chat template; expected one as `template`"
        raise ValueError(f"preference_reward: {text}")
    return tokenizer
