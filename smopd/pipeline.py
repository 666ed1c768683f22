"""The runs of a recipe in order: warm start, specialize, merge, controls, evaluation, report.

Every finished piece leaves a `done.json` as its last act and is not done again; an unfinished one goes on
from its newest checkpoint. Nothing here knows the algorithm: that is `smopd.loop`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.utils import logging as transformers_logging

from smopd import build
from smopd.cli import Command
from smopd.config import Settings
from smopd.data import PromptSet, import_function, load_demonstrations
from smopd.engine import distributed
from smopd.engine.checkpoint import Checkpoints, DamagedCheckpoint, export, replace_folder
from smopd.engine.models import load_tokenizer, stored_dtype
from smopd.engine.student import NonFiniteGradient
from smopd.evals.held_out import evaluate_held_out
from smopd.folder import Busy, OtherSettings, claimed, mark_done
from smopd.loop import Run, optimise
from smopd.plan import BASE, PlannedRun, is_done, plan
from smopd.progress import JsonlLog, Progress, say, write_atomically
from smopd.recorder import Recorder
from smopd.rewards.batch import RewardError
from smopd.rewards.isolation import RewardPool, RewardSpec
from smopd.scoring import Scorer
from smopd.summary import summarise
from smopd.warm_start import warm_start


class UnusableInput(RuntimeError):
    """Data, a factory or a plan that a run cannot begin with."""


FAILURES = (
    Busy,
    DamagedCheckpoint,
    NonFiniteGradient,
    OtherSettings,
    RewardError,
    UnusableInput,
    FileNotFoundError,
)
"""What a user can act on: answered in a few lines, without a traceback."""


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Turns what is wrong with a source into an answer that names the setting."""
    try:
        yield
    except (ValueError, ImportError) as error:
        raise UnusableInput(f"{what}: {error}") from error


@dataclass(frozen=True)
class Workshop:
    """What all runs of a recipe share."""

    settings: Settings
    folder: Path
    pool: RewardPool
    device: torch.device

    def finished(self, name: str) -> bool:
        return bool(distributed.broadcast_object(is_done(self.settings, name)))

    def model_path(self, name: str) -> str:
        """Where the model of a run, of the base, or of a teacher given by path is loaded from."""
        if name == BASE and not needs_base(self.settings):
            return str(self.settings.model.path)
        if name == BASE or name in self.settings.runs:
            return str(self.folder / name / "export")
        return name


