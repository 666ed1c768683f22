"""Checkpoints are bit-exact, complete or absent, and refused when damaged; transformers loads exports.

Kills while one is written are tested in tests/smopd/run/test_resume.py, ranks in ranks_worker.py.
"""

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import metadata as dcp_metadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from smopd.engine.settings import TrainSettings
from smopd.engine.student import fsdp
from smopd.engine.student.checkpoint import (
    Checkpoints,
    UnusableCheckpoint,
    export,
    require_whole,
    saved_steps,
    write_manifest,
)
from smopd.engine.student.student import Student
from smopd.worlds.models import world_model
from tests.engine.student.training import advance, equal, make_student, parameters

FACTS = {"step": 1, "world_size": 1, "strategy": "fsdp2"}


@pytest.fixture(scope="module")
def saved(device, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    Checkpoints(folder, keep=1).save(1, make_student(device))
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "run")) / "step_00000001"


class Counting(torch.optim.Optimizer):
    """Descends more slowly with each step, which it counts in an int."""

    def __init__(self, parameters, settings):
        super().__init__(parameters, {"lr": settings.learning_rate})

    def step(self, closure=None):
        with torch.no_grad():
            for each in self.param_groups[0]["params"]:
                self.state[each]["step"] = count = self.state[each].get("step", 0) + 1
                each.add_(each.grad, alpha=-self.param_groups[0]["lr"] / count)


@pytest.mark.parametrize("optimizer", ["adamw", "tests.engine.student.test_checkpoint:Counting"])
@pytest.mark.parametrize("at", [0, 3])
def test_resuming_is_bit_exact(tmp_path, device, at, optimizer):
    """At step 0 the optimizer has no state yet, and saving must not count as a step."""
    options = {"tied": True, "warmup_steps": 5, "optimizer": optimizer}
    untouched, straight = make_student(device, **options), make_student(device, **options)
    checkpoints = Checkpoints(tmp_path, keep=2)
    advance(straight, range(at))
    straight.skipped = 2
    checkpoints.save(at + 1, straight, {"own": at})
    rng = torch.get_rng_state()
    advance(straight, range(at, at + 2))
    resumed = make_student(device, seed=9, **options)
    torch.manual_seed(77)
    assert checkpoints.restore(resumed) == (at + 1, {"own": at})
    assert torch.get_rng_state().equal(rng) and (resumed.updates, resumed.skipped) == (at, 2)
    advance(resumed, range(at, at + 2))
    assert equal(parameters(resumed), parameters(straight))
    advance(untouched, range(at + 2))
    assert equal(parameters(untouched), parameters(straight))


def test_a_checkpoint_keeps_the_moments_and_not_the_settings_of_adamw(tmp_path, device):
    changed = {"weight_decay": 0.5, "betas": (0.5, 0.6), "adam_eps": 1e-3}
    trained, resumed = make_student(device), make_student(device, **changed)
    advance(trained, range(1))
    Checkpoints(tmp_path, keep=1).save(1, trained)
    Checkpoints(tmp_path, keep=1).restore(resumed, 1)
    for group in resumed.optimizer.param_groups:
        assert (group["weight_decay"], group["betas"], group["eps"]) == (0.5, (0.5, 0.6), 1e-3)
    states = [next(iter(each.optimizer.state.values())) for each in (trained, resumed)]
    assert states[0]["exp_avg"].full_tensor().equal(states[1]["exp_avg"].full_tensor())
    with pytest.raises(UnusableCheckpoint, match="step_00000007: no readable"):
        Checkpoints(tmp_path, keep=1).restore(resumed, 7)


def test_the_last_n_are_kept_and_a_partial_one_is_ignored(tmp_path, device):
    trained, checkpoints = make_student(device), Checkpoints(tmp_path, keep=2)
    assert checkpoints.restore(trained) == (0, None)
    for step in (1, 2, 3):
        checkpoints.confirm()
        checkpoints.save(step, trained)
    assert saved_steps(tmp_path) == [1, 2, 3], "weights of step 3 may have diverged"
    checkpoints.confirm()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    os.rename(tmp_path / "step_00000003", tmp_path / "step_00000003.partial")
    assert checkpoints.restore(trained) == (2, None)
    Checkpoints(tmp_path / "b" / "of", 1).save(3, trained)
    shutil.copytree(tmp_path / "b" / "of" / "step_00000003", tmp_path / "step_00000003")
    with pytest.raises(UnusableCheckpoint, match="step_00000003: is of another run"):
        checkpoints.restore(trained)


