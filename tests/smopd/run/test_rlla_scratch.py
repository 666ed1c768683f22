"""The recipe on RLLA prompts at the real vocabulary, cut to one step a run: the data set, and its sample."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open
from transformers import AutoTokenizer

from smopd.config.cli import read_settings
from smopd.data import sample
from smopd.evals.rlla import training_rows
from smopd.worlds.models import qwen_vocab_model
from tests.smopd.recipes import metric_lines, train_here

pytestmark = pytest.mark.slow


def run_recipe(folder: Path) -> str:
    """What the shortened recipe prints; every part has left what it should."""
    done = train_here(
        "rlla_scratch",
        *("--output", str(folder / "out")),
        *("--data.evaluation.limit", "3"),
        *("--warm_start.steps", "1"),
        *("--warm_start.batch_size", "2"),
        *("--loop.steps", "1"),
        *("--loop.prompts_per_step", "1"),
        *("--rollout.max_new_tokens", "8"),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for run in ("accuracy_teacher", "format_teacher", "student"):
        (line,) = metric_lines(folder / "out" / run)
        assert all(value is not None and math.isfinite(value) for value in line.values()), line
        assert list((folder / "out" / run / "checkpoints").glob("step_*/manifest.json"))
        with safe_open(folder / "out" / run / "export/model.safetensors", "pt") as weights:
            assert weights.get_slice("lm_head.weight").get_shape()[0] == 151_936
    return done.stdout


def test_every_part_of_the_path_takes_real_items(tmp_path, data_set):
    assert data_set("rlla/sft") and data_set("rlla/test") and data_set("tokenizer/qwen")
    shown = run_recipe(tmp_path)
    assert "399 training prompts of 399 rows (0 too long" in shown and "SAMPLE" not in shown
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/student/export")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") == 151_645
    kept = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert not sample.is_used(kept)


def test_without_data_it_runs_on_the_sample_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path / "no_data"))
    shown = run_recipe(tmp_path)
    assert "16 training prompts of 16 rows (0 too long" in shown
    assert sample.NOTE in shown and "SAMPLE: a BPE of 2048 tokens" in shown
    kept = yaml.safe_load((tmp_path / "out/config.yaml").read_text())
    assert kept["description"].startswith(sample.NOTE)
    sections = (
        kept["model"],
        kept["data"]["train"],
        kept["data"]["evaluation"],
        kept["warm_start"]["source"],
    )
    assert [section["kwargs"]["sample"] for section in sections] == [True] * 4
    assert sample.NOTE.partition(";")[0] in (tmp_path / "out/report.html").read_text()


def test_a_tokenizer_that_is_absent_beside_real_items_is_asked_for(tmp_path, monkeypatch):
    (tmp_path / "rlla").mkdir()
    (tmp_path / "rlla/rlla_sft.jsonl.gz").write_bytes(b"")
    monkeypatch.setenv("SMOPD_DATA", str(tmp_path))
    settings = read_settings("rlla_scratch")
    assert not sample.is_used(settings.model_dump())
    made = (settings.model.kwargs, partial(qwen_vocab_model, 0)), (settings.data.train.kwargs, training_rows)
    for arguments, function in made:
        with pytest.raises(FileNotFoundError, match=r"is absent: no .*; `python -m smopd.data fetch \w+`"):
            function(**arguments)
