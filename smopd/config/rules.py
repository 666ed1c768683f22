"""What does not go together in settings that are each right, and what they name that is not there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from smopd.config.errors import explain, line
from smopd.config.recipe import Keys
from smopd.config.schedule import BASE, product_reference, weight_merge
from smopd.config.settings import SHARED, Settings
from smopd.engine.settings import Vllm
from smopd.names import REWARD_ARGUMENTS, is_url, nearest

_RUN_NAME = re.compile(r"\w[\w-]*")
_FILE = re.compile(r"(~|\.{0,2}/).*|.*\.(jsonl|json|parquet|csv)(\.gz)?")

Wrong = Iterator[tuple[str, str]]
"""Dotted path of the setting to change, and what is wrong with it."""


def check(settings: Settings, origin: dict[Keys, str]) -> list[str]:
    """A line for each mistake: of the recipe, or else of its runs one by one."""

    def lines(own: Settings, found: Wrong, run: str = "") -> list[str]:
        """Each at the place where it was given: the recipe, or the run's own settings."""
        given = own.runs[run].set if run else {}
        keys = [(tuple(path.split(".")), text) for path, text in found]
        return [line(("runs", run, "set", *k) if k[0] in given else k, text, origin) for k, text in keys]

    if wrong := lines(settings, _recipe(settings)) + lines(settings, contradictions(settings)):
        return wrong
    wrong = lines(settings, _absent_files(settings))
    for name in settings.runs:
        try:
            own = settings.resolved(name)
        except ValidationError as error:
            wrong += explain(error, origin, ("runs", name, "set"))
            continue
        for found in (contradictions(own), _absent_files(own), _run(own, name)):
            wrong += lines(own, found, name)
    return list(dict.fromkeys(wrong))


def _recipe(settings: Settings) -> Wrong:
    """What all runs share."""
    if (settings.model.path is None) == (settings.model.factory is None):
        yield "model", "give exactly one of path and factory (and null for the other)"
    rewards = [reward.name for reward in settings.rewards]
    if len(set(rewards)) != len(rewards):
        yield "rewards", f"names must differ, got {rewards}"
    for i, reward in enumerate(settings.rewards):
        if taken := [name for name in REWARD_ARGUMENTS if name in reward.kwargs]:
            got = ", ".join(taken)
            yield f"rewards.{i}.kwargs", f"got {got}, which every call gives; expected other names"
        if isinstance(reward.range, tuple) and reward.range[0] >= reward.range[1]:
            yield f"rewards.{i}.range", f"got {list(reward.range)}, expected [lo, hi] with lo < hi"
    earlier = [BASE]
    for name, run in settings.runs.items():
        if name == BASE or not _RUN_NAME.fullmatch(name):
            yield f"runs.{name}", f"expected a name of letters, digits, '_' and '-', and not {BASE!r}"
        if run.init not in earlier:
            yield f"runs.{name}.init", f"{run.init!r} is no earlier run, expected one of {earlier}"
        if run.reward_weights is not None and len(run.reward_weights) != len(rewards):
            got = f"got {len(run.reward_weights)} weights"
            yield f"runs.{name}.reward_weights", f"{got}, expected one for each of the rewards {rewards}"
        if shared := [key for key in SHARED if key in run.set]:
            yield f"runs.{name}.set", f"{', '.join(shared)} cannot differ between runs"
        earlier.append(name)


def contradictions(settings: Settings) -> Wrong:
    """Of a recipe, and of a run's resolved settings."""
    yield from _sampling(settings)
    yield from _teachers(settings)
    yield from _merge(settings)
    student, loop, advantage = settings.student, settings.loop, settings.advantage
    if loop.updates_per_step > (most := loop.prompts_per_step):
        yield (
            "loop.updates_per_step",
            f"got {loop.updates_per_step}, expected at most prompts_per_step ({most})",
        )
    if advantage.snr_threshold is not None and advantage.estimator != "gd2po":
        yield "advantage.snr_threshold", f"is GD2PO's, advantage.estimator is {advantage.estimator}"
    if student.strategy == "deepspeed" and student.shard_size is not None:
        yield "student.shard_size", "is FSDP2's, student.strategy is deepspeed"
    if student.strategy == "fsdp2" and student.deepspeed_config is not None:
        yield "student.deepspeed_config", "is DeepSpeed's, student.strategy is fsdp2"
    if student.strategy == "deepspeed" and student.optimizer != "adamw":
        yield "student.optimizer", "DeepSpeed's is adamw alone, student.strategy is deepspeed"


def _sampling(settings: Settings) -> Wrong:
    loop, loss, rollout, top_p = settings.loop, settings.loss, settings.rollout, settings.rollout.top_p
    from_rollouts = loss.old_logps == "rollout"
    corrected = from_rollouts or loss.importance_cap is not None
    if from_rollouts and loss.importance_cap is not None:
        yield "loss.importance_cap", "the ratio to old_logps 'rollout' holds this correction already"
    if loop.async_level and not corrected:
        yield (
            "loop.async_level",
            "1 needs loss.old_logps rollout or loss.importance_cap: an earlier policy samples",
        )
    if corrected and top_p < 1:
        yield (
            "rollout.top_p",
            f"at {top_p} log-probabilities are the nucleus's, and ratios to the policy never 1",
        )
    elif top_p < 1 and (settings.opd.sampled or settings.kl_ref.coef > 0):
        term = "kl_ref" if settings.kl_ref.coef > 0 else "opd.divergence"
        yield (
            "rollout.top_p",
            f"at {top_p} {term}'s KL, a mean over sampled tokens, would be biased; expected 1",
        )
    if loop.async_level and rollout.colocated and rollout.vllm.tensor_parallel_size > 1:
        yield "loop.async_level", "1 beside tensor-parallel engines needs rollout.vllm.placement process"
    if rollout.urls and rollout.engine != "vllm":
        yield "rollout.urls", "are of vLLM servers, rollout.engine is local; set it to vllm"
    if rollout.urls and rollout.vllm != Vllm():
        yield "rollout.vllm", "is of an engine here, the servers at rollout.urls have their own"
    if rollout.transfer == "inline" and not rollout.urls:
        yield "rollout.transfer", "inline is of servers, rollout.urls has none"


