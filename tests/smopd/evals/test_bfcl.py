"""BFCL: reference answers are right, corrupted ones as bfcl-eval has it; the metric, the forms, mistakes."""

import copy
import http.server
import json
import random
import re
import subprocess
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smopd.evals.bfcl import checker as bfcl_checker
from smopd.evals.bfcl import metrics as bfcl_metrics
from smopd.evals.bfcl import multi_turn as bfcl_multi_turn
from smopd.evals.bfcl import official as bfcl_official
from smopd.evals.bfcl.calls import read_calls, write_calls
from smopd.evals.bfcl.checker import Call, find_mistake
from smopd.evals.bfcl.metrics import AST, COLUMNS, GROUPS, overall, paper_rows, parse_categories, summarise
from smopd.evals.bfcl.prompts import frame, messages
from smopd.evals.bfcl.suite import Bfcl, BfclSuite
from smopd.evals.bfcl.truths import mended, perfect_calls
from smopd.evals.bfcl.types import _puts, java_value, javascript_value, language_of

UNANSWERABLE = {
    "simple_java_36",
    "simple_java_65",
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}


def parameter(kind, element=None, **more):
    return {"type": kind, **({"items": {"type": element}} if element else {}), "description": "d", **more}


def function(name="area.of", required=("base",), **declared):
    declared = declared or {
        "base": parameter("integer"),
        "height": parameter("float"),
        "unit": parameter("string"),
        "sides": parameter("array", "integer"),
        "options": parameter("dict"),
        "rows": parameter("array", "dict"),
    }
    return {
        "name": name,
        "description": "What it does.",
        "parameters": {"type": "dict", "properties": declared, "required": list(required)},
    }


ALLOWED = {
    "base": [10],
    "height": [2.5, 3.0, ""],
    "unit": ["square metres", ""],
    "sides": [[1, 2], ""],
    "options": [{"mode": ["Fast", ""], "level": [1, 2]}, ""],
    "rows": [[{"a": [1]}, {"a": ["x", ""]}], ""],
}


def wrong(arguments, *, name="area.of", allowed=None, category="simple_python", **options):
    answer = {"area.of": ALLOWED if allowed is None else allowed}
    found = find_mistake([function()], [Call(name, arguments)], [answer], category, **options)
    return found and found.split(":")[0]


@pytest.mark.parametrize(
    ("arguments", "mistake"),
    [
        ({"base": 10}, None),
        ({"base": 10, "height": 3, "unit": "Square-Metres."}, None),  # an int for a float; case, punctuation
        ({"base": 10, "unit": "square feet"}, "value"),
        ({}, "missing"),
        ({"base": 10, "colour": "red"}, "unexpected"),
        ({"base": 10.0}, "type"),
        ({"base": "10"}, "type"),
        ({"base": True}, "type"),
        ({"base": 11}, "value"),
        ({"base": 10, "height": 2.6}, "value"),
        ({"base": 10, "sides": [1, 2]}, None),
        ({"base": 10, "sides": [2, 1]}, "value"),
        ({"base": 10, "sides": ["1", 2]}, "value"),
        ({"base": 10, "sides": []}, None),  # an optional list may be empty
        ({"base": 10, "options": {"level": 2, "mode": "FAST"}}, None),
        ({"base": 10, "options": {"level": 2}}, None),
        ({"base": 10, "options": {"mode": "fast"}}, "value"),
        ({"base": 10, "options": {"level": 2, "more": 1}}, "value"),
        ({"base": 10, "options": {"level": 3}}, "value"),
        ({"base": 10, "rows": [{"a": 1}, {"a": "X"}]}, None),
        ({"base": 10, "rows": [{"a": 1}, {}]}, None),
        ({"base": 10, "rows": [{"a": "X"}, {"a": 1}]}, "value"),
        ({"base": 10, "rows": [{"a": 1}]}, "value"),
        ({"base": 10, "rows": [1, None]}, "value"),
        ({"base": None}, "type"),
    ],
)
def test_one_call(arguments, mistake):
    assert wrong(arguments) == mistake


def test_names_and_what_must_be_given():
    assert wrong({"base": 10}, name="area_of") == "name"
    assert wrong({"base": 10}, name="area_of", underscores=True) is None
    assert wrong({"base": 10}, name="area.of", underscores=True) == "name"
    assert wrong({"base": 10}, allowed={"base": [10], "unit": ["m"]}) == "missing"  # optional, but expected
    variable = {"base": ["width"]}
    assert wrong({"base": "width"}, allowed=variable) is None
    assert wrong({"base": "Width"}, allowed=variable) == "value"  # a variable's name is compared exactly
    ints = {"base": [10], "sides": [[1.0, 2.0]]}
    assert wrong({"base": 10, "sides": [1, 2]}, allowed=ints) is None
    assert wrong({"base": 10, "height": 10**400}) == "type"


