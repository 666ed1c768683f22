"""What every suite's command takes, and the responses it scores: of a file, the ground truth, or a model.

A suite adds a dataclass of its own options that builds it.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import tyro

from smopd.data.places import VARIABLE, how_to_fetch, located
from smopd.evals.suite import Item, Suite
from smopd.rewards.rlla import MAX_JSON_DEPTH, extract_response, json_depth

if TYPE_CHECKING:
    from smopd.engine.protocols import RolloutEngine

GROUND_TRUTH = "ground-truth"
DATA_HINT = f"(default: the suite's own in ${VARIABLE} or the user's cache; python -m smopd.data)"
TEXTS = ("response", "completion", "result")  # the last in bfcl-eval's files, with `id` for `key`
GPU_SHARE = 0.9  # ours: of a GPU that nothing else uses


@dataclass(frozen=True)
class Evaluation:
    """Base of the suites' options. A subclass names its data, builds its suite and may say more of a run."""

    default_data: ClassVar[str]
    """Of `data`, a short name."""

    model: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A model's folder or hub id; one response to each item is sampled from it."""
    responses: Annotated[str | None, tyro.conf.arg(metavar="FILE|ground-truth")] = None
    """JSON lines with `response` (or `completion`), one for each item in order, or in any order with the
    items' `key`, as SUITE_items.jsonl has them; bfcl-eval's result files too; or the items' own truth."""
    engine: Literal["local", "vllm"] = "local"
    """What samples from the model."""
    data: Annotated[Path | None, tyro.conf.arg(metavar="PATH", help_behavior_hint=DATA_HINT)] = None
    """The items: their folder or one of its files, or the short name of either."""
    limit: int | None = None
    """So many of the items alone, evenly spread, each group by its share: the same ones every time."""
    output: Path = Path("runs/evaluate")
    """The folder to write into."""
    max_new_tokens: int = 1024
    """Longest response in tokens."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens; of longer ones the end is kept, and they are counted. None is no limit."""
    temperature: float = 0.0
    """Of the sampling; 0 is greedy, as in the paper."""
    seed: int = 0
    """Of the sampling."""
    compare: bool = False
    """Show the paper's rows too."""

    @property
    def data_path(self) -> Path:
        """Where the items are; FileNotFoundError where a short name's are absent."""
        return located(self.data or self.default_data)

    def suite(self) -> Suite:
        """The suite with its items.

        Raises:
            ValueError, FileNotFoundError: for every mistake in the suite's own options and its data.
        """
        raise NotImplementedError

    def prepare(self, suite: Any) -> None:
        """Loads what the scoring needs, before anything is sampled.

        Raises:
            ValueError, FileNotFoundError: it cannot be used.
        """

    def settings(self, suite: Any) -> dict[str, Any]:
        """More to keep of a run, by names of its own: settings of the suite, what scoring cost."""
        return {}

    def notes(self, suite: Any, summary: Mapping[str, float | None]) -> list[str]:
        """Lines to print below the table."""
        return []

    def check(self) -> None:
        """Raises ValueError or FileNotFoundError for a mistake in the options that all suites have."""
        if (self.model is None) == (self.responses is None):
            got = "none" if self.model is None else "both"
            raise ValueError(f"expected one of --model and --responses, got {got}")
        for name in ("limit", "max_new_tokens", "max_prompt_tokens"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}, expected at least 1")
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"--temperature is {self.temperature}, expected 0 or more")
        if self.output.exists() and not self.output.is_dir():
            raise ValueError(f"--output {self.output}: is no folder")
        if self.model is None:
            return
        if looks_local(self.model) and not Path(self.model).expanduser().is_dir():
            raise FileNotFoundError(f"--model {self.model}: no such folder, expected one, or a hub id")
        if self.engine == "vllm" and importlib.util.find_spec("vllm") is None:
            raise ValueError("--engine vllm: vllm is not installed, expected it, or --engine local")


@dataclass(frozen=True)
class Response:
    """A response; whether it ended by itself, None where that is not known; whether its prompt was cut."""

    text: str
    finished: bool | None = None
    prompt_cut: bool = False


def looks_local(model: str) -> bool:
    """Whether a model's name can be a path alone, no hub id."""
    return model.startswith((".", "/", "~")) or model.count("/") > 1