def _teachers(settings: Settings) -> Wrong:
    teachers, opd, weights = settings.teachers.models, settings.opd, settings.opd.product.weights
    rewards = [reward.name for reward in settings.rewards]
    for i, teacher in enumerate(teachers):
        if teacher.reward not in rewards:
            yield f"teachers.models.{i}.reward", f"{teacher.reward!r} is none of {rewards}"
    if opd.gate.kind != "uniform":
        if opd.gate.floor * len(teachers) > 1:
            yield "opd.gate.floor", f"{opd.gate.floor} times {len(teachers)} teachers exceeds 1"
        for i, reward in enumerate(settings.rewards):
            if reward.range is None and any(teacher.reward == reward.name for teacher in teachers):
                yield f"rewards.{i}.range", f"the gate needs [lo, hi] or batch for {reward.name!r}"
    if weights is not None and teachers and len(weights) != len(teachers):
        yield "opd.product.weights", f"got {len(weights)}, expected {len(teachers)}, one a teacher"
    remote, reference = {is_url(teacher.model) for teacher in teachers}, opd.product.reference
    if len(remote) > 1:
        yield "teachers.models", "got teachers at URLs and others, expected one kind"
    product = settings.merge.method == "product"
    if product and teachers and remote != {is_url(reference)}:
        place = "URLs" if True in remote else "paths"
        yield "opd.product.reference", f"got {reference!r} beside teachers at {place}, expected one kind"
    if product and opd.sampled:
        yield (
            "merge.method",
            "product is known on the teachers' ids, opd.divergence asks for each sampled token",
        )
    if ":" in opd.target and (product or opd.sampled):
        other = "merge.method product" if product else "reverse_kl_sampled"
        yield "opd.target", f"got {opd.target}, but {other} has a target of its own"


def _merge(settings: Settings) -> Wrong:
    merge, rewards = settings.merge, [reward.name for reward in settings.rewards]
    names = [each.model for each in merge.models]
    if len(set(names)) != len(names):
        yield "merge.models", f"must differ, got {names}"
    for i, each in enumerate(merge.models):
        for name, choices in (("keep", each.keep), ("exclude", each.exclude)):
            if merge.guard is None and len(choices) > 1:
                yield f"merge.models.{i}.{name}", f"got {choices}, expected one without a guard"
        if each.reward is not None and each.reward not in rewards:
            yield f"merge.models.{i}.reward", f"{each.reward!r} is none of {rewards}"
        if each.max_regression is not None and (each.reward is None or merge.guard is None):
            missing = "guard" if merge.guard is None else "reward"
            yield f"merge.models.{i}.max_regression", f"needs the {missing}, expected both or neither"


def _run(own: Settings, name: str) -> Wrong:
    """The models that a merge takes."""
    if own.runs[name].stage != "merge":
        return
    merge, models = weight_merge(own, name), {}
    if merge is None or not own.merge.models:
        models = {f"teachers.models.{i}.model": each.model for i, each in enumerate(own.teachers.models)}
        if not models:
            yield f"runs.{name}", "stage merge needs teachers, and teachers.models is empty"
        elif merge is not None and any(is_url(model) for model in models.values()):
            yield "merge.method", "weights needs the teachers' weights, they are at URLs; expected another"
    if merge is not None:
        models |= {f"merge.models.{i}.model": each.model for i, each in enumerate(own.merge.models)}
    try:
        if (reference := product_reference(own, name)) not in (None, BASE):
            models["opd.product.reference"] = str(reference)
    except ValueError as error:
        yield "opd.product.reference", str(error)
    names = list(own.runs)
    for path, model in models.items():
        if model in names and model not in names[: names.index(name)]:
            yield path, f"{model!r} does not come before the run {name!r} that needs it"
        if model not in names and difflib.get_close_matches(model, names, 1, 0.8):
            yield path, f"{model!r} is no run of this recipe{nearest(model, names)}"


def _absent_files(settings: Settings) -> Wrong:
    """Settings that name a local file or folder that does not exist."""
    held_out, warm_start = settings.data.evaluation, settings.warm_start
    named = {
        "model.path": settings.model.path,
        "data.train.source": settings.data.train.source,
        "data.evaluation.source": held_out.source if held_out else None,
        "warm_start.source.source": warm_start.source.source if warm_start else None,
        "opd.product.reference": settings.opd.product.reference
        if settings.merge.method == "product"
        else None,
    }
    named |= {f"teachers.models.{i}.model": each.model for i, each in enumerate(settings.teachers.models)}
    named |= {f"merge.models.{i}.model": each.model for i, each in enumerate(settings.merge.models)}
    for path, name in named.items():
        if not name or not _FILE.fullmatch(name):
            continue
        try:
            file = Path(name).expanduser()
            if file.exists():
                continue
            beside = [other.name for other in file.parent.iterdir()] if file.parent.is_dir() else None
        except (OSError, RuntimeError) as error:  # too long, not to be read, no such user
            yield path, f"{name[:80]!r}: {error}"
            continue
        if beside is None:
            yield path, f"no file {name!r} (there is no folder {str(file.parent)!r})"
        else:
            yield path, f"no file {name!r}{nearest(file.name, beside)}"