def test_counts_and_order_of_calls():
    functions = [function("f", ["a"], a=parameter("integer")), function("g", ["b"], b=parameter("string"))]
    answers = [{"f": {"a": [1]}}, {"f": {"a": [2]}}, {"g": {"b": ["x"]}}]
    calls = [Call("g", {"b": "X"}), Call("f", {"a": 2}), Call("f", {"a": 1})]

    def parallel(calls):
        return find_mistake(functions, calls, answers, "parallel_multiple")

    assert parallel(calls) is None and parallel(calls[::-1]) is None
    assert str(parallel(calls[:2])).startswith("count")
    assert str(parallel([*calls, calls[0]])).startswith("count")
    assert str(parallel([calls[0], calls[1], calls[1]])).startswith("call")
    assert find_mistake(functions, [Call("g", {"b": "x"})], [answers[2]], "multiple") is None
    assert str(find_mistake(functions, [Call("f", {"a": 1})], [answers[2]], "multiple")).startswith("name")
    assert str(find_mistake(functions, [], [answers[0]], "simple_python")).startswith("count")


@pytest.mark.parametrize(
    ("text", "declared", "element", "value"),
    [
        ("5", "integer", None, 5),
        ("5L", "integer", None, "5L"),
        ("5L", "long", None, 5),
        ("5", "long", None, "5"),
        ("2.5f", "float", None, 2.5),
        ("2.5", "float", None, "2.5"),
        ("1e3", "double", None, 1000.0),
        ("true", "boolean", None, True),
        ("True", "boolean", None, "True"),
        ("'c'", "char", None, "'c'"),
        ("name", "any", None, "name"),
        ('new ArrayList<String>(Arrays.asList("a", "b"))', "ArrayList", "String", ["a", "b"]),
        ("new ArrayList<>(Arrays.asList(1L, 2))", "ArrayList", "long", [1, "2"]),
        ('new ArrayList<String>() {{ add("a"); add("b"); }}', "ArrayList", "String", ["a", "b"]),
        ("new ArrayList<>()", "ArrayList", "integer", []),
        ("list", "ArrayList", "integer", "list"),
        ("new int[]{1, 2}", "Array", "integer", [1, 2]),
        ('new String[]{"a"}', "Array", "String", ['"a"']),
        ("new int[] { }", "Array", "integer", []),
        (
            'new HashMap<String, Object>() {{ put("k", 1); put("b", true); }}',
            "HashMap",
            None,
            {"k": 1, "b": True},
        ),
        ("new HashMap<>()", "HashMap", None, {}),
        ("map", "HashMap", None, "map"),
        ("9" * 5000, "integer", None, "9" * 5000),
    ],
)
def test_java_source(text, declared, element, value):
    found = java_value(text, declared, element)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "declared", "element", "value"),
    [
        ('"a"', "String", None, "a"),
        ("a", "String", None, "a"),
        ("5n", "Bigint", None, 5),
        ("5", "Bigint", None, "5"),
        ("2.50", "float", None, 2.5),
        ("1e3", "float", None, "1e3"),
        ("false", "Boolean", None, False),
        ("['a', \"b\"]", "array", "String", ["a", "b"]),
        ("new Array(1, 2)", "array", "integer", [1, 2]),
        ("[[1, 2], [3]]", "array", "array", [[1, 2], [3]]),
        ("[]", "array", "float", []),
        ("{}", "dict", None, {}),
        ('{"a": 1, \'b\': "x, y", c: [1, true]}', "dict", None, {"a": 1, "b": "x, y", "c": [1, True]}),
        ("items", "array", "float", "items"),
        ("{a", "dict", None, "{a"),
    ],
)
def test_javascript_source(text, declared, element, value):
    found = javascript_value(text, declared, element)
    assert (found, type(found)) == (value, type(value))


def test_java_values_are_strings():
    described = function("f", ["n"], n=parameter("long"))
    for value, mistake in (("5L", None), (5, "type"), ("5", "type"), ("6L", "value")):
        found = find_mistake([described], [Call("f", {"n": value})], [{"f": {"n": [5]}}], "simple_java")
        assert (found and found.split(":")[0]) == mistake


