"""examples/real_model: a recipe from its data to its table, at a tiny size; rewards that conflict."""

import io
import json
import pickle
import string
from pathlib import Path

import pytest

from examples.real_model import models, snips, steps, table
from smopd.config.cli import read_settings
from smopd.rewards.rlla import accuracy_reward, format_reward
from tests.smopd.recipes import save_world, train_here

RECIPES = Path(snips.__file__).parent / "recipes"


def test_the_recipes_resolve() -> None:
    found = {path.stem: {*read_settings(str(path)).runs} for path in RECIPES.iterdir()}
    assert sorted(found) == ["smollm2_safe", "smollm2_snips", "smollm2_snips_lora", "steps"]
    assert {run for run, _ in steps.OURS.values()} <= found["steps"]


@pytest.fixture
def utterances(tmp_path: Path) -> str:
    """Two utterances an intent and split, and one that has no slot."""
    (tmp_path / "snips").mkdir()
    two = [{"text": "b", "entity": "genre"}, {"text": " c ", "entity": "artist"}]
    for intent in snips.INTENTS:
        for split, form in snips.SPLITS.items():
            slot = [{"text": f"{split} the "}, {"text": ' "Bar" \n', "entity": "artist"}, {"text": "é"}]
            rows = [{"data": each} for each in (slot, two, [{"text": "nothing"}])]
            content = json.dumps({intent: rows}, ensure_ascii=False).encode("latin-1")
            (tmp_path / "snips" / form.format(intent)).write_bytes(content)
    return str(tmp_path / "snips")


def test_both_stages_at_a_tiny_size(utterances: str, tmp_path: Path, monkeypatch, capsys) -> None:
    rows = snips.prompts(utterances, 30, 0, "validate")
    assert {row["prompt"][1]["content"] for row in rows} == {'validate the "Bar" é', "b c"}
    assert all(f"{intent}(artist, genre)" in rows[0]["prompt"][0]["content"] for intent in snips.INTENTS)
    truths = [row["ground_truth"] for row in rows]
    for reward, best in ((accuracy_reward, 3.0), (format_reward, 1.0)):
        assert reward(truths, truths, ground_truth=truths) == [best] * 30

    model = save_world(tmp_path / "model", pieces=[*string.printable, "é"], max_positions=1024)
    words = f"""
        --only accuracy_teacher format_teacher smopd --output {tmp_path / "out"} --model.path {model}
        --data.train.kwargs.folder {utterances} --data.max_prompt_tokens 900
        --data.evaluation.kwargs.folder {utterances} --data.evaluation.kwargs.n 4 --loop.prompts_per_step 2
        --warm_start.source.kwargs.folder {utterances} --warm_start.steps 2 --warm_start.batch_size 2
        --rollout.group_size 4 --rollout.max_new_tokens 6 --loop.steps 1 --runs.smopd.set.loop.steps 1
        --runs.smopd.set.merge.guard.prompts 2 --runs.smopd.set.merge.guard.samples 2
    """
    done = train_here(RECIPES / "smollm2_snips.yaml", *words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    kept = tmp_path / "results.json"
    words = ["table", str(tmp_path / "out"), "--against", "base", "--output", str(kept)]
    monkeypatch.setattr("sys.argv", words)
    assert table.main() == 0
    assert "| SMOPD, weights | 1 | -" in capsys.readouterr().out
    (found,) = json.loads(kept.read_text()).values()
    assert found["runs"]["smopd"]["less"]["base"].keys() == found["runs"]["base"]["columns"].keys()


def test_a_pickle_that_asks_for_more_runs_nothing() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"asks for builtins.print; nothing was run"):
        models._Unpickler(io.BytesIO(pickle.dumps(print))).load()
