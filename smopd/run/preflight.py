"""Checks before training: packages, functions, rewards on a known answer, and the rollout engine."""

import logging
import math
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from packaging.version import Version
from transformers import PreTrainedTokenizerBase

from smopd.advantages import ESTIMATORS
from smopd.config.settings import Settings
from smopd.data.prompts import Prompt
from smopd.engine import distributed
from smopd.engine.imports import resolve
from smopd.engine.protocols import RolloutEngine
from smopd.engine.student.optimizers import OPTIMIZERS, SCHEDULES
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout, Sampling
from smopd.objective import MIXTURES
from smopd.record.alarms import ADVICE, MOST_MISMATCH
from smopd.record.progress import say
from smopd.record.trackers import TRACKERS
from smopd.rewards.pool import RewardPool
from smopd.run.failures import UnusableInput, error_context
from smopd.step.rewards import Rewarder
from smopd.step.stop import all_or_raise

log = logging.getLogger(__name__)
GROUND_TRUTHS = ("ground_truth", "answer", "solution", "completion", "response", "output", "target")
"""Ours: columns that may contain a right answer. The first of them with text is tried."""
GROSS_MISMATCH = 0.3  # ours, nats per token: more than rounding or lower precision can cause
TRIED_TOKENS = 16  # ours: length of the response that try_engine compares
NEWEST_TESTED = {"torch": "2.14", "transformers": "5.23", "triton": "3.8"}  # see CONTRIBUTING.md


def newer_than_tested() -> str | None:
    """Return a line that names packages newer than tested, or None. Patch releases do not count."""
    newer = [
        f"{package} {version(package)} (tested up to {tested})"
        for package, tested in NEWEST_TESTED.items()
        if find_spec(package) and Version(version(package)).release[:2] > Version(tested).release[:2]
    ]
    return f"newer than tested: {', '.join(newer)}" if newer else None


def require_functions(settings: Settings) -> None:
    """Raise UnusableInput if a run needs a function or package that does not exist."""
    for name in settings.runs:
        own = settings.resolved(name)
        named: list[tuple[str, str, Mapping[str, Any]]] = [
            ("advantage.estimator", own.advantage.estimator, ESTIMATORS),
            ("opd.target", own.opd.target, MIXTURES),
            ("student.optimizer", own.student.optimizer, OPTIMIZERS),
            ("student.schedule", own.student.schedule, SCHEDULES),
            *(("log.trackers", tracker, TRACKERS) for tracker in own.log.trackers),
        ]
        for setting, value, known in named:
            with error_context(setting):
                resolve(value, known)
        packages = {f"log.trackers {tracker}": tracker for tracker in own.log.trackers if ":" not in tracker}
        if own.rollout.engine == "vllm" and not own.rollout.urls:
            packages["rollout.engine vllm"] = "vllm"
        if own.teachers.engine == "vllm" and own.teachers.models:
            packages["teachers.engine vllm"] = "vllm"
        if own.student.strategy == "deepspeed":
            packages["student.strategy deepspeed"] = "deepspeed"
        if own.student.lora is not None:
            packages["student.lora"] = "peft"
        for setting, package in packages.items():
            if find_spec(package) is None:
                build = "-cpu" * (package == "vllm" and not torch.cuda.is_available())
                raise UnusableInput(f"{setting}: {package} is not installed (pip install {package}{build})")


def try_rewards(
    pool: RewardPool, settings: Settings, tokenizer: PreTrainedTokenizerBase, prompt: Prompt
) -> dict[str, bool]:
    """Score the prompt's ground truth and an empty answer, and print the scores. This is a collective call.

    Each answer is scored in a separate call. With an environment, it is a conversation of one response.

    Returns:
        Name of each reward that failed -> whether there was a ground truth and the reward failed on both
        answers.
    """
    row = prompt.columns.get("reward_model")  # verl's column
    columns = {**(row if isinstance(row, Mapping) else {}), **prompt.columns}
    column = next((name for name in GROUND_TRUTHS if isinstance(columns.get(name), str)), None)
    answers = {"an empty answer": ""}
    if column is not None:
        answers = {f"the text of its column {column!r}": columns[column], **answers}
    scoring = settings.scoring.model_copy(update={"max_unscorable_share": 1.0})
    rewarder = Rewarder(pool, tokenizer, scoring)
    batches = []
    for text in answers.values():
        rest = text.removeprefix(prompt.response_start)
        ids = torch.tensor(tokenizer.encode(rest, add_special_tokens=False), dtype=torch.int64)
        talks = settings.rollout.environment is not None
        messages = ({"role": "assistant", "content": text},) if talks else ()
        logps = torch.zeros(len(ids))
        rollout = Rollout(prompt.token_ids, ids, logps, 0, finished=False, messages=messages)
        here = int(distributed.rank() == 0)
        batches.append(rewarder.score([prompt] * here, [rollout] * here))
    failed = {}
    for k, name in enumerate(batches[0].names if distributed.rank() == 0 else ()):
        earned = []
        for answer, batch in zip(answers, batches, strict=True):
            value = float(batch.rewards_RK[0, k])
            earned.append(f"no score for {answer}" if math.isnan(value) else f"{value:g} for {answer}")
        errors = [batch.last_errors[name] for batch in batches if name in batch.last_errors]
        if errors:
            failed[name] = column is not None and len(errors) == len(batches)
        why = f" ({errors[0].splitlines()[-1]})" if errors else ""  # a traceback ends with the exception
        say(f"reward {name} on the first prompt: {', '.join(earned)}{why}")
    return distributed.broadcast_object(failed)


def require_rewards(failed: Iterable[str]) -> None:
    """Raise UnusableInput if `failed` names a reward."""
    if names := ", ".join(failed):
        raise UnusableInput(f"rewards: {names} failed on the first prompt, see above")


def try_engine(engine: RolloutEngine, student: Student, prompt: Prompt, settings: Settings) -> float:
    """Compare the engine's and the trainer's log-probabilities of a short response.

    This is a collective call. Return the mean absolute difference in nats per token, and warn if it exceeds
    MOST_MISMATCH. Raise UnusableInput if it exceeds GROSS_MISMATCH or is NaN.
    """
    rollout = settings.rollout
    most = min(TRIED_TOKENS, rollout.max_new_tokens)
    sampling = Sampling(temperature=rollout.temperature, max_new_tokens=most)
    rollouts = all_or_raise(lambda: engine.generate([prompt.token_ids], [0], sampling))
    logp_N = student.logps(rollouts, rollout.temperature).cpu()
    off = float((logp_N - rollouts[0].logps).abs().mean())
    if not off <= GROSS_MISMATCH:  # also for NaN
        what = f"gives log-probabilities that are {off:.2g} nats off those of training"
        raise UnusableInput(f"rollout.engine: {what}; use local, or another version of vLLM")
    if off > MOST_MISMATCH:
        log.warning("before the first step, %.2g nats apart: %s", off, ADVICE["mismatch"])
    return off