def test_tagged_calls_are_read_line_by_line():
    lines = [
        '{"name": "f", "parameters": {"a": 1}}',
        "no JSON",
        '{"name": "f"}',
        '{"name": "None", "parameters": {}}',
        '{"name": "f", "parameters": {"a": NaN}}',
        "[" * 100_000,
        '{"name": "f", "parameters": {"a": ' + "[" * 40 + "]" * 40 + "}}",
        '{"name": "g", "parameters": {}, "more": 1}',
    ]
    text = "<think> x </think>\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n" + "\n".join(
        lines[:5] + lines[6:]
    )
    assert read_calls(text + "\n</tool_call>", "rlla") == [Call("f", {"a": 1}), Call("g", {})]
    assert read_calls("<tool_call>\n" + lines[5], "rlla") == []
    assert read_calls("Nothing fits.", "rlla") == []


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
    ],
)
def test_python_calls(text, calls):
    assert read_calls(text, "bfcl") == calls


@pytest.mark.parametrize(
    "text",
    [
        "I cannot do that.",
        "[f(x=__import__('os').getcwd())]",
        "[f(x=2 ** 8)]",
        "[f(x=[i for i in y])]",
        "[f(**k)]",
        "[f(x={[]: 1})]",
        "[f]",
        "[f()()]",
        "[f(x=" + "[" * 150 + "]" * 150 + ")]",
        "[f(x=" + "-" * 20_000 + "1)]",
        "[f(x=" + "9" * 10_000 + ")]",
        "(" * 16_000,
    ],
)
def test_what_is_no_list_of_calls(text):
    with pytest.raises(ValueError):
        read_calls(text, "bfcl")


def test_source_calls_keep_their_source():
    text = '[A.f(m=new HashMap<String, Object>() {{ put("a, b", 1); }}, s="x(", t=true, n=g(1, 2))]'
    assert read_calls(text, "bfcl", "java") == [
        Call(
            "A.f",
            {
                "m": 'new HashMap<String, Object>() {{ put("a, b", 1); }}',
                "s": "x(",
                "t": "true",
                "n": "g(1, 2)",
            },
        )
    ]
    for bad in ("None fits.", "[f(a=1]", "[f(a='x)]", "[f(a=1) g(b=2)]"):
        with pytest.raises(ValueError):
            read_calls(bad, "bfcl", "javascript")


def test_the_paper_s_overall_and_means_come_of_its_columns():
    whole = {label: row for label, row in paper_rows().items() if len(row) == len(COLUMNS)}
    for label, row in whole.items():
        parts = {"non_live": row["non_live"], "live": row["live"], "irrelevance_all": row["irrelevance_all"]}
        found = overall({**parts, "multi_turn": row["multi_turn"], "agentic": None})
        assert found == pytest.approx(row["overall"], abs=1.01e-4), label
        kinds = [row[name] for name in ("simple", "multiple", "parallel", "parallel_multiple")]
        assert sum(kinds) / 4 == pytest.approx(row["non_live"], abs=1.01e-4), label
        live = bfcl_metrics.mean(
            [row[name] for name in bfcl_metrics.LIVE_ITEMS], list(bfcl_metrics.LIVE_ITEMS.values())
        )
        assert live == pytest.approx(row["live"], abs=1.01e-4), label
        assert (row["non_live"] + row["live"]) / 2 == pytest.approx(row["ast"], abs=1.01e-3), label
    assert len(whole) == 16
    assert paper_rows()["Qwen2.5-1.5B GD2PO Baseline"]["ast"] == pytest.approx(0.733)
    moderate = {label: row for label, row in paper_rows().items() if label not in whole}
    assert len(moderate) == 5 and moderate["Qwen2.5-3B moderate: SMOPD"] == {"ast": pytest.approx(0.769)}


@pytest.mark.parametrize(
    ("given", "mend", "right"),
    [
        ({"responses": "ground-truth"}, None, True),
        ({"responses": "saved.jsonl"}, None, False),
        ({"model": "m"}, None, False),
        ({"model": "m"}, True, True),
        ({"responses": "ground-truth"}, False, False),
    ],
)
def test_a_model_is_held_to_bfcl_s_own_answers(data_set, given, mend, right):
    data, chosen = data_set("bfcl"), ("simple_java",)
    options = Bfcl(data=data, categories=chosen, scorer="ours", mend=mend, **given)
    suite = options.suite()
    scores = suite.score(suite.truths())
    wrong = {item.key for item, score in zip(suite.items, scores, strict=True) if not score["correct"]}
    keys = {"simple_java_36", "simple_java_65"}
    assert (set(suite.mended), wrong) == ((keys, set()) if right else (set(), keys))
    assert any("mended" in note for note in options.notes(suite, {})) == right


