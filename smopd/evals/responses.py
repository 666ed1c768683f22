"""The responses that a suite scores: from a file, from the ground truth, or sampled from a model."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from smopd.data.chat import response_start, response_texts
from smopd.data.prompts import Encoder
from smopd.data.sources import JsonLines
from smopd.evals.suite import GROUND_TRUTH, Evaluation, Item, Suite
from smopd.rewards.rlla import MAX_JSON_DEPTH, extract_response, json_depth

if TYPE_CHECKING:
    from smopd.engine.protocols import RolloutEngine

TEXTS = ("response", "completion", "result")  # bfcl-eval's files use `result` and `id`
GPU_SHARE = 0.9  # ours: nothing else uses the GPU


class Response(NamedTuple):
    """A response. `finished` says whether it ended with an end token, and is None if unknown."""

    text: str
    finished: bool | None = None
    prompt_cut: bool = False


def spread(groups: Sequence[str], limit: int) -> list[int]:
    """Return ascending indices of at most `limit` items. Raise ValueError if there are more groups than that.

    `groups` has one label per item. The number of items of each group is proportional to its size
    (Sainte-Lague), but at least one. The chosen items of a group are evenly spaced.
    """
    members: dict[str, list[int]] = defaultdict(list)
    for index, group in enumerate(groups):
        members[group].append(index)
    if limit < len(members):
        raise ValueError(f"--limit is {limit}, expected at least {len(members)}, one item of each group")
    seats = sorted(
        (rank > 0, (2 * rank + 1) / len(found), group)
        for group, found in members.items()
        for rank in range(len(found))
    )
    chosen: list[int] = []
    for group, count in Counter(group for *_, group in seats[:limit]).items():
        found = members[group]
        chosen += [found[(2 * i + 1) * len(found) // (2 * count)] for i in range(count)]
    return sorted(chosen)


def given_responses(given: str, suite: Suite, whole: Sequence[Item]) -> tuple[Suite, list[Response]]:
    """Return the suite without the items that have no response in `given` (--responses), and the responses.

    Lines with a `key` (or `id`) may be in any order and may leave out items. Lines without keys must answer
    all items of `whole`, the suite before --limit, in order. A decoded chat is cut to its response.
    """
    if given == GROUND_TRUTH:
        truths = suite.truths()
        if truths is None:
            raise ValueError(f"--responses {GROUND_TRUTH}: {suite.name} has no ground truth, expected a file")
        return suite, [Response(truth) for truth in truths]
    path = Path(given).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"--responses {path}: no such file; expected JSON lines, or {GROUND_TRUTH!r}")
    found, keys = [], []
    for number, row in enumerate(JsonLines([path])):
        text = next((row[name] for name in TEXTS if name in row), None)
        if not isinstance(text, str):
            expected = f"a string {' or '.join(TEXTS)}"
            raise ValueError(f"{path}: row {number}: expected {expected}, got {sorted(row)}")
        found.append(Response(extract_response(text), row.get("finished")))
        key = row.get("key", row.get("id"))
        keys.append(str(key) if "key" in row and isinstance(key, int) else key)
    if not keys or not all(isinstance(key, str) for key in keys):
        if len(found) != len(whole):
            expected = f"{len(whole)} responses or a `key` on every line"
            raise ValueError(f"{path}: expected {expected}, got {len(found)} lines")
        keys = [item.key for item in whole]
    by_key = dict(zip(keys, found, strict=True))
    if len(by_key) < len(keys):
        raise ValueError(f"{path}: expected each key once, got {len(keys) - len(by_key)} repeated")
    if unknown := by_key.keys() - {item.key for item in whole}:
        first = min(map(str, unknown))
        raise ValueError(f"{path}: {len(unknown)} keys are not in the suite, first {first!r}")
    chosen = [i for i, item in enumerate(suite.items) if item.key in by_key]
    if not chosen:
        raise ValueError(f"{path}: has no response to any of the {len(suite.items)} items")
    part = suite if len(chosen) == len(suite.items) else suite.only(chosen)
    return part, [by_key[item.key] for item in part.items]


def read_json(text: str) -> Any:
    """Parse a model's text as JSON. Return None if it is invalid or nested deeper than MAX_JSON_DEPTH."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse) if json_depth(text) <= MAX_JSON_DEPTH else None
    except (ValueError, RecursionError):
        return None


def is_call(value: Any) -> bool:
    """Return whether a JSON value is an object whose `name` is a string and `parameters` an object."""
    if not isinstance(value, dict):
        return False
    return isinstance(value.get("name"), str) and isinstance(value.get("parameters"), dict)


def sampler(command: Evaluation, items: Sequence[Item]) -> Callable[[], list[Response]]:
    """Load the command's model. Return a function that samples one response to each item, in order."""
    from smopd.engine.models.loading import describe, load_tokenizer
    from smopd.engine.types import Sampling

    path = str(command.model)
    tokenizer = load_tokenizer(path)
    config, end_ids = describe(path, tokenizer)
    chats = [tuple(item.messages) for item in items]
    encoder = Encoder(tokenizer, f"--model {path}", "prompt", None, {})
    prompts = encoder.tokens([encoder.text(i, {"prompt": chat}) for i, chat in enumerate(chats)])
    limit = command.max_prompt_tokens or max(map(len, prompts))
    cut = [len(prompt) > limit for prompt in prompts]
    prompts = [prompt[-limit:] for prompt in prompts]
    longest = max(map(len, prompts))
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + command.max_new_tokens > positions:
        why = f"the model has {positions} positions and the longest prompt {longest} tokens"
        expected = f"at most {positions - longest}: {why}"
        raise ValueError(f"--max-new-tokens is {command.max_new_tokens}, expected {expected}")
    engine = _engine(command, end_ids, longest)
    sampling = Sampling(1, command.temperature, max_new_tokens=command.max_new_tokens, seed=command.seed)

    def sample() -> list[Response]:
        rollouts = engine.generate(prompts, range(len(prompts)), sampling)
        decoded = response_texts(tokenizer, rollouts)
        return [
            Response(extract_response(response_start(tokenizer, chat) + text), rollout.finished, prompt_cut)
            for chat, text, rollout, prompt_cut in zip(chats, decoded, rollouts, cut, strict=True)
        ]

    return sample


def _engine(command: Evaluation, end_ids: tuple[int, ...], longest: int) -> RolloutEngine:
    import torch

    from smopd.engine.models.loading import load_model, stored_dtype

    path = str(command.model)
    on_gpu = torch.cuda.is_available()
    dtype = stored_dtype(path) if on_gpu else torch.float32
    if command.engine == "local":
        from smopd.engine.local.rollout import LocalRollout

        return LocalRollout(load_model(path, dtype, "cuda" if on_gpu else "cpu"), end_ids)
    from smopd.engine.settings import Vllm
    from smopd.engine.vllm.rollout import LOWEST_TEMPERATURE, VllmRollout

    if 0 < command.temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"--temperature is {command.temperature}, expected 0 or >= {LOWEST_TEMPERATURE}")
    kwargs = {"dtype": str(dtype).removeprefix("torch."), "max_model_len": longest + command.max_new_tokens}
    kwargs |= {"gpu_memory_utilization": GPU_SHARE if on_gpu else None, "enable_sleep_mode": False}
    return VllmRollout(path, end_ids, Vllm(placement="process", engine_kwargs=kwargs))
