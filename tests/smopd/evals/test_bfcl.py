"""BFCL by bfcl-eval's data and checker: answers and mistakes, calls, prompts, the metric."""

from __future__ import annotations

import copy
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from smopd import evaluate
from smopd.evals.bfcl import official
from smopd.evals.bfcl import suite as bfcl
from smopd.evals.bfcl.official import Call, find_mistake
from smopd.evals.bfcl.rlla_form import messages, perfect_calls, read_calls, system_template
from smopd.evals.bfcl.suite import AST, COLUMNS, Bfcl, BfclSuite, load_items, read_scores, summarise

pytestmark = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason=f"needs bfcl-eval: {official.INSTALL}")
UNANSWERABLE = {
    "simple_java_36",
    "simple_java_65",
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}
CHOSEN = ("simple_python", "irrelevance", "live_relevance")


def parameter(kind: str, element: str | None = None) -> dict[str, Any]:
    return {"type": kind, **({"items": {"type": element}} if element else {}), "description": "d"}


def function(name: str = "area.of", **declared: Any) -> dict[str, Any]:
    declared = declared or {"base": parameter("integer"), "unit": parameter("string")}
    return {
        "name": name,
        "description": "What it does.",
        "parameters": {"type": "dict", "properties": declared, "required": [next(iter(declared))]},
    }


@pytest.fixture(scope="module")
def suite() -> BfclSuite:
    """All AST items."""
    return BfclSuite(load_items(official.folder() / "data", AST))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One item each of CHOSEN in BFCL's files."""
    question = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What area? "}]]
    (tmp_path / "possible_answer").mkdir()
    for category in CHOSEN:
        row = {"id": f"{category}_0", "question": question, "function": [function()]}
        (tmp_path / f"BFCL_v4_{category}.json").write_text(json.dumps(row) + "\n")
    answer = {"id": "simple_python_0", "ground_truth": [{"area.of": {"base": [10], "unit": ["m", ""]}}]}
    (tmp_path / "possible_answer" / "BFCL_v4_simple_python.json").write_text(json.dumps(answer))
    return tmp_path


def test_the_answers_are_right_but_for_six_that_nothing_meets(suite: BfclSuite) -> None:
    groups = [item.group for item in suite.items]
    assert len(groups) == 2501 and {name: groups.count(name) for name in bfcl.LIVE_ITEMS} == bfcl.LIVE_ITEMS
    scores = suite.score(suite.truths())
    wrong = {item.key for item, score in zip(suite.items, scores, strict=True) if not score["correct"]}
    assert wrong == UNANSWERABLE


def test_a_spoilt_answer_is_wrong(suite: BfclSuite) -> None:
    for item in suite.items[::25]:
        calls = perfect_calls(item.functions, item.truth, item.group)
        first, *rest = calls
        for spoilt in (
            [],
            [*calls, first],
            [first._replace(name=first.name + "x"), *rest],
            [first._replace(arguments={**first.arguments, "surplus": "1"}), *rest],
        ):
            assert find_mistake(item.functions, spoilt, item.truth, item.group), (item.key, spoilt)
    described, answer = function("f", n=parameter("long")), [{"f": {"n": [5]}}]
    for value, right in (("5L", True), (5, False), ("5", False), ("6L", False)):
        mistake = find_mistake([described], [Call("f", {"n": value})], answer, "simple_java")
        assert (mistake is None) == right


def test_values_that_break_the_checker_or_take_it_minutes_are_wrong_at_once() -> None:
    described, answer = function("f", m=parameter("HashMap")), [{"f": {"m": [{"k": [1]}]}}]
    value = "new HashMap<>() {{ " + 'put("a", ' * 2_000 + " }}"
    begun = time.process_time()
    mistake = find_mistake([described], [Call("f", {"m": value})], answer, "simple_java")
    assert mistake is not None and "expected at most 1000" in mistake
    short = value[: official.MAX_SOURCE_CHARS]
    assert find_mistake([described], [Call("f", {"m": short})], answer, "simple_java")
    assert time.process_time() - begun < 10
    described, answer = function("f", a=parameter("array", "dict")), [{"f": {"a": [[{"b": [1]}]]}}]
    assert find_mistake([described], [Call("f", {"a": [1, None]})], answer, "simple_python")