def test_means_are_weighted_as_bfcl_does_and_none_where_a_part_is_missing():
    accuracies = dict.fromkeys(bfcl_metrics.CATEGORIES, 0.0) | {"simple_java": 0.6, "live_simple": 1.0}
    found = summarise(accuracies)
    assert found["simple"] == pytest.approx(0.2) and found["non_live"] == pytest.approx(0.05)
    assert found["live"] == pytest.approx(258 / 1351)
    assert found["ast"] == pytest.approx((0.05 + 258 / 1351) / 2)
    assert found["multi_turn"] is None and found["agentic"] is None
    assert found["overall"] == pytest.approx(0.1 * (0.05 + 258 / 1351))
    assert bfcl_metrics.missing_parts(found) == ["Multi-Turn", "Agentic"]
    more = accuracies | dict.fromkeys(bfcl_metrics.MULTI_TURN, 0.5)
    more |= dict.fromkeys((*bfcl_metrics.WEB_SEARCH, *bfcl_metrics.MEMORY), 0.25)
    assert summarise(more)["overall"] == pytest.approx(0.1 * (0.05 + 258 / 1351) + 0.15 + 0.1)
    assert summarise({})["overall"] is None and summarise({"live_simple": 1.0})["live"] is None
    assert {column.key for column in COLUMNS} <= set(found)


def test_categories_by_name_and_group():
    assert parse_categories(["live", "simple_java"]) == ("simple_java", *GROUPS["live"])
    assert len(parse_categories(["all"])) == 13
    with pytest.raises(ValueError, match="'lively', expected of all, ast"):
        parse_categories(["lively"])


@pytest.fixture
def folder(tmp_path):
    """Two categories in BFCL's files, and an irrelevance set."""
    question = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What area? "}]]
    (tmp_path / "possible_answer").mkdir()
    for category in ("simple_python", "irrelevance", "live_relevance"):
        row = {"id": f"{category}_0", "question": question, "function": [function()]}
        (tmp_path / f"BFCL_v4_{category}.json").write_text(json.dumps(row) + "\n")
    answer = {"id": "simple_python_0", "ground_truth": [{"area.of": ALLOWED}]}
    (tmp_path / "possible_answer" / "BFCL_v4_simple_python.json").write_text(json.dumps(answer))
    return tmp_path


CHOSEN = ("simple_python", "irrelevance", "live_relevance")


@pytest.mark.parametrize("form", ["rlla", "bfcl"])
def test_a_suite_of_a_folder(folder, form):
    suite = BfclSuite.load(folder, categories=CHOSEN, scorer="ours", form=form)
    assert [item.key for item in suite.items] == [f"{name}_0" for name in CHOSEN]
    groups, truths = [item.group for item in suite.items], suite.truths()
    assert all(score["correct"] for score in suite.score(truths))
    swapped = suite.score([truths[1], truths[0], "I do not know."])
    assert [score["correct"] for score in swapped] == [False, False, False]
    found = suite.summary(groups, suite.score([truths[0], "no call", "nor here"]))
    assert (found["simple_python"], found["irrelevance"], found["live_relevance"]) == (1.0, 1.0, 0.0)
    assert found["simple"] is None and found["irrelevance_all"] is None and found["overall"] is None
    with pytest.raises(ValueError, match="expected 3 responses, got 1"):
        suite.score(["x"])
    json.dumps(swapped)


def test_options_build_the_suite(folder):
    options = Bfcl(responses="ground-truth", data=folder, categories=CHOSEN, scorer="ours", underscores=True)
    suite = options.suite()
    assert all(score["correct"] for score in suite.score(suite.truths()))
    assert "area_of" in suite.items[0].messages[0]["content"]
    assert options.settings(suite)["scorer"] == "ours" and options.settings(suite)["mended"] == []
    summary = suite.summary(["irrelevance"], [{"correct": True}])
    assert options.notes(suite, summary) == [
        "Overall counts as 0 what did not run: Non-Live, Live, Irrelevance, Multi-Turn, Agentic"
    ]


def test_one_category_s_file_is_data_too(folder):
    file = folder / "BFCL_v4_irrelevance.json"
    suite = Bfcl(responses="ground-truth", data=file, scorer="ours").suite()
    assert [item.key for item in suite.items] == ["irrelevance_0"]
    with pytest.raises(ValueError, match=r"irrelevance.json: expected a folder, or .* of simple_python$"):
        Bfcl(responses="ground-truth", data=file, categories=("simple_python",), scorer="ours").suite()


