"""Alarms with advice on suspicious metrics. Each is reported once and stops nothing. The thresholds are ours.

Alarms depend only on the lines of `metrics.jsonl`, so the report and the screen show the same alarms.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Values = Mapping[str, Any]
LEAST_ENTROPY = 0.02  # nats
MOST_MISMATCH = 0.1  # nats: largest mean difference between trainer and rollout engine without an alarm
RARE_SHARE = 0.05  # a reward that varies within a smaller share of the groups is rare
ADVICE = {
    "no variance": "all responses of each group earn the same rewards, so there is nothing to learn: use a "
    "larger rollout.group_size (above 1), other prompts, or a warm start",
    "rare": "a reward varies within fewer than 5% of the groups and its mean does not rise: if few responses "
    "earn it, advantage.estimator batch_balanced, more rollouts or a warm start helps",
    "no gradient": "the gradient is 0: no term of the loss has a weight or a signal",
    "skipped": "an update with a non-finite gradient was skipped",
    "collapsed": f"the policy's entropy has collapsed below {LEAST_ENTROPY} nats: lower "
    "student.learning_rate, or set loss.entropy_coef",
    "truncated": "more than half of the responses are cut at rollout.max_new_tokens: raise it if they need "
    "the room",
    "mismatch": "the rollout engine's log-probabilities differ from the trainer's by more than "
    f"{MOST_MISMATCH} nats: check the dtypes and that the engine has the same head, or correct with "
    "loss.importance_cap",
    "unscorable": "a reward failed on more than a fifth of the responses: see the lines above and its output "
    "in rewards_0.log",
    "far": "the KL to the teachers' target has grown to more than five times its first value: lower "
    "student.learning_rate, or raise opd.coef",
    "negative": "kl is negative because it is not a full divergence: the pooled target counts a token once "
    "per teacher and leaves out tokens outside the top kappa; opd.target merged with opd.tail true is full",
}
STEPS = {"rare": 10, "no gradient": 3, "mismatch": 1, "skipped": 1, "unscorable": 1, "negative": 1}
"""Consecutive steps for which an alarm must hold before it is reported. Unlisted alarms need 5."""


def holding(values: Values, first: Values) -> dict[str, bool]:
    """Return for each alarm whether it holds in a step's metrics, given the first step's metrics."""

    def number(line: Values, name: str) -> float:
        value = line.get(name)
        return 0.0 if value is None or not math.isfinite(value) else float(value)

    def is_rare(share_name: str) -> bool:
        reward = share_name.removesuffix("/zero_variance_groups")
        rise = number(values, f"{reward}/mean") - number(first, f"{reward}/mean")
        return number(values, share_name) > 1 - RARE_SHARE and rise <= number(values, f"{reward}/std")

    shares = [name for name in values if name.endswith("/zero_variance_groups")]
    equal = bool(shares) and all(values[name] == 1 for name in shares)
    entropy, began = values.get("entropy"), number(first, "entropy")
    return {
        "no variance": equal,
        "rare": len(shares) > 1 and not equal and any(is_rare(name) for name in shares),
        "no gradient": values.get("grad_norm") == 0,
        "skipped": number(values, "updates/skipped") > 0,
        "collapsed": entropy is not None and entropy < LEAST_ENTROPY < 5 * LEAST_ENTROPY < began,
        "truncated": number(values, "response/truncated") > 0.5,
        "mismatch": number(values, "rollout_mismatch") > MOST_MISMATCH,
        "unscorable": any(number(values, name) > 0.2 for name in values if name.endswith("/unscorable")),
        "far": number(values, "kl") > max(1.0, 5 * number(first, "kl")),
        "negative": number(values, "kl") < 0,
    }


class Watch:
    """Finds the alarms of one run, step by step."""

    def __init__(self) -> None:
        self._first: Values | None = None
        self._in_a_row: Counter[str] = Counter()

    def see(self, values: Values) -> list[str]:
        """Return the advice that is due after a step. The same advice is never returned again."""
        self._first = self._first or dict(values)
        due = []
        for name, holds in holding(values, self._first).items():
            steps = STEPS.get(name, 5)
            if self._in_a_row[name] < steps:
                self._in_a_row[name] = self._in_a_row[name] + 1 if holds else 0
                if self._in_a_row[name] == steps:
                    due.append(ADVICE[name])
        return due


def alarms_of(lines: Iterable[Values]) -> list[tuple[int, str, bool]]:
    """Return every alarm in a run's metrics: its step, its advice, and whether it holds in the last step."""
    watch = Watch()
    steps = [line for line in lines if "grad_norm" in line]  # without the lines of evaluations
    due = [(int(line["step"]), advice) for line in steps for advice in watch.see(line)]
    last = {ADVICE[name] for name, holds in holding(steps[-1], steps[0]).items() if holds} if due else set()
    return [(step, advice, advice in last) for step, advice in due]