def test_calls_are_read_line_by_line() -> None:
    lines = [
        '{"name": "f", "parameters": {"a": 1}}',
        "no JSON",
        '{"name": "f"}',
        '{"name": "None", "parameters": {}}',
        '{"name": "f", "parameters": {"a": NaN}}',
        '{"name": "f", "parameters": {"a": ' + "[" * 80 + "]" * 80 + "}}",
        '{"name": "g", "parameters": {}, "more": 1}',
    ]
    text = "<think> x </think>\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n" + "\n".join(lines)
    assert read_calls(text + "\n</tool_call>\n" + lines[0]) == [Call("f", {"a": 1}), Call("g", {})]
    for without in ("Nothing fits.", "<tool_call>\n\n</tool_call>", "<tool_call>\n" + lines[3]):
        assert read_calls(without) == []
    for broken in (*lines[1:3], *lines[4:6], "[" * 16_000, "x" * 17_000):
        with pytest.raises(ValueError, match=r"no line of the block is a call|17001 characters"):
            read_calls("<tool_call>\n" + broken)


def test_broken_attempts_are_told_from_abstentions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BFCL credits both in irrelevance. The responses are a result file of bfcl-eval, in any order."""
    broken = '<tool_call>\n{"name": "f", "parameters": {"a": 1}\n</tool_call>'
    texts = [broken, "I cannot.", broken.replace("1}", "1}}")]
    rows = [{"id": f"irrelevance_{i}", "result": text, "latency": 1.2} for i, text in enumerate(texts)]
    file = tmp_path / "BFCL_v4_irrelevance_result.json"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows[::-1]))
    given = ["--responses", str(file), "--output", str(tmp_path)]
    evaluate.main(["bfcl", "--categories", "irrelevance", *given])
    shown = capsys.readouterr().out
    assert "237 of 240 items have no response and are left out" in shown and "3 of 240 items" in shown
    assert "1 responses of the relevance sets attempt a call that cannot be read" in shown
    items = [json.loads(line) for line in (tmp_path / "bfcl_items.jsonl").read_text().splitlines()]
    assert [(item["correct"], item["calls"]) for item in items] == [(True, None), (True, 0), (False, 1)]
    assert items[0]["mistake"].startswith("unreadable: no line of the block") and items[1]["mistake"] is None
    kept = json.loads((tmp_path / "bfcl.json").read_text())
    assert (kept["unreadable/irrelevance"], kept["irrelevance"], kept["bfcl_eval"]) == (1, 2 / 3, "2026.3.23")


def test_means_are_weighted_as_bfcl_does_and_none_where_a_part_is_missing() -> None:
    accuracies = dict.fromkeys(bfcl.CATEGORIES, 0.0) | {"simple_java": 0.6, "live_simple": 1.0}
    found = summarise(accuracies)
    assert found["simple"] == pytest.approx(0.2) and found["non_live"] == pytest.approx(0.05)
    assert found["live"] == pytest.approx(258 / 1351)
    assert found["ast"] == pytest.approx((0.05 + 258 / 1351) / 2)
    assert found["multi_turn"] is None and found["agentic"] is None
    assert found["overall"] == pytest.approx(0.1 * (0.05 + 258 / 1351))
    assert bfcl.missing_parts(found) == ["Multi-Turn", "Agentic"]
    more = accuracies | dict.fromkeys(bfcl.MULTI_TURN, 0.5)
    more |= dict.fromkeys((*bfcl.WEB_SEARCH, *bfcl.MEMORY), 0.25)
    assert summarise(more)["overall"] == pytest.approx(0.1 * (0.05 + 258 / 1351) + 0.15 + 0.1)
    assert summarise({})["overall"] is None and summarise({"live_simple": 1.0})["live"] is None
    assert {column.key for column in COLUMNS} <= set(found)


def test_the_papers_overall_comes_of_its_columns() -> None:
    whole = [row for row in BfclSuite([]).paper().values() if len(row) == len(COLUMNS)]
    assert len(whole) == 16
    for row in whole:
        parts = {"multiple": row["multiple"], "parallel": row["parallel"]}
        parts |= {name: row[name] for name in ("parallel_multiple", *bfcl.LIVE_ITEMS)}
        parts |= dict.fromkeys(bfcl.SIMPLE, row["simple"])
        parts |= dict.fromkeys(bfcl.IRRELEVANCE, row["irrelevance_all"])
        found = summarise(parts | dict.fromkeys(bfcl.MULTI_TURN, row["multi_turn"]))
        for name, digit in (("non_live", 1e-4), ("live", 1e-4), ("ast", 1e-3), ("overall", 1e-4)):
            assert found[name] == pytest.approx(row[name], abs=1.01 * digit), name


def test_options_build_the_suite(folder: Path) -> None:
    suite = Bfcl(responses="ground-truth", data=folder, categories=CHOSEN[::-1]).suite()
    assert [item.key for item in suite.items] == [f"{name}_0" for name in CHOSEN]
    truths = suite.truths()
    assert all(score["correct"] for score in suite.score(truths))
    swapped = suite.score([truths[1], truths[0], "I do not know."])
    assert [score["correct"] for score in swapped] == [False, False, False]
    assert all(score["mistake"] for score in swapped)
    part = suite.only([2, 0])
    assert [score["correct"] for score in part.score([truths[2], truths[0]])] == [True, True]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data": Path("nowhere")}, "BFCL_v4_simple_python.json"),
        ({"categories": ("simple",)}, "--categories: 'simple', expected of simple_python"),
        ({"words": "nowhere.jsonl"}, "no file 'nowhere.jsonl'"),
        ({"multi_turn_scores": Path("nowhere")}, "scores nowhere: has no BFCL_v4_multi_turn"),
    ],
)
def test_mistakes_are_one_line(folder: Path, change: dict[str, Any], error: str) -> None:
    options = Bfcl(**{"data": folder, "categories": CHOSEN, **change})
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        options.suite()
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_without_the_package_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(official, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["bfcl", "--responses", "ground-truth"])
    error = "smopd.evaluate: bfcl: needs the package bfcl-eval, expected `pip install --no-deps bfcl-eval=="
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(error) and said.count("\n") == 1


def test_malformed_data_names_its_file(folder: Path) -> None:
    path = folder / "BFCL_v4_irrelevance.json"
    path.write_text(path.read_text() + '{"id": 1}\n')
    with pytest.raises(ValueError, match=r"irrelevance.json: a row of it, or of .* has no 'question'"):
        load_items(folder, ["irrelevance"])


def test_prompts_have_the_protocols_shapes(data_set: Any) -> None:
    question = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Area?"},
    ]
    ours = system_template()
    system, user = messages(question, [function()], "simple_python", ours)
    assert "\n1. Name: area.of\nDescription: What it does. " in system["content"]
    assert '\nParameters: {"base": {"type": "integer"' in system["content"]
    assert system["content"].endswith("\n\nBe brief.")
    assert user["content"].startswith("**Dialogue Records History**\n<user> Hello\n")
    assert "\n<response> Hi </response>\n<user> Area?\n" in user["content"]
    java = function("f", m=parameter("ArrayList", "long"))
    before = copy.deepcopy(java)
    system, _ = messages(question[1:2], [java], "simple_java", ours)
    assert '"type": "string"' in system["content"] and "elements of type long" in system["content"]
    assert java == before
    theirs = system_template(str(data_set("rlla/rlla_4k_test.jsonl.gz")))
    for template in (ours, theirs):
        head, tail = template.split("{tools}")
        assert "**Available Tools**" in head and tail.startswith("\n\n**Steps for Each Turn**")
    assert theirs != ours


def test_scores_of_multi_turn_are_read_into_overall(folder: Path, tmp_path: Path) -> None:
    def write(model: str, category: str, accuracy: float) -> Path:
        path = tmp_path / "score" / model / "multi_turn" / f"BFCL_v4_{category}_score.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"accuracy": accuracy, "correct_count": 1}) + "\n{}\n")
        return path

    for category, accuracy in zip(bfcl.MULTI_TURN, (0.1, 0.2, 0.3, 0.4), strict=True):
        path = write("model", category, accuracy)
    scores = tmp_path / "score"
    found = Bfcl(data=folder, categories=CHOSEN, multi_turn_scores=scores).suite().summary([], [])
    assert found["multi_turn"] == pytest.approx(0.25) and found["overall"] == pytest.approx(0.075)
    write("other", bfcl.MULTI_TURN[0], 0.5)
    with pytest.raises(ValueError, match="twice, expected the scores of one model"):
        read_scores(scores)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1: expected an object with `accuracy`"):
        read_scores(scores / "model")
