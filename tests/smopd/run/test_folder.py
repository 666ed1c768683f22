"""The run directory: its lock, its settings, and links in the way."""

import errno
import locale
import math
import os
from datetime import date
from pathlib import Path

import pytest

from smopd.config.recipe import write_yaml
from smopd.config.settings import Settings
from smopd.engine.files import empty_partial, replace_folder
from smopd.engine.student.checkpoint import UnusableCheckpoint, require_whole, write_manifest
from smopd.run import lease
from smopd.run.base import initial_model
from smopd.run.folder import ConfigMismatch, changes, compare_inputs, lock_run_dir, write_settings
from smopd.run.lease import RunDirLocked
from tests.ranks import python
from tests.smopd.recipes import json_lines
from tests.smopd.run.invariance_worker import SETTINGS, settings_of

MADE = Settings.model_validate(SETTINGS)
LOST = """
from smopd.run import lease
lease.BEAT_SECONDS, run = 0.1, lease.Path("run")
with lease.lease(run): {}; lease.time.sleep(60)
"""


def assert_refused(folder, error, match, settings=MADE):
    with pytest.raises(error, match=match), lock_run_dir(folder, settings):
        pass


def with_kwargs(**kwargs):
    dense, sparse = SETTINGS["rewards"]
    return settings_of(rewards=[{**dense, "kwargs": kwargs}, sparse])


def test_a_removed_lock_file_opens_no_second_way_in_and_no_folder_is_named(tmp_path):
    with lock_run_dir(tmp_path, MADE):
        (tmp_path / ".lock").unlink()
        assert_refused(tmp_path, RunDirLocked, "another command is at work there")
    with lock_run_dir(tmp_path, MADE):
        pass
    (tmp_path / "out").symlink_to(tmp_path / "absent")
    for output in (tmp_path / "out", tmp_path / ("n" * 300)):
        assert_refused(output, RunDirLocked, f"output: .*{output}")


def test_settings_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "student/export").mkdir(parents=True)
    for content, said in {
        b"\xff\xfe\x00\x01": "cannot be read",
        b"- " * 5000 + b"[": "cannot be read",
        b"rollout: {top_p: 0.9}": "another version of smopd.*\n.*rollout.top_p: was removed",
    }.items():
        (tmp_path / "config.yaml").write_bytes(content)
        assert_refused(tmp_path, ConfigMismatch, rf"(?s)config\.yaml: .*{said}")


def test_settings_are_read_in_any_locale(tmp_path):
    (tmp_path / "student/export").mkdir(parents=True)
    before, settings = locale.setlocale(locale.LC_CTYPE), settings_of(description="Ü")
    write_settings(tmp_path, settings, dict)
    locale.setlocale(locale.LC_CTYPE, "C")
    try:
        assert changes(tmp_path, settings) == []
    finally:
        locale.setlocale(locale.LC_CTYPE, before)


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (MADE, settings_of(scoring={"special_tokens": False}), ["scoring.special_tokens"]),
        (with_kwargs(), with_kwargs(limit=None), ["rewards.0.kwargs.limit"]),
        (with_kwargs(limit=math.nan), with_kwargs(limit=math.nan), []),
        (with_kwargs(limit=1), with_kwargs(limit=1.0), []),
    ],
    ids=["special tokens", "null for nothing", "the same NaN", "an equal number"],
)
def test_settings_that_differ_are_noticed_and_no_others(tmp_path, before, now, found):
    (tmp_path / "student/export").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(write_yaml(before))
    assert [each.setting for each in changes(tmp_path, now)] == found


def test_a_date_in_a_recipe_is_recorded(tmp_path):
    write_settings(tmp_path, with_kwargs(since=date(2024, 1, 31)), dict)
    (line,) = json_lines(tmp_path / "commands.jsonl")
    assert line["settings"]["rewards.0.kwargs.since"] == "2024-01-31"


