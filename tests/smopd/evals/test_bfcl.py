"""BFCL with bfcl-eval's data and checker: correct and wrong calls, parsing, prompts, the metric."""

import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from smopd.evals.bfcl import official
from smopd.evals.bfcl import suite as bfcl
from smopd.evals.bfcl.official import Call, find_mistake
from smopd.evals.bfcl.rlla_form import messages, read_calls
from smopd.evals.bfcl.suite import AST, Bfcl, BfclItem, BfclSuite, load_items, read_scores, summarise
from tests.smopd.recipes import evaluated, write_lines

pytestmark = pytest.mark.skipif(find_spec("bfcl_eval") is None, reason=f"needs bfcl-eval: {official.INSTALL}")
CHOSEN = ("simple_python", "irrelevance", "live_relevance")


def parameter(kind: str, element: str | None = None) -> dict[str, Any]:
    return {"type": kind, **({"items": {"type": element}} if element else {}), "description": "d"}


def function(name: str = "area.of", **declared: Any) -> dict[str, Any]:
    declared = declared or {"base": parameter("integer"), "unit": parameter("string")}
    parameters = {"type": "dict", "properties": declared, "required": [next(iter(declared))]}
    return {"name": name, "description": "What it does.", "parameters": parameters}


def true_calls(item: BfclItem) -> list[Call]:
    """The first allowed value of each parameter that must be given, in a Python category."""
    allowed = [pair for answer in item.truth for pair in answer.items()]
    return [Call(name, {key: each[0] for key, each in of.items() if "" not in each}) for name, of in allowed]


def block(*calls: Call) -> str:
    lines = [json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls]
    return "\n".join(["<tool_call>", *lines, "</tool_call>"])


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


def test_true_calls_are_correct_and_changed_ones_wrong() -> None:
    items = load_items(official.folder() / "data", AST)
    groups = [item.group for item in items]
    assert len(groups) == 2501 and {name: groups.count(name) for name in bfcl.LIVE_ITEMS} == bfcl.LIVE_ITEMS
    python = [item for item in items[::12] if item.group not in ("simple_java", "simple_javascript")]
    suite = BfclSuite(python)
    calls = [true_calls(item) for item in python]
    right = suite.score([block(*each) for each in calls])
    # The others have nested values or an optional parameter that they need.
    assert sum(score["correct"] for score in right) > 0.9 * len(python)
    turned = suite.score([block(*each[::-1]) for each in calls])
    assert [score["correct"] for score in turned] == [score["correct"] for score in right]
    wrong = [[*each, each[0]._replace(name="x")] for each in calls]
    assert not any(score["correct"] for score in suite.score([block(*each) for each in wrong]))


def test_values_are_read_in_their_language() -> None:
    for kind, category, right, wrong in (
        ("long", "simple_java", "5L", 5),
        ("Bigint", "simple_javascript", "5n", 5),
        ("integer", "simple_python", 5, "5"),
    ):
        described, answers = [function("f", n=parameter(kind))], [{"f": {"n": [5]}}]
        assert find_mistake(described, [Call("f", {"n": right})], answers, category) is None, kind
        assert find_mistake(described, [Call("f", {"n": wrong})], answers, category) is not None, kind


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
    lines = ['{"name": "f", "parameters": {"a": 1}}', "no JSON", '{"name": "f"}']
    lines += ['{"name": "None", "parameters": {}}', '{"name": "g", "parameters": {}, "more": 1}']
    text = "<think> x </think>\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n" + "\n".join(lines)
    assert read_calls(text + "\n</tool_call>\n" + lines[0]) == [Call("f", {"a": 1}), Call("g", {})]
    for without in ("Nothing fits.", "<tool_call>\n\n</tool_call>", "<tool_call>\n" + lines[3]):
        assert read_calls(without) == []
    for broken in (*lines[1:3], "[" * 16_000, "x" * 17_000):
        with pytest.raises(ValueError, match=r"block has no line with a call|17001 characters"):
            read_calls("<tool_call>\n" + broken)


