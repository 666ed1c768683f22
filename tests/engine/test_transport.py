"""How weights are cut into parts and reach a receiver; vLLM's receivers are tested in tests/engine/vllm."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from smopd.engine.weights import transport
from tests.engine.tiny import tiny_model


class Receiver:
    def __init__(self):
        self.calls, self.held, self.parts = [], {}, 0

    def start_weight_update(self):
        self.calls.append("start")

    def update_weights(self, request):
        found = request["update_info"]
        content = Path(found["path"]).read_bytes() if "path" in found else base64.b64decode(found["content"])
        self.held |= load(content)
        self.parts += 1

    def finish_weight_update(self):
        self.calls.append("finish")


@pytest.mark.parametrize("how", ["files", "inline"])
def test_every_tensor_arrives_as_it_is_and_files_are_removed(how, tmp_path, monkeypatch):
    monkeypatch.setattr(transport, "PART_BYTES", 20_000)
    model = tiny_model(layers=3, tied=True).bfloat16()
    receiver = Receiver()
    transport.send(receiver, model.state_dict().items(), how, tmp_path)
    assert receiver.calls == ["start", "finish"] and receiver.parts > 2
    assert receiver.held.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        assert receiver.held[name].dtype == value.dtype and torch.equal(receiver.held[name], value)
    assert not list(tmp_path.iterdir())


def test_a_layer_is_never_split(monkeypatch):
    weights = list(tiny_model(layers=3).state_dict().items())
    (whole,) = transport.parts(iter(weights))
    monkeypatch.setattr(transport, "PART_BYTES", 1)
    made = list(transport.parts(iter(weights)))
    assert [name for part in made for name in part] == [name for name, _ in weights]
    layers = [{name.split(".")[2] for name in part if "layers" in name} for part in made]
    assert [sorted(found) for found in layers if found] == [["0"], ["1"], ["2"]]
    assert whole.keys() == dict(weights).keys()