def test_settings_may_be_corrected_until_something_is_made_with_them(tmp_path):
    (tmp_path / "config.yaml").write_text("- [")  # nothing was made with it
    other = MADE.model_copy(update={"seed": MADE.seed + 1})
    with lock_run_dir(tmp_path, MADE):
        write_settings(tmp_path, MADE, dict)
    (tmp_path / "student/checkpoints").mkdir(parents=True)  # it failed in its first step
    (tmp_path / "student/metrics.jsonl").touch()
    with lock_run_dir(tmp_path, other):
        write_settings(tmp_path, other, dict)
    (tmp_path / "student/metrics.jsonl").write_text('{"step": 1}\n')
    assert_refused(tmp_path, ConfigMismatch, f"seed: was {other.seed}, now {MADE.seed}")
    (tmp_path / "student/evaluation.json").touch()
    with lock_run_dir(tmp_path, MADE, change=True):
        write_settings(tmp_path, MADE, dict, change=True)
    assert not (tmp_path / "student/evaluation.json").exists(), "it was of the other settings"
    other_run = MADE.model_copy(update={"runs": {"other": MADE.runs["student"]}})
    (tmp_path / "config.yaml").write_text(write_yaml(other_run))
    assert_refused(tmp_path, ConfigMismatch, r"runs\.student: was 'not in the last recipe'")


def test_a_model_is_made_again_until_something_is_made_with_it(tmp_path):
    def of(layers, rate=0.1):
        model = {"factory": "smopd.worlds.models:world_model", "kwargs": {"layers": layers}}
        return Settings.model_validate({**SETTINGS, "model": model, "student": {"learning_rate": rate}})

    for layers, found in ((1, 1), (2, 2), (1, 2)):
        made = Path(initial_model(of(layers), tmp_path / "base"), "config.json")
        assert f'"num_hidden_layers": {found},' in made.read_text()
        write_settings(tmp_path, of(layers), dict)
        if layers == 2:
            (tmp_path / "base/export").mkdir()
    with lock_run_dir(tmp_path, of(1, rate=0.5)):  # no warm start has used the rate
        pass
    changed = r"output:\n  model.kwargs.layers: was 1, now 2$"
    assert_refused(tmp_path, ConfigMismatch, changed, of(2, rate=0.5))


def test_the_bases_evaluation_goes_with_what_it_depends_on(tmp_path):
    rewards = [each.model_copy(update={"range": (0.0, 2.0)}) for each in MADE.rewards]
    (tmp_path / "base").mkdir()
    for settings, code, stays in (
        (MADE, "1", True),
        (MADE.model_copy(update={"description": "free"}), "1", True),
        (MADE.model_copy(update={"rewards": rewards}), "1", False),
        (MADE, "1", False),
        (MADE, "2", False),
    ):
        (tmp_path / "base/evaluation.json").touch()
        write_settings(tmp_path, settings, lambda: {"rewards.0.function": {"mine": code}})  # noqa: B023
        assert (tmp_path / "base/evaluation.json").exists() == stays


@pytest.mark.parametrize(
    ("before", "now", "stays"),
    [
        (MADE, settings_of(scoring={"special_tokens": False}), False),
        (MADE, settings_of(data={"max_prompt_tokens": 9}), False),
        (MADE, settings_of(data={"overlong": "error"}), False),
        (with_kwargs(limit=math.nan), with_kwargs(limit=math.nan), True),
    ],
    ids=["special tokens", "max_prompt_tokens", "overlong", "the same NaN"],
)
def test_the_bases_evaluation_goes_with_settings_of_its_prompts_and_texts(tmp_path, before, now, stays):
    write_settings(tmp_path, before, dict)
    (tmp_path / "base").mkdir()
    (tmp_path / "base/evaluation.json").touch()
    write_settings(tmp_path, now, dict)
    assert (tmp_path / "base/evaluation.json").exists() == stays


