"""Advice on suspicious metrics. Each alarm is reported once and stops nothing. The thresholds are ours.

Alarms depend only on the lines of `metrics.jsonl`, so the report shows the same ones as the screen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]
LEAST_ENTROPY = 0.02  # nats
RARE_SHARE = 0.05
"""Ours: a reward that differs in a smaller share of the groups is rare."""


@dataclass(frozen=True)
class Alarm:
    """A condition on the metrics of a step and of the first step, and advice after `steps` steps in a row."""

    holds: Callable[[Values, Values], bool]
    steps: int
    advice: str


def number(line: Values, name: str) -> float:
    return 0.0 if line.get(name) is None else float(line[name])


def no_variance(line: Values, first: Values) -> bool:
    equal = [share for name, share in line.items() if name.endswith("/zero_variance_groups")]
    return bool(equal) and all(share == 1 for share in equal)


def rare(line: Values, first: Values) -> bool:
    """Whether one of several rewards differs in few groups and has not risen since the first step."""
    equal = [name for name in line if name.endswith("/zero_variance_groups")]
    for name in equal:
        reward = name.removesuffix("/zero_variance_groups")
        rise = number(line, f"{reward}/mean") - number(first, f"{reward}/mean")
        if number(line, name) > 1 - RARE_SHARE and rise <= number(line, f"{reward}/std"):
            return len(equal) > 1 and not no_variance(line, first)
    return False


def collapsed(line: Values, first: Values) -> bool:
    entropy = line.get("entropy")
    return entropy is not None and entropy < LEAST_ENTROPY < 5 * LEAST_ENTROPY < number(first, "entropy")


def unscorable(line: Values, first: Values) -> bool:
    return any(number(line, name) > 0.2 for name in line if name.endswith("/unscorable"))


ALARMS = (
    Alarm(
        no_variance,
        5,
        "all responses of each group earn the same rewards, so there is nothing to learn: use a larger "
        "rollout.group_size (above 1), other prompts, or a warm start",
    ),
    Alarm(
        rare,
        10,
        "a reward differs in fewer than 5% of the groups and its mean does not rise: if few responses "
        "earn it, advantage.estimator batch_balanced gives it more weight; if nearly all do, all is well",
    ),
    Alarm(
        lambda line, _: line.get("grad_norm") == 0,
        3,
        "the gradient is 0: no term of the loss has a weight or a signal",
    ),
    Alarm(
        lambda line, _: number(line, "updates/skipped") > 0,
        1,
        "an update with a non-finite gradient was skipped",
    ),
    Alarm(
        collapsed,
        5,
        f"the policy's entropy has collapsed below {LEAST_ENTROPY} nats: lower student.learning_rate, or set "
        "loss.entropy_coef",
    ),
    Alarm(
        lambda line, _: number(line, "response/truncated") > 0.5,
        5,
        "more than half of the responses are cut at rollout.max_new_tokens: raise it",
    ),
    Alarm(
        lambda line, _: number(line, "rollout_mismatch") > 0.1,
        3,
        "the rollout engine's log-probabilities differ from the trainer's by more than 0.1 nats: check the "
        "dtypes, or correct with loss.importance_cap",
    ),
    Alarm(
        unscorable,
        1,
        "a reward failed on more than a fifth of the responses: see its output in rewards_0.log",
    ),
    Alarm(
        lambda line, first: number(line, "kl") > max(1.0, 5 * number(first, "kl")),
        5,
        "the KL to the teachers' target has grown to more than five times its first value: lower "
        "student.learning_rate, or raise opd.coef",
    ),
    Alarm(
        lambda line, _: number(line, "kl") < 0,
        1,
        "kl is negative because it is not a full divergence: the pooled target counts a token once per "
        "teacher, and leaves out tokens outside the top kappa; opd.target merged with opd.tail true is one",
    ),
)


class Watch:
    """The alarms of one run, step by step."""

    def __init__(self) -> None:
        self._first: Values | None = None
        self._in_a_row: Counter[Alarm] = Counter()

    def see(self, line: Values) -> list[str]:
        """Return the advice that is due after a step. Each advice is returned once."""
        self._first = self._first or dict(line)
        due = []
        for alarm in ALARMS:
            if self._in_a_row[alarm] < alarm.steps:
                self._in_a_row[alarm] = self._in_a_row[alarm] + 1 if alarm.holds(line, self._first) else 0
                if self._in_a_row[alarm] == alarm.steps:
                    due.append(alarm.advice)
        return due


def alarms_of(lines: Iterable[Values]) -> list[tuple[int, str]]:
    """Return step and advice of every alarm in a run's metrics."""
    watch = Watch()
    steps = (line for line in lines if "grad_norm" in line)  # not those of evaluations
    return [(int(line["step"]), advice) for line in steps for advice in watch.see(line)]
