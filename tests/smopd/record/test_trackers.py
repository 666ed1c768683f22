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


OFFLINE = {  # tracker -> its environment, with the folder for {}
    "wandb": {"WANDB_MODE": "offline"},
    "mlflow": {"MLFLOW_TRACKING_URI": "file://{}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"},
    "swanlab": {"SWANLAB_MODE": "local"},
    "trackio": {"TRACKIO_DIR": "{}/trackio"},
}


@pytest.mark.parametrize("name", OFFLINE)
def test_a_tracker_keeps_its_run(name, tmp_path, monkeypatch):
    for variable, value in OFFLINE[name].items():
        monkeypatch.setenv(variable, value.format(tmp_path))
    package = pytest.importorskip(name, reason=f"needs {name} (the trackers extra)")
    run(name, tmp_path, [1, 2])
    if name == "trackio":
        assert [kept.name for kept in package.Api().runs("recipe")] == ["student"]
        return
    run(name, tmp_path, [2], start=1)
    kept = (tmp_path / f"{name}_id").read_text()
    if name == "wandb":
        assert {path.name.rpartition("-")[2] for path in tmp_path.glob("wandb/offline-run-*")} == {kept}
    elif name == "mlflow":
        (found,) = package.search_runs(experiment_names=["recipe"], output_format="list")
        assert (found.info.run_name, found.info.run_id) == ("student", kept)
        assert found.data.metrics == STEPS[2]
    else:
        assert any((tmp_path / "swanlab").rglob("*")) and len(kept) == 32
