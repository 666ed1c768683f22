"""BFCL by bfcl-eval's data and checker: answers and mistakes, the forms of responses, prompts, the metric."""

from __future__ import annotations

import copy
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from smopd import evaluate
from smopd.evals.bfcl import metrics, official
from smopd.evals.bfcl.calls import FORMS, perfect_calls, read_calls, write_calls
from smopd.evals.bfcl.metrics import AST, COLUMNS, GROUPS, overall, parse_categories, read_scores, summarise
from smopd.evals.bfcl.official import Call, find_mistake, language_of
from smopd.evals.bfcl.prompts import frame, messages
from smopd.evals.bfcl.suite import Bfcl, BfclSuite, load_items

pytestmark = pytest.mark.skipif(
    official.importlib.util.find_spec("bfcl_eval") is None, reason=f"needs bfcl-eval: {official.INSTALL}"
)
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


@pytest.mark.parametrize("form", FORMS)
def test_the_answers_are_right_but_for_six_that_nothing_meets(suite: BfclSuite, form: Any) -> None:
    assert len(suite.items) == 2501
    assert Counter(item.group for item in suite.items) | Counter(metrics.LIVE_ITEMS) == Counter(
        item.group for item in suite.items
    )
    same = BfclSuite(suite.items, form=form)
    scores = same.score(same.truths())
    wrong = {item.key for item, score in zip(suite.items, scores, strict=True) if not score["correct"]}
    assert wrong == UNANSWERABLE


def test_a_spoilt_answer_is_wrong(suite: BfclSuite) -> None:
    for item in suite.items[::5]:
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


def test_values_that_the_checker_would_read_for_minutes_are_wrong_at_once() -> None:
    described, answer = function("f", m=parameter("HashMap")), [{"f": {"m": [{"k": [1]}]}}]
    value = "new HashMap<>() {{ " + 'put("a", ' * 2_000 + " }}"
    begun = time.process_time()
    mistake = find_mistake([described], [Call("f", {"m": value})], answer, "simple_java")
    assert mistake is not None and "expected at most 1000" in mistake
    short = value[: official.MAX_SOURCE_CHARS]
    assert find_mistake([described], [Call("f", {"m": short})], answer, "simple_java")
    assert time.process_time() - begun < 10


def test_a_response_that_the_checker_fails_on_is_wrong() -> None:
    described, answer = function("f", a=parameter("array", "dict")), [{"f": {"a": [[{"b": [1]}]]}}]
    mistake = find_mistake([described], [Call("f", {"a": [1, None]})], answer, "simple_python")
    assert mistake is not None


def test_tagged_calls_are_read_line_by_line() -> None:
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
    assert read_calls(text + "\n</tool_call>", "rlla") == [Call("f", {"a": 1}), Call("g", {})]
    assert read_calls("Nothing fits.", "rlla") == read_calls("<tool_call>\n\n</tool_call>", "rlla") == []
    assert read_calls("<tool_call>\n" + lines[3], "rlla") == []
    for broken in (*lines[1:3], *lines[4:6], "[" * 16_000, "x" * 17_000):
        with pytest.raises(ValueError, match=r"no line of the block is a call|17001 characters"):
            read_calls("<tool_call>\n" + broken, "rlla")


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[a.f(x=1, y=-2.5), g()]", [Call("a.f", {"x": 1, "y": -2.5}), Call("g", {})]),
        (
            "```\nf(x=[1, (2,)], y={'k': None}, z=name)\n```",
            [Call("f", {"x": [1, (2,)], "y": {"k": None}, "z": "name"})],
        ),
        ("<think> f() </think>\n[f(x='it\\'s')]", [Call("f", {"x": "it's"})]),
        ("f(1, x=2)", [Call("f", {"x": 2})]),
        ("[]", []),
        ("I cannot do that (yet).", []),
    ],
)
def test_python_calls(text: str, calls: list[Call]) -> None:
    assert read_calls(text, "bfcl") == calls


@pytest.mark.parametrize(
    "text",
    [
        "[f(x=__import__('os').getcwd())]",
        "[f(x=2 ** 8)]",
        "[f(x=[i for i in y])]",
        "[f(**k)]",
        "[f(x={[]: 1})]",
        "[f]",
        "[f()()]",
        "f(a=1",
        "[f(x=" + "[" * 150 + "]" * 150 + ")]",
        "[f(x=" + "-" * 20_000 + "1)]",
        "[f(x=" + "9" * 10_000 + ")]",
        "f(" * 8_000,
    ],
)
def test_what_is_no_list_of_calls(text: str) -> None:
    with pytest.raises(ValueError):
        read_calls(text, "bfcl")


def test_source_calls_keep_their_source() -> None:
    source = 'new HashMap<String, Object>() {{ put("a, b", 1); }}'
    text = f'[A.f(m={source}, s="x(", t=true, n=g(1, 2))]'
    expected = [Call("A.f", {"m": source, "s": "x(", "t": "true", "n": "g(1, 2)"})]
    assert read_calls(text, "bfcl", "java") == expected
    for bad in ("[f(a=1]", "[f(a='x)]", "[f(a=1) g(b=2)]"):
        with pytest.raises(ValueError):
            read_calls(bad, "bfcl", "javascript")


