"""Trackers: logged values and resumed runs."""

import pytest

from smopd.record.trackers import TRACKERS

STEPS = {1: {"kl": 0.5, "reward/a/mean": -1.0}, 2: {"kl": 0.25, "reward/a/mean": 1.0}}


def run(name, folder, steps, start=0):
    tracker = TRACKERS[name](folder, "recipe", "student", {"seed": 1}, start)
    for step in steps:
        tracker.log(step, STEPS[step])
    tracker.close()


def test_tensorboard_has_every_value_once_after_a_resume(tmp_path):
    reason = "needs tensorboard (the test extra)"
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    run("tensorboard", tmp_path, [1, 2])
    run("tensorboard", tmp_path, [2], start=1)  # killed after step 2, resumed from step 1
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"kl", "reward/a/mean"}
    assert [(event.step, event.value) for event in found.Scalars("kl")] == [(1, 0.5), (2, 0.25)]


def test_wandb_writes_offline_and_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="needs wandb (the trackers extra)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run("wandb", tmp_path, [1, 2])
    run("wandb", tmp_path, [2], start=1)
    kept = (tmp_path / "wandb_id").read_text()
    assert {path.name.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*")} == {kept}


def test_mlflow_keeps_its_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow (the trackers extra)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise it needs a database
    run("mlflow", tmp_path, [1, 2])
    run("mlflow", tmp_path, [2], start=1)
    (kept,) = mlflow.search_runs(experiment_names=["recipe"], output_format="list")
    assert kept.info.run_name == "student" and kept.info.run_id == (tmp_path / "mlflow_id").read_text()
    assert kept.data.metrics == STEPS[2]


def test_swanlab_keeps_its_id(tmp_path, monkeypatch):
    pytest.importorskip("swanlab", reason="needs swanlab (the trackers extra)")
    monkeypatch.setenv("SWANLAB_MODE", "local")
    run("swanlab", tmp_path, [1, 2])
    run("swanlab", tmp_path, [2], start=1)
    assert any((tmp_path / "swanlab").rglob("*")) and len((tmp_path / "swanlab_id").read_text()) == 32


def test_trackio_keeps_the_values(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio", reason="needs trackio (the trackers extra)")
    run("trackio", tmp_path, [1, 2])
    (kept,) = trackio.Api().runs("recipe")
    assert kept.name == "student"