def test_a_part_of_a_suite(folder):
    suite = BfclSuite.load(folder, categories=CHOSEN, scorer="ours")
    part = suite.only([2, 0])
    assert [item.group for item in part.items] == ["live_relevance", "simple_python"]
    assert all(score["correct"] for score in part.score(part.truths()))
    assert [score["correct"] for score in part.score(part.truths()[::-1])] == [True, False]
    assert len(suite.items) == 3


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"data": "nowhere"}, "nowhere/BFCL_v4_simple_python.json: no such file"),
        ({"categories": ("simple",)}, "'simple', expected of all, ast"),
        ({"form": "bfcl", "words": "x"}, "words 'x' for the form bfcl, expected none or 'bfcl-eval'"),
        ({"words": "nowhere.jsonl"}, "nowhere.jsonl: no such file"),
        ({"multi_turn_scores": "nowhere"}, "scores nowhere: no such folder"),
    ],
)
def test_mistakes_are_one_line(folder, change, error):
    from pathlib import Path

    paths = {key: Path(value) for key, value in change.items() if key in ("data", "multi_turn_scores")}
    options = Bfcl(**{"data": folder, "categories": CHOSEN, "scorer": "ours", **change, **paths})
    with pytest.raises((ValueError, FileNotFoundError)) as raised:
        options.suite()
    assert error in str(raised.value) and "\n" not in str(raised.value)


def test_malformed_data_names_its_line(folder):
    path = folder / "BFCL_v4_irrelevance.json"
    path.write_text(path.read_text() + '{"id": 1}\n')
    with pytest.raises(ValueError, match="line 2: expected id, question, function, got"):
        BfclSuite.load(folder, categories=["irrelevance"])
    answers = folder / "possible_answer" / "BFCL_v4_simple_python.json"
    answers.write_text(json.dumps({"id": "simple_python_0", "ground_truth": [{"other": {}}]}))
    with pytest.raises(ValueError, match=r"simple_python_0: the answer calls other, expected of area.of"):
        BfclSuite.load(folder, categories=["simple_python"])


def test_prompts_have_the_protocols_shapes():
    question = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello "},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Area?"},
    ]
    system, user = messages(question, [function()], "simple_python", "rlla", frame("rlla", None))
    assert "\n1. Name: area.of\nDescription: What it does. " in system["content"]
    assert '\nParameters: {"base": {"type": "integer"' in system["content"]
    assert system["content"].endswith("\n\nBe brief.")
    assert user["content"].startswith("**Dialogue Records History**\n<user> Hello\n")
    assert "\n<response> Hi </response>\n<user> Area?\n" in user["content"]
    asked = messages(question, [function()], "simple_python", "bfcl", frame("bfcl", None))
    assert [message["role"] for message in asked] == ["system", "user", "assistant", "user"]
    java = function("f", ["m"], m=parameter("ArrayList", "long"))
    before = copy.deepcopy(java)
    system, _ = messages(question[1:2], [java], "simple_java", "rlla", frame("rlla", None))
    assert '"type": "string"' in system["content"] and "elements of type long" in system["content"]
    assert java == before


def test_words_of_an_rlla_file(data_set):
    words = frame("rlla", str(data_set("rlla/rlla_4k_test.jsonl.gz")))
    ours = frame("rlla", None)
    for found in (words, ours):
        assert "**Available Tools**" in found.head and found.tail.startswith("\n\n**Steps for Each Turn**")
    assert words != ours


@pytest.fixture(scope="module")
def suite(data_set):
    """All AST items."""
    return BfclSuite.load(data_set("bfcl"), categories=("ast",), scorer="ours", mend=True)


@pytest.mark.slow
def test_reference_answers_are_right_in_every_category(suite):
    sizes = Counter(item.group for item in suite.items)
    assert sum(sizes.values()) == 2501 and [sizes[name] for name in bfcl_metrics.LIVE_ITEMS] == [
        258,
        1053,
        16,
        24,
    ]
    scores = suite.score(suite.truths())
    assert [item.key for item, score in zip(suite.items, scores, strict=True) if not score["correct"]] == []
    found = suite.summary([item.group for item in suite.items], scores)
    assert all(found[name] == 1.0 for name in (*AST, "non_live", "live", "ast"))
    assert set(suite.mended) == UNANSWERABLE


@pytest.mark.slow
def test_reference_answers_in_bfcl_s_form(suite):
    for item, functions in zip(suite.items, suite._functions, strict=True):
        calls = perfect_calls(functions, item.truth, item.group)
        language = language_of(item.group)
        read = read_calls(write_calls(calls, "bfcl", language), "bfcl", language)
        assert read == calls, item.key