def run_recipe(command: Command) -> int:
    """Does what `command` asks for and is not finished; returns the exit status."""
    logging.basicConfig(
        format="%(message)s", level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.ERROR
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    settings, folder = command.settings, Path(command.settings.output)
    rewards = [RewardSpec(reward.name, reward.function, reward.kwargs) for reward in settings.rewards]
    with distributed.process_group() as device:
        try:
            with (
                claimed(folder, settings),
                RewardPool(
                    rewards,
                    deadline_seconds=settings.scoring.deadline_seconds,
                    log_path=folder / f"rewards_{distributed.rank()}.log",
                ) as pool,
            ):
                pool.probe()
                do_runs(Workshop(settings, folder, pool, device), command)
        except FAILURES as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
    return 0


def do_runs(shop: Workshop, command: Command) -> None:
    settings = shop.settings
    if needs_base(settings) and not shop.finished(BASE):
        make_base(shop)
    tokenizer = load_tokenizer(shop.model_path(BASE))
    with reading("data.train"):
        prompts = build.prompt_set(settings, settings.data.train, tokenizer, settings.data.overlong)
    held_out = None
    if settings.data.evaluation is not None:
        cut = settings.data.overlong == "truncate_left"
        with reading("data.evaluation"):
            held_out = build.prompt_set(
                settings, settings.data.evaluation, tokenizer, "truncate_left" if cut else "error"
            )
    tell(prompts, held_out)
    planned = plan(settings, command.stage, command.only)
    for run in planned:
        if run.name != BASE and not shop.finished(run.name):
            train(shop, run, prompts, held_out)
            gc.collect()
    if held_out is not None:
        wanted = {run.name for run in planned} if command.stage != "evaluate" else set(settings.runs)
        for name in (BASE, *settings.runs):
            if name == BASE or (name in wanted and shop.finished(name)):
                evaluate(shop, name, held_out)
    if distributed.rank() == 0:
        summarise(settings, shop.folder)


def needs_base(settings: Settings) -> bool:
    """Whether the base model has to be made or warmed up before the first run."""
    return settings.model.factory is not None or settings.warm_start is not None


def make_base(shop: Workshop) -> None:
    """The starting model.

    From its factory or path, then warmed up on demonstrations if the recipe says so.
    """
    settings, folder = shop.settings, shop.folder / BASE
    origin, warm = settings.model, settings.warm_start
    path = str(origin.path)
    if origin.factory is not None:
        path = str(folder / "initial")
        if distributed.rank() == 0:
            with reading("model.factory"):
                model, tokenizer = import_function(origin.factory)(seed=settings.seed, **origin.kwargs)
            partial = folder / "initial.partial"
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
            replace_folder(partial, Path(path))
        distributed.barrier()
    tokenizer = load_tokenizer(path)
    changes = {"learning_rate": warm.learning_rate, "warmup_steps": warm.warmup_steps} if warm else {}
    student = build.student(settings, path, shop.device, **changes)
    if warm is not None:
        source = warm.source
        with reading("warm_start.source"):
            demonstrations = load_demonstrations(
                source.source,
                tokenizer,
                prompt_column=source.prompt_column,
                completion_column=warm.completion_column,
                map=source.map,
                max_tokens=warm.max_tokens,
                split=source.split,
                limit=source.limit,
                kwargs=source.kwargs,
                system=settings.data.system,
            )
        log = JsonlLog(folder / "metrics.jsonl")
        writes = distributed.rank() == 0
        if writes:
            log.cut(0)
        with progress(settings, "warm start", warm.steps, 0) if writes else nullcontext() as shown:
            warm_start(student, demonstrations, warm, settings.seed, log, shown)
    export(student, tokenizer, folder / "export", stored_dtype(path))
    mark_done(folder, {"steps": warm.steps if warm else 0})


def train(shop: Workshop, run: PlannedRun, prompts: PromptSet, held_out: PromptSet | None) -> None:
    """One run of the recipe, from its start or its newest checkpoint to its export."""
    settings, folder = shop.settings.resolved(run.name), shop.folder / run.name
    for needed in (run.init, *run.teachers):
        if needed in settings.runs and not shop.finished(needed):
            raise UnusableInput(
                f"runs.{run.name}: needs the run {needed!r}, which is not finished; run it first"
            )
    path = shop.model_path(run.init)
    tokenizer = load_tokenizer(path)
    student = build.student(settings, path, shop.device)
    teachers = [shop.model_path(teacher) for teacher in run.teachers]
    with Recorder(folder, run.name, settings) as recorder:
        optimise(
            Run(
                settings=settings,
                weights=list(run.weights.values()),
                prompts=prompts,
                held_out=held_out,
                student=student,
                rollouts=build.rollout_engine(settings, path, shop.device),
                teachers=build.teacher_engine(settings, teachers, student.vocabulary, shop.device),
                scorer=Scorer(shop.pool, tokenizer, settings.scoring.max_unscorable_share),
                checkpoints=Checkpoints(folder / "checkpoints", settings.checkpoint.keep),
                recorder=recorder,
            )
        )
    export(student, tokenizer, folder / "export", stored_dtype(path))
    mark_done(folder, {"steps": settings.loop.steps, "skipped_updates": student.skipped})


def evaluate(shop: Workshop, name: str, held_out: PromptSet) -> None:
    """The run's row of the table: `evaluation.json` and every response, unless they are there."""
    folder, path = shop.folder / name, shop.model_path(name)
    if distributed.broadcast_object((folder / "evaluation.json").exists()):
        return
    scorer = Scorer(shop.pool, load_tokenizer(path), shop.settings.scoring.max_unscorable_share)
    engine = build.rollout_engine(shop.settings, path, shop.device)
    result = evaluate_held_out(shop.settings, held_out, engine, scorer)
    if distributed.rank() == 0:
        responses = "".join(json.dumps(item) + "\n" for item in result.items)
        write_atomically(folder / "responses.jsonl", responses.encode())
        write_atomically(folder / "evaluation.json", json.dumps(result.values, indent=1).encode())
    distributed.barrier()


def tell(prompts: PromptSet, held_out: PromptSet | None) -> None:
    """One line on what was read and what was left out of it."""
    if distributed.rank() == 0:
        left = (
            f"{prompts.dropped_overlong} too long, {prompts.truncated} truncated, "
            f"{prompts.mapped_out} mapped out"
        )
        beside = f", {len(held_out)} held out" if held_out is not None else ""
        say(f"{len(prompts)} prompts of {prompts.rows} rows ({left}){beside}")


def progress(settings: Settings, name: str, steps: int, start: int) -> Progress:
    return Progress(name, steps, start, True if settings.log.plain else None)
