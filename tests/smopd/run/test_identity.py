"""What a run depends on may not change between two commands without --change: rows, models, code."""

import json
import os
import sys
from functools import partial

import pytest

from smopd.data.prompts import RowSet
from smopd.engine.files import DamagedFile
from smopd.export import main as export
from smopd.record.files import JsonlLog
from smopd.run import identity
from smopd.run.folder import ConfigMismatch, compare_inputs
from smopd.run.inputs import Inputs
from tests.smopd.recipes import TINY, save_world, train_here, write_recipe
from tests.smopd.run.invariance_worker import SETTINGS, settings_of

ROWS = "def some(**options):\n    return [{'prompt': 'call anna', 'ground_truth': ''}] * 4\n"
FILES = {
    "rows.py": ROWS,
    "mine.py": "from parts import lengths\n\ndef brevity(prompts, completions, **columns):\n    import late\n"
    "    return [late.factor / lengths.length(text) for text in completions]\n",
    "late.py": "factor = 1.0\n",
    "parts/__init__.py": "",
    "parts/lengths.py": "import torch\nfrom . import one\n\n"
    "def length(text):\n    return one.one + len(text)\n",
    "parts/one.py": "one = 1\n",
    "parts/other.py": "",
}
CHANGES = {
    "student": {"compute_dtype": "float32", "lora": None},
    "data": {"train": {"source": "rows:some", "kwargs": {}}, "evaluation": None},
    "rewards": [{"name": "mine", "function": "mine:brevity", "range": [0, 1]}, TINY["rewards"][1]],
    "model": {"path": "model", "factory": None},
    "loop": {"steps": 1},
    "checkpoint": {"every": 1},
    "runs": {"distilled": {"stage": "merge"}},
    "teachers": {"models": [{"model": "./teacher", "reward": "mine"}]},
}


NO_ROWS = Inputs(RowSet(0, [].__getitem__, 0, digest="1"), None, None)


@pytest.mark.slow
def test_a_changed_input_is_refused_by_name_and_recorded_with_a_word(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the model's path is relative
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for seed, name in enumerate(("model", "teacher")):
        save_world(tmp_path / name, seed)
    recipe = write_recipe(tmp_path, CHANGES, drop=("runs", "teachers", "warm_start"))

    command = partial(train_here, recipe)
    assert command().returncode == 0
    (tmp_path / "parts/other.py").write_text("unused = 1\n")
    weights = (tmp_path / "teacher/model.safetensors").read_bytes()
    changed = {
        "rows.py": ROWS.replace("anna", "bert").encode(),
        "parts/one.py": b"one = 2\n",
        "teacher/model.safetensors": weights[:-1] + bytes([weights[-1] ^ 1]),
        "model/tokenizer_config.json": b"{}",
        "model/chat_template.jinja": b"{{ messages }}",
    }
    before = {name: (tmp_path / name).read_bytes() for name in changed if (tmp_path / name).exists()}
    for name, content in changed.items():
        (tmp_path / name).write_bytes(content)
    refused = command()
    assert refused.returncode == 1 and "holds runs with other inputs" in refused.stderr, refused.stderr
    named = [line.split(": was ")[0].strip() for line in refused.stderr.splitlines()[1:]]
    models = ["model.path (chat_template.jinja)", "model.path (tokenizer_config.json)"]
    parts = ["rewards.0.function (parts.one)", "teachers.models.0.model (model.safetensors)"]
    assert named == ["data.train (rows)", *models, *parts]
    model = ["--output", str(tmp_path / "exported")]
    with pytest.raises(SystemExit):
        export([str(tmp_path / "runs/tiny/distilled"), *model])
    assert "belongs to" in capsys.readouterr().err
    for name in changed:
        (tmp_path / name).unlink()
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "late.py").write_text("factor = 2.0\n")
    assert command("--change").returncode == 0
    assert export(["runs/tiny/distilled", *model]) == 0
    (line,) = (tmp_path / "runs/tiny/distilled/changes.jsonl").read_text().splitlines()
    assert json.loads(line)["setting"] == "rewards.0.function (late)" and json.loads(line)["step"] == 1