def test_relevance_sets(data_set):
    suite = BfclSuite.load(data_set("bfcl"), categories=("irrelevance", "live_relevance"), scorer="ours")
    assert Counter(item.group for item in suite.items) == {"irrelevance": 240, "live_relevance": 16}
    assert all(score["correct"] for score in suite.score(suite.truths()))


def corruptions(calls, functions, category, draw):
    """(kind, calls) for each way to spoil, or only to vary, a right response."""
    python = language_of(category) == "python"

    def with_argument(index, name, value):
        return [
            Call(call.name, {**call.arguments, name: value}) if i == index else call
            for i, call in enumerate(calls)
        ]

    yield "no call", []
    yield "one too many", [*calls, draw.choice(calls)]
    yield "wrong name", [Call(calls[0].name + "x", calls[0].arguments), *calls[1:]]
    yield "underscores", [Call(call.name.replace(".", "_"), call.arguments) for call in calls]
    if len(calls) > 1:
        yield "one too few", calls[:-1]
        yield "other order", calls[::-1]
        yield "one twice", [calls[0], *calls[:-1]]
        swapped = [calls[1].arguments, calls[0].arguments, *(call.arguments for call in calls[2:])]
        yield (
            "swapped arguments",
            [Call(call.name, given) for call, given in zip(calls, swapped, strict=True)],
        )
    other = draw.choice(functions)["name"]
    yield "another function", [Call(other, calls[0].arguments), *calls[1:]]
    index = draw.randrange(len(calls))
    yield "extra parameter", with_argument(index, "surplus", "1")
    given = calls[index].arguments
    if not given:
        return
    name = draw.choice(sorted(given))
    less = {key: value for key, value in given.items() if key != name}
    yield "missing parameter", [Call(call.name, less) if i == index else call for i, call in enumerate(calls)]
    value = given[name]
    variants = [("none", None), ("list of it", [value]), ("its text", str(value)), ("a dict", {"x": value})]
    if isinstance(value, str):
        variants += [
            ("upper case", value.upper()),
            ("punctuation", "-".join(value) + "."),
            ("without spaces", value.replace(" ", "")),
            ("longer", value + "x"),
            ("other quotes", value.replace("'", '"')),
            ("quoted", f'"{value}"'),
            ("empty", ""),
        ]
        if not python:
            variants += [
                ("suffix", value + "L"),
                ("decimals", value + ".0"),
                ("no suffix", value.rstrip("Lf")),
                ("another element", value.replace("{", "{7, ", 1).replace("(", "(7, ", 1)),
                ("brackets", value.replace("[", "(").replace("]", ")")),
            ]
    elif isinstance(value, bool):
        variants += [("negated", not value), ("a number", int(value))]
    elif isinstance(value, int):
        variants += [("a float", float(value)), ("another", value + 1), ("a bool", bool(value))]
    elif isinstance(value, float):
        variants += [("an int", int(value)), ("another", value + 0.5)]
    elif isinstance(value, list):
        variants += [("reversed", value[::-1]), ("shorter", value[:-1]), ("longer", [*value, *value[:1]])]
        variants += [("empty", []), ("a tuple", tuple(value)), ("texts", [str(item) for item in value])]
        variants += [("floats", [float(i) if type(i) is int else i for i in value])]
        variants += [("upper case", [item.upper() if isinstance(item, str) else item for item in value])]
        variants += [
            ("nested", [{**item, "x": 1} if isinstance(item, dict) else [item] for item in value]),
            (
                "nested less",
                [dict(list(item.items())[1:]) if isinstance(item, dict) else 0 for item in value],
            ),
        ]
    elif isinstance(value, dict):
        key = draw.choice(sorted(value)) if value else "x"
        inner = value.get(key)
        variants += [
            ("key less", {k: v for k, v in value.items() if k != key}),
            ("key more", {**value, "zz": 1}),
        ]
        variants += [
            ("inner text", {**value, key: str(inner).upper()}),
            ("inner list", {**value, key: [inner]}),
        ]
        variants += [("inner float", {**value, key: float(inner) if type(inner) is int else 0.5})]
    for kind, changed in variants:
        yield kind, with_argument(index, name, changed)


ALWAYS_WRONG = {"no call", "one too many", "wrong name", "one too few", "extra parameter"}


def corrupted(suite, seed=0):
    draw = random.Random(seed)
    for item, functions in zip(suite.items, suite._functions, strict=True):
        calls = perfect_calls(functions, item.truth, item.group)
        for kind, changed in corruptions(calls, functions, item.group, draw):
            yield item, functions, kind, changed


