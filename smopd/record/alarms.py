"""What in a run's metrics a person should know about: each is reported once, and stops nothing.

Functions of the lines of `metrics.jsonl` alone: the report finds what the screen said. Thresholds are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Values = Mapping[str, Any]
LEAST_ENTROPY = 0.02  # nats
MOST_EQUAL = 0.95
"""Share of groups without a difference in a reward, above which it is rare."""
ALARMS = {
    "no variance": (
        5,
        "in no group do the responses differ in any reward: nothing can be learned from them; use a larger "
        "rollout.group_size (above 1), other prompts, or a warm start",
    ),
    "rare": (
        10,
        "a reward differs in fewer than 5% of the groups and its mean does not rise: if few responses "
        "earn it, advantage.estimator batch_balanced gives it more weight; if nearly all do, all is well",
    ),
    "no gradient": (3, "the gradient is 0: no term of the loss has a weight or a signal"),
    "skipped": (1, "an update with a gradient that is not finite was skipped"),
    "collapsed": (
        5,
        f"the policy's entropy has collapsed below {LEAST_ENTROPY} nats: groups will be copies of one "
        "response; lower student.learning_rate, or set loss.entropy_coef",
    ),
    "truncated": (
        5,
        "more than half of the responses are cut at rollout.max_new_tokens: raise it, or shorten the answers",
    ),
    "mismatch": (
        3,
        "the rollout engine's log-probabilities differ from the trainer's by more than 0.1 nats: check the "
        "dtypes, or correct with loss.importance_cap",
    ),
    "unscorable": (
        1,
        "a reward could not score more than a fifth of the responses: rewards_0.log has what it printed",
    ),
    "far": (
        5,
        "the KL to the teachers' target has grown to more than five times its first value: lower "
        "student.learning_rate, or raise opd.coef",
    ),
}
"""Name -> steps in a row that it must hold for, and what it means and what to change."""


def holding(values: Values, first: Values) -> dict[str, bool]:
    """Which alarms hold in a step's metrics, given those of the first step."""

    def number(line: Values, name: str) -> float:
        return 0.0 if line.get(name) is None else float(line[name])

    def rare(share_name: str) -> bool:
        reward = share_name.removesuffix("/zero_variance_groups")
        rise = number(values, f"{reward}/mean") - number(first, f"{reward}/mean")
        return number(values, share_name) > MOST_EQUAL and rise <= number(values, f"{reward}/std")

    shares = [name for name in values if name.endswith("/zero_variance_groups")]
    entropy, began = values.get("entropy"), number(first, "entropy")
    level = bool(shares) and all(values[name] == 1 for name in shares)
    return {
        "no variance": level,
        "rare": len(shares) > 1 and not level and any(rare(name) for name in shares),
        "no gradient": values.get("grad_norm") == 0,
        "skipped": number(values, "updates/skipped") > 0,
        "collapsed": entropy is not None and entropy < LEAST_ENTROPY < 5 * LEAST_ENTROPY < began,
        "truncated": number(values, "response/truncated") > 0.5,
        "mismatch": number(values, "rollout_mismatch") > 0.1,
        "unscorable": any(number(values, name) > 0.2 for name in values if name.endswith("/unscorable")),
        "far": number(values, "kl") > max(1.0, 5 * number(first, "kl")),
    }


class Watch:
    """Looks at one run's metrics, step by step."""

    def __init__(self) -> None:
        self._first: Values | None = None
        self._in_a_row: Counter[str] = Counter()

    def see(self, values: Values) -> list[str]:
        """The advice that has become due with this step; each is due once."""
        self._first = self._first or dict(values)
        due = []
        for name, holds in holding(values, self._first).items():
            steps, advice = ALARMS[name]
            if self._in_a_row[name] < steps:  # else it was due
                self._in_a_row[name] = self._in_a_row[name] + 1 if holds else 0
                if self._in_a_row[name] == steps:
                    due.append(advice)
        return due


def alarms_of(lines: Iterable[Values]) -> list[tuple[int, str]]:
    """Step and advice of every alarm in a run's metrics."""
    watch = Watch()
    steps = (line for line in lines if "grad_norm" in line)  # not those of evaluations
    return [(int(line["step"]), advice) for line in steps for advice in watch.see(line)]
