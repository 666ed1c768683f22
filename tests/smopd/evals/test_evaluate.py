"""`python -m smopd.evaluate`: the suite rlla and its files, what is written, intervals, mistakes."""

import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smopd import evaluate
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.models.loading import load_model, load_tokenizer
from smopd.evals import rlla
from smopd.evals.responses import spread
from smopd.evals.suite import Column
from smopd.evaluate import intervals
from tests.smopd.recipes import evaluated, json_lines, save_world, write_lines

TRUTHS = [
    rlla.TOOL_THINK + '\n<tool_call>\n{"name": "find", "parameters": {"city": "Oslo"}}\n</tool_call>',
    rlla.RESPONSE_THINK + "\n<response> Hello. </response>",
]


def row(truth: str, user: str = "hi") -> dict:
    messages = [{"content": "Be good.", "role": "system"}, {"content": user, "role": "user"}]
    return {"prompt": messages, "reward_model": {"ground_truth": truth, "style": "rule"}}


@pytest.fixture
def data(tmp_path):
    return write_lines(tmp_path / "items.jsonl", [row(truth) for truth in TRUTHS])


def test_ground_truth_of_the_real_items(data_set, tmp_path, capsys):
    folder = data_set("rlla/test").parent
    scores, _ = evaluated("rlla", tmp_path, "--responses", "ground-truth", "--data", folder)
    assert [scores[name] for name in ("accuracy", "format_pass", "mean", "n")] == [2.6625, 1.0, 3.6625, 80]
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("Acc Reward", "2.6625", "Format Pass (%)", "100.00", "3.6625"))


@given(st.lists(st.sampled_from("abcd"), min_size=1), st.integers(1, 120))
def test_a_part_keeps_the_groups_shares(groups, limit):
    sizes = Counter(groups)
    if limit < len(sizes):
        with pytest.raises(ValueError, match=f"--limit is {limit}, expected at least {len(sizes)}"):
            spread(groups, limit)
        return
    chosen = spread(groups, limit)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(limit, len(groups))
    counts = Counter(groups[i] for i in chosen)
    assert set(counts) == set(sizes)
    for group, count in counts.items():
        exact = min(limit, len(groups)) * sizes[group] / len(groups)
        assert count <= max(1, exact + 1) and count <= sizes[group]
    assert spread("aaaaaaaabc", 3) == [4, 8, 9] and spread("abababab", 4) == [2, 3, 6, 7]


def test_every_response_is_kept_with_its_scores(data, tmp_path):
    given = ["<|im_start|>assistant\n" + TRUTHS[0] + "<|im_end|>", "Hello."]
    lines = [{"response": given[0], "finished": True}, {"completion": given[1], "finished": False}]
    responses = write_lines(tmp_path / "given.jsonl", lines)
    scores, kept = evaluated("rlla", tmp_path / "out", "--responses", responses, "--data", data)
    shown = [[item[name] for name in ("accuracy", "format", "key", "response", "truth")] for item in kept]
    assert shown == [[3.0, 1.0, "0", TRUTHS[0], TRUTHS[0]], [0.0, 0.0, "1", "Hello.", TRUTHS[1]]]
    assert (scores["accuracy"], scores["format_pass"], scores["mean"], scores["n"]) == (1.5, 0.5, 2.0, 2)
    assert scores["truncated"] == 1
    responses = write_lines(tmp_path / "turned", [{"response": TRUTHS[key], "key": key} for key in (1, 0)])
    assert evaluated("rlla", tmp_path / "out", "--responses", responses, "--data", data)[0]["mean"] == 2.5


