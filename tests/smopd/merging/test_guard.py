"""Which candidates there are, and which one the guard takes of a table made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from smopd.config.merging import Merge
from smopd.merging.guard import Judged, candidates, given, judged
from smopd.merging.vectors import Part


def merge(accuracy: dict[str, Any] | None = None, form: dict[str, Any] | None = None, **values: Any) -> Merge:
    models = [
        {"model": "a", "reward": "accuracy", "keep": [0.1, 1], **(accuracy or {})},
        {"model": "f", "reward": "format", "may_lose": 0.1, **(form or {})},
    ]
    return Merge.model_validate({"models": models, "guard": {}, **values})


def judge(
    table: dict[str, tuple[float, float]], given: Merge, weights=(0.5, 0.5)
) -> tuple[list[Judged], Judged]:
    todo = candidates(given)
    assert [each.name for each in todo] == list(table)
    rows = [(each, dict(zip(("accuracy", "format"), table[each.name], strict=True))) for each in todo]
    return judged(rows, given.models, dict(zip(("accuracy", "format"), weights, strict=True)))


TABLE = {
    "base": (-1.0, 0.0),
    "a alone": (2.5, 0.0),
    "f alone": (1.0, 0.9),
    "plain sum": (2.4, 0.05),
    "a 0.1 + f": (2.0, 0.85),
}


def test_the_best_of_those_that_keep_the_format_is_taken() -> None:
    rows, chosen = judge(TABLE, merge())
    assert chosen.candidate.name == "a 0.1 + f"
    assert {row.candidate.name: row.out for row in rows} == {
        "base": "lacks 100% of what f gained",
        "a alone": "lacks 100% of what f gained",
        "f alone": None,
        "plain sum": "lacks 94% of what f gained",
        "a 0.1 + f": None,
    }
    assert rows[4].lost == pytest.approx({"a": 0.5 / 3.5, "f": 0.05 / 0.9})
    assert [row.score for row in rows] == pytest.approx([-0.5, 1.25, 0.95, 1.225, 1.425])


@pytest.mark.parametrize(
    ("changes", "weights", "chosen"),
    [
        ({"f alone": (1.0, 0.95), "a 0.1 + f": (2.0, 0.85)}, (0.5, 0.5), "f alone"),  # 10.5% over 10%
        ({"plain sum": (1.9, 0.9)}, (0.5, 0.5), "a 0.1 + f"),  # 2.8 against 2.85
        ({"plain sum": (1.9, 0.9)}, (0.1, 0.9), "plain sum"),
        ({"plain sum": (1.95, 0.9)}, (0.5, 0.5), "plain sum"),  # equal to the other one, and first
        ({"a 0.1 + f": (0.0, 0.89)}, (0.5, 0.5), "f alone"),
    ],
)
def test_what_the_guard_takes(changes: dict, weights: tuple[float, float], chosen: str) -> None:
    assert judge(TABLE | changes, merge(), weights)[1].candidate.name == chosen


def test_where_all_are_out_the_one_that_loses_least_too_much_is_taken() -> None:
    both = merge({"may_lose": 0.1})
    rows, chosen = judge(TABLE, both)
    assert all(row.out for row in rows) and chosen.candidate.name == "a 0.1 + f"
    assert rows[4].out == "lacks 14% of what a gained"
    assert rows[0].out == "lacks 100% of what a gained; lacks 100% of what f gained"


def test_a_model_that_gained_nothing_keeps_out_what_is_below_it() -> None:
    rows, chosen = judge(TABLE | {"base": (-1.0, 0.9)}, merge())
    assert rows[0].lost == {"a": 1.0, "f": None} and rows[0].out is None
    assert rows[4].out == "lacks some of what f gained" and chosen.candidate.name == "f alone"


def test_candidates_are_the_base_each_model_the_plain_sum_and_the_grid() -> None:
    found = candidates(merge({"keep": [0.1, 1], "scale": [0.5, 1]}, {"keep": [0.5, 1]}))
    names = [each.name for each in found]
    assert names[:4] == ["base", "a alone", "f alone", "plain sum"]
    first = ["a 0.1 x 0.5", "a x 0.5", "a 0.1", "a"]
    assert names[4:] == [f"{one} + {other}" for one in first for other in ("f 0.5", "f")][:-1]
    assert len({(each.parts, each.method) for each in found}) == len(found) == 11
    assert found[0].parts == (Part(0.0), Part(0.0)) and found[2].parts == (Part(0.0), Part())


def test_what_is_left_out_is_a_choice_too() -> None:
    found = candidates(merge({"keep": 1, "leave_out": ["", "self_attn"]}))
    assert [each.name for each in found[3:]] == ["plain sum", "a without self_attn + f"]
    assert found[4].parts == (Part(leave_out="self_attn"), Part())


def test_another_method_has_the_plain_sum_beside_it() -> None:
    found = candidates(merge(method="ties"))
    assert [each.name for each in found[3:]] == ["plain sum", "a 0.1 + f (ties)", "a + f (ties)"]
    assert [each.method for each in found[3:]] == ["sum", "ties", "ties"]


def test_one_model_alone_stands_once() -> None:
    one = Merge.model_validate({"models": [{"model": "a", "keep": [0.2, 1]}], "guard": {}})
    assert [each.name for each in candidates(one)] == ["base", "a alone", "a 0.2"]
    assert [each.name for each in given(one)] == ["a 0.2", "a"]
