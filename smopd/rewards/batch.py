"""The scores of a batch of responses, with what could not be scored and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

FAILURE_KINDS = ("exception", "timeout", "length", "nonfinite", "none", "worker_died")


class RewardError(RuntimeError):
    """A reward that cannot be loaded, or that left too many responses without a score."""


@dataclass(frozen=True)
class RewardBatch:
    """The scores of R responses in K dimensions.

    names: the K rewards.
    values_RK: (R, K) float64, NaN where a response could not be scored.
    failures: for each reward the number of unscorable responses by kind, every kind of FAILURE_KINDS present;
        their sum is the number of NaN in the reward's column. `none` counts a function's own None.
    last_errors: for each reward that failed in this batch its error, with the end of the traceback.
    seconds: how long each reward took, a restart of its worker included.
    restarts: for each reward how often its worker was started again since the pool was made.
    """

    names: tuple[str, ...]
    values_RK: np.ndarray
    failures: Mapping[str, Mapping[str, int]]
    last_errors: Mapping[str, str]
    seconds: Mapping[str, float]
    restarts: Mapping[str, int]

    def check_share(self, max_unscorable_share: float) -> None:
        """Raise RewardError where a dimension left more than this share of the batch without a score."""
        responses = len(self.values_RK)
        for name in self.names:
            error = self.last_errors.get(name)
            check_share(name, self.failures[name], responses, max_unscorable_share, last_error=error)


def check_share(
    name: str,
    failures: Mapping[str, int],
    responses: int,
    max_unscorable_share: float,
    last_error: str | None = None,
) -> None:
    """Raise RewardError where reward `name` left more than this share of `responses` without a score.

    `failures` counts unscorable responses by kind, None included. Sum the counts over ranks first where there
    are several, so that all ranks stop together.
    """
    unscorable = sum(failures.values())
    if unscorable <= max_unscorable_share * responses:
        return
    kinds = ", ".join(f"{kind} {count}" for kind, count in failures.items() if count)
    raise RewardError(
        f"reward {name!r} left {unscorable} of {responses} responses without a score (share "
        f"{unscorable / responses:.3f}, limit {max_unscorable_share:g}): {kinds}. "
        f"Last error: {last_error or 'none'}"
    )