def rewrite(folder: Path, manifest: str) -> None:
    """Replace the manifest and its digest, as another program would."""
    (folder / "manifest.json").write_text(manifest)
    (folder / "manifest.sha256").write_text(hashlib.sha256(manifest.encode()).hexdigest())


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, device):
    checkpoints = Checkpoints(tmp_path, keep=1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step_00000001").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "step_00000003.bak").mkdir()
    for name in ("step_best", "step_7", "step_\u00b2"):  # the user's, and no number to int()
        (tmp_path / name).mkdir()
    checkpoints.save(2, make_student(device))
    checkpoints.confirm()
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [
        "step_00000001", "step_00000002", "step_00000003.bak", "step_7", "step_best", "step_\u00b2",
    ]  # fmt: skip


def test_another_strategy_or_number_of_ranks_is_refused_where_it_matters(device, folder):
    trained, checkpoints = make_student(device), Checkpoints(folder.parent, keep=1)
    write_manifest(folder, FACTS | {"world_size": 2})
    assert checkpoints.restore(trained) == (1, None)
    trained.strategy.reshards = False
    with pytest.raises(UnusableCheckpoint, match=r"was saved by 2 ranks, now 1; fsdp2 cannot"):
        checkpoints.restore(trained)
    trained.strategy.name = "another"
    with pytest.raises(UnusableCheckpoint, match=r"was saved under fsdp2, this run trains under another"):
        checkpoints.restore(trained)


def flip(file: Path, place: int) -> None:
    raw = bytearray(file.read_bytes())
    raw[place] ^= 1
    file.write_bytes(raw)


DAMAGE = {
    "a bit of the weights": (lambda f: flip(next(f.glob("*.distcp")), 5000), r"distcp: SHA-256 is"),
    "a file is short": (lambda f: os.truncate(next(f.glob("*.distcp")), 5000), r"distcp: SHA-256 is"),
    "a file is missing": (lambda f: next(f.glob("process_*")).unlink(), "no such file"),
    "a bit of the manifest": (lambda f: flip(f / "manifest.json", 11), r"manifest\.json does not match"),
    "no digest": (lambda f: (f / "manifest.sha256").unlink(), r"no readable manifest\.json"),
    "no object": (lambda f: rewrite(f, "[1]"), r"no readable manifest\.json"),
    "no step": (lambda f: rewrite(f, '{"files": {}}'), "contains step None"),
    "no files": (lambda f: rewrite(f, '{"files": 3, "step": 1}'), r"no readable manifest\.json"),
    "a deep manifest": (lambda f: rewrite(f, "[" * 100_000), r"no readable manifest\.json"),
    "another's name": (lambda f: f.rename(f.with_name("step_00000005")), "contains step 1 instead"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_refused_and_named(device, folder, damage, message):
    damage(folder)
    with pytest.raises(UnusableCheckpoint, match=message) as error:
        Checkpoints(folder.parent, keep=1).restore(make_student(device))
    assert str(folder.parent) in str(error.value) and "remove the folder" in str(error.value)


class Forged:
    def __reduce__(self):
        return (exec, ("import pathlib; pathlib.Path('pwned').touch()",))


class Looked:
    """An object pickled as a call of getattr, as Python 3.11.0 to 3.11.3 pickle members of enumerations."""

    def __init__(self, owner: type, name: str) -> None:
        self.looked_up = owner, name

    def __reduce__(self):
        return getattr, self.looked_up


def test_members_of_enumerations_are_plain_whatever_python_wrote_them(tmp_path) -> None:
    encoding = dcp_metadata._MEM_FORMAT_ENCODING
    for member in (encoding.TORCH_CONTIGUOUS_FORMAT, Looked(encoding, "TORCH_CONTIGUOUS_FORMAT")):
        (tmp_path / "metadata").write_bytes(pickle.dumps(member))
        fsdp.require_plain(tmp_path / "metadata")


@pytest.mark.parametrize(
    "forged",
    [
        {"a": Forged()},
        torch.load,
        None,
        Looked(dcp_metadata.TensorProperties, "__init__"),
        Looked(dcp_metadata._MEM_FORMAT_ENCODING, "mro"),
    ],
)
def test_metadata_that_could_run_code_is_refused(device, folder, monkeypatch, forged):
    monkeypatch.chdir(folder.parent)
    (folder / ".metadata").write_bytes(b"" if forged is None else pickle.dumps(forged))
    write_manifest(folder, FACTS)
    with pytest.raises(UnusableCheckpoint, match=r"\.metadata: does not only describe tensors"):
        Checkpoints(folder.parent, keep=1).restore(make_student(device))
    assert not Path("pwned").exists()


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, True), (torch.bfloat16, False)])
def test_exports_load_in_transformers(tmp_path, device, dtype, tied):
    model, tokenizer = world_model(seed=0, tie_embeddings=tied)
    trained = Student(model, TrainSettings(learning_rate=1e-2, compute_dtype="float32"), device)
    advance(trained, range(1))
    expected = parameters(trained)
    export(trained, tokenizer, tmp_path / "export", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    stored = load_file(tmp_path / "export/model.safetensors")
    assert {value.dtype for value in stored.values()} == {dtype} == {loaded.dtype}
    assert json.loads((tmp_path / "export/config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    for name, value in loaded.state_dict().items():
        assert value.equal(expected[name].to(dtype)), name
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    asked = {"conversation": [{"role": "user", "content": "call anna please"}], "tokenize": False}
    assert again.apply_chat_template(**asked) == tokenizer.apply_chat_template(**asked)
    assert not list(tmp_path.glob("*.partial"))
    require_whole(tmp_path / "export")
    flip(tmp_path / "export/model.safetensors", -1)
    with pytest.raises(UnusableCheckpoint, match=r"model\.safetensors: SHA-256 is"):
        require_whole(tmp_path / "export")
