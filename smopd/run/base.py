"""The base model. It comes from a path or a factory, and is then trained by the warm start, if any."""

import shutil
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from smopd.config.schedule import BASE, needs_base
from smopd.config.settings import Loss, Settings
from smopd.data.prompts import Demonstration, DemonstrationSet, batch_indices
from smopd.engine import distributed
from smopd.engine.files import empty_partial, replace_folder, room_for
from smopd.engine.imports import resolve
from smopd.engine.models.loading import load_tokenizer, require_usable, stored_dtype
from smopd.engine.student.checkpoint import Checkpoints, export
from smopd.engine.student.optimizers import last_share
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from smopd.objective import token_weights
from smopd.ops import LossSettings, LossTokens
from smopd.record.files import JsonlLog
from smopd.record.progress import Progress
from smopd.run import build
from smopd.run.failures import error_context
from smopd.run.folder import begun_runs, mark_done
from smopd.step.stop import Stop, Stopped

PROBE = "What is 2 plus 3?\n {a_b}"  # text that tokenizers encode differently


def model_path(settings: Settings, folder: Path, name: str) -> str:
    """Return the path of a run's model, of the base, or of a model that is not part of the recipe."""
    if name == BASE and not needs_base(settings):
        return str(settings.model.path)
    return str(folder / name / "export") if name == BASE or name in settings.runs else name


def initial_model(settings: Settings, folder: Path) -> str:
    """Return the path of the model before any training.

    A factory's model is saved in `folder`. Each command builds it anew until a run has a result.
    """
    origin = settings.model
    if origin.factory is None:
        return str(origin.path)
    made = folder / "initial"

    def make() -> None:
        if made.exists() and begun_runs(folder.parent, settings):
            return
        path = str(origin.factory)
        match resolve(path, dict[str, Any]())(seed=settings.seed, **origin.kwargs):
            case (PreTrainedModel() as model, PreTrainedTokenizerBase() as tokenizer):
                pass
            case found:
                raise ValueError(f"{path} returned {found!r:.80}, expected a model and its tokenizer")
        if model.device.type == "meta":
            raise ValueError(f"{path} returned a model without weights, expected one on a CPU")
        with room_for(made):
            new = empty_partial(made)
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
            _require_as_saved(path, tokenizer, new)
            replace_folder(new, made)

    with error_context("model.factory"):
        distributed.on_rank0(make)
    return str(made)


def _require_as_saved(factory: str, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise ValueError if the saved model is unusable, or its tokenizer encodes PROBE unlike `tokenizer`."""
    saved = load_tokenizer(folder)
    require_usable(folder, saved)
    if saved(PROBE)["input_ids"] != tokenizer(PROBE)["input_ids"]:
        raise ValueError(
            f"{factory}: AutoTokenizer loads its saved {type(tokenizer).__name__} as {type(saved).__name__}, "
            f"which gives {PROBE!r} other ids; expected a tokenizer that the model's family does not replace"
        )


def make_base(
    settings: Settings,
    folder: Path,
    path: str,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: DemonstrationSet | None,
    device: torch.device,
    stop: Stop,
) -> None:
    """Train the model at `path` on the demonstrations, if any, and export it to `folder`.

    Training resumes from its newest checkpoint. Checkpoints are written as in a run and removed at the end.
    """
    warm = settings.warm_start
    steps, every = warm.steps if warm else 0, settings.checkpoint.every
    own: dict[str, Any] = {"lora": None}
    if warm is not None:
        own |= {"learning_rate": warm.learning_rate, "warmup_steps": warm.warmup_steps}
        own["schedule"] = partial(last_share, updates=steps, share=warm.decay_share)
    student = build.student(settings, path, device, **own)
    with stop.postponed():
        if warm is not None and demonstrations is not None:
            log, checkpoints = JsonlLog(folder / "metrics.jsonl"), Checkpoints(folder / "checkpoints", 1)
            start, _ = checkpoints.restore(student)
            with ExitStack() as stack:
                stack.enter_context(distributed.collective_timeout(settings.waiting_seconds))
                shown = None
                if distributed.rank() == 0:
                    log.cut(start)
                    shown = stack.enter_context(Progress("warm start", steps, start))
                for step in range(start, steps):
                    chosen = batch_indices(len(demonstrations), warm.batch_size, step, settings.seed)
                    mine = chosen[distributed.rank() :: distributed.world_size()]
                    values = supervised_step(student, [demonstrations[i] for i in mine])
                    if shown is not None:
                        log.write({"step": step + 1, **values})
                        shown.update(step + 1, values)
                    stopped = stop.asked()
                    if stopped or (every and (step + 1) % every == 0 and step + 1 < steps):
                        checkpoints.confirm()
                        log.flush()
                        checkpoints.save(step + 1, student)
                    if stopped:
                        raise Stopped(stopped, f"warm-start step {step + 1} is done and saved", agreed=True)
        export(student, tokenizer, folder / "export", stored_dtype(path))
        mark_done(folder, {"steps": steps})
        distributed.on_rank0(lambda: shutil.rmtree(folder / "checkpoints", ignore_errors=True))


def supervised_step(student: Student, demonstrations: list[Demonstration]) -> dict[str, float]:
    """Update `student` on the mean negative log-likelihood of all ranks' completion tokens.

    This is a collective call. The gradient equals that of the clipped surrogate at ratio 1 and advantage 1.
    """
    rollouts = []
    for group, each in enumerate(demonstrations):
        answer = torch.tensor(each.completion_ids, dtype=torch.int64)
        rollouts.append(Rollout(each.prompt_ids, answer, torch.zeros(len(answer)), group, finished=True))
    lengths_R = torch.tensor([len(rollout.response_ids) for rollout in rollouts], dtype=torch.int64)
    weight_N = token_weights(Loss(aggregation="token-mean"), lengths_R).to(student.device)
    none = torch.zeros(0, dtype=torch.int64)
    ids_N = torch.cat([none, *(rollout.response_ids for rollout in rollouts)]).to(student.device)
    tokens = LossTokens(token_ids_N=ids_N, adv_N=torch.ones_like(weight_N), pg_weight_N=weight_N)
    update = student.update(rollouts, tokens, LossSettings(opd_coef=0.0))
    nll = -distributed.all_reduce((update.stats.logp_N * weight_N).sum())
    return {"nll": float(nll), "grad_norm": update.grad_norm}
