"""Reward functions in worker processes that can be killed: a bad one costs its own dimension, never the run.

Each reward runs in its own process and all are called at once. What cannot be scored is NaN and is counted by
its reason; a call over its deadline is ended by killing the worker with all its children, and the next call
starts a new one. POSIX only.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from smopd.rewards.batch import RewardBatch, RewardError, check_share
from smopd.rewards.process import RewardSpec, RewardWorker

__all__ = ["RewardBatch", "RewardError", "RewardPool", "RewardSpec", "RewardWorker", "check_share"]


class RewardPool:
    """K rewards, each in its own worker, called at once. A context manager: leaving it kills the workers."""

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        *,
        deadline_seconds: float = 60.0,
        startup_seconds: float = 300.0,
        log_path: Path | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            rewards: the K dimensions, with different names.
            deadline_seconds: longest time of one call of one reward.
            startup_seconds: longest time to start a worker and import its function.
            log_path: where what the functions print goes; None: the standard error of this process.
        Raises:
            ValueError: no reward, a repeated name, a time that is not positive, or a malformed import path.
        """
        names = tuple(reward.name for reward in rewards)
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"RewardPool: rewards are named {list(names)}, expected one or more different names"
            )
        if deadline_seconds <= 0 or startup_seconds <= 0:
            raise ValueError(
                f"RewardPool: deadline_seconds is {deadline_seconds} and startup_seconds {startup_seconds}, "
                "expected more than 0"
            )
        self.names = names
        self._workers = [
            RewardWorker(
                reward, deadline_seconds=deadline_seconds, startup_seconds=startup_seconds, log_path=log_path
            )
            for reward in rewards
        ]
        self._threads = ThreadPoolExecutor(len(names), thread_name_prefix="reward")

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def probe(self) -> None:
        """Start all workers and load their functions.

        Raises:
            RewardError: names every reward that cannot be loaded, with the reason.
        """
        starts = [self._threads.submit(worker.start) for worker in self._workers]
        errors = [str(error) for start in starts if isinstance(error := start.exception(), RewardError)]
        if errors:
            raise RewardError("\n".join(errors))
        for start in starts:
            start.result()

    def score(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> RewardBatch:
        """Score R completions with all K rewards.

        Args:
            prompts, completions: R each.
            columns: the data's other columns by name, R values each.
        Raises:
            ValueError: lengths differ, or a column is called `prompts` or `completions`.
        """
        responses = len(completions)
        for name, values in {"prompts": prompts, **columns}.items():
            if len(values) != responses:
                raise ValueError(
                    f"RewardPool.score: {name} has {len(values)} entries, "
                    f"expected {responses} to match completions"
                )
        if reserved := {"prompts", "completions"} & columns.keys():
            raise ValueError(f"RewardPool.score: columns may not hold {sorted(reserved)}")
        request = pickle.dumps((list(prompts), list(completions), dict(columns)), 5)
        scores = list(self._threads.map(lambda worker: worker.score(request, responses), self._workers))
        by_name = dict(zip(self.names, scores, strict=True))
        return RewardBatch(
            names=self.names,
            values_RK=np.array([score.values for score in scores], dtype=np.float64).T.copy(),
            failures={name: score.failures for name, score in by_name.items()},
            last_errors={name: score.error for name, score in by_name.items() if score.error is not None},
            seconds={name: score.seconds for name, score in by_name.items()},
            restarts={worker.reward.name: worker.restarts for worker in self._workers},
        )

    def close(self) -> None:
        """Kill the workers with their children. A closed pool scores nothing more."""
        for worker in self._workers:
            worker.interrupt()
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()
