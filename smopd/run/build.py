"""Build the student, the rollout engine and the teachers from settings and model paths."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from smopd.config.schedule import BASE, PlannedRun
from smopd.config.settings import Settings
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.local.teachers import load_teachers
from smopd.engine.models.attention import rope_boundary
from smopd.engine.models.loading import custom_code, describe, load_model, load_tokenizer, stored_dtype
from smopd.engine.protocols import RolloutEngine, TeacherEngine
from smopd.engine.remote.servers import Servers
from smopd.engine.settings import Vllm
from smopd.engine.student.student import Student
from smopd.engine.weights.adapters import read_adapter
from smopd.names import is_url
from smopd.run.failures import UnusableInput, error_context

log = logging.getLogger(__name__)
TRANSFER_FOLDER = "SMOPD_TRANSFER_FOLDER"
"""Environment variable that names the folder for sending weights to servers, the same on every host."""
LONG_ROPE = (
    "%s: vLLM uses long RoPE factors for all sequences, because some may have %d positions; training uses "
    "short factors up to %d positions, so log-probabilities will differ"
)
PROBE_TEXT = 'Answer: the tools\' names, 3.14 and {"x": [1, 2]}.'
"""Text that the tokenizers of teacher and student must encode alike."""


def student(
    settings: Settings,
    path: str,
    device: torch.device,
    *,
    schedule: Callable[[int], float] | None = None,
    **changes: Any,
) -> Student:
    """Load the model at `path` for training. `changes` override the section `student`."""
    torch.manual_seed(settings.seed)
    with error_context("model"):
        model = load_model(path, torch.float32)
    with error_context("student"):
        return Student(model, settings.student.model_copy(update=changes), device, schedule=schedule)


def rollout_engine(
    settings: Settings, path: str, tokenizer: PreTrainedTokenizerBase, device: torch.device, recipe: Settings
) -> RolloutEngine:
    """Return an engine that samples from the model at `path`. All runs of a recipe share one vLLM engine."""
    options, longest = settings.rollout, settings.longest_sequence
    with error_context("model"):
        config, ends = describe(path, tokenizer)
        text_config = config.get_text_config()
        limit = getattr(text_config, "max_position_embeddings", longest)
        boundary = rope_boundary(text_config)
        if options.engine == "vllm" and boundary is not None and longest > boundary:
            log.warning(LONG_ROPE, path, longest, boundary)
        if longest > limit:
            raise ValueError(
                f"{path} has {limit} positions, expected {longest} for a prompt and its response "
                "(data.max_prompt_tokens or data.max_evaluation_tokens, plus rollout.max_new_tokens)"
            )
    if options.urls:
        with error_context("rollout.urls"):
            from smopd.engine.remote.rollout import RemoteRollout

            folder = os.environ.get(TRANSFER_FOLDER)
            vocabulary = text_config.vocab_size
            remote = RemoteRollout(Servers(options.urls), ends, longest, vocabulary, options.transfer, folder)
            remote.load_path(path)  # the servers may have the weights of another run
            return remote
    if options.engine == "vllm":
        with error_context("rollout.engine"):
            from smopd.engine.vllm.rollout import VllmRollout

            return VllmRollout(path, ends, rollout_settings(settings, recipe, limit))
    with error_context("model"):
        model = load_model(path, getattr(torch, options.dtype), device)
    return LocalRollout(model, ends, options.max_batch_tokens)


def teacher_engine(
    settings: Settings,
    paths: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    device: torch.device,
    role: str = "teachers",
) -> TeacherEngine | None:
    """Return an engine for the frozen models or adapters at `paths`, or None if there are no paths.

    `tokenizer` and `vocabulary` are the student's. Models of different roles never share a vLLM engine.
    """
    if not paths:
        return None
    options, kappa = settings.teachers, settings.opd.kappa
    tokens = max(tokenizer.get_vocab().values()) + 1  # higher ids are padding
    if kappa > vocabulary:
        raise UnusableInput(f"opd.kappa: got {kappa}, expected at most the vocabulary of {vocabulary}")
    with error_context("teachers.models"):
        if is_url(paths[0]):
            from smopd.engine.remote.teachers import Probe, RemoteTeachers

            urls = [each.split(",") for each in paths]
            probe = Probe(PROBE_TEXT, tuple(tokenizer.encode(PROBE_TEXT, add_special_tokens=False)), tokens)
            return RemoteTeachers(urls, vocabulary, probe, kappa, settings.kl_temperature)
        if options.engine == "local":
            dtype = getattr(torch, options.dtype)
            return load_teachers(paths, settings.student, vocabulary, dtype, device, tokens=tokens)
        from smopd.engine.vllm.teachers import VllmTeachers

        longest = settings.data.max_prompt_tokens + settings.rollout.longest_response
        own = vllm_settings(options.vllm, options.dtype, longest)
        return VllmTeachers(paths, own, vocabulary, engines=options.vllm.engines, role=role, tokens=tokens)


def require_models(settings: Settings, runs: list[PlannedRun], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check models that no run creates. Raise UnusableInput if one is unreadable or has another tokenizer."""
    named = {name: f"runs.{run.name}.merge" for run in runs for name in run.starts[1:]}
    named |= {name: "teachers.models" for run in runs for name in run.teachers}
    for name, setting in named.items():
        if name != BASE and name not in settings.runs and not is_url(name):
            with error_context(setting):
                adapter = read_adapter(name)
                stored_dtype(adapter.base if adapter else name)
                require_tokenizer(tokenizer, name)


def require_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str, owner: str = "the student") -> None:
    """Raise ValueError if the model or adapter at `path` has another tokenizer than `tokenizer`.

    The error message says that `tokenizer` belongs to `owner`. Either tokenizer may have extra tokens,
    because models of one family differ in their special tokens.
    """
    adapter = read_adapter(path)
    try:
        other = load_tokenizer(adapter.base if adapter else path)
    except (OSError, ValueError) as error:
        log.warning("%s: cannot read its tokenizer, assuming that of %s (%s)", path, owner, error)
        return
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    tokens = {token_id: token for token, token_id in theirs.items()}
    for token, token_id in ours.items():
        if theirs.get(token, token_id) != token_id or tokens.get(token_id, token) != token:
            raise ValueError(
                f"{path} has another tokenizer than {owner}: {token!r} has the id {theirs.get(token)}, "
                f"{token_id} is {tokens.get(token_id)!r}, expected {token!r} at {token_id}"
            )
    found, expected = (each.encode(PROBE_TEXT, add_special_tokens=False) for each in (other, tokenizer))
    if found != expected:
        raise ValueError(
            f"{path} has another tokenizer than {owner}: it reads {PROBE_TEXT!r} as {found}, "
            f"expected {expected}"
        )


def rollout_settings(settings: Settings, recipe: Settings, limit: int) -> Vllm:
    """Return vLLM settings with room for the longest sequence of all runs, which share an engine."""
    runs = [settings, *(recipe.resolved(name) for name in recipe.runs)]
    longest = min(limit, max(run.longest_sequence for run in runs))
    return vllm_settings(settings.rollout.vllm, settings.rollout.dtype, longest)


def vllm_settings(section: Vllm, dtype: str, max_model_len: int) -> Vllm:
    """Return `section` with `dtype` and `max_model_len`, unless its engine_kwargs set them."""
    engine_kwargs = {"dtype": dtype, "max_model_len": max_model_len, **custom_code(), **section.engine_kwargs}
    return section.model_copy(update={"engine_kwargs": engine_kwargs})
