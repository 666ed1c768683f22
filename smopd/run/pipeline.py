"""`smopd train`: do the unfinished runs of a recipe, evaluate the models, and write the report."""

import gc
import json
import logging
import os
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from smopd.config.cli import Command
from smopd.config.schedule import BASE, PlannedRun, done_steps, is_done, needs_base, plan
from smopd.config.settings import Merge, Settings
from smopd.data.prompts import Prompt, PromptSet
from smopd.engine import distributed
from smopd.engine.errors import Failure
from smopd.engine.files import write_atomically
from smopd.engine.local.teachers import held_already, load_teachers
from smopd.engine.models import loading
from smopd.engine.student.checkpoint import Checkpoints, export, require_whole, saved_steps
from smopd.engine.student.optimizers import schedule
from smopd.engine.types import Rollout, TeacherTopK
from smopd.engine.weights.transport import publish_weights
from smopd.loop import Run, optimise
from smopd.merging.guard import Starter
from smopd.merging.vectors import TaskVectors
from smopd.names import printable
from smopd.record.progress import say, say_error
from smopd.record.recorder import Recorder
from smopd.record.token_view import SHOWN, add_merged
from smopd.report.summary import summarise, write_card
from smopd.rewards.pool import RewardPool
from smopd.run import build
from smopd.run.base import initial_model, make_base, model_path
from smopd.run.failures import UnusableInput, error_context
from smopd.run.folder import compare_inputs, flat, lock_run_dir, mark_done, write_settings
from smopd.run.identity import hub_commits, identity
from smopd.run.inputs import Inputs, log_inputs, read_inputs, require_same
from smopd.run.preflight import newer_than_tested, require_functions, require_rewards, try_engine, try_rewards
from smopd.step.conversation import Conversations, Environments
from smopd.step.held_out import evaluate_held_out
from smopd.step.rewards import WINDOW_STEPS, Rewarder
from smopd.step.stop import Stop, Stopped

CODE_EXITS = "code that the recipe names has called sys.exit: "


@dataclass(frozen=True)
class RunContext:
    """What all runs of a recipe share."""

    settings: Settings
    folder: Path
    pool: RewardPool
    device: torch.device
    stop: Stop
    environments: Environments
    change: bool
    """Whether inputs may differ from those of the last command."""
    whole: set[str] = field(default_factory=set)
    """Models whose files have been verified."""

    def finished(self, name: str) -> bool:
        return distributed.on_rank0(lambda: is_done(self.settings, name))

    def model_path(self, name: str) -> str:
        return model_path(self.settings, self.folder, name)

    def require_whole(self, path: str) -> None:
        """Raise UnusableCheckpoint if the files of an export are damaged."""
        if path not in self.whole:
            require_whole(Path(path))
            self.whole.add(path)

    def teacher_path(self, name: str) -> str:
        """Return the path of a teacher, or of only its adapter if a run of this recipe trained an adapter."""
        adapter = Path(self.model_path(name)) / "adapter"
        trained_here = name in self.settings.runs and self.settings.resolved(name).student.lora is not None
        return str(adapter) if trained_here else self.model_path(name)


