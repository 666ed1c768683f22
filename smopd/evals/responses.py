"""The responses that a suite scores: of a file, the ground truth, or sampled from a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smopd.data.prompts import tokenize_prompts
from smopd.evals.suite import GROUND_TRUTH, Evaluation, Item, Suite
from smopd.rewards.rlla import MAX_JSON_DEPTH, extract_response, json_depth

if TYPE_CHECKING:
    from smopd.engine.protocols import RolloutEngine

TEXTS = ("response", "completion", "result")  # the last in bfcl-eval's files, with `id` for `key`
GPU_SHARE = 0.9  # ours: of a GPU that nothing else uses


@dataclass(frozen=True)
class Response:
    """A response; whether it ended by itself, None where that is unknown; whether its prompt was cut."""

    text: str
    finished: bool | None = None
    prompt_cut: bool = False


def spread(groups: Sequence[str], limit: int) -> list[int]:
    """Ascending indices of `limit` items, or all: each group by its share, evenly spread inside it.

    Raises:
        ValueError: limit is below the number of groups, each of which gives at least one.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    if limit < len(members):
        raise ValueError(f"--limit is {limit}, expected at least {len(members)}, one item of each group")
    if limit >= len(groups):
        return list(range(len(groups)))
    exact = [limit * len(found) / len(groups) for found in members.values()]
    counts = [max(1, int(share)) for share in exact]
    while sum(counts) != limit:
        step = 1 if sum(counts) < limit else -1
        open_ones = [i for i, count in enumerate(counts) if step > 0 or count > 1]
        counts[max(open_ones, key=lambda i: step * (exact[i] - counts[i]))] += step
    return sorted(
        found[(2 * i + 1) * len(found) // (2 * count)]
        for found, count in zip(members.values(), counts, strict=True)
        for i in range(count)
    )


def given_responses(given: str, suite: Suite, whole: Sequence[Item]) -> tuple[Suite, list[Response]]:
    """The responses that --responses names, and the suite of the items that have one.

    Lines that all have a text as `key` (or `id`) may stand in any order, and items without a line are left
    out. Otherwise there is a line for each item of the suite, or of the `whole` it is a part of, in order.
    Decoded chats are cut to the response.

    Raises:
        FileNotFoundError, ValueError: no such file or truth, an unreadable line, or responses to other items.
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
    for number, row in read_lines(path):
        text = next((row[name] for name in TEXTS if name in row), None)
        if not isinstance(text, str):
            expected = f"a text as `{'`, `'.join(TEXTS[:-1])}` or `{TEXTS[-1]}`"
            raise ValueError(f"{path}: line {number}: expected {expected}, got {sorted(row)}")
        found.append(Response(extract_response(text), row.get("finished")))
        keys.append(row.get("key", row.get("id")))
    if not keys or not all(isinstance(key, str) for key in keys):
        if len(found) not in (len(suite.items), len(whole)):
            choice = f", or {len(whole)} to take them from" * (len(whole) != len(suite.items))
            raise ValueError(f"{path}: expected {len(suite.items)} responses{choice}, got {len(found)}")
        keys = [item.key for item in (suite.items if len(found) == len(suite.items) else whole)]
    by_key = dict(zip(keys, found, strict=True))
    if len(by_key) < len(keys):
        raise ValueError(f"{path}: expected every key once, got {len(keys) - len(by_key)} again")
    if unknown := by_key.keys() - {item.key for item in whole}:
        raise ValueError(
            f"{path}: expected keys of the items, got {min(map(str, unknown))!r} and {len(unknown) - 1} more"
        )
    chosen = [i for i, item in enumerate(suite.items) if item.key in by_key]
    if not chosen:
        raise ValueError(f"{path}: has no response to any of the {len(suite.items)} items")
    part = suite if len(chosen) == len(suite.items) else suite.only(chosen)
    return part, [by_key[item.key] for item in part.items]


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its line's number; ValueError where a line is none."""
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(f"{path}: line {number}: expected an object, got {type(row).__name__}")
        rows.append((number, row))
    return rows


def read_json(text: str) -> Any:
    """The JSON value in a model's text; None where there is none, or one deeper than MAX_JSON_DEPTH."""

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is no JSON")

    try:
        return json.loads(text, parse_constant=refuse) if json_depth(text) <= MAX_JSON_DEPTH else None
    except (ValueError, RecursionError):
        return None


def sampler(command: Evaluation, items: Sequence[Item]) -> Callable[[], list[Response]]:
    """Loads the command's model; the call samples one response to each item, in order.

    Raises:
        ValueError, FileNotFoundError: no usable model, no chat template, or too few positions.
    """
    from smopd.engine.models.loading import describe, load_tokenizer
    from smopd.engine.types import Sampling

    path = str(command.model)
    tokenizer = load_tokenizer(path)
    config, end_ids = describe(path)
    chats = [tuple(item.messages) for item in items]
    prompts = tokenize_prompts(chats, tokenizer, f"--model {path}")
    limit = command.max_prompt_tokens
    cut = [limit is not None and len(prompt) > limit for prompt in prompts]
    if limit is not None:
        prompts = [prompt[-limit:] for prompt in prompts]
    longest = max(len(prompt) for prompt in prompts)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + command.max_new_tokens > positions:
        raise ValueError(
            f"--max-new-tokens is {command.max_new_tokens}, expected at most {positions - longest}: "
            f"the model has {positions} positions and the longest prompt {longest} tokens"
        )
    engine = _engine(command, end_ids, longest)
    sampling = Sampling(
        n=1, temperature=command.temperature, max_new_tokens=command.max_new_tokens, seed=command.seed
    )

    def sample() -> list[Response]:
        rollouts = engine.generate(prompts, range(len(prompts)), sampling)
        decoded = tokenizer.batch_decode(
            [rollout.response_ids.tolist() for rollout in rollouts], skip_special_tokens=True
        )
        return [
            Response(extract_response(text), rollout.finished, prompt_cut)
            for text, rollout, prompt_cut in zip(decoded, rollouts, cut, strict=True)
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
    from smopd.engine.settings import VllmSettings
    from smopd.engine.vllm.rollout import LOWEST_TEMPERATURE, VllmRollout

    if 0 < command.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"--temperature is {command.temperature}, expected 0 or at least {LOWEST_TEMPERATURE} for vllm"
        )
    settings = VllmSettings(
        placement="process",
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=longest + command.max_new_tokens,
        gpu_memory_share=GPU_SHARE if on_gpu else None,
        sleep=False,
    )
    return VllmRollout(path, end_ids, settings)