def test_unreadable_calls_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BFCL credits both in irrelevance. The responses are a result file of bfcl-eval, in any order."""
    broken = '<tool_call>\n{"name": "f", "parameters": {"a": 1}\n</tool_call>'
    texts = [broken, "I cannot.", broken.replace("1}", "1}}")]
    rows = [{"id": f"irrelevance_{i}", "result": text, "latency": 1.2} for i, text in enumerate(texts)]
    file = write_lines(tmp_path / "BFCL_v4_irrelevance_result.json", rows[::-1])
    kept, items = evaluated("bfcl", tmp_path, "--categories", "irrelevance", "--responses", file)
    shown = capsys.readouterr().out
    assert "237 of 240 items have no response and are skipped" in shown and "3 of 240 items" in shown
    assert "1 responses to the relevance sets have an unreadable call" in shown
    assert "0 in Overall: Non-Live, Live, Irrelevance (live_irrelevance), Multi-Turn, Agentic" in shown
    assert [(item["correct"], item["calls"]) for item in items] == [(True, None), (True, 0), (False, 1)]
    assert items[0]["mistake"].startswith("unreadable: block has no line") and items[1]["mistake"] is None
    assert (kept["unreadable/irrelevance"], kept["irrelevance"], kept["bfcl_eval"]) == (1, 2 / 3, "2026.3.23")


def test_means_are_none_where_a_part_is_missing_and_overall_counts_it_as_0() -> None:
    accuracies = dict.fromkeys(bfcl.CATEGORIES, 0.0) | {"simple_java": 0.6, "live_simple": 1.0}
    agentic = dict.fromkeys((*bfcl.WEB_SEARCH, *bfcl.MEMORY), 0.25)
    found = summarise(accuracies | agentic)
    assert found["overall"] == pytest.approx(0.1 * (0.05 + 258 / 1351) + 0.1)
    assert found["multi_turn"] is None and bfcl.missing_parts(found) == ["Multi-Turn"]
    assert summarise({})["overall"] is None and summarise({"live_simple": 1.0})["live"] is None


def test_options_build_the_suite(folder: Path) -> None:
    suite = Bfcl(data=folder, categories=CHOSEN[::-1]).suite()
    assert [item.key for item in suite.items] == [f"{name}_0" for name in CHOSEN]
    responses = [block(Call("area.of", {"base": 10})), "I do not know.", block(Call("area.of", {}))]
    assert [score["mistake"] for score in suite.score(responses)] == [None] * 3
    scores = suite.score([responses[1], responses[0], responses[1]])
    assert not any(score["correct"] for score in scores) and all(score["mistake"] for score in scores)
    part = suite.only([2, 0])
    assert [score["correct"] for score in part.score([responses[2], responses[0]])] == [True, True]


def test_mistakes_are_one_line(folder: Path) -> None:
    with (folder / "BFCL_v4_irrelevance.json").open("a") as lines:
        lines.write('{"id": 1}\n')
    for change, error in (
        ({}, "irrelevance.json: a row here or in possible_answer has no 'question'"),
        ({"data": Path("nowhere")}, "BFCL_v4_simple_python.json"),
        ({"categories": ("simple",)}, "--categories: got 'simple', expected some of simple_python"),
        ({"multi_turn_scores": Path("nowhere")}, "scores nowhere: has no BFCL_v4_multi_turn"),
    ):
        options = Bfcl(**{"data": folder, "categories": CHOSEN, **change})
        with pytest.raises((ValueError, FileNotFoundError)) as raised:
            options.suite()
        assert error in str(raised.value) and "\n" not in str(raised.value)


def test_prompts_have_the_protocols_shapes() -> None:
    said = [("system", "Be brief."), ("user", "Hello "), ("assistant", "Hi"), ("user", "Area?")]
    question = [{"role": role, "content": text} for role, text in said]
    system, user = messages(question, [function()], "simple_python")
    assert "\n1. Name: area.of\nDescription: What it does. " in system["content"]
    assert '\nParameters: {"base": {"type": "integer"' in system["content"]
    assert system["content"].endswith("\n\nBe brief.")
    assert user["content"].startswith("**Dialogue Records History**\n<user> Hello\n")
    assert "\n<response> Hi </response>\n<user> Area?\n" in user["content"]
    system, _ = messages(question[1:2], [function("f", m=parameter("ArrayList", "long"))], "simple_java")
    assert '"type": "string"' in system["content"] and "elements of type long" in system["content"]


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
