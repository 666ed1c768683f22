"""Checkpoints: bit-exact, whole or not there, refused when damaged; exports that transformers loads."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp_metadata
from transformers import AutoModelForCausalLM, AutoTokenizer

from smopd.engine import distributed
from smopd.engine.settings import TrainSettings
from smopd.engine.student import checkpoint, fsdp
from smopd.engine.student.checkpoint import (
    Checkpoints,
    DamagedCheckpoint,
    UnusableCheckpoint,
    export,
    require_whole,
)
from smopd.engine.student.student import Student
from smopd.ops import LossSettings
from smopd.worlds.models import world_model
from tests.engine.student.test_student import loss_tokens, parameters
from tests.engine.tiny import ragged_rollouts, tiny_model


@pytest.fixture(scope="module", autouse=True)
def device():
    with distributed.process_group() as device:
        yield device


def student(device, seed: int = 0, tied: bool = False) -> Student:
    settings = TrainSettings(learning_rate=1e-2, compute_dtype="float32", warmup_steps=5)
    return Student(tiny_model(seed=seed, tied=tied), settings, device)


def advance(trained: Student, steps: range) -> None:
    for step in steps:
        rollouts = ragged_rollouts(step)
        trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0))


@pytest.mark.parametrize("tied", [False, True])
def test_going_on_from_a_checkpoint_is_bit_exact(tmp_path, device, tied):
    straight, checkpoints = student(device, tied=tied), Checkpoints(tmp_path, keep=2)
    advance(straight, range(3))
    checkpoints.save(3, straight)
    rng = torch.get_rng_state()
    advance(straight, range(3, 6))
    resumed = student(device, seed=9, tied=tied)
    torch.manual_seed(77)
    assert checkpoints.restore(resumed) == (3, None)
    assert torch.get_rng_state().equal(rng)
    assert resumed.updates == 3
    advance(resumed, range(3, 6))
    expected = parameters(straight)
    for name, value in parameters(resumed).items():
        assert value.equal(expected[name]), name


def test_a_checkpoint_before_the_first_update_is_no_step_of_adam(tmp_path, device):
    straight, saved, resumed = student(device), student(device), student(device, seed=9)
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, saved)
    checkpoints.restore(resumed)
    for trained in (straight, saved, resumed):
        advance(trained, range(2))
    expected = parameters(straight)
    for other in (saved, resumed):
        assert all(value.equal(expected[name]) for name, value in parameters(other).items())


def test_nothing_saved_starts_at_step_0(tmp_path, device):
    trained = student(device)
    before = parameters(trained)
    assert Checkpoints(tmp_path / "none", keep=1).restore(trained) == (0, None)
    assert all(value.equal(before[name]) for name, value in parameters(trained).items())


def test_the_last_n_are_kept_and_a_partial_one_is_ignored(tmp_path, device):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        advance(trained, range(step, step + 1))
        checkpoints.save(step, trained)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]
    os.rename(tmp_path / "step_00000003", tmp_path / "step_00000003.partial")
    assert checkpoints.restore(student(device)) == (2, None)


def test_another_strategys_checkpoint_is_refused(tmp_path, device):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, trained)
    trained.strategy.name = "another"
    with pytest.raises(UnusableCheckpoint, match=r"was saved under fsdp2, this run trains under another"):
        checkpoints.restore(trained)


def test_another_number_of_ranks_is_refused_where_shards_cannot_move(tmp_path, device):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, trained)
    rewrite(tmp_path / "step_00000001", lambda manifest: manifest | {"world_size": 2})
    assert checkpoints.restore(trained) == (1, None)
    trained.strategy.reshards = False
    with pytest.raises(UnusableCheckpoint, match=r"was saved by 2 ranks, now 1, and fsdp2 cannot"):
        checkpoints.restore(trained)


def rewrite(folder: Path, change) -> None:
    """Another manifest, with its own digest: as another program, not an accident, writes it."""
    changed = json.dumps(change(json.loads((folder / "manifest.json").read_text())))
    (folder / "manifest.json").write_text(changed)
    (folder / "manifest.sha256").write_text(hashlib.sha256(changed.encode()).hexdigest())


def test_no_bit_of_the_manifest_can_flip(tmp_path, device):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=1)
    checkpoints.save(4, trained)
    manifest = tmp_path / "step_00000004/manifest.json"
    raw = manifest.read_bytes()
    digit = raw.index(b'"step": 4') + len(b'"step": ')
    for place in (digit, len(raw) // 2):
        for bit in range(8):
            flipped = bytearray(raw)
            flipped[place] ^= 1 << bit
            manifest.write_bytes(flipped)
            with pytest.raises(DamagedCheckpoint, match=r"manifest\.json is not the one of manifest\.sha256"):
                checkpoints.restore(trained)
    manifest.write_bytes(raw)
    assert checkpoints.restore(trained) == (4, None)


@pytest.mark.parametrize(
    "form",
    [
        {},
        [],
        None,
        "text",
        {"files": 3},
        {"files": ["a"]},
        {"files": {}},
        {"files": {}, "step": "1", "world_size": 1, "strategy": "fsdp2"},
        {"files": {}, "step": 1, "world_size": None, "strategy": "fsdp2"},
        {"files": {}, "step": 1, "world_size": 1},
        {"files": {}, "step": 2, "world_size": 1, "strategy": "fsdp2"},
        {"files": {"n" * 300: "0"}, "step": 1, "world_size": 1, "strategy": "fsdp2"},
    ],
)
def test_a_manifest_of_another_form_is_refused(tmp_path, device, form):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, trained)
    rewrite(tmp_path / "step_00000001", lambda _: form)
    with pytest.raises(DamagedCheckpoint, match=r"step_00000001.*remove"):
        checkpoints.restore(trained)


def test_a_deep_manifest_and_one_without_a_digest_are_refused(tmp_path, device):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, trained)
    folder = tmp_path / "step_00000001"
    deep = "[" * 100_000
    (folder / "manifest.json").write_text(deep)
    (folder / "manifest.sha256").write_text(hashlib.sha256(deep.encode()).hexdigest())
    with pytest.raises(DamagedCheckpoint, match="no readable manifest"):
        checkpoints.restore(trained)
    (folder / "manifest.sha256").unlink()
    with pytest.raises(DamagedCheckpoint, match="no readable manifest"):
        checkpoints.restore(trained)


def test_a_renamed_checkpoint_is_refused(tmp_path, device):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, trained)
    os.rename(tmp_path / "step_00000001", tmp_path / "step_00000005")
    with pytest.raises(DamagedCheckpoint, match="is of step 1, expected the folder's"):
        checkpoints.restore(trained)


class Forged:
    def __reduce__(self):
        return (exec, ("import pathlib; pathlib.Path('pwned').touch()",))


class Looked:
    """Pickled as a look-up by getattr, as Python 3.11.0 to 3.11.3 pickle a member of an enumeration."""

    def __init__(self, owner: type, name: str) -> None:
        self.looked_up = owner, name

    def __reduce__(self):
        return getattr, self.looked_up


def test_members_of_enumerations_are_plain_whatever_python_wrote_them(tmp_path) -> None:
    encoding = dcp_metadata._MEM_FORMAT_ENCODING
    (tmp_path / "new").write_bytes(pickle.dumps(encoding.TORCH_CONTIGUOUS_FORMAT))
    (tmp_path / "old").write_bytes(pickle.dumps(Looked(encoding, "TORCH_CONTIGUOUS_FORMAT")))
    fsdp.require_plain(tmp_path / "new")
    fsdp.require_plain(tmp_path / "old")


NO_MEMBERS = [
    Looked(dcp_metadata.TensorProperties, "__init__"),
    Looked(dcp_metadata._MEM_FORMAT_ENCODING, "mro"),
]


@pytest.mark.parametrize(
    "forged", [Forged(), {"a": Forged()}, os.path.join, torch.load, "no metadata"[:0], *NO_MEMBERS]
)
def test_metadata_that_could_run_code_is_refused(tmp_path, device, monkeypatch, forged):
    monkeypatch.chdir(tmp_path)
    trained, checkpoints = student(device), Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(1, trained)
    folder = tmp_path / "run/step_00000001"
    (folder / ".metadata").write_bytes(pickle.dumps(forged) if forged != "" else b"")
    checkpoint.write_manifest(folder, {"step": 1, "world_size": 1, "strategy": "fsdp2"})
    with pytest.raises(UnusableCheckpoint, match=r"\.metadata: is no description of tensors"):
        checkpoints.restore(trained)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_damage_is_refused_and_named(tmp_path, device, damage):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, student(device))
    folder = tmp_path / "step_00000001"
    (data,) = folder.glob("*.distcp")
    raw = bytearray(data.read_bytes())
    if damage == "flip":
        raw[len(raw) // 2] ^= 1
        data.write_bytes(raw)
    elif damage == "truncate":
        data.write_bytes(raw[:-1])
    elif damage == "remove":
        data.unlink()
    else:
        data = folder / "manifest.json"
        data.write_text("{")
    with pytest.raises(DamagedCheckpoint) as error:
        checkpoints.restore(student(device))
    assert str(folder) in str(error.value)
    assert "remove" in str(error.value)


def test_a_kill_before_the_rename_leaves_the_one_before(tmp_path, device, monkeypatch):
    trained, checkpoints = student(device), Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, trained)
    before = parameters(trained)
    advance(trained, range(1))

    def killed(folder: Path, facts: dict) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_manifest", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(2, trained)
    monkeypatch.undo()
    other = student(device, seed=5)
    assert checkpoints.restore(other) == (1, None)
    assert all(value.equal(before[name]) for name, value in parameters(other).items())
    checkpoints.save(2, trained)
    assert checkpoints.restore(other) == (2, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_exports_load_in_transformers(tmp_path, device, dtype, tied):
    model, tokenizer = world_model(seed=0, tie_embeddings=tied)
    settings = TrainSettings(learning_rate=1e-2, compute_dtype="float32")
    trained = Student(model, settings, device)
    advance(trained, range(1))
    expected = parameters(trained)
    export(trained, tokenizer, tmp_path / "export", dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert loaded.dtype == dtype
    assert json.loads((tmp_path / "export/config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    for name, value in loaded.state_dict().items():
        assert value.equal(expected[name].to(dtype)), name
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    messages = [{"role": "user", "content": "call anna please"}]
    assert again.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    )
    assert not list(tmp_path.glob("*.partial"))
    require_whole(tmp_path / "export")
    weights = tmp_path / "export/model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(DamagedCheckpoint, match=r"model\.safetensors: SHA-256 is"):
        require_whole(tmp_path / "export")
