"""The runs of a recipe in order: warm start, specialize, merge, train, evaluation, report.

Every finished piece leaves a `done.json` as its last act and is not done again; an unfinished one resumes
from its newest checkpoint. Nothing here knows the algorithm: that is `smopd.loop`.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from smopd.advantages import ESTIMATORS
from smopd.config.cli import Command
from smopd.config.schedule import BASE, PlannedRun, is_done, needs_base, plan, product_reference
from smopd.config.settings import Settings
from smopd.data.prompts import PromptSet
from smopd.engine import distributed
from smopd.engine.files import write_atomically
from smopd.engine.imports import resolve
from smopd.engine.local.teachers import held_already
from smopd.engine.models.loading import load_tokenizer, stored_dtype
from smopd.engine.student.checkpoint import Checkpoints, export, require_whole
from smopd.engine.student.optimizers import OPTIMIZERS, SCHEDULES, schedule
from smopd.loop import Run, optimise
from smopd.merging.guard import Starter
from smopd.merging.vectors import TaskVectors
from smopd.names import is_url, printable
from smopd.objective import MIXTURES
from smopd.record.progress import say
from smopd.record.recorder import Recorder
from smopd.record.trackers import TRACKERS, missing
from smopd.report.summary import summarise
from smopd.rewards.pool import RewardPool, RewardSpec
from smopd.run import build
from smopd.run.base import initial_model, make_base
from smopd.run.failures import FAILURES, UnusableInput, error_context
from smopd.run.folder import lock_run_dir, mark_done, write_settings
from smopd.run.inputs import Inputs, digests, log_inputs, read_inputs
from smopd.run.versions import newer_than_tested
from smopd.step.held_out import evaluate_held_out
from smopd.step.rewards import WINDOW_STEPS, Rewarder
from smopd.step.stop import Stop, Stopped


@dataclass(frozen=True)
class RunContext:
    """What all runs of a recipe share."""

    settings: Settings
    folder: Path
    pool: RewardPool
    device: torch.device
    stop: Stop
    whole: set[str] = field(default_factory=set)
    """Models whose files have been checked."""

    def finished(self, name: str) -> bool:
        return distributed.on_rank0(lambda: is_done(self.settings, name))

    def model_path(self, name: str) -> str:
        """Where the model of a run, of the base, or of a teacher given by path is loaded from."""
        if name == BASE and not needs_base(self.settings):
            return str(self.settings.model.path)
        if name == BASE or name in self.settings.runs:
            return str(self.folder / name / "export")
        return name

    def require_whole(self, name: str) -> None:
        """Raises UnusableCheckpoint: the export of a run, or of the base, is not what was written."""
        path = self.model_path(name)
        if path not in self.whole:
            require_whole(Path(path))
            self.whole.add(path)

    def teacher_path(self, name: str) -> str:
        """Where a teacher is loaded from; the adapter alone where a run trained one."""
        adapter = Path(self.model_path(name)) / "adapter"
        trained_here = name in self.settings.runs and self.settings.resolved(name).student.lora is not None
        return str(adapter) if trained_here else self.model_path(name)


class Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def run_recipe(command: Command) -> int:
    """Does what `command` asks for and is not finished; returns the exit status."""
    quiet = os.environ.get("RANK", "0") != "0"
    handler = logging.StreamHandler()
    handler.setFormatter(Printable("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.ERROR if quiet else logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    settings, folder = command.settings, Path(command.settings.output)
    rewards = [RewardSpec(reward.name, reward.function, reward.kwargs) for reward in settings.rewards]
    with Stop() as stop, distributed.process_group() as device:
        try:
            require_functions(settings)
            with (
                lock_run_dir(folder, settings),
                RewardPool(
                    rewards,
                    deadline_seconds=settings.scoring.deadline_seconds,
                    log_path=folder / f"rewards_{distributed.rank()}.log",
                    memory_bytes=round((settings.scoring.memory_gib or 0) * 2**30),
                ) as pool,
            ):
                pool.probe()
                do_runs(RunContext(settings, folder, pool, device, stop), command)
        except FAILURES as error:
            if distributed.first_to_fail():
                print(printable(f"error: {error}"), file=sys.stderr, flush=True)
            return 1
        except Stopped as stopped:
            if stopped.agreed:
                distributed.barrier()  # the launcher ends all when the first one is gone
            if distributed.first_to_fail():
                print(stopped, file=sys.stderr, flush=True)
            return stopped.status
    return 0


def require_functions(settings: Settings) -> None:
    """Raises UnusableInput where a setting of a run names a function or a package that is not there."""
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
        if absent := " ".join(missing(own.log.trackers)):
            raise UnusableInput(f"log.trackers: {absent} is not installed (pip install {absent})")


def do_runs(context: RunContext, command: Command) -> None:
    settings = context.settings
    planned = plan(settings, command.stage, command.only)
    names = [run.name for run in planned]
    base_due = needs_base(settings) and not context.finished(BASE)
    if base_due and BASE not in names:
        raise UnusableInput("the base model is not made yet; run --stage warm-start first")
    start = initial_model(settings, context.folder / BASE)
    with error_context("model"):
        tokenizer = load_tokenizer(start)
    inputs = read_inputs(settings, tokenizer, demonstrations=base_due)
    write_settings(context.folder, settings, lambda: digests(settings, inputs))
    if distributed.rank() == 0:
        if newer := newer_than_tested():
            say(newer)
        log_inputs(inputs)
    for run in planned:
        if not context.finished(run.name):
            if run.name == BASE:
                folder = context.folder / BASE
                make_base(settings, folder, start, tokenizer, inputs.demonstrations, context.device)
            else:
                train(context, run, inputs)
            gc.collect()
    if inputs.held_out is not None:
        for name in dict.fromkeys([BASE, *(settings.runs if command.stage == "evaluate" else names)]):
            if name == BASE or context.finished(name):
                evaluate(context, name, inputs.held_out)
    if distributed.rank() == 0:
        summarise(settings, context.folder)


def train(context: RunContext, run: PlannedRun, inputs: Inputs) -> None:
    """One run of the recipe, from its start or its newest checkpoint to its export."""
    settings, folder, device = context.settings.resolved(run.name), context.folder / run.name, context.device
    setting_of = dict.fromkeys(run.teachers, "teachers.models")
    if (product_base := product_reference(settings, run.name)) is not None:
        setting_of[product_base] = "opd.product.reference"
    needed = dict.fromkeys([*run.starts, *setting_of])
    for name in needed:
        if name in settings.runs and not context.finished(name):
            raise UnusableInput(
                f"runs.{run.name}: needs the run {name!r}, which is not finished; run it first"
            )
    for name in needed:
        context.require_whole(name)
    path = start_of(context, run, settings, inputs.train)
    tokenizer = load_tokenizer(path)
    for name, setting in setting_of.items():
        if name != BASE and name not in settings.runs and not is_url(name):
            with error_context(setting):
                build.require_tokenizer(tokenizer, name)

    scheduled = schedule(settings.student, settings.loop.steps * settings.loop.updates_per_step)
    student = build.student(settings, path, device, schedule=scheduled)
    rollouts = build.rollout_engine(settings, path, device, context.settings)
    frozen = [context.teacher_path(teacher) for teacher in run.teachers]
    if product_base is not None:
        frozen.append(context.model_path(product_base))
    teachers = build.teacher_engine(settings, frozen, tokenizer, student.vocabulary, device)
    reference = None
    if settings.kl_ref.coef > 0:
        reference = held_already(path, path, student, teachers) or build.teacher_engine(
            settings, [path], tokenizer, student.vocabulary, device, role="reference"
        )
    window_steps = min(WINDOW_STEPS, settings.loop.steps)
    with Recorder(folder, run.name, settings, tokenizer) as recorder:
        optimise(
            Run(
                settings=settings,
                weights=list(run.weights.values()),
                prompts=inputs.train,
                held_out=inputs.held_out,
                student=student,
                rollouts=rollouts,
                teachers=teachers,
                reference=reference,
                rewarder=Rewarder(
                    context.pool, tokenizer, settings.scoring.max_unscorable_share, window_steps
                ),
                checkpoints=Checkpoints(folder / "checkpoints", settings.checkpoint.keep),
                recorder=recorder,
                stop=context.stop,
            )
        )
    export(student, tokenizer, folder / "export", stored_dtype(path))
    mark_done(folder, {"steps": settings.loop.steps, "skipped_updates": student.skipped})


def start_of(context: RunContext, run: PlannedRun, settings: Settings, prompts: PromptSet) -> str:
    """Where the first weights of a run are: an earlier model's, or the merge that is made of several."""
    base = context.model_path(run.init)
    if run.merge is None:
        return base
    full = settings.model_copy(update={"student": settings.student.model_copy(update={"lora": None})})
    with error_context(f"runs.{run.name}.merge"):
        models = [context.teacher_path(each.model) for each in run.merge.models]
        return Starter(
            settings=settings,
            merge=run.merge,
            vectors=TaskVectors(base, models, context.device),
            weights=run.weights,
            prompts=prompts,
            pool=context.pool,
            make_engine=partial(build.rollout_engine, full, base, context.device, context.settings),
            folder=context.folder / run.name,
        ).start()


def evaluate(context: RunContext, name: str, held_out: PromptSet) -> None:
    """The run's row of the table: `evaluation.json` and every response, unless they are there."""
    folder, path = context.folder / name, context.model_path(name)
    if distributed.on_rank0((folder / "evaluation.json").exists):
        return
    context.require_whole(name)
    settings = context.settings if name == BASE else context.settings.resolved(name)
    rewarder = Rewarder(context.pool, load_tokenizer(path), settings.scoring.max_unscorable_share)
    engine = build.rollout_engine(settings, path, context.device, context.settings)
    result = evaluate_held_out(settings, held_out, engine, rewarder)
    if distributed.rank() == 0:
        responses = "".join(json.dumps(item, allow_nan=False) + "\n" for item in result.items)
        write_atomically(folder / "responses.jsonl", responses.encode())
        write_atomically(folder / "evaluation.json", json.dumps(result.values, indent=1).encode())
    distributed.barrier()
