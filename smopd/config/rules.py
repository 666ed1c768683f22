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
    if loop.async_level and not corrected:
        yield (
            "loop.async_level: with 1 the responses come from an earlier policy than the one in training; "
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
    if loop.async_level and rollout.colocated and rollout.vllm.tensor_parallel_size > 1:
        yield (
            "loop.async_level: 1 samples in a thread of its own, where the collectives of colocated "
            "tensor-parallel engines would cross those of training; set rollout.vllm.placement to process"
        )
    if rollout.urls and rollout.engine != "vllm":
        yield "rollout.urls: are of vLLM servers, rollout.engine is local; set it to vllm"
    if settings.advantage.snr_threshold is not None and settings.advantage.estimator != "gd2po":
        yield f"advantage.snr_threshold: is GD2PO's, advantage.estimator is {settings.advantage.estimator}"


def _engines(settings: Settings) -> Iterator[str]:
    rollout = settings.rollout
    for name, default in type(rollout.vllm)() if rollout.urls else ():
        if getattr(rollout.vllm, name) != default:
            yield f"rollout.vllm.{name}: is of an engine here, the servers at rollout.urls have their own"
    if rollout.colocated and rollout.vllm.transfer == "ipc":
        yield (
            "rollout.vllm.transfer: ipc is of an engine in a process of its own, rollout.vllm.placement "
            "is colocated; set it to process, or transfer to files"
        )


def _frozen_models(settings: Settings) -> Iterator[str]:
    teachers = settings.teachers
    remote = [is_url(teacher.model) for teacher in teachers.models]
    if any(remote) and not all(remote):
        yield "teachers.models: got teachers at URLs and others, expected one kind"
    reference = settings.opd.product.reference
    if settings.merge.method == "product" and remote and any(remote) != is_url(reference):
        yield (
            f"opd.product.reference: got {reference!r} beside teachers at "
            f"{'URLs' if any(remote) else 'paths'}, expected one kind"
        )
    if settings.merge.method == "product" and settings.opd.sampled:
        yield (
            "merge.method: the product is known on the ids that the teachers name, and reverse_kl_sampled "
            "asks about each sampled token; set it to published, or opd.divergence to forward_kl"
        )
    if ":" in settings.opd.target and (settings.merge.method == "product" or settings.opd.sampled):
        other = "merge.method product" if settings.merge.method == "product" else "reverse_kl_sampled"
        yield f"opd.target: got {settings.opd.target}, but {other} has a target of its own"


def _reference(settings: Settings) -> Iterator[str]:
    kl_ref, opd, estimator = settings.kl_ref, settings.opd, settings.advantage.estimator
    if kl_ref.coef == 0:
        return
    if kl_ref.place == "reward" and estimator in ("gdpo", "gd2po"):
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
    if student.strategy == "deepspeed" and student.optimizer != "adamw":
        yield "student.optimizer: DeepSpeed's is adamw alone, student.strategy is deepspeed"
