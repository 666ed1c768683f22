"""What a command will do: its runs in order, what each starts from and needs, and what is finished."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from smopd.config.errors import explain, line, nearest
from smopd.config.merging import Merge, usual
from smopd.config.recipe import Keys
from smopd.config.settings import Settings
from smopd.names import is_url

Part = Literal["all", "warm-start", "specialize", "merge", "train", "evaluate"]
BASE = "base"
_PATH = re.compile(r"(~|\.{0,2}/).*|.*\.(jsonl|json|parquet|csv)(\.gz)?")


@dataclass(frozen=True)
class PlannedRun:
    """One entry of the plan; the warm start is the run `base`."""

    name: str
    stage: str
    init: str
    weights: dict[str, float]
    """The priority profile, by reward."""
    steps: int
    done: bool
    """Whether the output directory says it is finished."""
    teachers: tuple[str, ...] = ()
    """The models that it distils."""
    merge: Merge | None = None
    """The merge of weights that it starts from, its models named."""

    @property
    def starts(self) -> tuple[str, ...]:
        """The models that its first weights are made of."""
        return (self.init, *(each.model for each in self.merge.models)) if self.merge else (self.init,)

    @property
    def start(self) -> str:
        """What it starts from, in words."""
        if self.merge is None:
            return self.init
        guarded = f", the best of {self.merge.choices()}" if self.merge.guard else ""
        return f"{self.init} and the changes of {', '.join(self.starts[1:])}{guarded}"


def output_directory(settings: Settings) -> Path:
    """The run directory: `output` with `{name}` filled in."""
    return Path(settings.output.replace("{name}", settings.name)).expanduser()


def is_done(settings: Settings, run: str) -> bool:
    """Whether `run` (or `base`, the warm start) is finished in the output directory."""
    return (output_directory(settings) / run / "done.json").is_file()


def needs_base(settings: Settings) -> bool:
    """Whether the base model has to be made or warmed up before the first run."""
    return settings.model.factory is not None or settings.warm_start is not None


def ordered(settings: Settings) -> list[str]:
    """The runs of the recipe in the order in which they are done: as written, those of adapters last.

    vLLM's engine for adapters cannot sleep: what comes after it has less memory.
    """
    late: list[str] = []
    for name, run in settings.runs.items():
        own = settings.resolved(name)
        needs = {run.init, own.kl_ref.model, own.opd.product.reference}
        if distils(own, name):
            needs |= {teacher.model for teacher in own.teachers.models}
        if (merge := weight_merge(own, name)) is not None:
            needs |= {each.model for each in merge.models}
        if own.student.lora is not None or needs & set(late):
            late.append(name)
    return [*(name for name in settings.runs if name not in late), *late]


def distils(own: Settings, name: str) -> bool:
    """Whether the run asks its teachers while it trains; `own` are its resolved settings."""
    return own.runs[name].stage == "merge" and own.merge.method != "weights"


def weight_merge(own: Settings, name: str) -> Merge | None:
    """The merge of weights that the run starts from, its models named; None: it starts from `init` alone.

    Args:
        own: the resolved settings of the run `name`.
    """
    if own.runs[name].stage != "merge" or distils(own, name):
        return None
    guarded = own.merge.guard is not None
    teachers = [usual(each.model, each.reward, guarded=guarded) for each in own.teachers.models]
    return own.merge.model_copy(update={"models": own.merge.models or teachers})


def product_reference(own: Settings, name: str) -> str | None:
    """What the product of the run's teachers is relative to: a run, `base`, a path or URLs; None: no product.

    Args:
        own: the resolved settings of the run `name`.
    Raises:
        ValueError: it is to be what the teachers started from, and they started from several models.
    """
    if not distils(own, name) or own.merge.method != "product":
        return None
    if own.opd.product.reference != "init":
        return own.opd.product.reference
    taught = [own.runs[each.model] for each in own.teachers.models if each.model in own.runs]
    starts = {"a merge" if run.stage == "merge" else run.init for run in taught} or {BASE}
    if len(starts) > 1 or starts == {"a merge"}:
        raise ValueError(f"the teachers started from {' and '.join(sorted(starts))}; name one")
    return starts.pop()


def plan(settings: Settings, part: Part = "all", only: tuple[str, ...] = ()) -> list[PlannedRun]:
    """The runs of this part of the recipe in order, the warm start first; `only` keeps the runs it names."""
    runs = []
    if needs_base(settings) and part in ("all", "warm-start", "specialize", "train"):
        steps = settings.warm_start.steps if settings.warm_start else 0
        done = is_done(settings, BASE)
        runs.append(PlannedRun(BASE, "warm-start", init="model", weights={}, steps=steps, done=done))
    for name in ordered(settings):
        run = settings.runs[name]
        if part not in ("all", run.stage) or (only and name not in only):
            continue
        own = settings.resolved(name)
        weights = dict(zip((reward.name for reward in own.rewards), own.weights(name), strict=True))
        runs.append(
            PlannedRun(
                name,
                run.stage,
                init=run.init,
                weights=weights,
                steps=own.loop.steps,
                done=is_done(settings, name),
                teachers=tuple(t.model for t in own.teachers.models) if distils(own, name) else (),
                merge=weight_merge(own, name),
            )
        )
    return runs


def check_runs(settings: Settings, origin: dict[Keys, str]) -> list[str]:
    """What is wrong with single runs: their own settings, their teachers, local files that are missing."""
    files = _local_files(settings)
    wrong = [line(keys, _missing(path), origin) for keys, path in files.items() if not _exists(path)]
    for name, run in settings.runs.items():
        prefix: Keys = ("runs", name, "set")
        try:
            own = settings.resolved(name)
        except ValidationError as error:
            wrong += explain(error, origin, prefix)
            continue
        for keys, path in _local_files(own).items():
            if files.get(keys) != path and not _exists(path):
                wrong.append(line((*prefix, *keys), _missing(path), origin))
        if run.stage == "merge":
            wrong += _wrong_teachers(own, name, origin)
            wrong += _wrong_reference(own, name, origin)
            wrong += _wrong_merge(own, name, origin)
        if own.kl_ref.coef > 0 and own.kl_ref.model != "init":
            own_prefix: Keys = prefix if "kl_ref" in run.set else ()
            wrong += _wrong_model(own.kl_ref.model, (*own_prefix, "kl_ref", "model"), own, name, origin)
    return list(dict.fromkeys(wrong))


def _wrong_merge(own: Settings, name: str, origin: dict[Keys, str]) -> list[str]:
    merge = weight_merge(own, name)
    prefix: Keys = ("runs", name, "set") if "merge" in own.runs[name].set else ()
    if merge is None:
        return []
    if not own.merge.models and any(is_url(each.model) for each in merge.models):
        text = "weights: needs the teachers' weights, they are at URLs; expected product or published"
        return [line((*prefix, "merge", "method"), text, origin)]
    return [
        mistake
        for i, each in enumerate(own.merge.models)
        for mistake in _wrong_model(each.model, (*prefix, "merge", "models", i, "model"), own, name, origin)
    ]


def _wrong_teachers(own: Settings, name: str, origin: dict[Keys, str]) -> list[str]:
    if own.merge.models and not distils(own, name):
        return []
    if not own.teachers.models:
        return [line(("runs", name), "stage merge needs teachers, and teachers.models is empty", origin)]
    prefix: Keys = ("runs", name, "set") if "teachers" in own.runs[name].set else ()
    return [
        mistake
        for i, teacher in enumerate(own.teachers.models)
        for mistake in _wrong_model(
            teacher.model, (*prefix, "teachers", "models", i, "model"), own, name, origin
        )
    ]


def _wrong_reference(own: Settings, name: str, origin: dict[Keys, str]) -> list[str]:
    prefix: Keys = ("runs", name, "set") if "product" in own.runs[name].set.get("opd", {}) else ()
    keys = (*prefix, "opd", "product", "reference")
    try:
        reference = product_reference(own, name)
    except ValueError as error:
        return [line(keys, str(error), origin)]
    return [] if reference is None else _wrong_model(reference, keys, own, name, origin)


def _wrong_model(model: str, keys: Keys, own: Settings, name: str, origin: dict[Keys, str]) -> list[str]:
    """What is wrong with a frozen model of the run `name`, if another run of the recipe is meant."""
    names = list(own.runs)
    if model in names and model not in names[: names.index(name)]:
        return [line(keys, f"{model!r} does not come before the run {name!r} that needs it", origin)]
    if model not in names and difflib.get_close_matches(model, names, 1, 0.8):
        return [line(keys, f"{model!r} is no run of this recipe{nearest(model, names)}", origin)]
    return []


def _local_files(settings: Settings) -> dict[Keys, str]:
    """The settings that name a local file or folder."""
    held_out, warm_start = settings.data.evaluation, settings.warm_start
    named: dict[Keys, str | None] = {
        ("model", "path"): settings.model.path,
        ("data", "train", "source"): settings.data.train.source,
        ("data", "evaluation", "source"): held_out.source if held_out else None,
        ("warm_start", "source", "source"): warm_start.source.source if warm_start else None,
    }
    for i, teacher in enumerate(settings.teachers.models):
        named["teachers", "models", i, "model"] = teacher.model
    if settings.merge.method == "product":
        named["opd", "product", "reference"] = settings.opd.product.reference
    for i, each in enumerate(settings.merge.models):
        named["merge", "models", i, "model"] = each.model
    named["kl_ref", "model"] = settings.kl_ref.model if settings.kl_ref.coef > 0 else None
    return {keys: value for keys, value in named.items() if value and _PATH.fullmatch(value)}


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _missing(path: str) -> str:
    folder = Path(path).expanduser().parent
    if not folder.is_dir():
        return f"no file {path!r} (there is no folder {str(folder)!r})"
    return f"no file {path!r}{nearest(Path(path).name, [other.name for other in folder.iterdir()])}"