def test_changed_code_of_the_base_and_its_evaluation_removes_the_evaluation_once(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base/evaluation.json").touch()
    for code in "12":
        parts = {key: {"mine": code} for key in ("model.factory code", "rewards.0.function")}
        write_settings(tmp_path, MADE, lambda: parts, change=True)  # noqa: B023
    assert not (tmp_path / "base/evaluation.json").exists()


def test_a_refused_command_keeps_the_bases_evaluation(tmp_path):
    for run in ("student", "base"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "evaluation.json").touch()
    write_settings(tmp_path, MADE, lambda: {"rewards.0.function": {"mine": "1"}})
    with pytest.raises(ConfigMismatch, match=r"rewards.0.function \(mine\): was '1', now '2'"):
        write_settings(tmp_path, MADE, lambda: {"rewards.0.function": {"mine": "2"}})
    assert (tmp_path / "base/evaluation.json").exists()


def test_a_changed_run_begins_its_guard_anew_until_it_has_a_checkpoint(tmp_path):
    def kept(case, changed, *made):
        run = tmp_path / case / "student"
        for name in ("start", *made):
            (run / name).mkdir(parents=True)
        (run / "merge.json").touch()
        write_settings(tmp_path / case, MADE, dict)
        write_settings(tmp_path / case, settings_of(**changed), dict, change=True)
        return [name for name in ("start", "merge.json") if (run / name).exists()]

    assert kept("longer", {"loop": {"steps": 9}}) == ["start", "merge.json"]
    assert kept("saved", {"seed": 5}, "checkpoints/step_00000001") == ["start", "merge.json"]
    assert kept("guarded", {"seed": 5}) == []
    (tmp_path / "done/student").mkdir(parents=True)
    (tmp_path / "done/student/done.json").write_text('{"steps": 0}')
    done = {"output": str(tmp_path / "done"), "seed": 5}
    assert kept("done", done) == ["start", "merge.json"], "a merge without steps is finished"


def test_a_run_keeps_the_start_that_it_already_uses(tmp_path):
    (tmp_path / "student/start").mkdir(parents=True)
    for commit in "12":
        compare_inputs(tmp_path, MADE, {"model.path": {"commit": commit}}, change=True, started=True)
    assert (tmp_path / "student/changes.jsonl").exists() and (tmp_path / "student/start").exists()


def test_a_damaged_model_in_the_home_folder_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    (tmp_path / "m/weights").write_text("whole")
    write_manifest(tmp_path / "m", {})
    (tmp_path / "m/weights").write_text("damaged")
    with pytest.raises(UnusableCheckpoint, match="m/weights: SHA-256 is"):
        require_whole(Path("~/m"))


@pytest.mark.parametrize("name", ["export", "export.partial"])
def test_a_link_in_the_place_of_a_folder_is_replaced(tmp_path, name):
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").touch()
    (tmp_path / name).symlink_to(other)
    partial = empty_partial(tmp_path / "export")
    (partial / "new").touch()
    replace_folder(partial, tmp_path / "export")
    assert [path.name for path in (tmp_path / "export").iterdir()] == ["new"]
    assert not (tmp_path / "export").is_symlink() and (other / "mine").exists()


def test_a_command_on_another_host_is_noticed_where_locks_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "STALE_SECONDS", 1.0)
    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    for change in ((lease.socket, "gethostname", lambda: "elsewhere"), (lease, "_boot", lambda: "another")):
        with lock_run_dir(tmp_path, MADE):
            monkeypatch.setattr(*change)
            assert_refused(tmp_path, RunDirLocked, rf"process {os.getpid()} on .* is at work there")
    (tmp_path / ".lease").write_text('{"host": "gone", "pid": 1, "id": "0", "beat": 7}')
    with lock_run_dir(tmp_path, MADE):
        assert '"elsewhere"' in (tmp_path / ".lease").read_text()
    assert not (tmp_path / ".lease").exists()


def test_a_command_that_loses_its_lease_or_folder_ends_itself(tmp_path):
    (tmp_path / "run").mkdir()
    for act, said in {
        "run.rename('other'); run.mkdir()": "run was renamed or removed",
        """(run / ".lease").write_text('{"host": "e", "pid": 5, "id": "0"}')""": "taken over by process 5",
    }.items():
        ended = python("-c", LOST.format(act), cwd=tmp_path)
        assert ended.returncode == 1 and said in ended.stderr


def test_a_disk_that_is_gone_for_a_while_does_not_end_a_run(tmp_path, monkeypatch):
    def stale(_):
        raise OSError(errno.ESTALE, "stale")

    assert lease._moved(tmp_path / "absent", 1) and lease._moved(tmp_path, -1)
    monkeypatch.setattr(Path, "stat", stale)
    assert not lease._moved(tmp_path, 1)


def test_ranks_that_do_not_share_the_directory_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "TRY_SECONDS", 0.0)
    with pytest.raises(RunDirLocked, match=r"is not that of elsewhere; give a folder they share"):
        lease.require_shared(tmp_path, {"host": "elsewhere", "id": "0"})