@pytest.mark.slow
def test_corrupted_answers(suite):
    right, total = Counter(), Counter()
    for item, functions, kind, calls in corrupted(suite):
        mistake = find_mistake(functions, calls, item.truth, item.group)
        total[kind] += 1
        right[kind] += mistake is None
        assert mistake is not None or kind not in ALWAYS_WRONG, (item.key, kind, calls)
    assert right["other order"] >= total["other order"] - 1 > 400  # any order; one item is matched greedily
    assert right["upper case"] > 0.7 * total["upper case"] > 500
    assert right["one twice"] <= 1 < total["one twice"]  # genotypes AA, Aa: strings have no case
    assert right["another"] < 0.05 * total["another"]
    assert right["a float"] == 0 < total["a float"]
    assert right["none"] < 0.02 * total["none"]  # null is among what is allowed now and then
    assert sum(total.values()) > 40_000


@pytest.mark.slow
def test_ours_and_bfcl_eval_agree(suite):
    if not bfcl_official.is_installed():
        pytest.skip("bfcl-eval is not installed")
    disagree, count, right = [], Counter(), Counter()
    for item, functions in zip(suite.items, suite._functions, strict=True):
        calls = perfect_calls(functions, item.truth, item.group)
        assert bfcl_official.find_mistake(functions, calls, item.truth, item.group) is None, item.key
    for item, functions, kind, calls in corrupted(suite):
        ours = bfcl_checker.find_mistake(functions, calls, item.truth, item.group)
        theirs = bfcl_official.find_mistake(functions, calls, item.truth, item.group)
        count[kind] += 1
        right[kind] += theirs is None
        if (ours is None) != (theirs is None):
            disagree.append((item.key, kind, ours, theirs, calls))
    print(
        f"{count.total()} corrupted answers, {right.total()} right:",
        {kind: (right[kind], n) for kind, n in count.items()},
    )
    assert disagree == []


def test_what_bfcl_eval_accepts_no_answer_to(data_set):
    rough = BfclSuite.load(data_set("bfcl"), categories=("simple_java", "live_simple"))
    keys = {
        item.key
        for item, functions in zip(rough.items, rough._functions, strict=True)
        if mended(functions, item.truth, item.group) is not None
    }
    known = {key for key in UNANSWERABLE if not key.startswith("live_multiple")}
    assert keys == known and rough.mended == ()
    scores = {
        item.key: score["correct"]
        for item, score in zip(rough.items, rough.score(rough.truths()), strict=True)
    }
    assert {key for key, correct in scores.items() if not correct} == known


def test_bfcl_eval_is_asked_for_only_where_it_is(folder, monkeypatch):
    monkeypatch.setattr(bfcl_official, "is_installed", lambda: False)
    assert BfclSuite.load(folder, categories=CHOSEN).scorer == "ours"
    with pytest.raises(ValueError, match="--scorer bfcl-eval: not installed"):
        BfclSuite.load(folder, categories=CHOSEN, scorer="bfcl-eval")


def write_score(folder, category, accuracy):
    path = folder / "model" / "multi_turn" / f"BFCL_v4_{category}_score.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"accuracy": accuracy, "correct_count": 1, "total_count": 2}) + "\n{}\n")
    return path


def test_scores_of_multi_turn_are_read_into_overall(folder, tmp_path):
    scores = tmp_path / "score"
    for category, accuracy in zip(bfcl_metrics.MULTI_TURN, (0.1, 0.2, 0.3, 0.4), strict=True):
        path = write_score(scores, category, accuracy)
    suite = BfclSuite.load(folder, categories=CHOSEN, multi_turn_scores=scores)
    found = suite.summary([], [])
    assert found["multi_turn"] == pytest.approx(0.25) and found["overall"] == pytest.approx(0.075)
    write_score(scores / "other", bfcl_metrics.MULTI_TURN[0], 0.5)
    with pytest.raises(ValueError, match="twice, expected the scores of one model"):
        bfcl_multi_turn.read_scores(scores)
    path.write_text("[]\n")
    with pytest.raises(ValueError, match="line 1: expected an object with `accuracy`"):
        bfcl_multi_turn.read_scores(scores / "model")


