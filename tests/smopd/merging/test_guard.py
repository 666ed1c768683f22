"""Which starts there are, which one the guard takes of a table made by hand, and what its engine gets."""

from types import SimpleNamespace
from typing import Any

import pytest

from smopd.config.settings import Guard, Merge
from smopd.merging import guard
from smopd.merging.guard import Candidate, Judged, Starter, alone, best, judged, levels, nearest
from smopd.merging.vectors import Part, TaskVectors
from tests.engine.tiny import tiny_model
from tests.smopd.merging.test_vectors import saved
from tests.smopd.run.invariance_worker import prompt_set, settings_of

NAMES = ("accuracy", "format")


def merge(accuracy: dict[str, Any] | None = None, form: dict[str, Any] | None = None, **values: Any) -> Merge:
    models = [
        {"model": "a", "reward": "accuracy", "keep": [1, 0.1], **(accuracy or {})},
        {"model": "f", "reward": "format", "max_regression": 0.1, **(form or {})},
    ]
    return Merge.model_validate({"models": models, "guard": {}, **values})


def judge(table: dict[str, tuple[float, float]], given: Merge, weights=(0.5, 0.5)) -> list[Judged]:
    todo = [*alone(given), *(each for level in levels(given) for each in level)]
    assert [each.name for each in todo] == list(table)
    rows = [(each, dict(zip(NAMES, table[each.name], strict=True))) for each in todo]
    return judged(rows, given.models, dict(zip(NAMES, weights, strict=True)))


TABLE = {
    "base": (-1.0, 0.0),
    "a alone": (2.5, 0.0),
    "f alone": (1.0, 0.9),
    "plain sum": (2.4, 0.05),
    "a (keep 0.1) + f": (2.0, 0.85),
}


def test_who_lacks_too_much_of_a_gain_is_out() -> None:
    rows = judge(TABLE, merge())
    out = "lacks 100% of what f gained"
    assert [row.out for row in rows] == [out, out, None, "lacks 94% of what f gained", None]
    assert rows[4].lost == pytest.approx({"a": 0.5 / 3.5, "f": 0.05 / 0.9})
    assert [row.score for row in rows] == pytest.approx([-0.5, 1.25, 0.95, 1.225, 1.425])
    assert [row.excess for row in rows[3:]] == pytest.approx([0.85 / 0.9 - 0.1, 0])


@pytest.mark.parametrize(
    ("changes", "out"),
    [
        ({"f alone": (1.0, 0.95)}, "lacks 11% of what f gained"),  # 10.5% over 10%
        ({"f alone": (1.0, 0.9)}, None),
        ({"a (keep 0.1) + f": (0.9, 0.9)}, "scores less than f alone"),
        ({"a (keep 0.1) + f": (1.0, 0.9)}, None),
        ({"base": (-1.0, 0.9)}, "lacks some of what f gained"),  # f gained nothing, and the sum is below it
    ],
)
def test_a_sum_is_in_or_out(changes: dict[str, tuple[float, float]], out: str | None) -> None:
    assert judge(TABLE | changes, merge())[4].out == out


def test_the_runs_weights_choose_the_best_and_of_equal_ones_the_first() -> None:
    table = TABLE | {"plain sum": (1.95, 0.9)}
    found = [best(judge(table, merge(), weights)[3:]) for weights in ((0.5, 0.5), (0.6, 0.4), (0.4, 0.6))]
    names = [row.candidate.name for row in found if row is not None]
    assert names == ["plain sum", "a (keep 0.1) + f", "plain sum"]
    assert best(judge(TABLE, merge())[:2]) is None


def test_where_no_sum_is_in_the_nearest_is_taken() -> None:
    rows = judge(TABLE, merge({"max_regression": 0.1}))
    assert all(row.out for row in rows) and nearest(rows).candidate.name == "a (keep 0.1) + f"
    assert rows[4].out == "lacks 14% of what a gained"
    assert rows[0].out == "lacks 100% of what a gained; lacks 100% of what f gained"
    rows = judge(TABLE | {"a (keep 0.1) + f": (0.5, 0.9)}, merge())
    assert nearest(rows).candidate.name == "f alone"


def test_levels_go_from_the_whole_to_the_most_trimmed() -> None:
    found = levels(merge({"keep": [0.1, 1], "exclude": ["", "self_attn"]}, {"keep": [0.5, 1]}))
    assert [[each.name for each in level] for level in found] == [
        ["plain sum", "a without self_attn + f"],
        ["a + f (keep 0.5)", "a without self_attn + f (keep 0.5)"],
        ["a (keep 0.1) + f", "a (keep 0.1) without self_attn + f"],
        ["a (keep 0.1) + f (keep 0.5)", "a (keep 0.1) without self_attn + f (keep 0.5)"],
    ]
    assert found[2][1].parts == (Part(keep=0.1, exclude="self_attn"), Part())


def test_near_shares_have_names_of_their_own() -> None:
    found = [each.name for level in levels(merge({"keep": [0.1234567, 0.1234568]})) for each in level]
    assert found == ["plain sum", "a (keep 0.1234568) + f", "a (keep 0.1234567) + f"]


def test_the_engine_gets_a_tied_head(tmp_path, monkeypatch):
    paths, given = saved(tmp_path, tied=True), []
    engine = SimpleNamespace(policy_version=0, load_weights=lambda weights, _: given.extend(dict(weights)))
    monkeypatch.setattr(guard, "answers", lambda *_: [])
    monkeypatch.setattr(guard, "means", lambda names, _: dict.fromkeys(names, 0.0))
    vectors = TaskVectors(paths[0], paths[1:])
    parts = (settings_of(), Merge(), vectors, {}, prompt_set(), None, None, lambda: engine, tmp_path)
    Starter(*parts)._scorer(Guard())(Candidate("sum", (Part(),) * len(paths[1:])))
    assert set(given) == set(tiny_model(0, tied=True, layers=1).state_dict())
