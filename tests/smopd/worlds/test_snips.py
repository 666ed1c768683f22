"""SNIPS as tool calls: rows from a small folder of its form, the real ones, and the recipe's first steps."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from smopd.config.cli import read_settings
from smopd.data.prompts import load_demonstrations, load_prompts
from smopd.engine.models.loading import load_tokenizer
from smopd.rewards.rlla import accuracy_reward, format_reward
from smopd.run.failures import UnusableInput
from smopd.run.inputs import require_data
from smopd.worlds import snips
from smopd.worlds.toy_world import format_rates
from tests.smopd.recipes import metric_lines, train_here

Rows = list[dict[str, str]]


def scores(rows: Rows, column: str) -> tuple[list[float], list[float]]:
    """Accuracy and format of a column's texts."""
    texts, truths = [row[column] for row in rows], [row["ground_truth"] for row in rows]
    return (
        accuracy_reward(texts, texts, ground_truth=truths),
        format_reward(texts, texts, ground_truth=truths),
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two utterances an intent and split, and one that has no slot."""
    for intent in snips.INTENTS:
        for split, form in snips.SPLITS.items():
            rows = [
                {
                    "data": [
                        {"text": f"{split} the "},
                        {"text": ' "Bar" \n', "entity": "artist"},
                        {"text": "é"},
                    ]
                },
                {"data": [{"text": "b", "entity": "genre"}, {"text": " c ", "entity": "artist"}]},
                {"data": [{"text": "nothing"}]},
            ]
            (tmp_path / form.format(intent)).write_bytes(
                json.dumps({intent: rows}, ensure_ascii=False).encode("latin-1")
            )
    return tmp_path


def test_rows_are_chats_whose_truths_earn_everything(folder: Path) -> None:
    rows = snips.prompts(str(folder), 30, 0, "validate")
    assert (
        rows == snips.prompts(str(folder), 30, 0, "validate") != snips.prompts(str(folder), 30, 1, "validate")
    )
    asked = {row["prompt"][1]["content"] for row in rows}
    assert asked == {'validate the "Bar" é', "b c"}
    assert {tuple(message["role"] for message in row["prompt"]) for row in rows} == {("system", "user")}
    assert all(f"{intent}(artist, genre)" in rows[0]["prompt"][0]["content"] for intent in snips.INTENTS)
    assert scores(rows, "ground_truth") == ([3.0] * 30, [1.0] * 30)


def test_a_line_that_is_not_utf_8_leaves_the_others(folder: Path) -> None:
    lines = ('{"PlayMusic": [{"data": [{"text": "Música"}]},\n', '{"data": [{"text": "é"}]}]}\n')
    content = lines[0].encode() + lines[1].encode("latin-1")
    (folder / "train_PlayMusic_full.json").write_bytes(content)
    read = snips.read(str(folder), "train")
    assert [one.text for one in read if one.intent == "PlayMusic"] == ["Música", "é"]


def test_what_cannot_be_read_is_named(folder: Path) -> None:
    with pytest.raises(ValueError, match="split is 'test', expected one of train, validate"):
        snips.prompts(str(folder), 1, 0, "test")
    (folder / "validate_RateBook.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"^snips: no file .*validate_RateBook.json"):
        snips.prompts(str(folder), 1, 0, "validate")


def test_demonstrations_are_right_calls_in_the_exact_form_as_often_as_asked(folder: Path) -> None:
    n, rate = 4000, 0.05
    rows = snips.demonstrations(str(folder), n, 0, rate)
    accuracy, exact = scores(rows, "completion")
    assert accuracy == [3.0] * n
    assert abs(sum(exact) - n * rate) < 4 * math.sqrt(n * rate)
    thinking = [row["completion"] for row in rows if "<think>" in row["completion"]]
    rates = format_rates(rate)
    assert abs(len(thinking) - n * rates.think) < 4 * math.sqrt(n * rates.think)
    # one wrong way, and the likelier one
    assert {text.count("</think>\n") for text in thinking} == {1}
    assert sum("</think>\n\n<tool_call>" in text for text in thinking) > len(thinking) / 2


def test_the_real_ones_fit_the_model_and_the_recipe(data_set: Callable[[str], Path]) -> None:
    data_set("snips")
    tokenizer = load_tokenizer(data_set("smollm2"))
    settings = read_settings("smollm2_snips")
    data, warm = settings.data, settings.warm_start
    assert data.evaluation is not None and warm is not None
    kept = [
        load_prompts(one.source, tokenizer, kwargs=one.kwargs, max_prompt_tokens=data.max_prompt_tokens)
        for one in (data.train, data.evaluation)
    ]
    assert [(len(one), one.dropped_overlong) for one in kept] == [(4096, 0), (100, 0)]
    assert {prompt.content[1]["content"] for prompt in kept[0]}.isdisjoint(
        prompt.content[1]["content"] for prompt in kept[1]
    )
    answers = [str(prompt.columns["ground_truth"]) for one in kept for prompt in one]
    longest = max(len(ids) for ids in tokenizer(answers)["input_ids"])
    assert longest < settings.rollout.max_new_tokens  # and the end
    shown = load_demonstrations(warm.source.source, tokenizer, kwargs=warm.source.kwargs)
    assert len(shown) == warm.steps * warm.batch_size  # each once
    accuracy, exact = scores(snips.demonstrations(**warm.source.kwargs), "completion")
    assert set(accuracy) == {3.0} and sum(exact) == 12


def test_what_is_absent_says_how_it_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    with pytest.raises(UnusableInput, match=r"^model.path: smollm2 is absent: .* fetch smollm2` fetches it"):
        require_data(read_settings("smollm2_snips"))


@pytest.mark.slow
def test_the_recipe_s_first_steps(tmp_path: Path, data_set: Callable[[str], Path]) -> None:
    assert data_set("snips") and data_set("smollm2")
    words = {
        "output": "out", "warm_start.steps": 1, "warm_start.batch_size": 2, "loop.steps": 1,
        "loop.prompts_per_step": 2, "rollout.group_size": 2, "rollout.max_new_tokens": 8,
        "evaluation.samples": 0, "data.evaluation.limit": 2, "log.plain": "true",
    }  # fmt: skip
    given = [word for name, value in words.items() for word in (f"--{name}", str(value))]
    done = train_here("smollm2_snips", *given, "--only", "gdpo", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    (shown,) = metric_lines(tmp_path / "out/base")
    assert 0 < shown["nll"] < 3  # it knows English and JSON
    assert [line["step"] for line in metric_lines(tmp_path / "out/gdpo") if "loss/pg" in line] == [1]
    values = json.loads((tmp_path / "out/gdpo/evaluation.json").read_text())
    assert math.isfinite(values["greedy/accuracy"])
    config = json.loads((tmp_path / "out/gdpo/export/config.json").read_text())
    assert config["model_type"] == "llama" and config["dtype"] == "float32"
