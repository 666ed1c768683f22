"""What a run leaves behind of each step: one line of metrics, a few samples, and a line on the screen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from smopd.batch import Batch
from smopd.config import Settings
from smopd.engine import distributed
from smopd.engine.student import Update
from smopd.metrics import Metrics
from smopd.objective import Target
from smopd.ops import CLIP_DUAL, CLIP_HIGH, CLIP_LOG_RATIO, CLIP_LOW
from smopd.progress import JsonlLog, Progress
from smopd.scoring import Scores

CLIP_BITS = {"low": CLIP_LOW, "high": CLIP_HIGH, "dual": CLIP_DUAL, "log_ratio": CLIP_LOG_RATIO}


class Recorder:
    """Writes `metrics.jsonl` and `samples.jsonl` of one run; only rank 0 writes. A context manager.

    Args:
        folder: the run's.
        name: the run's, for the screen.
    """

    def __init__(self, folder: Path, name: str, settings: Settings):
        self.settings = settings
        self.name = name
        self.writes = distributed.rank() == 0
        self.metrics = JsonlLog(folder / "metrics.jsonl")
        self.samples = JsonlLog(folder / "samples.jsonl")
        self._stack = ExitStack()
        self._progress: Progress | None = None

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def begin(self, start: int) -> None:
        """Drops what was written after step `start`, which is about to be done again."""
        if self.writes:
            self.metrics.cut(start)
            self.samples.cut(start)
            plain = True if self.settings.log.plain else None
            progress = Progress(self.name, self.settings.loop.steps, start, plain)
            self._progress = self._stack.enter_context(progress)

    def record(
        self,
        step: int,
        metrics: Metrics,
        batch: Batch,
        scores: Scores,
        adv_R: Tensor,
        kept_R: Tensor,
        coef: float,
        target: Target | None,
        old_logp_N: Tensor | None,
        updates: Sequence[Update],
    ) -> None:
        """Reduces the step's metrics over all ranks and writes them; a collective call."""
        add_rewards(metrics, self.settings, batch, scores)
        metrics.add("advantage", adv_R, spread=True)
        metrics.add("advantage/kept", kept_R.double())
        metrics.add("response/tokens", batch.lengths_R.double())
        metrics.add("response/truncated", torch.tensor([float(not r.finished) for r in batch.rollouts]))
        add_updates(metrics, batch, target, old_logp_N, updates)
        values = metrics.reduce()
        values |= {"opd_coef": coef, "grad_norm": updates[-1].grad_norm}
        values["updates/skipped"] = float(sum(update.skipped for update in updates))
        values["micro_batches"] = float(sum(update.micro_batches for update in updates))
        for term in ("pg_loss", "kl_loss", "entropy", "reverse_loss"):
            local = torch.stack([getattr(update.stats, term) for update in updates]).sum()
            values[f"loss/{term.removesuffix('_loss')}"] = float(distributed.all_reduce(local)) / len(updates)
        tokens = distributed.all_reduce(batch.lengths_R.sum())
        values["tokens"] = float(tokens)
        values["tokens_per_second"] = float(tokens) / max(
            1e-9, sum(value for name, value in values.items() if name.startswith("seconds/"))
        )
        if self.writes:
            self.metrics.write({"step": step, **values})
            self._write_samples(step, batch, scores, adv_R)
            if self._progress is not None:
                self._progress.update(step, values)

    def evaluated(self, step: int, values: dict[str, float]) -> None:
        """Notes an evaluation after `step`."""
        if self.writes:
            self.metrics.write({"step": step, **values})
            if self._progress is not None:
                self._progress.update(step, values)

    def _write_samples(self, step: int, batch: Batch, scores: Scores, adv_R: Tensor) -> None:
        names = [reward.name for reward in self.settings.rewards]
        for i in range(min(self.settings.log.samples_per_step, len(batch.rollouts))):
            self.samples.write(
                {
                    "step": step,
                    "prompt": batch.prompts[i].content,
                    "response": scores.texts[i],
                    "rewards": dict(zip(names, scores.rewards_RK[i].tolist(), strict=True)),
                    "advantage": float(adv_R[i]),
                }
            )


def add_rewards(metrics: Metrics, settings: Settings, batch: Batch, scores: Scores) -> None:
    """Each dimension's mean and spread, and its share of groups without variance.

    Also what could not be scored.
    """
    _, group_of_R = batch.group_R.unique(return_inverse=True)
    n_groups = int(group_of_R.max()) + 1 if len(group_of_R) else 0
    for k, reward in enumerate(settings.rewards):
        values_R = scores.rewards_RK[:, k]
        metrics.add(f"reward/{reward.name}", values_R, spread=True)
        metrics.add(f"reward/{reward.name}/unscorable", values_R.isnan().double())
        scorable_R = ~values_R.isnan()
        index, values = group_of_R[scorable_R], values_R[scorable_R]
        low = torch.full((n_groups,), torch.inf, dtype=values.dtype).scatter_reduce(0, index, values, "amin")
        high = torch.full((n_groups,), -torch.inf, dtype=values.dtype).scatter_reduce(
            0, index, values, "amax"
        )
        metrics.add(f"reward/{reward.name}/zero_variance_groups", (high <= low).double())


def add_updates(
    metrics: Metrics,
    batch: Batch,
    target: Target | None,
    old_logp_N: Tensor | None,
    updates: Sequence[Update],
) -> None:
    """What the loss saw of each token, and what the teachers said of it."""
    for update in updates:
        stats = update.stats
        metrics.add("entropy", stats.entropy_N)
        for name, bit in CLIP_BITS.items():
            metrics.add(f"clipped/{name}", ((stats.clipped_N & bit) > 0).double())
        if target is not None:
            metrics.add("kl", stats.kl_N)
            metrics.add("kl/negative", (stats.kl_N < 0).double())
            metrics.add("teacher_mass", stats.teacher_mass_N)
            metrics.add("student_mass", stats.student_mass_N)
    if target is not None:
        for m, mass_N in enumerate(target.topk.logps_NMS.exp().sum(-1).unbind(-1)):
            metrics.add(f"teacher_{m}/top_kappa_mass", mass_N)
    first = batch.parts[0].tokens
    before_N = updates[0].stats.logp_N if old_logp_N is None else old_logp_N[first]
    metrics.add("rollout_mismatch", (before_N.cpu() - batch.rollout_logp_N[first]).abs())
