"""Alarms: each is reported once, after its number of steps in a row, on screen and in the report alike."""

import math
from pathlib import Path

import pytest

from smopd.record.alarms import Watch, alarms_of
from smopd.record.files import JsonlLog
from smopd.report.page import Report, write_report

WELL = {
    "grad_norm": 0.5,
    "entropy": 1.5,
    "kl": 0.4,
    "rollout_mismatch": 1e-4,
    "response/truncated": 0.1,
    "updates/skipped": 0.0,
    "reward/a/unscorable": 0.0,
    "reward/a/zero_variance_groups": 0.9,
    "reward/b/zero_variance_groups": 0.9,
}
RARE = {"reward/a/zero_variance_groups": 0.96, "reward/a/mean": 0.05, "reward/a/std": 0.1}
LEVEL = dict.fromkeys(("reward/a/zero_variance_groups", "reward/b/zero_variance_groups"), 1.0)
CASES = [
    (LEVEL, 5, "all responses of each group earn"),
    (RARE, 10, "fewer than 5% of the groups"),
    ({"grad_norm": 0.0}, 3, "the gradient is 0"),
    ({"updates/skipped": 1.0}, 1, "was skipped"),
    ({"entropy": 0.01}, 5, "entropy has collapsed"),
    ({"response/truncated": 0.6}, 5, "rollout.max_new_tokens"),
    ({"rollout_mismatch": 0.2}, 1, "the rollout engine's log-probabilities"),
    ({"reward/a/unscorable": 0.3}, 1, "failed on more than a fifth"),
    ({"kl": 2.5}, 5, "more than five times its first value"),
    ({"kl": -0.1}, 1, "not a full divergence"),
]


@pytest.mark.parametrize(("change", "steps", "text"), CASES)
def test_an_alarm_is_told_once_after_its_steps_in_a_row(change, steps, text):
    watch = Watch()
    almost = [WELL] + [WELL | change] * (steps - 1)
    for line in (almost + almost)[: None if steps > 1 else 1]:  # interrupted once
        assert watch.see(line) == []
    (told,) = watch.see(WELL | change)
    assert text in told
    for _ in range(2 * steps):
        assert watch.see(WELL | change) == []


AT_THE_LIMITS = {"entropy": 0.02, "kl": 2.0, "rollout_mismatch": 0.1, "response/truncated": 0.5}
AT_THE_LIMITS |= {"reward/a/unscorable": 0.2, "reward/a/zero_variance_groups": 0.95}
SATURATED = RARE | {"reward/a/mean": 0.99}


def test_what_raises_no_alarm():
    for line in (AT_THE_LIMITS, SATURATED, dict.fromkeys(WELL), dict.fromkeys(WELL, math.nan)):
        watch = Watch()
        assert [watch.see(values) for values in [WELL] + [WELL | line] * 10] == [[]] * 11, line


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_the_screen_tells_what_the_file_with_its_nulls_does(tmp_path: Path, number: float):
    odd = WELL | {"reward/a/mean": number, "rollout_mismatch": number}
    lines = [{"step": 1, **odd}, *({"step": step, **WELL, **RARE} for step in range(2, 13))]
    log, watch = JsonlLog(tmp_path / "metrics.jsonl"), Watch()
    log.replace(lines)
    screen = [(line["step"], advice) for line in lines for advice in watch.see(line)]
    assert screen == [alarm[:2] for alarm in alarms_of(log.read())]


def test_the_report_has_what_the_screen_said(tmp_path: Path):
    lines = [{"step": step, **WELL, "grad_norm": 0.0} for step in range(1, 6)]
    evaluation = {"step": 2, "greedy/a": 1.0}
    assert alarms_of([*lines[:2], evaluation, *lines[2:]])[0][::2] == (3, True)
    runs = {"<one>": lines, "over": [*lines, {"step": 6, **WELL}]}
    write_report(tmp_path / "report.html", Report("t", metrics=runs))
    page = (tmp_path / "report.html").read_text()
    assert "&lt;one&gt;, step 3, still at the end: the gradient is 0" in page and "over, step 3: the" in page
