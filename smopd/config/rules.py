"""Settings that are right one by one and do not go together. Loads no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from smopd.names import is_url

if TYPE_CHECKING:
    from smopd.config.settings import Settings


def contradictions(settings: Settings) -> list[str]:
    """A line for each, beginning with the setting to change."""
    checks = (_sampled_policy, _engines, _frozen_models, _reference, _student)
    return [line for check in checks for line in check(settings)]


def _sampled_policy(settings: Settings) -> Iterator[str]:
    loop, loss, rollout = settings.loop, settings.loss, settings.rollout
    corrected = loss.old_logps == "rollout" or loss.importance_cap is not None
    if loop.lag and not corrected:
        yield (
            "loop.lag: with 1 the responses come from an earlier policy than the one that is trained; "
            "set loss.old_logps to rollout, or give loss.importance_cap"
        )
    if corrected and rollout.top_p < 1:
        yield (
            f"rollout.top_p: at {rollout.top_p} the sampler's log-probabilities are the nucleus's, not the "
            "policy's, and their ratio is never 1; set top_p to 1, or loss.old_logps to recompute without "
            "importance_cap"
        )
    elif rollout.top_p < 1 and (settings.opd.sampled or settings.kl_ref.coef > 0):
        term = "kl_ref" if settings.kl_ref.coef > 0 else "opd.divergence"
        yield (
            f"rollout.top_p: at {rollout.top_p} tokens come from the nucleus, and {term}'s KL is a mean over "
            "tokens of the whole policy: it would be biased; set top_p to 1, or leave that KL out"
        )
    if loop.lag and rollout.colocated and rollout.vllm.tensor_parallel_size > 1:
        yield (
            "loop.lag: 1 samples in a thread of its own, where the collectives of colocated tensor-parallel "
            "engines would cross those of training; set rollout.vllm.placement to process"
        )
    if rollout.urls and rollout.engine != "vllm":
        yield "rollout.urls: are of vLLM servers, rollout.engine is local; set it to vllm"
    if settings.advantage.snr_threshold is not None and settings.advantage.estimator != "gd2po":
        yield f"advantage.snr_threshold: is GD2PO's, advantage.estimator is {settings.advantage.estimator}"


def _engines(settings: Settings) -> Iterator[str]:
    rollout, remote = settings.rollout, settings.remote
    for name, default in type(rollout.vllm)() if rollout.urls else ():
        if getattr(rollout.vllm, name) != default:
            yield f"rollout.vllm.{name}: is of an engine here, the servers at rollout.urls have their own"
    for name, section in (("rollout", rollout), ("teachers", settings.teachers)):
        if section.colocated and section.vllm.transfer == "ipc":
            yield (
                f"{name}.vllm.transfer: ipc is of an engine in a process of its own, {name}.vllm.placement "
                "is colocated; set it to process, or transfer to files"
            )
    if remote.transfer_folder is not None and remote.transfer != "files":
        yield f"remote.transfer_folder: is of the transfer by files, remote.transfer is {remote.transfer}"


def _frozen_models(settings: Settings) -> Iterator[str]:
    teachers, sampled_at = settings.teachers, settings.rollout.temperature
    remote = [is_url(teacher.model) for teacher in teachers.models]
    if any(remote) and not all(remote):
        yield "teachers.models: got teachers at URLs and others, expected one kind"
    reference = settings.opd.product.reference
    if settings.opd.support == "product" and remote and any(remote) != is_url(reference):
        yield (
            f"opd.product.reference: got {reference!r} beside teachers at "
            f"{'URLs' if any(remote) else 'paths'}, expected one kind"
        )
    if settings.opd.support == "product" and settings.opd.sampled:
        yield (
            "opd.support: a product is known on the ids that the teachers name, and reverse_kl_sampled asks "
            "about each sampled token; set it to merged or pooled, or opd.divergence to forward_kl"
        )
    if teachers.engine != "vllm" or teachers.route != "prompt_logprobs":
        return
    if settings.kl_temperature != 1:
        yield (
            "teachers.route: prompt_logprobs serves temperature 1 alone, the KL's is "
            f"{settings.kl_temperature}; use pooler"
        )
    if settings.kl_ref.coef > 0 and sampled_at != 1:
        yield (
            "teachers.route: prompt_logprobs serves temperature 1 alone, kl_ref's is the rollout's, "
            f"{sampled_at}; use pooler"
        )
    if settings.unites:
        name = "teachers.union" if teachers.union else "opd.support: product"
        yield f"{name}: needs the pooler route or the local engine"


def _reference(settings: Settings) -> Iterator[str]:
    kl_ref, opd, estimator = settings.kl_ref, settings.opd, settings.advantage.estimator
    if kl_ref.coef == 0:
        return
    if kl_ref.place == "reward" and estimator != "grpo":
        yield (
            f"kl_ref.place: {estimator} normalises each reward by its own spread, so the KL would weigh the "
            "same however small it is; set place to loss, or advantage.estimator to grpo"
        )
    if kl_ref.place == "loss" and opd.sampled and opd.reverse_kl_surrogate == "ppo":
        yield (
            "opd.reverse_kl_surrogate: with ppo the teachers' term and kl_ref's cannot be one clipped term; "
            "set it to paper, or kl_ref.coef to 0"
        )


def _student(settings: Settings) -> Iterator[str]:
    student = settings.student
    if student.strategy == "deepspeed" and student.shard_size is not None:
        yield "student.shard_size: is FSDP2's, student.strategy is deepspeed"
    if student.strategy == "fsdp2" and student.deepspeed_config is not None:
        yield "student.deepspeed_config: is DeepSpeed's, student.strategy is fsdp2"
    if student.row_tokens > student.micro_batch_tokens:
        yield (
            f"student.row_tokens: {student.row_tokens} are more than micro_batch_tokens "
            f"({student.micro_batch_tokens}) allow"
        )