class Printable(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def run_recipe(command: Command) -> int:
    """Do the unfinished work of `command`, and return the exit status."""
    settings, folder = command.settings, Path(command.settings.output)
    set_up(settings)
    with (
        Stop() as stop,
        distributed.process_group() as device,
        distributed.watched(settings.loop.timeout_seconds),
    ):
        try:
            require_same(flat(settings.model_dump(mode="json")), "start all ranks by one command")
            require_functions(settings)
            with (
                lock_run_dir(folder, settings, change=command.change),
                workers(settings, folder) as (pool, environments),
            ):
                own = RunContext(settings, folder, pool, device, stop, environments, command.change)
                do_runs(own, command)
        except (Failure, OSError, SystemExit) as error:
            if distributed.first_to_fail():
                say_error(f"error: {CODE_EXITS * isinstance(error, SystemExit)}{error}")
            return 1
        except Stopped as stopped:
            if stopped.agreed:
                distributed.barrier()  # the launcher ends all ranks when the first rank exits
            if distributed.first_to_fail():
                say_error(str(stopped))
            return stopped.status
        except Exception as error:
            if distributed.first_to_fail():
                lost = distributed.is_lost(error)
                say_error("error: another rank has ended" if lost else traceback.format_exc())
            return 1
    return 128 + stop.number if stop.number else 0  # a signal arrived while the command ended


def try_recipe(command: Command) -> int:
    """Check the model's files, the data and every reward without training, and return the exit status."""
    settings = command.settings
    set_up(settings)
    with tempfile.TemporaryDirectory() as own, distributed.process_group() as device:
        try:
            require_functions(settings)
            place = distributed.broadcast_object(own)
            with workers(settings, Path(place)) as (pool, _):
                with error_context("model"):
                    start = initial_model(settings, Path(place))
                    tokenizer = loading.load_tokenizer(start)
                    loading.require_usable(start, tokenizer)
                inputs = read_inputs(settings, tokenizer, demonstrations=settings.warm_start is not None)
                pool.require_columns(inputs.columns)
                log_inputs(inputs)
                build.require_models(settings, plan(settings, command.stage, command.only), tokenizer)
                failed = try_rewards(pool, settings, tokenizer, inputs.train[0])
                try_model(settings, start, tokenizer, inputs.train[0], device)
                require_rewards(failed)
        except (Failure, OSError, SystemExit) as error:
            say_error(f"error: {CODE_EXITS * isinstance(error, SystemExit)}{error}")
            return 1
    return 0


def try_model(
    settings: Settings, path: str, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, device: torch.device
) -> None:
    """Compare the first run's rollout engine with its trainer, if both can be loaded here."""
    own, on_gpu = settings.resolved(next(iter(settings.runs))), device.type == "cuda"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    room = torch.cuda.mem_get_info()[0] if on_gpu else memory // 2
    stored = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    if own.rollout.urls or (own.rollout.engine == "vllm" and not on_gpu) or not 0 < 4 * stored < room:
        say("the model's log-probabilities were not compared: no folder, engine or memory for it here")
        return
    student = build.student(own, path, device)
    off = try_engine(build.rollout_engine(own, path, tokenizer, device, settings), student, prompt, own)
    say(f"the engine's log-probabilities on the first prompt are {off:.1g} nats from the trainer's")


def set_up(settings: Settings) -> None:
    quiet = os.environ.get("RANK", "0") != "0"
    handler = logging.StreamHandler()
    handler.setFormatter(Printable("%(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.ERROR if quiet else logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    loading.allow_custom_code(settings.model.trust_remote_code)


@contextmanager
def workers(settings: Settings, folder: Path) -> Iterator[tuple[RewardPool, Environments]]:
    """Start a worker for each reward, import the rewards, and start a worker for each run's environment."""
    limits: dict[str, Any] = {"log_path": folder / f"rewards_{distributed.rank()}.log"}
    limits["memory_bytes"] = round((settings.scoring.memory_gib or 0) * 2**30)
    with (
        RewardPool(settings.rewards, deadline_seconds=settings.scoring.deadline_seconds, **limits) as pool,
        Environments(**limits) as environments,
    ):
        pool.probe()
        for name in settings.runs:
            environments.of(settings.resolved(name))
        yield pool, environments


def do_runs(context: RunContext, command: Command) -> None:
    settings = context.settings
    planned = plan(settings, command.stage, command.only)
    names = [run.name for run in planned]
    if command.stage == "evaluate":
        names = [*(command.only or settings.runs)]
    base_due = needs_base(settings) and not context.finished(BASE)
    if base_due and BASE not in names:
        raise UnusableInput("the base model is not made yet; run --stage warm-start first")
    start = initial_model(settings, context.folder / BASE)
    context.require_whole(start)
    with error_context("model"):
        tokenizer = loading.load_tokenizer(start)
        if planned:
            loading.require_usable(start, tokenizer)
    inputs = read_inputs(settings, tokenizer, demonstrations=base_due)
    require_same(inputs.digests, "the rows of a source or map must not depend on chance or the process")
    context.pool.require_columns(inputs.columns)
    of = partial(identity, settings, inputs, start)
    write_settings(context.folder, settings, of, command.arguments, change=context.change)
    if distributed.rank() == 0:
        if newer := newer_than_tested():
            say(newer)
        log_inputs(inputs)
    due = [run for run in planned if not context.finished(run.name)]
    if due:
        failed = try_rewards(context.pool, settings, tokenizer, inputs.train[0])
        if settings.scoring.max_unscorable_share < 1:
            require_rewards(name for name, always in failed.items() if always)
        build.require_models(settings, due, tokenizer)
    for run in due:
        if run.name == BASE:
            folder = context.folder / BASE
            make_base(settings, folder, start, tokenizer, inputs.demonstrations, context.device, context.stop)
        else:
            train(context, run, inputs)
        gc.collect()
    for run in planned:
        if run.merge is not None and context.finished(run.name):
            view_merged(context, run.name, run.merge)
    if inputs.held_out is not None:
        for name in dict.fromkeys([BASE, *names]):
            if name == BASE or context.finished(name):
                evaluate(context, name, inputs.held_out)
    if distributed.rank() == 0:
        summarise(settings, context.folder)
        for name in settings.runs:
            if (export_folder := context.folder / name / "export").exists():
                write_card(settings, context.folder, name, export_folder)


def train(context: RunContext, run: PlannedRun, inputs: Inputs) -> None:
    """Train a run from its start or its newest checkpoint, and export the model."""
    settings, folder, device = context.settings.resolved(run.name), context.folder / run.name, context.device
    needed = dict.fromkeys([*run.starts, *run.teachers])
    for name in needed:
        if name in settings.runs and not context.finished(name):
            raise UnusableInput(f"runs.{run.name}: needs {name!r}, which is not finished; run it first")
    for name in needed:
        context.require_whole(context.model_path(name))
    distributed.on_rank0(lambda: reopen(context.settings, run.name, folder))
    tokenizer = loading.load_tokenizer(context.model_path(run.init))
    path = start_of(context, run, settings, inputs.train, tokenizer)
    context.require_whole(path)
    scheduled = schedule(settings.student, settings.loop.steps * settings.loop.updates_per_step)
    student = build.student(settings, path, device, schedule=scheduled)
    rollouts = build.rollout_engine(settings, path, tokenizer, device, context.settings)
    frozen = [context.teacher_path(teacher) for teacher in run.teachers]
    teachers = build.teacher_engine(settings, frozen, tokenizer, student.vocabulary, device)
    digests = {f"teacher {m}": found for m, found in getattr(teachers, "digests", {}).items()}
    loaded = {f"runs.{run.name}.servers": digests, **hub_commits(context.settings)}
    recipe, change = context.settings, context.change
    distributed.on_rank0(lambda: compare_inputs(context.folder, recipe, loaded, change=change, started=True))
    reference = None
    if settings.kl_ref.coef > 0:
        reference = held_already(path, path, student, teachers) or build.teacher_engine(
            settings, [path], tokenizer, student.vocabulary, device, role="reference"
        )
    if not distributed.on_rank0(lambda: saved_steps(folder / "checkpoints")):
        with error_context("rollout.engine"):
            publish_weights(student, rollouts, 0)  # as each step does
        try_engine(rollouts, student, inputs.train[0], settings)
    window_steps = min(WINDOW_STEPS, settings.loop.steps)
    with context.stop.postponed(), Recorder(folder, run.name, settings, tokenizer) as recorder:
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
                rewarder=Rewarder(context.pool, tokenizer, settings.scoring, window_steps),
                checkpoints=Checkpoints(folder / "checkpoints", settings.checkpoint.keep),
                recorder=recorder,
                views=run.stage == "merge",
                stop=context.stop,
                conversations=Conversations.of(context.environments, tokenizer, settings),
            )
        )
        export(student, tokenizer, folder / "export", loading.stored_dtype(path))
        mark_done(folder, {"steps": settings.loop.steps, "skipped_updates": student.skipped})


def view_merged(context: RunContext, name: str, merge: Merge) -> None:
    """Add the merged models' scores to the run's token view. Rank 0 loads the models one after the other."""
    settings, path = context.settings.resolved(name), context.model_path(name)
    tokenizer = loading.load_tokenizer(path)
    vocabulary = loading.describe(path, tokenizer)[0].get_text_config().vocab_size
    dtype = getattr(torch, settings.teachers.dtype)

    def score(model: str, rollouts: list[Rollout]) -> TeacherTopK:
        teacher = context.teacher_path(model)
        engine = load_teachers([teacher], settings.student, vocabulary, dtype, context.device)
        return engine.score(rollouts, SHOWN, settings.kl_temperature)

    file, models = context.folder / name / "tokens.jsonl", [each.model for each in merge.models]
    distributed.on_rank0(lambda: add_merged(file, tokenizer, models, score))


def reopen(settings: Settings, run: str, folder: Path) -> None:
    """Prepare a finished run for more steps. Require its last checkpoint, and remove its evaluation."""
    done = done_steps(settings, run)
    if done is None:
        return
    if done > max(saved_steps(folder / "checkpoints"), default=0):
        raise UnusableInput(
            f"runs.{run}: has no checkpoint of step {done} to continue from (checkpoint.every was 0); "
            f"remove {folder} to train it again"
        )
    users = [each.name for each in plan(settings) if run in (*each.starts, *each.teachers)]
    if begun := [name for name in users if (folder.parent / name).exists()]:
        say(f"{run} gets more steps, but {', '.join(begun)} began with its earlier weights")
    for name in ("evaluation.json", "responses.jsonl"):
        (folder / name).unlink(missing_ok=True)


def start_of(
    context: RunContext,
    run: PlannedRun,
    settings: Settings,
    prompts: PromptSet,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """Return the path of the initial weights: an earlier model, or a merge, which is made if needed."""
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
            rewarder=Rewarder(context.pool, tokenizer, settings.scoring),
            conversations=Conversations.of(context.environments, tokenizer, settings),
            make_engine=lambda: build.rollout_engine(full, base, tokenizer, context.device, context.settings),
            folder=context.folder / run.name,
        ).start()


def evaluate(context: RunContext, name: str, held_out: PromptSet) -> None:
    """Write evaluation.json and responses.jsonl of a model, unless evaluation.json exists."""
    folder, path = context.folder / name, context.model_path(name)
    if distributed.on_rank0((folder / "evaluation.json").exists):
        return
    context.require_whole(path)
    settings = context.settings if name == BASE else context.settings.resolved(name)
    tokenizer = loading.load_tokenizer(path)
    rewarder = Rewarder(context.pool, tokenizer, settings.scoring)
    conversations = Conversations.of(context.environments, tokenizer, settings)
    engine = build.rollout_engine(settings, path, tokenizer, context.device, context.settings)
    values, items = evaluate_held_out(settings, held_out, engine, rewarder, conversations)
    if distributed.rank() == 0:
        responses = "".join(json.dumps(item, allow_nan=False) + "\n" for item in items)
        write_atomically(folder / "responses.jsonl", responses.encode())
        write_atomically(folder / "evaluation.json", json.dumps(values, indent=1).encode())
    distributed.barrier()