def test_the_code_of_a_factory_is_compared(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings_of(model={"path": None, "factory": "making:make"})
    (tmp_path / "making.py").write_text("def make(seed):\n    import sized")
    (tmp_path / "student/export").mkdir(parents=True)

    def compare(change=False):
        compare_inputs(tmp_path, settings, identity.identity(settings, NO_ROWS, "made"), change=change)

    for layers in ("1", "2"):
        (tmp_path / "sized.py").write_text(f"layers = {layers}")
        if layers == "2":
            with pytest.raises(ConfigMismatch, match=r"other inputs.*\n  model.factory code \(sized\): was"):
                compare()
        compare(change=True)
        compare()


def test_the_base_of_an_adapter_and_the_commits_of_the_hub_are_compared(tmp_path, monkeypatch):
    adapter = '{"peft_type": "LORA", "base_model_name_or_path": "base"}'
    for path, text in {"base/config.json": "{}", "adapter/adapter_config.json": adapter}.items():
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = identity.named_model("adapter")
    (tmp_path / "base/config.json").write_text('{"changed": 1}')
    after = identity.named_model("adapter")
    assert [part for part in after if after[part] != before[part]] == ["base: config.json"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    model, settings = tmp_path / "models--a--b", settings_of()
    (model / "refs").mkdir(parents=True)
    for commit in ("1" * 40, "2" * 40):
        (model / "snapshots" / commit).mkdir(parents=True)
        (model / "snapshots" / commit / "config.json").touch()
        (model / "refs/main").write_text(commit)
        assert identity.hub_commits(settings) == {"teachers.models.0.model": {"commit": commit}}


def test_an_empty_text_names_no_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").touch()
    merge = {"method": "weights", "models": [{"model": "a/b", "exclude": [""]}]}
    assert [*identity.identity(settings_of(merge=merge), NO_ROWS, "")] == ["data.train"]


def test_the_file_of_deepspeeds_configuration_is_compared(tmp_path):
    file, found = tmp_path / "zero.json", []
    own = {"student": {"strategy": "deepspeed", "deepspeed_config": str(file)}}
    settings = settings_of(**own, runs={"student": {"set": own}})
    for text in ("{}", '{"zero_optimization": {}}'):
        file.write_text(text)
        found.append(identity.identity(settings, NO_ROWS, ""))
    differing = {setting for setting in found[0] if found[0][setting] != found[1][setting]}
    assert differing == {"student.deepspeed_config", "runs.student.set.student.deepspeed_config"}


def test_a_redacted_setting_is_compared():
    found = []
    for key in ("A", "B"):
        rewards = [{**each, "kwargs": {"answer_key": key}} for each in SETTINGS["rewards"]]
        settings = settings_of(rewards=rewards)
        found.append(identity.identity(settings, NO_ROWS, "")["rewards.0.kwargs.answer_key"]["redacted"])
    assert found[0] != found[1] and all(len(digest) == 4 for digest in found), "too short to guess the value"


def test_a_large_file_is_compared_by_size_time_and_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(identity, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 8)
    path, found = tmp_path / "model.safetensors", set()
    content = bytes(range(256)) * 8
    for data, time in ((content, 1), (content, 2), (content + b"0", 1), (b"x" + content[1:], 1)):
        path.write_bytes(data)
        os.utime(path, (time, time))
        found.add(identity.model_parts(tmp_path)["model.safetensors"])
    assert len(found) == 4
    path.write_bytes(content)
    os.utime(path, (2, 2))
    assert identity.model_parts(tmp_path)["model.safetensors"] in found


def test_a_damaged_record_of_inputs_is_named_and_versions_may_change(tmp_path):
    settings = settings_of()
    (tmp_path / "student").mkdir()
    (tmp_path / "student/evaluation.json").touch()
    for version in ("1.0", "1.1"):
        compare_inputs(tmp_path, settings, {"versions": {"torch": version}}, change=False)
    (line,) = JsonlLog(tmp_path / "student/changes.jsonl").read()
    assert line == {"step": 0, "setting": "versions (torch)", "was": "1.0", "now": "1.1"}
    assert (tmp_path / "student/evaluation.json").exists()
    (tmp_path / "inputs.json").write_bytes(b'{"a": "\xff')
    with pytest.raises(DamagedFile, match=r"inputs\.json: is damaged"):
        compare_inputs(tmp_path, settings, {}, change=False)


def test_a_namespace_package_within_a_package_is_followed_and_not_imported(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "outer_pkg/inner").mkdir(parents=True)
    modules = {"__init__": "", "rewards": "from outer_pkg.inner.deep import f", "inner/deep": ""}
    for name, text in modules.items():
        (tmp_path / f"outer_pkg/{name}.py").write_text(text)
    found = sorted(identity.code_parts("outer_pkg.rewards"))
    assert found == ["outer_pkg", "outer_pkg.inner.deep", "outer_pkg.rewards"]
    assert "outer_pkg" not in sys.modules
