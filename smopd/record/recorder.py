"""Records of each step: one line of metrics, a few samples, and the progress line."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smopd import ops
from smopd.config.settings import Settings
from smopd.engine import distributed
from smopd.engine.errors import UnusableInput
from smopd.engine.imports import resolve
from smopd.engine.student.student import Student, Update
from smopd.engine.types import ENDINGS, FAILED, Rollout
from smopd.names import redacted
from smopd.objective import Objective, Signals
from smopd.record.alarms import Watch
from smopd.record.files import JsonlLog
from smopd.record.metrics import Metrics
from smopd.record.progress import Progress, say
from smopd.record.token_view import SHOWN, add_teachers, part, token_records
from smopd.record.trackers import TRACKERS, Tracker
from smopd.rewards.pool import RewardBatch
from smopd.step.batch import Batch
from smopd.step.teachers import TeacherScores

log = logging.getLogger(__name__)
CLIP_BITS = {
    "low": ops.CLIP_LOW,
    "high": ops.CLIP_HIGH,
    "dual": ops.CLIP_DUAL,
    "log_ratio": ops.CLIP_LOG_RATIO,
    "reverse_low": ops.CLIP_REVERSE_LOW,
    "reverse_high": ops.CLIP_REVERSE_HIGH,
}


class StepResult(NamedTuple):
    """The result of one step on this rank. `step` counts from 1."""

    step: int
    objective: Objective
    batch: Batch
    rewards: RewardBatch
    adv_R: Tensor
    kept_R: Tensor
    scores: TeacherScores
    signals: Signals
    updates: Sequence[Update]
    bad_answers: int | None
    """Number of invalid answers from servers since the command began. None if there are no servers."""


class Recorder(AbstractContextManager["Recorder"]):
    """A context manager that writes a run's metrics.jsonl, samples.jsonl and tokens.jsonl on rank 0."""

    def __init__(self, folder: Path, name: str, settings: Settings, tokenizer: PreTrainedTokenizerBase):
        self.folder, self.name, self.settings, self.tokenizer = folder, name, settings, tokenizer
        self.writes = distributed.rank() == 0
        self.metrics = JsonlLog(folder / "metrics.jsonl")
        self.samples = JsonlLog(folder / "samples.jsonl")
        self.tokens = JsonlLog(folder / "tokens.jsonl")
        self.evaluated = 0
        """Newest step with an evaluation. It is valid on rank 0."""
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._trackers: dict[str, Tracker] = {}
        self._watch = Watch()

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def begin(self, start: int) -> None:
        """Remove log lines after step `start`, from which the run resumes. Start progress and trackers."""
        if not self.writes:
            return
        for log in (self.metrics, self.samples, self.tokens):
            log.cut(start)
        lines = self.metrics.read()
        if (lost := start - sum("grad_norm" in line for line in lines)) > 0:
            say(f"{self.name}: metrics.jsonl lacks {lost} of {start} steps")
        for line in lines:
            if "grad_norm" in line:
                self._watch.see(line)  # its alarms were reported before
            else:
                self.evaluated = line["step"]
        self._progress = self._stack.enter_context(Progress(self.name, self.settings.loop.steps, start))
        self.folder.mkdir(parents=True, exist_ok=True)
        values = redacted(self.settings.model_dump(mode="json"))
        for kind in self.settings.log.trackers:
            opens = resolve(kind, TRACKERS)
            try:
                self._trackers[kind] = opens(self.folder, self.settings.name, self.name, values, start)
            except Exception as error:
                raise UnusableInput(f"log.trackers {kind}: {type(error).__name__}: {error}") from error
            self._stack.callback(self._use_tracker, kind, lambda own: own.close())

    def flush(self) -> None:
        """Flush the logs to disk. Call this before a checkpoint of the same step is written."""
        if self.writes:
            for log in (self.metrics, self.samples, self.tokens):
                log.flush()

    def record(self, result: StepResult, metrics: Metrics) -> None:
        """Reduce the step's metrics over all ranks and write them. This is a collective call."""
        add_rewards(metrics, result.batch, result.rewards)
        add_batch(metrics, result)
        add_updates(metrics, result.updates)
        add_policies(metrics, result)
        add_target(metrics, result)
        values = metrics.reduce()
        updates = result.updates
        values["opd_coef"] = result.objective.coef
        values["grad_norm"] = sum(update.grad_norm for update in updates) / len(updates)
        values["updates/skipped"] = float(sum(update.skipped for update in updates))
        values["micro_batches"] = float(sum(update.micro_batches for update in updates))
        seconds = sum(value for name, value in values.items() if name.startswith("seconds/"))
        values["tokens_per_second"] = values["tokens"] / max(seconds, 1e-9)
        self._write(result.step, values)
        if self.writes:
            self._write_samples(result)
            for advice in self._watch.see(values):
                say(f"{self.name}, step {result.step}: {advice}")

    def view_tokens(self, result: StepResult, student: Student) -> None:
        """Write token views of the step's first samples, with the updated student. All ranks call this."""
        batch, target = result.batch, result.signals.target
        shown = batch.rollouts[: self.settings.log.samples_per_step]
        found = student.topk(shown, SHOWN, self.settings.kl_temperature)
        if not self.writes:
            return
        names = [teacher.model for teacher in self.settings.teachers.models] if target else []
        begin = 0
        for i, rollout in enumerate(shown):
            own = slice(begin, begin := begin + int(batch.lengths_R[i]))
            records = token_records(self.tokenizer, rollout, part(found, own))
            if target is not None:
                add_teachers(records, self.tokenizer, part(target.topk, own))
            view = {"step": result.step, "teachers": names, "prompt": batch.prompts[i].content}
            ids = {"prompt_ids": list(rollout.prompt_ids), "response_ids": rollout.response_ids.tolist()}
            self.tokens.write({**view, **ids, "tokens": records})

    def record_evaluation(self, step: int, values: Mapping[str, float | None]) -> None:
        self.evaluated = step
        self._write(step, values)

    def _write(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._progress is None:  # not rank 0
            return
        self.metrics.write({"step": step, **values})
        self._progress.update(step, values)
        finite = {name: v for name, v in values.items() if v is not None and math.isfinite(v)}
        for kind in [*self._trackers]:
            self._use_tracker(kind, lambda tracker: tracker.log(step, finite))

    def _use_tracker(self, kind: str, action: Callable[[Tracker], object]) -> None:
        """Call a tracker unless it has failed before. A failure, such as a timeout, does not end the run."""
        try:
            if kind in self._trackers:
                action(self._trackers[kind])
        except Exception as error:
            del self._trackers[kind]
            log.warning("log.trackers %s failed and gets no more values: %r", kind, error)

    def _write_samples(self, result: StepResult) -> None:
        batch, rewards = result.batch, result.rewards
        for i, text in enumerate(rewards.texts[: self.settings.log.samples_per_step]):
            sample = {"step": result.step, "prompt": batch.prompts[i].content, "response": text}
            earned = dict(zip(rewards.names, rewards.rewards_RK[i].tolist(), strict=True))
            self.samples.write({**sample, "rewards": earned, "advantage": float(result.adv_R[i])})


def add_rewards(metrics: Metrics, batch: Batch, rewards: RewardBatch) -> None:
    """Add each reward's mean and deviation, its share of groups without variance, and its failures."""
    groups = batch.group_R.unique()
    for k, reward in enumerate(rewards.names):
        name, values_R = f"reward/{reward}", rewards.rewards_RK[:, k]
        metrics.add(name, values_R, spread=True)
        metrics.add(f"{name}/unscorable", values_R.isnan().double())
        for kind, count in rewards.failures[reward].items():
            metrics.add(f"{name}/failed/{kind}", count / max(1, len(values_R)))
        metrics.add(f"{name}/worker_restarts", float(rewards.restarts.get(reward, 0)))
        scored = [values_R[(batch.group_R == group) & ~values_R.isnan()] for group in groups]
        equal = [float((own == own[0]).all()) for own in scored if len(own)]
        metrics.add(f"{name}/zero_variance_groups", torch.tensor(equal))


def add_batch(metrics: Metrics, result: StepResult) -> None:
    """Add advantages, response lengths, and the cost of the teachers."""
    batch, scores = result.batch, result.scores
    metrics.add("advantage", result.adv_R, spread=True)
    metrics.add("advantage/kept", result.kept_R.double())
    metrics.add("response/tokens", batch.lengths_R.double())
    metrics.add("response/truncated", torch.tensor([float(not r.finished) for r in batch.rollouts]))
    metrics.total("tokens", batch.lengths_R.sum())
    if result.objective.settings.rollout.environment is not None:
        add_conversations(metrics, batch.rollouts)
    if result.signals.ref_log_ratio_N is not None:
        metrics.add("kl_ref", result.signals.ref_log_ratio_N)
    if scores.topk is not None or scores.ref_logp_N is not None:
        metrics.add("seconds_overlapped/teachers", scores.seconds)
    if scores.topk is not None:
        metrics.total("teachers/padding_entries", scores.dropped)
    if result.bad_answers is not None:
        metrics.total("servers/bad_answers", result.bad_answers)


def add_conversations(metrics: Metrics, rollouts: Sequence[Rollout]) -> None:
    """Add turns, the environment's tokens, the endings of conversations, and the chat template's drift."""

    def add(name: str, value: Callable[[Rollout], float]) -> None:
        metrics.add(f"conversation/{name}", torch.tensor([float(value(rollout)) for rollout in rollouts]))

    add("turns", lambda rollout: sum(message["role"] == "assistant" for message in rollout.messages))
    add("environment_tokens", lambda rollout: len(rollout.response_ids) - rollout.n_tokens)
    add("drift", lambda rollout: rollout.drift)
    ends = [rollout.ended for rollout in rollouts]
    for kind in (*ENDINGS, *FAILED):
        metrics.add(f"conversation/ended/{kind}", torch.tensor([float(end == kind) for end in ends]))


def add_updates(metrics: Metrics, updates: Sequence[Update]) -> None:
    """Add per-token statistics of every update, and the mean of each loss term over updates."""
    for update in updates:
        metrics.add("entropy", update.stats.entropy_N)
        for name, bit in CLIP_BITS.items():
            metrics.add(f"clipped/{name}", ((update.stats.clipped_N & bit) > 0).double())
        for term in ("pg_loss", "kl_loss", "entropy", "reverse_loss"):
            mean = getattr(update.stats, term).double() / len(updates)
            metrics.total(f"loss/{term.removesuffix('_loss')}", mean)


def add_policies(metrics: Metrics, result: StepResult) -> None:
    """Add how far the log-probabilities of rollout engine and trainer differ before the first update."""
    batch, old_logp_N = result.batch, result.signals.old_logp_N
    known = batch.parts[0].tokens if old_logp_N is None else slice(None)
    before_N = (result.updates[0].stats.logp_N if old_logp_N is None else old_logp_N).cpu()
    log_ratio_N = before_N - batch.rollout_logp_N[known]
    metrics.add("rollout_mismatch", log_ratio_N.abs())
    cap = result.objective.settings.loss.importance_cap
    if cap is not None:
        metrics.add("importance/truncated", (log_ratio_N.exp() > cap).double())


def add_target(metrics: Metrics, result: StepResult) -> None:
    """Add the teachers' weights and top-kappa mass, and the student's KL to the target."""
    target, old_logp_N = result.signals.target, result.signals.old_logp_N
    if target is None:
        return
    settings = result.objective.settings
    alpha_NM = target.log_alpha.exp().expand(len(result.batch.token_ids_N), -1)
    of_batch = {reward.name for reward in settings.rewards if reward.range == "batch"}
    for m, teacher in enumerate(settings.teachers.models):
        metrics.add(f"teacher_{m}/top_kappa_mass", target.topk.logps_NMS[:, m].exp().sum(-1))
        metrics.add(f"teacher_{m}/alpha", alpha_NM[:, m])
        if teacher.reward in of_batch:
            metrics.add(f"teacher_{m}/range_low", float(target.low_M[m]))
            metrics.add(f"teacher_{m}/range_high", float(target.high_M[m]))
    if settings.opd.sampled and old_logp_N is not None:
        metrics.add("reverse_kl", old_logp_N - target.logq_mix_N)
    for update in result.updates:
        metrics.add("kl", update.stats.kl_N)
        metrics.add("kl/negative", (update.stats.kl_N < 0).double())
        metrics.add("teacher_mass", update.stats.teacher_mass_N)
        metrics.add("student_mass", update.stats.student_mass_N)
