"""The tables of a pretrained model's runs, means with intervals and paired differences; and step times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.real_model import steps, table
from smopd.config.cli import read_settings
from smopd.config.recipe import write_yaml


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run directory of smollm2_snips: two runs, four prompts, two samples each; gdpo is 1 above base."""
    (tmp_path / "config.yaml").write_text(write_yaml(read_settings("smollm2_snips")))
    (tmp_path / "environment.json").write_text(json.dumps({"cpus": 2, "git": None, "python": "3.11"}))
    for run, above in (("base", 0.0), ("gdpo", 1.0)):
        (tmp_path / run).mkdir()
        items = [
            {"prompt": prompt, "kind": kind, "rewards": {"accuracy": prompt + above, "format": exact}}
            for kind, samples in (("greedy", [1.0]), ("sampled", [0.0, 1.0]))
            for prompt in range(4)
            for exact in samples
        ]
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (tmp_path / run / "responses.jsonl").write_text(lines)
    rows = [
        {"step": 1, "seconds/update": 2.0, "seconds/rollout": 1.0},
        {"step": 1, "reward/accuracy/mean": 0.5},
    ]
    (tmp_path / "gdpo/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_means_intervals_and_differences(folder: Path) -> None:
    found = table.numbers(folder, ["base"])
    base, gdpo = found["runs"]["base"], found["runs"]["gdpo"]
    assert found["name"] == "smollm2_snips" and found["environment"]["cpus"] == 2
    assert list(base["columns"]) == [
        f"{kind}/{name}"
        for kind in ("greedy", "sampled")
        for name in ("accuracy", "format", "sum", "accuracy = 3")
    ]
    assert [each["columns"]["sampled/accuracy = 3"]["mean"] for each in (base, gdpo)] == [0.25, 0.5]
    assert base["columns"]["sampled/sum"]["mean"] == 2.0 and gdpo["columns"]["greedy/sum"]["mean"] == 3.5
    accuracy = base["columns"]["greedy/accuracy"]
    assert 0.25 <= accuracy["low"] < 1.5 < accuracy["high"] <= 2.75
    assert gdpo["less"]["base"]["greedy/accuracy"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert "less" not in base and found["settings"] == {}
    assert (base["steps"], gdpo["steps"]) == (0, 1)
    assert gdpo["seconds_a_step"] == {"rollout": 1.0, "update": 2.0}


def test_what_could_not_be_scored_is_left_out(folder: Path) -> None:
    items = [
        {"prompt": prompt, "kind": "greedy", "rewards": {"accuracy": value, "format": None}}
        for prompt, values in enumerate([[1.0, 1.0], [None, None], [None, 3.0]])
        for value in values
    ]
    (folder / "gdpo/responses.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    found = table.by_prompt(folder / "gdpo", read_settings("smollm2_snips"))
    np.testing.assert_equal(found["greedy/accuracy"], [1.0, np.nan, 3.0])
    told = table.with_intervals(found)
    assert told["greedy/accuracy"]["mean"] == 2.0 and "greedy/format" not in told
    with pytest.raises(ValueError, match=r"as many held-out prompts .* \{'base': 4, 'gdpo': 3\}"):
        table.numbers(folder, [])


def test_a_run_or_folder_that_cannot_be_meant_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["--against", "gpdo"], "--against names gpdo, expected of base, gdpo, accuracy_teacher, "),
        ([str(folder)], "another folder has smollm2_snips/seed_0 too"),
    ):
        monkeypatch.setattr("sys.argv", ["table", str(folder), *words])
        with pytest.raises(SystemExit):
            table.main()
        assert said in capsys.readouterr().err


def test_the_command_prints_and_keeps_them(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "made/results.json"
    drawn = tmp_path / "made/curves.png"
    words = ["table", str(folder), "--against", "base", "--output", str(kept), "--curves", str(drawn)]
    monkeypatch.setattr("sys.argv", words)
    assert table.main() == 0
    told = capsys.readouterr().out
    assert (
        "| GDPO, balanced | 1 | 2.500 (" in told and "| less base | - | +1.000 (+1.000 to +1.000) |" in told
    )
    assert list(json.loads(kept.read_text())) == ["smollm2_snips/seed_0"]
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_seeds_gather_in_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "results.json"
    monkeypatch.setattr("sys.argv", ["table", str(folder), "--output", str(kept)])
    assert table.main() == 0
    assert ", seeds " not in capsys.readouterr().out
    other = read_settings("smollm2_snips", {"seed": ["1"], "rollout.engine": ["vllm"]})
    (folder / "config.yaml").write_text(write_yaml(other))
    items = [json.loads(line) for line in (folder / "gdpo/responses.jsonl").read_text().splitlines()]
    for item in items:
        item["rewards"]["accuracy"] += 1.0
    (folder / "gdpo/responses.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    assert table.main() == 0
    told = capsys.readouterr().out
    assert "smollm2_snips, seeds 0, 1; seed 1: rollout.engine vllm\n" in told
    assert "| GDPO, balanced | 2 | 3.000 ± 0.707 |" in told
    assert list(json.loads(kept.read_text())) == ["smollm2_snips/seed_0", "smollm2_snips/seed_1"]


def test_a_step_s_row_is_of_the_medians() -> None:
    rows = [{"seconds/rollout": 1.0, "seconds/update": at, "tokens": 100} for at in (1.0, 2.0, 9.0)]
    found = steps.summary(rows)
    assert found["phases"] == {"rollout": 1.0, "update": 2.0} and found["seconds"] == 3.0
    assert found["response_tokens"] == 100 and found["ms_per_token"] == 50.0


def test_the_steps_recipe_resolves() -> None:
    settings = read_settings(str(steps.HERE / "steps.yaml"))
    assert [*settings.runs] == ["gdpo", "accuracy_teacher", "format_teacher", "merge"]
    assert settings.warm_start is None and settings.data.evaluation is None
    assert {run for run, _ in steps.OURS.values()} <= set(settings.runs)


def test_a_word_that_no_system_takes_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["steps", "--model", "m", "--systems", "trl", "--turn_s", "2"]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        steps.main()
    assert "--turn_s: a setting of ours, and none of smopd, " in capsys.readouterr().err
