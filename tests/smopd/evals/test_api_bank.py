"""API-Bank: both parsers, outcomes, hostile responses, the real items, and the command."""

import json

import pytest

from smopd.evals.api_bank import suite as api_bank
from smopd.evals.api_bank.suite import outcome, read_calls
from tests.smopd.recipes import evaluated, write_lines

CALL = {"name": "Find", "parameters": {"city": "Oslo", "days": "2"}}
OTHER = {"name": "Other", "parameters": {}}


def block(*calls: object, think: str = "<think> t </think>\n") -> str:
    lines = "\n".join(call if isinstance(call, str) else json.dumps(call) for call in calls)
    return f"{think}<tool_call>\n{lines}\n</tool_call>"


def changed(**parameters: object) -> dict:
    return {"name": "Find", "parameters": {**CALL["parameters"], **parameters}}


@pytest.mark.parametrize(
    "response, expected",
    [
        (block(OTHER, CALL), "exact"),
        (block({"parameters": {"days": "2", "city": "Oslo"}, "name": "Find", "why": "x"}), "exact"),
        (block(changed(extra="")), "wrong_arguments"),
        (block({"name": "Find"}), "wrong_arguments"),
        (block(OTHER, changed(city="oslo")), "wrong_arguments"),
        (block({**CALL, "name": "find"}), "wrong_tool"),
        (block(), "no_call"),
    ],
)
def test_outcomes(response, expected):
    assert outcome(response, [CALL]) == expected


PARAMETERS = CALL["parameters"]
NO_END, NO_TAGS = block(CALL).replace("</tool_call>", ""), json.dumps(CALL)


@pytest.mark.parametrize(
    ("response", "first", "last", "published"),
    [
        (block(CALL), "exact", "exact", "exact"),
        (block(CALL) + block(OTHER), "exact", "wrong_tool", "exact"),
        (block(OTHER) + block(CALL), "wrong_tool", "exact", "wrong_tool"),  # what is closed is over
        (NO_END, "no_call", "exact", "no_call"),
        (NO_TAGS, "no_call", "exact", "no_call"),
        ("<tool_call>\n" + block(CALL, think=""), "no_call", "exact", "exact"),  # a second opening tag
        (block(json.dumps(json.dumps(CALL))), "no_call", "no_call", "exact"),  # a JSON text of a call
        (block(CALL, "3"), "exact", "exact", "no_call"),  # a number fails all
        (block(PARAMETERS), "no_call", "no_call", "exact"),  # the parameters alone
        (block({**PARAMETERS, "city": "Rome"}), "no_call", "no_call", "wrong_tool"),
        (block(changed(days=2)), *["wrong_arguments"] * 3),
        (block("no JSON", '"no JSON"', "[]", "null", '{"name": 3}', "", CALL), *["exact"] * 3),
    ],
)
def test_each_parser_reads_as_it_says(response, first, last, published):
    found = [outcome(response, [CALL], parser=parser) for parser in ("first", "last", "published")]
    assert found == [first, last, published]


@pytest.mark.parametrize("parser", ["first", "last", "published"])
def test_hostile_calls_are_passed_over(parser):
    nested = '{"name": "Find", "parameters": ' + '{"a": ' * 80 + "1" + "}" * 81
    for line in (nested, '{"name": "Find", "parameters": {"a": NaN}}'):
        assert outcome(block(line), [CALL], parser=parser) == "no_call"
        assert outcome(block(line, CALL), [CALL], parser=parser) == "exact"
    assert outcome(block("x" * 70_000, CALL), [CALL], parser=parser) == "no_call"
    assert read_calls("<tool_call>" * 100_000, parser) == []


def test_the_real_ground_truth_is_exact(data_set, tmp_path):
    words = ("--responses", "ground-truth", "--parser", "published", "--data", data_set("api_bank"))
    result, rows = evaluated("api_bank", tmp_path, *words)
    assert [result[key] for key in ("L1", "L2", "L3", "overall", "n")] == [1, 1, 1, 1, 597]
    assert [result[f"exact/{level}"] for level in api_bank.LEVELS] == [399, 67, 131]
    assert result["parser"] == "published" and result["intervals"]["L1"] == [1.0, 1.0]
    symptom = {row["key"]: row["truth"] for row in rows}["L1-8"]  # as the paper numbers its cases
    assert symptom == [{"name": "SymptomSearch", "parameters": {"symptom": "fatigue"}}]
    items = api_bank.load_items(data_set("api_bank"))
    for parser in ("first", "last"):
        suite = api_bank.ApiBank(items, parser)
        assert all(score["exact"] for score in suite.score(suite.truths()))


def item(answer: object, user: str = "u") -> dict:
    return {"system": "s", "user": user, "answer": answer, "other": {}}


@pytest.fixture
def data(tmp_path):
    """Two items of level 1, one of each of the others."""
    folder = tmp_path / "data"
    folder.mkdir()
    for level, rows in ((1, [item([CALL]), item([CALL])]), (2, [item(CALL)]), (3, [item([OTHER])])):
        (folder / f"level-{level}-api_processed.json").write_text(json.dumps(rows))
    return folder


def test_levels_micro_average_and_classes(data, tmp_path, capsys):
    responses = [block(CALL), block(changed(days="3")), block(OTHER), "Sure."]
    given = write_lines(tmp_path / "given.jsonl", [{"response": text} for text in responses])
    words = ("--responses", given, "--data", data, "--compare")
    result, rows = evaluated("api_bank", tmp_path / "out", *words)
    assert [result[key] for key in ("L1", "L2", "L3", "overall")] == [0.5, 0.0, 0.0, 0.25]
    assert [row["outcome"] for row in rows] == ["exact", "wrong_arguments", "wrong_tool", "no_call"]
    assert (result["wrong_arguments/L1"], result["wrong_tool/L2"], result["no_call/L3"]) == (1, 1, 1)
    assert [*result["paper"]["Qwen2.5-1.5B SMOPD"].values()] == [0.7444, 0.6418, 0.3969, 0.6566]
    shown = capsys.readouterr().out
    assert "paper: Qwen2.5-3B Format Teacher [0.1,0.9]" in shown and "61.14" in shown
    assert "Exact L1 (%, first)" in " ".join(shown.split())
    assert "wrong tool 1 (L1 0, L2 1, L3 0)" in shown


def test_a_mistake_in_the_data_is_named(data):
    path = data / "level-2-api_processed.json"
    for row in ({"user": "u"}, item([]), item("x"), item([CALL, {"name": "Find"}])):
        path.write_text(json.dumps([row]))
        with pytest.raises(ValueError, match=r"row 0: expected strings `system` and `user`, and calls as"):
            api_bank.load_items(data)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"level-2-api_processed.json: no such file"):
        api_bank.load_items(data)
