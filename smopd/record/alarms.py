"""What in a run's metrics a person should know about: each is told once, and stops nothing.

The thresholds are ours. They are functions of the lines of `metrics.jsonl` alone, so that the report finds
what the screen said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Alarm:
    """One thing to know.

    Attributes:
        holds: of a step's metrics and those of the first step.
        steps: in a row that it must hold for.
        advice: what it means and what to change.
    """

    holds: Callable[[Values, Values], bool]
    steps: int
    advice: str


def _all_equal(values: Values, first: Values) -> bool:
    shares = [value for name, value in values.items() if name.endswith("/zero_variance_groups")]
    return bool(shares) and all(share == 1 for share in shares)


def _above(name: str, limit: float) -> Callable[[Values, Values], bool]:
    return lambda values, first: _number(values, name) > limit


def _number(values: Values, name: str) -> float:
    value = values.get(name)
    return 0.0 if value is None else float(value)


ALARMS = (
    Alarm(
        _all_equal,
        5,
        "in no group do the responses differ in any reward: nothing can be learned from them; use a larger "
        "rollout.group_size (above 1), other prompts, or a warm start",
    ),
    Alarm(
        lambda values, first: values.get("grad_norm") == 0,
        3,
        "the gradient is 0: no term of the loss has a weight or a signal",
    ),
    Alarm(_above("updates/skipped", 0), 1, "an update with a gradient that is not finite was skipped"),
    Alarm(
        lambda values, first: (
            values.get("entropy") is not None
            and _number(values, "entropy") < 0.02 < 5 * 0.02 < _number(first, "entropy")
        ),
        5,
        "the policy's entropy has collapsed below 0.02 nats: groups will be copies of one response; lower "
        "student.learning_rate, or set loss.entropy_coef",
    ),
    Alarm(
        _above("response/truncated", 0.5),
        5,
        "more than half of the responses are cut at rollout.max_new_tokens: raise it, or shorten the answers",
    ),
    Alarm(
        _above("rollout_mismatch", 0.1),
        3,
        "the sampler's log-probabilities are more than 0.1 nats from the trainer's: look at dtypes and at "
        "rollout.top_p, or correct by loss.importance_cap",
    ),
    Alarm(
        lambda values, first: any(
            _number(values, name) > 0.2 for name in values if name.endswith("/unscorable")
        ),
        1,
        "a reward could not score more than a fifth of the responses: rewards_0.log has what it printed",
    ),
    Alarm(
        lambda values, first: _number(values, "kl") > max(1.0, 5 * _number(first, "kl")),
        5,
        "the KL to the teachers' target has grown to more than five times its first value: lower "
        "student.learning_rate, or raise opd.coef",
    ),
)


class Watch:
    """Looks at one run's metrics, step by step."""

    def __init__(self) -> None:
        self._first: Values | None = None
        self._in_a_row: Counter[int] = Counter()

    def see(self, values: Values) -> list[str]:
        """What has become true for long enough with this step, each once."""
        first = self._first = self._first or dict(values)
        told = []
        for i, alarm in enumerate(ALARMS):
            if self._in_a_row[i] >= alarm.steps:  # told
                continue
            self._in_a_row[i] = self._in_a_row[i] + 1 if alarm.holds(values, first) else 0
            if self._in_a_row[i] == alarm.steps:
                told.append(alarm.advice)
        return told


def alarms_of(lines: Iterable[Values]) -> list[tuple[int, str]]:
    """Step and advice of every alarm in a run's metrics."""
    watch = Watch()
    steps = (line for line in lines if "grad_norm" in line)  # not those of evaluations
    return [(int(line["step"]), advice) for line in steps for advice in watch.see(line)]
