"""Claims of the paper against what runs show: agrees, contradicts, or undecided within the spread.

A claim names a range for a quantity. Over seeds, the quantity's mean with `DECIDED` deviations on both sides
is wholly inside the range (agrees), wholly outside (contradicts), or neither; one seed decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from bench.study.measures import spread

DECIDED = 2.0  # ours: deviations over the seeds; at three seeds chance alone decides 7 comparisons in 100
Answer = Literal["agrees", "contradicts", "undecided"]
ANSWERS: tuple[Answer, ...] = get_args(Answer)
Values = Sequence[float | None]
"""One a seed, None where it has none."""


class Verdict(NamedTuple):
    """What one claim came to; the claim begins with its family in page.yaml, `family: claim`."""

    claim: str
    found: str
    answer: Answer


def judge(
    claim: str, values: Values, *, low: float = -math.inf, high: float = math.inf, sign: str = ""
) -> list[Verdict]:
    """The claim that a quantity is in [low, high]; no verdict where no seed has a value."""
    found = spread(values)
    if found is None:
        return []
    reach = DECIDED * found.deviation
    begin, end = found.mean - reach, found.mean + reach
    answer: Answer = "undecided"
    if found.n > 1 and low <= begin and end <= high:
        answer = "agrees"
    elif found.n > 1 and (end < low or begin > high):
        answer = "contradicts"
    return [Verdict(claim, f"{found:{sign}}", answer)]


def above(claim: str, these: Values, those: Values) -> list[Verdict]:
    """The claim that `these` are above `those`, seed by seed."""
    return _compared(claim, these, those, low=math.ulp(0.0))


def no_lower(claim: str, these: Values, those: Values) -> list[Verdict]:
    """The claim that `these` are not below `those`, seed by seed."""
    return _compared(claim, these, those, low=0.0)


def alike(claim: str, these: Values, those: Values, bound: float) -> list[Verdict]:
    """The claim that the two are no further apart than `bound`."""
    return _compared(claim, these, those, low=-bound, high=bound)


def _compared(
    claim: str, these: Values, those: Values, *, low: float, high: float = math.inf
) -> list[Verdict]:
    """Undecided where they are equal in every seed and the claim is of an order, or they may be at an end."""
    different = differences(these, those)
    level = spread([a for a, apart in zip(these, different, strict=True) if apart is not None])
    at_an_end = level is not None and (level.deviation == 0 or high == math.inf)
    if level is not None and at_an_end and not any(different):
        return [Verdict(claim, f"no difference: both at {level}", "undecided")]
    return judge(claim, different, low=low, high=high, sign="+")


def counted(claim: str, agreeing: int, other: int, what: str) -> list[Verdict]:
    """The claim that pairs go one way, against a fair coin."""
    n = agreeing + other
    reach = DECIDED * math.sqrt(n)
    answer: Answer = "undecided"
    if n and abs(agreeing - other) > reach:
        answer = "agrees" if agreeing > other else "contradicts"
    return [Verdict(claim, what, answer)]


def differences(these: Values, those: Values) -> list[float | None]:
    return [None if a is None or b is None else a - b for a, b in zip(these, those, strict=True)]


def best(*candidates: Values) -> list[float | None]:
    """The highest of several, seed by seed; None where one is absent."""
    return [
        None if any(value is None for value in row) else max(value for value in row if value is not None)
        for row in zip(*candidates, strict=True)
    ]