def test_a_part_replaces_no_file_of_all_responses(data, tmp_path, capsys):
    _, kept = evaluated("rlla", tmp_path, "--responses", "ground-truth", "--data", data)
    own = tmp_path / "rlla_items.jsonl"
    words = ["--data", data, "--limit", "1", "--responses"]
    with pytest.raises(SystemExit):
        evaluated("rlla", tmp_path, *words, own)
    assert "--output: a part would replace all responses of" in capsys.readouterr().err
    assert json_lines(own) == kept
    part = evaluated("rlla", tmp_path / "part", *words, own)[1]
    assert evaluated("rlla", tmp_path / "part", *words, tmp_path / "part" / own.name)[1] == part


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "expected one of --model and --responses, got none"),
        (["--model", "./no_such_model"], "./no_such_model"),
        (["--responses", "no_such.jsonl"], "--responses no_such.jsonl: no such file"),
        (["--responses", "one.jsonl"], "one.jsonl: expected 2 responses or a `key` on every line, got 1"),
        (["--responses", "keys.jsonl"], "row 1: expected a string response or completion or result"),
        (["--responses", "torn.jsonl"], "torn.jsonl: line 2 is not JSON in UTF-8"),
        (["--responses", "number.jsonl"], "number.jsonl: row 0 is a int, expected an object"),
        (["--responses", "twice.jsonl"], "twice.jsonl: expected each key once, got 1 repeated"),
        (["--responses", "strange.jsonl"], "strange.jsonl: 1 keys are not in the suite, first '7'"),
        (["--responses", "ground-truth", "--data", "empty.jsonl"], "empty.jsonl: no items"),
        (["--responses", "ground-truth", "--data", "truth.jsonl"], "malformed ground_truth"),
        (["--responses", "ground-truth", "--max-new-tokens", "0"], "--max-new-tokens is 0"),
        (["--responses", "ground-truth", "--temperature", "-1"], "--temperature is -1"),
        (["--responses", "ground-truth", "--output", "torn.jsonl"], "--output torn.jsonl: expected a folder"),
    ],
)
def test_a_mistake_is_one_line(data, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    one, keyed = {"response": "a"}, [{"response": "a", "key": key} for key in ("0", "7")]
    files = {"one": [one], "keys": [one, {"answer": "a"}], "number": [3], "empty": [], "strange": keyed}
    files |= {"twice": [keyed[0]] * 2, "truth": [row("<tool_call>\n{\n</tool_call>")]}
    for name, rows in files.items():
        write_lines(tmp_path / f"{name}.jsonl", rows)
    (tmp_path / "torn.jsonl").write_text('{"response": "a"}\n{"respon')
    given = [] if "--data" in arguments else ["--data", str(data)]
    with pytest.raises(SystemExit) as ended:
        evaluate.main(["rlla", *arguments, *given])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and message in error and error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_suite_whose_module_breaks_off_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken.py").write_text("class Suite:\n    columns = undefined\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        evaluate.main(["broken:Suite"])
    assert "broken:Suite raised NameError: name 'undefined' is not" in capsys.readouterr().err


class Shares:
    """A suite of one column over two groups of very different sizes."""

    columns = (Column("share", "share"), Column("nothing", "nothing"))

    def summary(self, groups, scores):
        sizes = Counter(groups)
        assert sizes == {"a": 100, "b": 4}
        passed = Counter(group for group, score in zip(groups, scores, strict=True) if score["ok"])
        return {"share": sum(passed[group] / sizes[group] for group in sizes) / 2, "nothing": None}


def test_intervals_are_drawn_within_groups():
    groups = ["a", "b", *["a"] * 99, *["b"] * 3]
    scores = [{"ok": i % 2 == 0 if group == "a" else True} for i, group in enumerate(groups)]
    found = intervals(Shares(), groups, scores)
    assert list(found) == ["share"] and found == intervals(Shares(), groups, scores)
    low, high = found["share"]
    share = Shares().summary(groups, scores)["share"]
    assert low < share < high
    spread = 1.96 * (0.25 / 100) ** 0.5 / 2  # half the spread of a's share; b has none
    assert (high - low) / 2 == pytest.approx(spread, rel=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a tiny model, whose architecture the local engine has checked."""
    folder = tmp_path_factory.mktemp("model")
    save_world(folder)
    LocalRollout(load_model(folder, torch.float32), (0,))
    return folder


def test_sampled_responses_are_cut_as_saved_ones_are(data, model, tmp_path, monkeypatch):
    text = torch.tensor(load_tokenizer(str(model))("\n<think>\n")["input_ids"])
    plain = LocalRollout.generate
    said = lambda *given: [replace(each, response_ids=text) for each in plain(*given)]  # noqa: E731
    monkeypatch.setattr(LocalRollout, "generate", said)
    words = ("--data", data, "--model", model, "--max-new-tokens", "2")
    _, kept = evaluated("rlla", tmp_path / "sampled", *words)
    assert kept[0]["response"] == "<think>"
    turned = write_lines(tmp_path / "turned.jsonl", kept[::-1])
    assert evaluated("rlla", tmp_path / "again", "--data", data, "--responses", turned)[1] == kept
    opened = shutil.copytree(model, tmp_path / "opened")
    with (opened / "chat_template.jinja").open("a") as template:
        template.write("{% if add_generation_prompt %}<think>{% endif %}")
    _, kept = evaluated("rlla", tmp_path / "opens", "--data", data, "--model", opened, *words[4:])
    assert kept[0]["response"].count("<think>") == 2


def test_a_model_is_sampled_with_a_seed_and_long_prompts_are_cut(data, model, tmp_path, capsys, monkeypatch):
    """On the left."""
    asked, plain = [], LocalRollout.generate
    generate = lambda engine, *given: asked.append(given[0]) or plain(engine, *given)  # noqa: E731
    monkeypatch.setattr(LocalRollout, "generate", generate)
    common = ["--model", model, "--data", data, "--max-new-tokens", "4", "--temperature", "1"]

    def run(name, *arguments):
        return evaluated("rlla", tmp_path / name, *common, *arguments)

    whole, rows = run("whole")
    assert run("again") == (whole, rows) and run("other", "--seed", "1")[1] != rows
    assert (whole["n"], whole["truncated"]) == (2, 2) and not any(row["finished"] for row in rows)
    limit = min(map(len, asked[0])) - 1
    cut, rows = run("cut", "--max-prompt-tokens", str(limit))
    assert asked[-1] == [prompt[-limit:] for prompt in asked[0]]
    assert f"2 prompts were cut to their last {limit} tokens" in capsys.readouterr().out
    assert (whole["prompts_cut"], cut["prompts_cut"], cut["max_prompt_tokens"]) == (0, 2, limit)
    assert [row["prompt_cut"] for row in rows] == [True, True]


def test_an_unusable_model_is_one_line(data, model, tmp_path, capsys):
    folder = tmp_path / "model"
    arguments = ["rlla", "--data", str(data), "--model", str(folder), "--output", str(tmp_path / "out")]

    def mistake(tokens):
        with pytest.raises(SystemExit) as ended:
            evaluate.main([*arguments, "--max-new-tokens", tokens])
        assert ended.value.code == 2 and not (tmp_path / "out").exists()
        return capsys.readouterr().err.splitlines()[-1]

    shutil.copytree(model, folder)
    assert "--max-new-tokens is 256, expected at most" in mistake("256")  # of 256 positions
    (folder / "chat_template.jinja").unlink()
    expected = "row 0: the prompt is chat messages, and the tokenizer has no chat template"
    assert f"--model {folder}: {expected}" in mistake("4")


def test_training_items_leave_the_test_split_out(data_set):
    source, test = data_set("rlla/sft"), data_set("rlla/test")
    assert len(rlla.load_rlla_items(source)) == 400
    items = rlla.load_rlla_items(source, exclude=rlla.load_rlla_items(test))
    assert [item.key for item in items] == [str(index) for index in range(400) if index != 393]
    rows = [{"prompt": list(item.messages), "ground_truth": item.truth} for item in items]
    assert rlla.training_rows(str(source), str(test)) == rows
    assert all(item.truth.count("</think>") == 1 for item in items)


def test_a_bad_row_is_named(tmp_path):
    empty, untrue = {**row("x"), "prompt": []}, {**row("x"), "reward_model": {"ground_truth": None}}
    for bad, message in (
        (empty, "prompt has 0 messages"),
        (untrue, "NoneType"),
        ({"output": "x", "instruction": "i"}, "got no text as .'input'"),
    ):
        path = write_lines(tmp_path / "items.jsonl", [row("x"), bad])
        with pytest.raises(ValueError, match=rf"items\.jsonl: row 1: .*{message}"):
            rlla.load_rlla_items(path)