def test_calls_are_read_as_they_are_written(suite: BfclSuite) -> None:
    for item in suite.items[::3]:
        calls, language = perfect_calls(item.functions, item.truth, item.group), language_of(item.group)
        assert read_calls(write_calls(calls, "bfcl", language), "bfcl", language) == calls, item.key


def test_broken_attempts_are_told_from_abstentions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """BFCL credits both in irrelevance."""
    broken = '<tool_call>\n{"name": "f", "parameters": {"a": 1}\n</tool_call>'
    texts = {
        "irrelevance_0": broken,
        "irrelevance_1": "I cannot.",
        "irrelevance_2": broken.replace("1}", "1}}"),
    }
    rows = [{"key": key, "response": text} for key, text in texts.items()]
    (tmp_path / "given.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--responses", str(tmp_path / "given.jsonl"), "--output", str(tmp_path)]
    evaluate.main(["bfcl", "--categories", "irrelevance", *given])
    shown = capsys.readouterr().out
    assert "237 of 240 items have no response and are left out" in shown and "3 of 240 items" in shown
    assert "1 responses of the relevance sets attempt a call that cannot be read" in shown
    items = [json.loads(line) for line in (tmp_path / "bfcl_items.jsonl").read_text().splitlines()]
    assert [(item["correct"], item["calls"]) for item in items] == [(True, None), (True, 0), (False, 1)]
    assert items[0]["mistake"].startswith("unreadable: no line of the block") and items[1]["mistake"] is None
    kept = json.loads((tmp_path / "bfcl.json").read_text())
    assert (kept["unreadable/irrelevance"], kept["irrelevance"], kept["bfcl_eval"]) == (1, 2 / 3, "2026.3.23")


def test_bfcl_eval_s_result_files_are_responses(tmp_path: Path) -> None:
    file = tmp_path / "BFCL_v4_irrelevance_result.json"
    rows = [
        {"id": f"irrelevance_{i}", "result": text} for i, text in enumerate(("[f(a=1)]", "No.", "[f(a=1"))
    ]
    file.write_text("".join(json.dumps({**row, "latency": 1.2}) + "\n" for row in rows[::-1]))
    given = ["--responses", str(file), "--output", str(tmp_path), "--form", "bfcl"]
    evaluate.main(["bfcl", "--categories", "irrelevance", *given])
    items = [json.loads(line) for line in (tmp_path / "bfcl_items.jsonl").read_text().splitlines()]
    assert [(item["correct"], item["calls"]) for item in items] == [(False, 1), (True, 0), (True, None)]


def test_the_paper_s_overall_and_means_come_of_its_columns(suite: BfclSuite) -> None:
    rows = suite.paper()
    whole = {label: row for label, row in rows.items() if len(row) == len(COLUMNS)}
    for label, row in whole.items():
        parts = {"non_live": row["non_live"], "live": row["live"], "irrelevance_all": row["irrelevance_all"]}
        found = overall({**parts, "multi_turn": row["multi_turn"], "agentic": None})
        assert found == pytest.approx(row["overall"], abs=1.01e-4), label
        kinds = [row[name] for name in ("simple", "multiple", "parallel", "parallel_multiple")]
        assert sum(kinds) / 4 == pytest.approx(row["non_live"], abs=1.01e-4), label
        live = metrics.mean([row[name] for name in metrics.LIVE_ITEMS], list(metrics.LIVE_ITEMS.values()))
        assert live == pytest.approx(row["live"], abs=1.01e-4), label
        assert (row["non_live"] + row["live"]) / 2 == pytest.approx(row["ast"], abs=1.01e-3), label
    assert len(whole) == 16 and len(rows) == 21
    assert rows["Qwen2.5-3B moderate: SMOPD"] == {"ast": pytest.approx(0.769)}


def test_means_are_weighted_as_bfcl_does_and_none_where_a_part_is_missing() -> None:
    accuracies = dict.fromkeys(metrics.CATEGORIES, 0.0) | {"simple_java": 0.6, "live_simple": 1.0}
    found = summarise(accuracies)
    assert found["simple"] == pytest.approx(0.2) and found["non_live"] == pytest.approx(0.05)
    assert found["live"] == pytest.approx(258 / 1351)
    assert found["ast"] == pytest.approx((0.05 + 258 / 1351) / 2)
    assert found["multi_turn"] is None and found["agentic"] is None
    assert found["overall"] == pytest.approx(0.1 * (0.05 + 258 / 1351))
    assert metrics.missing_parts(found) == ["Multi-Turn", "Agentic"]
    more = accuracies | dict.fromkeys(metrics.MULTI_TURN, 0.5)
    more |= dict.fromkeys((*metrics.WEB_SEARCH, *metrics.MEMORY), 0.25)
    assert summarise(more)["overall"] == pytest.approx(0.1 * (0.05 + 258 / 1351) + 0.15 + 0.1)
    assert summarise({})["overall"] is None and summarise({"live_simple": 1.0})["live"] is None
    assert {column.key for column in COLUMNS} <= set(found)