def test_mistakes_before_multi_turn_is_run(tmp_path):
    run = bfcl_multi_turn.run_multi_turn
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        run("http://localhost:1/v1", tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"categories: .'simple_java'., expected of multi_turn_base"):
        run("http://localhost:1/v1", tmp_path, tmp_path / "out", categories=["simple_java"])
    with pytest.raises(ValueError, match="url 'localhost': expected http://HOST:PORT/v1"):
        run("localhost", tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="no OpenAI-compatible server answers at /models"):
        run("http://localhost:1/v1", tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_multi_turn_says_where_bfcl_eval_is_missing(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(bfcl_multi_turn, "served_models", lambda url, key: [str(tmp_path)])
    with pytest.raises(ValueError, match="python /nowhere: No such file"):
        bfcl_multi_turn.run_multi_turn("http://h/v1", tmp_path, tmp_path / "out", python="/nowhere")
    false = tmp_path / "false"
    false.write_text("#!/bin/sh\necho 'No module named bfcl_eval' >&2; exit 1\n")
    false.chmod(0o755)
    with pytest.raises(ValueError, match="cannot be imported, expected it there: No module named bfcl_eval"):
        bfcl_multi_turn.run_multi_turn("http://h/v1", tmp_path, tmp_path / "out", python=false)


STAND_IN = """
import json, os, pathlib, sys
root = pathlib.Path(os.environ["BFCL_PROJECT_ROOT"])
command, given = sys.argv[1], sys.argv[2:]
with (root / "asked.jsonl").open("a") as asked:
    asked.write(json.dumps([command, given, os.environ["REMOTE_OPENAI_BASE_URL"]]) + "\\n")
if (root / "fail").exists():
    sys.exit("it broke")
def write(folder, name, lines):
    path = root / folder / "Qwen_Qwen3-1.7B" / "multi_turn" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\\n" for line in lines))
if command == "generate":
    results = ["[f()]", "Error during inference: too long"]
    lines = [{"id": str(i), "result": result} for i, result in enumerate(results)]
    write("result", "BFCL_v4_multi_turn_base_result.json", lines)
else:
    write("score", "BFCL_v4_multi_turn_base_score.json", [{"accuracy": 0.5}])
"""


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A server that names one model, that model's folder, and a stand-in of bfcl-eval's commands."""
    package = tmp_path / "path" / "bfcl_eval"
    (package / "constants").mkdir(parents=True)
    for file in ("__init__.py", "constants/__init__.py"):
        (package / file).write_text("")
    (package / "constants" / "model_config.py").write_text('MODEL_CONFIG_MAPPING = {"Qwen/Qwen3-1.7B": 1}')
    (package / "__main__.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    model = tmp_path / "export"
    model.mkdir()
    (model / "config.json").write_text("{}")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = json.dumps({"data": [{"id": str(model)}]}).encode()
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1", model
        server.shutdown()


def test_multi_turn_runs_both_commands_and_reads_their_files(served, tmp_path):
    url, model = served
    output = tmp_path / "out"
    names, ids = ["multi_turn_base"], {"multi_turn_base": ["multi_turn_base_0"]}
    found = bfcl_multi_turn.run_multi_turn(url, model, output, categories=names, ids=ids)
    assert (dict(found.accuracies), found.failed) == ({"multi_turn_base": 0.5}, 1)
    assert json.loads((output / "test_case_ids_to_generate.json").read_text()) == ids
    generate, evaluate = [json.loads(line) for line in (output / "asked.jsonl").read_text().splitlines()]
    assert generate[0] == "generate" and generate[2] == url and "--skip-server-setup" in generate[1]
    assert (
        generate[1][generate[1].index("--local-model-path") + 1] == str(model) and "--run-ids" in generate[1]
    )
    assert evaluate[0] == "evaluate" and "--partial-eval" in evaluate[1]
    (output / "fail").touch()
    with pytest.raises(ValueError, match="bfcl-eval generate: ended with 1:\nit broke"):
        bfcl_multi_turn.run_multi_turn(url, model, output, categories=names)
    with pytest.raises(ValueError, match="registered 'other': unknown to bfcl-eval"):
        bfcl_multi_turn.run_multi_turn(url, model, output, registered="other")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"serves {model}, expected {elsewhere}"):
        bfcl_multi_turn.run_multi_turn(url, elsewhere, output)


def test_the_modules_load_without_torch():
    code = (
        "import sys, smopd.evals.bfcl.suite, smopd.evals.bfcl.multi_turn;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'pydantic', 'bfcl_eval')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


PUT = re.compile(r'put\("([^\n]*?)",\s*([^\n]*?)\)')  # BFCL's


@given(st.lists(st.sampled_from(['put("', '",', '"', ",", ")", "\n", " ", "k", "("]), max_size=30))
def test_puts_are_found_as_bfcl_finds_them(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert list(_puts(text)) == PUT.findall(text)


def test_a_repeated_put_takes_no_time() -> None:
    assert list(_puts('put("a", ' * 20_000)) == []
    assert list(_puts('put("' + '",' * 50_000)) == []
