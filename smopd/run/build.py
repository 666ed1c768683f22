"""From settings and a model's path to the student, the rollout engine and the teachers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from smopd.config.schedule import output_directory
from smopd.config.settings import RolloutVllm, Settings
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.local.teachers import held_already, load_teachers
from smopd.engine.models.loading import describe, load_model, load_tokenizer
from smopd.engine.protocols import RolloutEngine, TeacherEngine
from smopd.engine.remote.servers import RetryPolicy, Servers
from smopd.engine.settings import Vllm, VllmSettings
from smopd.engine.student.student import Student
from smopd.engine.weights.adapters import read_adapter
from smopd.names import is_url
from smopd.run.failures import error_context

log = logging.getLogger(__name__)
TRANSFER_FOLDER = "SMOPD_TRANSFER_FOLDER"
"""Where weights stand as files for servers on other hosts, under the same path on each."""
PROBE_TEXT = 'Answer: the tools\' names, 3.14 and {"x": [1, 2]}.'
"""On which a teacher's tokenizer and the student's must agree."""


def student(
    settings: Settings,
    path: str,
    device: torch.device,
    *,
    schedule: Callable[[int], float] | None = None,
    **changes: Any,
) -> Student:
    """The model at `path`, ready to train; `changes` replace settings of `student`; schedule: as Student."""
    torch.manual_seed(settings.seed)
    with error_context("model"):
        model = load_model(path, torch.float32)
    with error_context("student"):
        return Student(model, settings.student.model_copy(update=changes), device, schedule=schedule)


def rollout_engine(
    settings: Settings, path: str, device: torch.device, recipe: Settings | None = None
) -> RolloutEngine:
    """Samples from its own copy of the model at `path`; vLLM's engine is kept from one run to the next.

    recipe: whose runs an engine of vLLM is to have room for; None is this run alone.
    """
    options = settings.rollout
    longest = settings.longest_sequence
    with error_context("model"):
        config, ends = describe(path)
        limit = getattr(config, "max_position_embeddings", longest)
        if longest > limit:
            raise ValueError(
                f"{path} has {limit} positions, expected {longest} for a prompt and its response "
                "(data.max_prompt_tokens, rollout.max_new_tokens, and evaluation's)"
            )
    if options.urls:
        with error_context("rollout.urls"):
            from smopd.engine.remote.rollout import RemoteRollout

            servers = Servers(options.urls, patience(settings))
            remote = RemoteRollout(
                servers,
                ends,
                longest,
                vocabulary=config.get_text_config().vocab_size,
                transport=settings.remote.transfer,
                folder=os.environ.get(TRANSFER_FOLDER),
            )
            remote.load_path(path)  # a server holds whatever the run before it ended with
            return remote
    if options.engine == "vllm":
        with error_context("rollout.engine"):
            from smopd.engine.vllm.rollout import VllmRollout

            return VllmRollout(path, ends, rollout_settings(settings, recipe or settings, limit))
    with error_context("model"):
        model = load_model(path, getattr(torch, options.dtype), device)
    return LocalRollout(model, ends, options.max_batch_tokens)


def teacher_engine(
    settings: Settings,
    paths: Sequence[str],
    vocabulary: int,
    device: torch.device,
    role: str = "teachers",
    *,
    tokens: int | None = None,
) -> TeacherEngine | None:
    """The frozen models at `paths`, LoRA adapters among them, or None where there are none.

    role: models of different roles never take turns in one vLLM engine.
    tokens: how many ids of the vocabulary are tokens; None: all.
    """
    if not paths:
        return None
    options = settings.teachers
    with error_context("opd.kappa"):
        if settings.opd.kappa > vocabulary:
            raise ValueError(f"{settings.opd.kappa} is over the vocabulary of {vocabulary}")
    with error_context("teachers.models"):
        if is_url(paths[0]):
            return remote_teachers(settings, paths, vocabulary)
        if options.engine == "local":
            dtype = getattr(torch, options.dtype)
            return load_teachers(paths, settings.student, vocabulary, dtype, device, tokens=tokens)
        from smopd.engine.vllm.teachers import VllmTeachers

        longest = settings.data.max_prompt_tokens + settings.rollout.max_new_tokens
        own = vllm_settings(options.vllm, options.dtype, longest)
        return VllmTeachers(paths, own, vocabulary, engines=options.vllm.engines, role=role, tokens=tokens)


def n_tokens(tokenizer: PreTrainedTokenizerBase) -> int:
    """One above the largest id of a token: what lies above only pads a model's vocabulary."""
    return max(tokenizer.get_vocab().values()) + 1


