"""Preference models as rewards: one sequence classifier a dimension, on its own chat template.

    rewards:
      - {name: helpful,  function: "smopd.rewards.preference_model:preference_reward", kwargs: {model: PATH}}
      - {name: harmless, function: "smopd.rewards.preference_model:preference_reward", kwargs: {model: PATH}}

Each reward's worker holds its model from the first call on: `scoring.deadline_seconds` must cover loading it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from smopd.engine.models.loading import load_tokenizer
from smopd.engine.preference import LocalPreferenceModel, RemotePreferenceModel

MAX_TOKENS = 2048  # SEMANTICS section 5; the official scripts' reward_model.max_length
BATCH_TOKENS = 16_384  # ours
TEMPLATE_SUFFIX = ".jinja"

log = logging.getLogger(__name__)

Chat = list[dict[str, str]]


def preference_reward(
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    completions: Sequence[str],
    *,
    model: str,
    sign: int = 1,
    template: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
    max_tokens: int = MAX_TOKENS,
    truncation_side: str = "left",
    device: str | None = None,
    url: str | None = None,
    **columns: Any,
) -> list[float | None]:
    """`sign` times the preference model's raw score of each prompt with its completion, an fp32 number.

    The score is the head's value at the last token of the chat in the model's own template, the completion as
    the last, assistant message. Of a longer chat the last `max_tokens` tokens are read (ours; the scripts
    under the paper read the first), and the log counts these. None where the template refuses a chat, or
    leaves no token of it.

    Args:
        prompts: a text, which is one user message, or chat messages.
        model: a folder or hub id of a sequence classifier with one output; with `url` only its tokenizer.
        sign: 1 where a higher score is better, -1 where lower is (the Beaver cost models).
        template: the model's chat template where its tokenizer has none or another: Jinja text, or the path
            of a .jinja file.
        batch_tokens: most tokens scored at once, padding counted. Scores do not depend on it but for
            rounding; equal chats have exactly equal scores.
        truncation_side: of a chat longer than `max_tokens`; "left" reads its end, "right" its beginning.
        device: such as "cuda:1"; None is the GPU of this rank where there is one, otherwise the CPU.
        url: `http://host:port` of a `vllm serve MODEL --runner pooling`, or several with commas.
        columns: unused.
    Raises:
        ValueError, FileNotFoundError: an argument or the model is not as said above, or the server answers
            otherwise; the template refuses every chat.
        NoServer: no server answers, after bounded retries.
    """
    if not isinstance(model, str) or not model:
        raise ValueError(f"preference_reward: model is {model!r}, expected a folder or hub id")
    if sign not in (1, -1):
        raise ValueError(f"preference_reward: sign is {sign!r}, expected 1 or -1")
    texts: dict[str, Any] = {"template": template, "device": device, "url": url}
    for name, text in texts.items():
        if not isinstance(text, str | None):
            kind = type(text).__name__
            raise ValueError(
                f"preference_reward: {name} is a {kind}; is it a column of the data? then set it in kwargs"
            )
    for name, count in (("batch_tokens", batch_tokens), ("max_tokens", max_tokens)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"preference_reward: {name} is {count!r}, expected a whole number of 1 or more")
    if truncation_side not in ("left", "right"):
        raise ValueError(
            f"preference_reward: truncation_side is {truncation_side!r}, expected 'left' or 'right'"
        )
    if len(prompts) != len(completions):
        raise ValueError(
            f"preference_reward: got {len(prompts)} prompts, expected {len(completions)} as completions"
        )
    chats = [
        _chat(prompt, text, i) for i, (prompt, text) in enumerate(zip(prompts, completions, strict=True))
    ]
    scorer = _scorer(model, device, url)
    if max_tokens > scorer.max_tokens:
        raise ValueError(
            f"preference_reward: max_tokens is {max_tokens}, expected at most the {scorer.max_tokens} that "
            f"{url or model} takes"
        )
    sequences = _encode(chats, _tokenizer(model, template), max_tokens, model, truncation_side)
    kept = [i for i, sequence in enumerate(sequences) if sequence]
    values: list[float | None] = [None] * len(chats)
    for i, value in zip(kept, scorer.score([sequences[i] for i in kept], batch_tokens), strict=True):
        values[i] = sign * value
    return values


def _chat(prompt: Any, completion: str, index: int) -> Chat:
    answer = {"role": "assistant", "content": completion}
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}, answer]
    if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        return [*(dict(message) for message in prompt), answer]
    raise ValueError(
        f"preference_reward: prompts[{index}] is {str(prompt)[:60]!r}, expected a text or chat messages"
    )


def _encode(
    chats: Sequence[Chat], tokenizer: PreTrainedTokenizerBase, max_tokens: int, model: str, side: str
) -> list[list[int]]:
    """Token ids of each chat, cut on the `side`; none where the template refuses it."""
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
        n, first = len(refusals), refusals[0]
        log.warning("%s: its template refuses %d of %d chats: %s", model, n, len(chats), first)
    sequences = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    cut = slice(-max_tokens, None) if side == "left" else slice(max_tokens)
    if overlong := sum(len(sequence) > max_tokens for sequence in sequences):
        read = "last" if side == "left" else "first"
        log.warning("%s: %d chats are cut to the %s %d tokens", model, overlong, read, max_tokens)
    return [sequence[cut] for sequence in sequences]


@cache
def _scorer(model: str, device: str | None, url: str | None) -> LocalPreferenceModel | RemotePreferenceModel:
    if url is not None:
        return RemotePreferenceModel(url.split(","))
    return LocalPreferenceModel(model, device)


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
        raise ValueError(
            f"preference_reward: the tokenizer of {model} has no chat template; expected one as `template`"
        )
    return tokenizer
