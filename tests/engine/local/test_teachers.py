"""Local teachers equal full forward passes of transformers and peft."""

import json
import logging
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smopd.engine.local.teachers import LocalTeachers, load_teachers
from smopd.engine.models.loading import UnusableModel
from smopd.engine.settings import Packing
from smopd.engine.weights.adapters import read_adapter
from smopd.engine.weights.architecture import weights_digest
from tests.engine.local.teacher_truth import ROLLOUTS, by_peft, check, save_adapters, whole_logprobs, widened
from tests.engine.tiny import VOCABULARY, tiny_model

PACKING = Packing(micro_batch_tokens=64)


@pytest.mark.parametrize(("kappa", "temperature"), [(0, 0.7), (4, 0.7), (VOCABULARY, 1.0)])
def test_equals_whole_forward_passes(kappa: int, temperature: float) -> None:
    models = [tiny_model(1), tiny_model(2, tied=True)]
    topk = LocalTeachers(models, PACKING, VOCABULARY).score(ROLLOUTS, kappa, temperature)
    check(topk, [whole_logprobs(model, ROLLOUTS, temperature) for model in models], kappa, 1e-4)


def test_padding_of_a_larger_vocabulary_is_dropped_and_counted() -> None:
    models = [widened(tiny_model(1), 70), tiny_model(2)]
    teachers = LocalTeachers(models, PACKING, VOCABULARY)
    topk = teachers.score(ROLLOUTS, 8, 1.0)
    expected = [whole_logprobs(model, ROLLOUTS) for model in models]
    check(topk, expected, 8, 1e-4)
    assert teachers.dropped == int((expected[0].topk(8).indices >= VOCABULARY).sum()) > 0
    assert int(topk.ids_NMS.max()) < VOCABULARY


def test_a_smaller_vocabulary_is_refused() -> None:
    for more, tokens in (({}, 60), ({"tokens": VOCABULARY + 1}, VOCABULARY + 1)):
        message = f"models.1: .* has {VOCABULARY} tokens, the student has {tokens}"
        with pytest.raises(UnusableModel, match=message):
            LocalTeachers([widened(tiny_model(), 60), tiny_model()], PACKING, 60, **more)


def test_fewer_padded_rows_than_the_students_are_served() -> None:
    """A token that only pads the student's vocabulary is unknown to the teacher, and counted."""
    model = tiny_model(1)
    teachers = LocalTeachers([model], PACKING, VOCABULARY + 7, tokens=VOCABULARY)
    check(teachers.score(ROLLOUTS, 8, 0.7), [whole_logprobs(model, ROLLOUTS, 0.7)], 8, 1e-4)
    assert teachers.dropped == 0
    ids = ROLLOUTS[-1].response_ids.clone()
    ids[-1] = VOCABULARY + 3
    odd = [*ROLLOUTS[:-1], replace(ROLLOUTS[-1], response_ids=ids)]
    found, plain = teachers.score(odd, 8, 1.0), teachers.score(ROLLOUTS, 8, 1.0)
    assert teachers.dropped == 1 and found.token_logps_NM[-1] == -torch.inf
    assert found.logps_NMS.equal(plain.logps_NMS) and found.token_logps_NM[:-1].equal(
        plain.token_logps_NM[:-1]
    )


def test_unequal_paddings_leave_what_all_have() -> None:
    """The larger teacher's most likely id has no row in the smaller one."""
    model, larger = tiny_model(1), widened(tiny_model(2), VOCABULARY + 7)
    bias = torch.zeros(VOCABULARY + 7)
    bias[VOCABULARY + 3] = 50.0
    larger.lm_head.bias = torch.nn.Parameter(bias)
    teachers = LocalTeachers([model, larger], PACKING, VOCABULARY + 7, tokens=VOCABULARY)
    found = teachers.score(ROLLOUTS, 4, 1.0)
    assert teachers.dropped >= len(found.ids_NMS)
    assert int(found.ids_NMS.max()) < VOCABULARY


def test_adapters_share_their_base_which_is_scored_without_them(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    adapters = save_adapters(tmp_path, tiny_model(4))
    caplog.clear()
    paths = [adapters[1], tmp_path / "base", adapters[0]]
    teachers = load_teachers(paths, PACKING, VOCABULARY, torch.float32)
    assert "newly initialized" not in caplog.text, "peft's false report of a second adapter"
    assert len({id(teacher.model) for teacher in teachers.teachers}) == 1
    models = [by_peft(tmp_path / "base", adapters[1]), tiny_model(4), by_peft(tmp_path / "base", adapters[0])]
    expected = [whole_logprobs(model, ROLLOUTS) for model in models]
    for first, second in pairwise(expected):
        assert (first - second).abs().max() > 0.1
    base = teachers.base(tmp_path / "base")
    assert base.teachers[0].model is teachers.teachers[0].model
    for _ in range(2):
        check(teachers.score(ROLLOUTS, 6, 1.0), expected, 6, 1e-4)
        check(base.score(ROLLOUTS, 4, 1.0), expected[1:2], 4, 1e-4)
    assert teachers.base(tmp_path / "adapter0") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected 'LORA'"),
        ({"base_model_name_or_path": "/nowhere"}, "model /nowhere: no such folder"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None, expected its model"),
        ({"target_modules": ["q_proj", 1]}, r"target_modules is \"\['q_proj', 1\]\", expected module names"),
        ({"target_modules": ["q_proj", "lm_head"]}, "adapts lm_head, expected no embedding and no head"),
        ({"bias": "all"}, "bias is 'all', expected none"),
        ({"modules_to_save": ["q_proj"]}, r"modules_to_save is \['q_proj'\], expected none"),
        ({"trainable_token_indices": [3]}, r"trainable_token_indices is \[3\], expected none"),
        ({"target_modules": ["k_proj"]}, "of its weights do not fit"),
    ],
)
def test_adapters_that_cannot_be_served(changes: dict, message: str, tmp_path: Path) -> None:
    (adapter,) = save_adapters(tmp_path, tiny_model(4), 1)
    before = weights_digest(adapter)
    _change(adapter, **changes)
    assert weights_digest(adapter) != before
    with pytest.raises((UnusableModel, FileNotFoundError), match=message):
        load_teachers([adapter], PACKING, VOCABULARY, torch.float32)


@pytest.mark.parametrize("key", ["lm_head.lora_A.weight", "model.layers.0.mlp.down_proj.bias"])
def test_an_adapter_whose_file_holds_more_is_refused(key: str, tmp_path: Path) -> None:
    """A regular expression in target_modules can match the head."""
    (adapter,) = save_adapters(tmp_path, tiny_model(4), 1)
    _change(adapter, target_modules=".*(q_proj|v_proj|down_proj|lm_head)$")
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{key}": torch.zeros(4, 64)}, file)
    with pytest.raises(UnusableModel, match=f"has the tensor base_model.model.{key}, expected low-rank"):
        load_teachers([adapter], PACKING, VOCABULARY, torch.float32)


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    assert read_adapter(tmp_path) is None
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(UnusableModel, match=r"adapter_config\.json cannot be read"):
        read_adapter(tmp_path)


def _change(adapter: Path, **changes) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
