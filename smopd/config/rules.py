"""Checks for invalid combinations of settings, and for names of runs, rewards or files that do not exist."""

import difflib
import re
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from smopd.config.errors import explain, line
from smopd.config.recipe import Keys
from smopd.config.schedule import BASE, weight_merge
from smopd.config.settings import SHARED, Settings
from smopd.engine.settings import Vllm
from smopd.names import EVALUATION_VALUES, REWARD_ARGUMENTS, is_url, nearest

_RUN_NAME = re.compile(r"\w[\w-]*")
_FILE = re.compile(r"(~|\.{0,2}/)[^*?\[]*|[^*?\[]*\.(jsonl|json|parquet|csv|arrow)(\.gz)?")

Wrong = Iterator[tuple[str, str]]
"""Mistakes, each as the dotted path of the setting to change and a text."""


def check(settings: Settings, origin: dict[Keys, str]) -> list[str]:
    """Return one line per mistake. Resolved runs and files are checked only if the recipe is valid so far."""

    def lines(own: Settings, found: Wrong, run: str = "") -> list[str]:
        """Return one line per mistake. It names the run's `set` if that has the section, else the recipe."""
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
    """Find mistakes in the settings that all runs share and in the list of runs."""
    if (settings.model.path is None) == (settings.model.factory is None):
        yield "model", "give exactly one of path and factory (and null for the other)"
    rewards = [reward.name for reward in settings.rewards]
    if len(set(rewards)) != len(rewards):
        yield "rewards", f"got the names {rewards}, expected different ones"
    for i, reward in enumerate(settings.rewards):
        if reward.name in EVALUATION_VALUES or "/" in reward.name:
            others = ", ".join(map(repr, EVALUATION_VALUES))
            yield f"rewards.{i}.name", f"got {reward.name!r}, expected a name without '/', and not {others}"
        if taken := [name for name in REWARD_ARGUMENTS if name in reward.kwargs]:
            yield f"rewards.{i}.kwargs", f"{', '.join(taken)}: reserved, expected another name"
        if isinstance(reward.range, tuple) and reward.range[0] >= reward.range[1]:
            yield f"rewards.{i}.range", f"got {list(reward.range)}, expected [lo, hi] with lo < hi"
    earlier = [BASE]
    for name, run in settings.runs.items():
        if name == BASE or not _RUN_NAME.fullmatch(name):
            yield f"runs.{name}", f"expected a name of letters, digits, '_' and '-' other than {BASE!r}"
        if run.init not in earlier:
            yield f"runs.{name}.init", f"{run.init!r} is not an earlier run, expected one of {earlier}"
        if run.reward_weights is not None and len(run.reward_weights) != len(rewards):
            got = f"got {len(run.reward_weights)} weights"
            yield f"runs.{name}.reward_weights", f"{got}, expected one for each of the rewards {rewards}"
        alike = len(rewards) > 1 and len({reward.weight for reward in settings.rewards}) == 1
        if run.stage == "specialize" and run.reward_weights is None and alike:
            yield f"runs.{name}.reward_weights", "missing; a teacher gives one reward more weight: [0.9, 0.1]"
        if shared := [key for key in SHARED if key in run.set]:
            yield f"runs.{name}.set", f"{', '.join(shared)} cannot differ between runs"
        earlier.append(name)


def contradictions(settings: Settings) -> Wrong:
    """Find invalid combinations in the settings of a recipe or in the resolved settings of a run."""
    yield from _sampling(settings)
    yield from _teachers(settings)
    yield from _merge(settings)
    student, loop, advantage = settings.student, settings.loop, settings.advantage
    if loop.updates_per_step > (most := loop.prompts_per_step):
        got = loop.updates_per_step
        yield "loop.updates_per_step", f"got {got}, expected at most prompts_per_step ({most})"
    if advantage.snr_threshold is not None and advantage.estimator != "gd2po":
        yield "advantage.snr_threshold", f"needs advantage.estimator gd2po, got {advantage.estimator}"
    if student.strategy == "deepspeed" and student.shard_size is not None:
        yield "student.shard_size", "needs student.strategy fsdp2, got deepspeed"
    if student.strategy == "fsdp2" and student.deepspeed_config is not None:
        yield "student.deepspeed_config", "needs student.strategy deepspeed, got fsdp2"
    if student.strategy == "deepspeed" and student.optimizer != "adamw":
        yield "student.optimizer", f"got {student.optimizer}, expected adamw with student.strategy deepspeed"