def require_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str) -> None:
    """Compares the student's tokenizer with that of the model or adapter at `path`, as servers' are compared.

    Tokens that one of them has alone are of no harm: models of one family differ in their special tokens.

    Raises:
        ValueError: a token has another id there, an id another token, or a text other tokens.
    """
    adapter = read_adapter(path)
    try:
        other = load_tokenizer(adapter.base if adapter else path)
    except (OSError, ValueError) as error:
        log.warning("%s: its tokenizer cannot be read and is taken for the student's (%s)", path, error)
        return
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    for token, token_id in ours.items():
        if theirs.get(token, token_id) != token_id:
            raise ValueError(
                f"{path} has another tokenizer than the student: {token!r} has the id {theirs[token]}, "
                f"expected {token_id}"
            )
    tokens = {token_id: token for token, token_id in theirs.items()}
    for token, token_id in ours.items():
        if tokens.get(token_id, token) != token:
            raise ValueError(
                f"{path} has another tokenizer than the student: the id {token_id} is {tokens[token_id]!r}, "
                f"expected {token!r}"
            )
    found, expected = (each.encode(PROBE_TEXT, add_special_tokens=False) for each in (other, tokenizer))
    if found != expected:
        raise ValueError(
            f"{path} has another tokenizer than the student: it reads {PROBE_TEXT!r} as {found}, "
            f"expected {expected}"
        )


def reference_engine(
    settings: Settings,
    path: str | None,
    student_path: str,
    student: Student,
    teachers: TeacherEngine | None,
    device: torch.device,
    tokens: int | None = None,
) -> TeacherEngine | None:
    """The policy at `path` that kl_ref holds on to: as student or teachers hold it, or one model more."""
    if path is None:
        return None
    held = held_already(path, student_path, student, teachers)
    return held or teacher_engine(
        settings, [path], student.vocabulary, device, role="reference", tokens=tokens
    )


def remote_teachers(settings: Settings, urls: Sequence[str], vocabulary: int) -> TeacherEngine:
    from smopd.engine.remote.teachers import Probe, RemoteTeachers

    path = str(settings.model.path or output_directory(settings) / "base" / "export")
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    return RemoteTeachers(
        [each.split(",") for each in urls],
        vocabulary,
        Probe(PROBE_TEXT, tuple(ids), n_tokens(tokenizer)),
        settings.opd.kappa,
        settings.kl_temperature,
        union=settings.unites,
        retry=patience(settings),
    )


def patience(settings: Settings) -> RetryPolicy:
    return RetryPolicy(settings.remote.deadline_seconds)


def rollout_settings(settings: Settings, recipe: Settings, limit: int) -> VllmSettings:
    """Of an engine with room for the longest responses of the recipe's runs, so that one serves them all.

    On a GPU runs of adapters share another one, with room for the largest of theirs. On a CPU an adapter goes
    as whole weights, into the same engine: vLLM samples several times as long beside an adapter there.

    Args:
        settings: of the run, resolved.
        limit: the model's positions.
    """
    runs = [settings, *(recipe.resolved(name) for name in recipe.runs)]
    longest = min(limit, max(run.longest_sequence for run in runs))
    rank = max(run.student.lora.rank if run.student.lora else 0 for run in runs)
    own = settings.rollout
    adapters = settings.student.lora is not None and torch.cuda.is_available()
    return vllm_settings(own.vllm, own.dtype, longest, rank if adapters else 0)


FIELDS = {
    "tensor_parallel_size": "tensor_parallel_size",
    "max_model_len": "max_model_len",
    "gpu_memory_utilization": "gpu_memory_share",
    "kv_cache_memory_bytes": "kv_cache_bytes",
    "enforce_eager": "enforce_eager",
    "enable_sleep_mode": "sleep",
}
"""Arguments of vllm.LLM that our engine plans with, and its own names for them."""


def vllm_settings(section: Vllm, dtype: str, max_model_len: int, lora_rank: int = 0) -> VllmSettings:
    """Of an engine made with the section's engine_kwargs.

    Raises:
        ValueError: one of them is out of range.
    """
    given = section.engine_kwargs
    return VllmSettings(
        placement=section.placement,
        transfer=section.transfer if isinstance(section, RolloutVllm) else "files",
        dtype=dtype,
        max_lora_rank=lora_rank,
        more={name: value for name, value in given.items() if name not in FIELDS},
        **{"max_model_len": max_model_len, **{FIELDS[name]: given[name] for name in given if name in FIELDS}},
    )