def test_categories_by_name_and_group() -> None:
    assert parse_categories(["live", "simple_java"]) == ("simple_java", *GROUPS["live"])
    assert len(parse_categories(["all"])) == 13
    with pytest.raises(ValueError, match="'lively', expected of all, ast"):
        parse_categories(["lively"])


@pytest.mark.parametrize("underscores", [False, True])
def test_options_build_the_suite(folder: Path, underscores: bool) -> None:
    options = Bfcl(responses="ground-truth", data=folder, categories=CHOSEN, underscores=underscores)
    suite = options.suite()
    assert [item.key for item in suite.items] == [f"{name}_0" for name in CHOSEN]
    truths = suite.truths()
    assert all(score["correct"] for score in suite.score(truths))
    assert ("area_of" in suite.items[0].messages[0]["content"]) == underscores
    swapped = suite.score([truths[1], truths[0], "I do not know."])
    assert [score["correct"] for score in swapped] == [False, False, False]
    assert all(score["mistake"] for score in swapped)
    part = suite.only([2, 0])
    assert [score["correct"] for score in part.score([truths[2], truths[0]])] == [True, True]
    with pytest.raises(ValueError, match="expected 3 responses, got 1"):
        suite.score(["x"])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data": Path("nowhere")}, "BFCL_v4_simple_python.json: no such file"),
        ({"categories": ("simple",)}, "'simple', expected of all, ast"),
        ({"form": "bfcl", "words": "x"}, "words 'x': the form bfcl asks in the words of bfcl-eval"),
        ({"words": "nowhere.jsonl"}, "no file 'nowhere.jsonl'"),
        ({"multi_turn_scores": Path("nowhere")}, "scores nowhere: no such folder"),
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


def test_malformed_data_names_its_line(folder: Path) -> None:
    path = folder / "BFCL_v4_irrelevance.json"
    path.write_text(path.read_text() + '{"id": 1}\n')
    with pytest.raises(ValueError, match="line 2: expected id, question, function, got"):
        load_items(folder, ["irrelevance"])
    answers = folder / "possible_answer" / "BFCL_v4_simple_python.json"
    answers.write_text(json.dumps({"id": "other", "ground_truth": []}))
    with pytest.raises(ValueError, match=r"has no answer to simple_python_0"):
        load_items(folder, ["simple_python"])


def test_prompts_have_the_protocols_shapes() -> None:
    question = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Area?"},
    ]
    system, user = messages(question, [function()], "simple_python", "rlla", frame("rlla"))
    assert "\n1. Name: area.of\nDescription: What it does. " in system["content"]
    assert '\nParameters: {"base": {"type": "integer"' in system["content"]
    assert system["content"].endswith("\n\nBe brief.")
    assert user["content"].startswith("**Dialogue Records History**\n<user> Hello\n")
    assert "\n<response> Hi </response>\n<user> Area?\n" in user["content"]
    asked = messages(question, [function()], "simple_python", "bfcl", frame("bfcl"))
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "user"]
    assert asked[0]["content"].startswith("You are an expert in composing functions")  # bfcl-eval's
    java = function("f", m=parameter("ArrayList", "long"))
    before = copy.deepcopy(java)
    system, _ = messages(question[1:2], [java], "simple_java", "rlla", frame("rlla"))
    assert '"type": "string"' in system["content"] and "elements of type long" in system["content"]
    assert java == before


def test_words_of_an_rlla_file(data_set: Any) -> None:
    words, ours = frame("rlla", str(data_set("rlla/rlla_4k_test.jsonl.gz"))), frame("rlla")
    for found in (words, ours):
        assert "**Available Tools**" in found.head and found.tail.startswith("\n\n**Steps for Each Turn**")
    assert words != ours


def write_score(folder: Path, category: str, accuracy: float) -> Path:
    path = folder / "model" / "multi_turn" / f"BFCL_v4_{category}_score.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"accuracy": accuracy, "correct_count": 1, "total_count": 2}) + "\n{}\n")
    return path


def test_scores_of_multi_turn_are_read_into_overall(folder: Path, tmp_path: Path) -> None:
    scores = tmp_path / "score"
    for category, accuracy in zip(metrics.MULTI_TURN, (0.1, 0.2, 0.3, 0.4), strict=True):
        path = write_score(scores, category, accuracy)
    found = Bfcl(data=folder, categories=CHOSEN, multi_turn_scores=scores).suite().summary([], [])
    assert found["multi_turn"] == pytest.approx(0.25) and found["overall"] == pytest.approx(0.075)
    write_score(scores / "other", metrics.MULTI_TURN[0], 0.5)
    with pytest.raises(ValueError, match="twice, expected the scores of one model"):
        read_scores(scores)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1: expected an object with `accuracy`"):
        read_scores(scores / "model")
