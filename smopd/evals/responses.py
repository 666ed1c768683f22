"""The responses that a suite scores: read from a file, or sampled from a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smopd.evals.options import GROUND_TRUTH, Evaluation
from smopd.evals.suite import Item, Suite
from smopd.rewards.rlla import extract_response

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from smopd.engine.protocols import RolloutEngine

GPU_SHARE = 0.9  # ours: of a GPU that nothing else uses


@dataclass(frozen=True)
class Response:
    """A response; whether it ended by itself, None where that is not known; whether its prompt was cut."""

    text: str
    finished: bool | None = None
    prompt_cut: bool = False


def given_responses(command: Evaluation, suite: Suite, whole: Sequence[Item]) -> list[Response] | None:
    """The responses that --responses names, one an item in order; None where a model is to be sampled.

    Args:
        whole: all items, of which the suite's may be a part.
    Raises:
        ValueError, FileNotFoundError: the file is none of these responses, or the suite has no ground truth.
    """
    if command.responses is None:
        return None
    if command.responses != GROUND_TRUTH:
        return read_responses(Path(command.responses).expanduser(), suite.items, whole)
    truths = suite.truths()
    if truths is None:
        raise ValueError(f"--responses {GROUND_TRUTH}: {suite.name} has no ground truth, expected a file")
    return [Response(truth) for truth in truths]


def read_responses(path: Path, items: Sequence[Item], whole: Sequence[Item]) -> list[Response]:
    """The responses of a file of JSON lines; decoded chats are cut to the response.

    Lines that all have a text as `key` may stand in any order; others stand in the items'. The file has
    responses to the items, or to all those of `whole`, of which the items' are taken.

    Raises:
        FileNotFoundError, ValueError: no such file, an unreadable line, or responses to other items.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--responses {path}: no such file; expected JSON lines, or {GROUND_TRUTH!r}")
    rows = read_lines(path)
    found, keys = [], []
    for number, row in rows:
        text = row.get("response", row.get("completion"))
        if not isinstance(text, str):
            raise ValueError(
                f"{path}: line {number}: expected a text as `response` or `completion`, got {sorted(row)}"
            )
        finished = row.get("finished")
        found.append(Response(extract_response(text), finished if isinstance(finished, bool) else None))
        keys.append(row.get("key"))
    if len(found) not in (len(items), len(whole)):
        choice = "" if len(whole) == len(items) else f", or {len(whole)} to take them from"
        raise ValueError(f"{path}: expected {len(items)} responses{choice}, got {len(found)}")
    if not all(isinstance(key, str) for key in keys):
        keys = [item.key for item in (items if len(found) == len(items) else whole)]
    by_key = dict(zip(keys, found, strict=True))
    missing = [item.key for item in items if item.key not in by_key]
    if missing:
        raise ValueError(
            f"{path}: expected the keys of the items, got none of {len(missing)}, first {missing[0]!r}"
        )
    return [by_key[item.key] for item in items]


def read_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a file of JSON lines, each with its line's number; empty lines are passed over.

    Raises:
        ValueError: a line is no object.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}: line {number}: {error}") from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}: line {number}: expected a text as `response` in an object, got {type(row).__name__}"
            )
        rows.append((number, row))
    return rows


def sampler(command: Evaluation, items: Sequence[Item]) -> Callable[[], list[Response]]:
    """Loads the command's model; the call samples one response to each item, in order, cut as saved ones are.

    Raises:
        ValueError, FileNotFoundError: no usable model, no chat template, or too few positions.
    """
    from smopd.engine.models.loading import describe, load_tokenizer
    from smopd.engine.types import Sampling

    path = command.model_path
    tokenizer = load_tokenizer(path)
    if not tokenizer.chat_template:
        raise ValueError(f"--model {path}: its tokenizer has no chat template, expected one for the items")
    config, end_ids = describe(path)
    texts = tokenizer.apply_chat_template(
        [[dict(message) for message in item.messages] for item in items],
        tokenize=False,
        add_generation_prompt=True,
    )
    prompts: list[list[int]] = tokenizer(texts, add_special_tokens=False)["input_ids"]
    limit = command.max_prompt_tokens
    cut = [limit is not None and len(prompt) > limit for prompt in prompts]
    if limit is not None:
        prompts = [prompt[-limit:] for prompt in prompts]
    engine = _engine(command, config, end_ids, max(len(prompt) for prompt in prompts))
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


def _require_positions(command: Evaluation, config: PreTrainedConfig, longest: int) -> None:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and longest + command.max_new_tokens > limit:
        raise ValueError(
            f"--max-new-tokens is {command.max_new_tokens}, expected at most {limit - longest}: "
            f"the model has {limit} positions and the longest prompt {longest} tokens"
        )


def _engine(
    command: Evaluation, config: PreTrainedConfig, end_ids: tuple[int, ...], longest: int
) -> RolloutEngine:
    import torch

    from smopd.engine.models.loading import load_model, stored_dtype

    path = command.model_path
    on_gpu = torch.cuda.is_available()
    dtype = stored_dtype(path) if on_gpu else torch.float32
    if command.engine == "local":
        from smopd.engine.local.rollout import LocalRollout

        model = load_model(path, dtype, "cuda" if on_gpu else "cpu")
        _require_positions(command, config, longest)
        return LocalRollout(model, end_ids)
    from smopd.engine.settings import VllmSettings
    from smopd.engine.vllm.rollout import LOWEST_TEMPERATURE, VllmRollout

    if 0 < command.temperature < LOWEST_TEMPERATURE:
        raise ValueError(
            f"--temperature is {command.temperature}, expected 0 or at least {LOWEST_TEMPERATURE} for vllm"
        )
    _require_positions(command, config, longest)
    settings = VllmSettings(
        placement="process",
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=longest + command.max_new_tokens,
        gpu_memory_share=GPU_SHARE if on_gpu else None,
        sleep=False,
    )
    return VllmRollout(path, end_ids, settings)