def _sampling(settings: Settings) -> Wrong:
    loop, loss, rollout = settings.loop, settings.loss, settings.rollout
    from_rollouts = loss.old_logps == "rollout"
    if from_rollouts and loss.importance_cap is not None:
        yield "loss.importance_cap", "cannot be combined with loss.old_logps rollout, the same correction"
    if loop.async_level and not from_rollouts and loss.importance_cap is None:
        yield "loop.async_level", "1 samples off-policy: needs loss.old_logps rollout or loss.importance_cap"
    if loop.async_level and rollout.colocated and rollout.vllm.tensor_parallel_size > 1:
        yield "loop.async_level", "1 with tensor parallelism needs rollout.vllm.placement process"
    if loop.async_level and rollout.resample:
        yield "rollout.resample", f"got {rollout.resample}, expected 0 with loop.async_level 1"
    if (most := rollout.conversation_tokens) is not None and most < rollout.max_new_tokens:
        expected = f"expected at least max_new_tokens ({rollout.max_new_tokens})"
        yield "rollout.conversation_tokens", f"got {most}, {expected}"
    if rollout.urls and rollout.engine != "vllm":
        yield "rollout.urls", "needs rollout.engine vllm, got local"
    if rollout.urls and rollout.vllm != Vllm():
        yield "rollout.vllm", "has no effect on the servers at rollout.urls; remove one of them"
    if rollout.transfer == "inline" and not rollout.urls:
        yield "rollout.transfer", "inline needs servers, and rollout.urls is empty"


def _teachers(settings: Settings) -> Wrong:
    teachers, opd = settings.teachers.models, settings.opd
    rewards = [reward.name for reward in settings.rewards]
    for i, teacher in enumerate(teachers):
        if teacher.reward not in rewards:
            yield f"teachers.models.{i}.reward", f"no reward {teacher.reward!r}, expected one of {rewards}"
    if opd.gate.kind != "uniform":
        if opd.gate.floor * len(teachers) > 1:
            yield "opd.gate.floor", f"got {opd.gate.floor}, expected at most 1 / {len(teachers)} teachers"
        for i, reward in enumerate(settings.rewards):
            if reward.range is None and any(teacher.reward == reward.name for teacher in teachers):
                yield f"rewards.{i}.range", f"the gate needs [lo, hi] or batch for {reward.name!r}"
    if len({is_url(teacher.model) for teacher in teachers}) > 1:
        yield "teachers.models", "got both URLs and models, expected one kind"
    if opd.target not in ("pooled", "merged") and opd.sampled:
        yield "opd.target", f"got {opd.target}, which opd.divergence {opd.divergence} does not use"


def _merge(settings: Settings) -> Wrong:
    merge, rewards = settings.merge, [reward.name for reward in settings.rewards]
    for i, each in enumerate(merge.models):
        for name, choices in (("keep", each.keep), ("exclude", each.exclude)):
            if merge.guard is None and len(choices) > 1:
                yield f"merge.models.{i}.{name}", f"got {choices}, expected one value without a guard"
        if each.reward is not None and each.reward not in rewards:
            yield f"merge.models.{i}.reward", f"no reward {each.reward!r}, expected one of {rewards}"
        if each.max_regression is not None and (each.reward is None or merge.guard is None):
            missing = "merge.guard" if merge.guard is None else f"merge.models.{i}.reward"
            yield f"merge.models.{i}.max_regression", f"needs {missing}"


def _run(own: Settings, name: str) -> Wrong:
    """Check the models that a run of stage merge combines."""
    if own.runs[name].stage != "merge":
        return
    merge, models = weight_merge(own, name), {}
    if merge is None or not own.merge.models:
        models = {f"teachers.models.{i}.model": each.model for i, each in enumerate(own.teachers.models)}
        if not models:
            yield f"runs.{name}", "stage merge needs teachers, and teachers.models is empty"
        elif merge is not None and any(is_url(model) for model in models.values()):
            yield "merge.method", "weights needs the teachers' weights, but the teachers are at URLs"
    if merge is not None:
        added = [each.model for each in merge.models]
        if len(set(added)) < len(added):
            place = "merge.models" if own.merge.models else "teachers.models"
            yield place, f"got {added}, expected different models"
        models |= {f"merge.models.{i}.model": each.model for i, each in enumerate(own.merge.models)}
    names = list(own.runs)
    for path, model in models.items():
        if model in names and model not in names[: names.index(name)]:
            yield path, f"{model!r} must come before the run {name!r}, which uses it"
        if model not in names and difflib.get_close_matches(model, names, 1, 0.8):
            yield path, f"{model!r} is not a run of this recipe{nearest(model, names)}"


def _absent_files(settings: Settings) -> Wrong:
    """Find settings that name an absent local file or folder."""
    held_out, warm_start = settings.data.evaluation, settings.warm_start
    named = {
        "model.path": settings.model.path,
        "data.train.source": settings.data.train.source,
        "data.evaluation.source": held_out.source if held_out else None,
        "warm_start.source.source": warm_start.source.source if warm_start else None,
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
        except (OSError, RuntimeError) as error:  # name too long, no permission, no such user
            yield path, f"{name[:80]!r}: {error}"
            continue
        if beside is None:
            yield path, f"no file {name!r} (there is no folder {str(file.parent)!r})"
        else:
            yield path, f"no file {name!r}{nearest(file.name, beside)}"
