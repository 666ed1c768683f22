"""The study's verdicts, and which runs they compare."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.study import verdicts
from bench.study.finished import Finished, paired


@pytest.mark.parametrize(
    ("judged", "answer"),
    [
        (lambda: verdicts.above("", [1.0, 1.1, 1.2], [0.5, 0.5, 0.6]), "agrees"),
        (lambda: verdicts.above("", [0.5, 0.5, 0.6], [1.0, 1.1, 1.2]), "contradicts"),
        (lambda: verdicts.above("", [1.0, 1.1, 0.4], [0.5, 0.5, 0.6]), "undecided"),
        (lambda: verdicts.above("", [1.0], [0.5]), "undecided"),
        (lambda: verdicts.above("", [3.0, 3.0], [3.0, 3.0]), "undecided"),
        (lambda: verdicts.no_lower("", [3.0, 3.0], [3.0, 3.0]), "undecided"),
        (lambda: verdicts.no_lower("", [3.0, 3.0, 2.9], [3.0, 3.0, 2.8]), "undecided"),
        (lambda: verdicts.alike("", [0.0, 0.0], [0.0, 0.0], 0.06), "undecided"),
        (lambda: verdicts.alike("", [3.4, 3.9], [3.4, 3.9], 0.06), "agrees"),
        (lambda: verdicts.alike("", [1.00, 1.01], [1.01, 1.00], 0.06), "agrees"),
        (lambda: verdicts.alike("", [1.00, 1.01], [2.01, 2.00], 0.06), "contradicts"),
        (lambda: verdicts.alike("", [1.0, 1.2], [1.0, 1.0], 0.06), "undecided"),
        (lambda: verdicts.judge("", [0.02, 0.03], high=0.09), "agrees"),
        (lambda: verdicts.judge("", [0.02, None, 0.3], high=0.09), "undecided"),
        (lambda: verdicts.counted("", 12, 1, ""), "agrees"),
        (lambda: verdicts.counted("", 2, 0, ""), "undecided"),
        (lambda: verdicts.counted("", 1, 12, ""), "contradicts"),
    ],
)
def test_verdicts(judged: Callable[[], list[verdicts.Verdict]], answer: str) -> None:
    assert [verdict.answer for verdict in judged()] == [answer]


def test_a_claim_without_a_value_has_no_verdict() -> None:
    assert verdicts.above("", [None, None], [1.0, 2.0]) == []
    assert verdicts.best([1.0, None], [2.0, 3.0]) == [2.0, None]


def test_equal_at_a_rewards_end_is_no_evidence() -> None:
    equal = verdicts.alike("", [4.0, 4.0, None], [4.0, 4.0, 1.0], 0.06)
    assert equal == [verdicts.Verdict("", "no difference: both at 4.000 ± 0.000", "undecided")]


def evaluated(folder: Path, run: str, **values: float) -> Path:
    (folder / run).mkdir(parents=True, exist_ok=True)
    evaluation = {name.replace("_", "/"): value for name, value in values.items()}
    (folder / run / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def test_runs_of_variants_are_paired_by_their_seeds_folder(tmp_path: Path) -> None:
    one = Finished("profiles", [evaluated(tmp_path / f"a/seed_{i}", "x", sampled_sum=i) for i in (0, 2, 5)])
    other = Finished(
        "profiles", [evaluated(tmp_path / f"b/seed_{i}", "x", sampled_sum=10 * i) for i in (2, 4, 5)]
    )
    assert paired("sampled/sum", (one, "x"), (other, "x")) == [[2, 5], [20, 50]]
    assert paired("sampled/sum", (one, "x"), (Finished("ablations", []), "x")) == [[], []]