def group_files(data: Path, names: Mapping[str, str], what: str) -> dict[str, Path]:
    """Group -> its file, of all groups in a folder, or of the one whose file is given.

    Args:
        names: group -> name of its file.
        what: for error messages, such as "API-Bank data".
    Raises:
        FileNotFoundError, ValueError: a file is absent, or is none of these.
    """
    if data.is_file():
        group = {name: group for group, name in names.items()}.get(data.name)
        if group is None:
            raise ValueError(f"{what} {data}: expected a folder, or one of {', '.join(names.values())}")
        return {group: data}
    found = {group: data / name for group, name in names.items()}
    for path in found.values():
        if not path.is_file():
            raise FileNotFoundError(
                f"{what} {path}: no such file, expected {', '.join(names.values())}{how_to_fetch(path)}"
            )
    return found


def spread(groups: Sequence[str], limit: int) -> list[int]:
    """Indices of `limit` items, ascending: each group by its share, evenly spread inside it.

    Args:
        groups: of each item.
    Returns:
        All indices where there are no more than `limit` items.
    Raises:
        ValueError: limit is below the number of groups, each of which gives one at least.
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


def given_responses(
    command: Evaluation, suite: Suite, whole: Sequence[Item]
) -> tuple[Suite, list[Response]] | None:
    """What --responses names, one an item in order; None where a model is to be sampled.

    Args:
        whole: all items, of which the suite's may be a part.
    Returns:
        The suite of the items that have a response, and the responses.
    Raises:
        ValueError, FileNotFoundError: the file is none of these responses, or the suite has no ground truth.
    """
    if command.responses is None:
        return None
    if command.responses != GROUND_TRUTH:
        return read_responses(Path(command.responses).expanduser(), suite, whole)
    truths = suite.truths()
    if truths is None:
        raise ValueError(f"--responses {GROUND_TRUTH}: {suite.name} has no ground truth, expected a file")
    return suite, [Response(truth) for truth in truths]


def read_responses(path: Path, suite: Suite, whole: Sequence[Item]) -> tuple[Suite, list[Response]]:
    """The responses of a file of JSON lines; decoded chats are cut to the response.

    Lines that all have a text as `key` (or `id`) may stand in any order, and items without a line are left
    out of the suite. Others stand in the order of the suite's items, or of `whole`.

    Raises:
        FileNotFoundError, ValueError: no such file, an unreadable line, or responses to other items.
    """
    if not path.is_file():
        raise FileNotFoundError(f"--responses {path}: no such file; expected JSON lines, or {GROUND_TRUTH!r}")
    found, keys = [], []
    for number, row in read_lines(path):
        text = next((row[name] for name in TEXTS if name in row), None)
        if not isinstance(text, str):
            expected = f"a text as `{'`, `'.join(TEXTS[:-1])}` or `{TEXTS[-1]}`"
            raise ValueError(f"{path}: line {number}: expected {expected}, got {sorted(row)}")
        finished = row.get("finished")
        found.append(Response(extract_response(text), finished if isinstance(finished, bool) else None))
        keys.append(row.get("key", row.get("id")))
    if not keys or not all(isinstance(key, str) for key in keys):
        if len(found) not in (len(suite.items), len(whole)):
            choice = f", or {len(whole)} to take them from" * (len(whole) != len(suite.items))
            raise ValueError(f"{path}: expected {len(suite.items)} responses{choice}, got {len(found)}")
        keys = [item.key for item in (suite.items if len(found) == len(suite.items) else whole)]
    by_key = dict(zip(map(str, keys), found, strict=True))
    if len(by_key) < len(keys):
        raise ValueError(f"{path}: expected every key once, got {len(keys) - len(by_key)} again")
    if unknown := by_key.keys() - {item.key for item in whole}:
        raise ValueError(
            f"{path}: expected keys of the items, got {min(unknown)!r} and {len(unknown) - 1} more"
        )
    chosen = [i for i, item in enumerate(suite.items) if item.key in by_key]
    if not chosen:
        raise ValueError(f"{path}: has no response to any of the {len(suite.items)} items")
    part = suite if len(chosen) == len(suite.items) else suite.only(chosen)
    return part, [by_key[item.key] for item in part.items]


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
            raise ValueError(f"{path}: line {number}: expected an object, got {type(row).__name__}")
        rows.append((number, row))
    return rows


def read_json(text: str) -> Any:
    """The JSON value in a model's text; None where there is none, or one deeper than MAX_JSON_DEPTH."""
    try:
        return json.loads(text, parse_constant=_no_constant) if json_depth(text) <= MAX_JSON_DEPTH else None
    except (ValueError, RecursionError):
        return None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def sampler(command: Evaluation, items: Sequence[Item]) -> Callable[[], list[Response]]:
    """Loads the command's model; the call samples one response to each item, in order, cut as saved ones are.

    Raises:
        ValueError, FileNotFoundError: no usable model, no chat template, or too few positions.
    """
    from smopd.engine.models.loading import describe, load_tokenizer
    from smopd.engine.types import Sampling

    path = str(command.model)
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
