"""Sending weights in parts; tests/engine/vllm tests vLLM's receivers."""

import base64
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load

from smopd.engine.errors import CannotSend
from smopd.engine.weights import transport
from tests.engine.tiny import tiny_model


class Receiver:
    def __init__(self):
        self.calls, self.held, self.parts, self.files = [], {}, [], []

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, request):
        found = request["update_info"]
        self.files += [(Path(path), Path(path).stat()) for path in [found.get("path")] if path]
        content = self.files[-1][0].read_bytes() if self.files else base64.b64decode(found["content"])
        part = load(content)
        self.held |= part
        self.parts.append({name.split(".")[2] for name in part if "layers" in name})

    def finish_weight_update(self):
        self.calls.append("finish")


@pytest.mark.parametrize("how", ["files", "inline"])
def test_every_tensor_arrives_as_it_is_and_no_layer_is_split(how, tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "PART_BYTES", 1)
    model = tiny_model(layers=3, tied=True).bfloat16()
    receiver = Receiver()
    transport.send(receiver, model.state_dict().items(), how, tmp_path)
    assert receiver.calls == ["start", "finish"]
    assert all(stat.st_mode & 0o777 == 0o644 for _, stat in receiver.files), "an engine may be another user's"
    assert [sorted(layers) for layers in receiver.parts if layers] == [["0"], ["1"], ["2"]]
    assert receiver.held.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert receiver.held[name].dtype == value.dtype and torch.equal(receiver.held[name], value)
    assert not list(tmp_path.iterdir()), "files are removed"
    assert len(list(transport.parts(model.state_dict().items()))) > 2
    monkeypatch.setattr(transport, "PART_BYTES", 1 << 20)
    assert len(list(transport.parts(model.state_dict().items()))) == 1


@pytest.mark.parametrize("folder", [".", "~"])
def test_an_engine_in_another_folder_finds_the_files(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    receiver = Receiver()
    transport.send(receiver, tiny_model().state_dict().items(), "files", folder)
    assert receiver.files[0][0].parents[1] == tmp_path


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CannotSend, match=f"{tmp_path}/absent: weights for an engine cannot be written"):
        transport.send(Receiver(), tiny_model().state_dict().items(), "files", tmp_path / "absent")


def test_a_full_folder_is_named(tmp_path, monkeypatch):
    def full(tensors, path):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transport, "save_file", full)
    with pytest.raises(CannotSend, match=rf"{tmp_path}/.*part\.safetensors: weights .*No space left"):
        transport.send(Receiver(), tiny_model().state_dict().items(), "files", tmp_path)
    assert not list(tmp_path.iterdir())
