"""Adapters: gradients, the frozen base, files for peft, and merged weights."""

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from smopd.engine.local.teachers import held_already
from smopd.engine.settings import Lora
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.engine.weights.adapters import read_adapter
from tests.engine.models.families import family
from tests.engine.student.training import NLL, TOKENS, advance, loss_tokens, make_student, settings_of
from tests.engine.tiny import plain_logps, ragged_rollouts, tiny_model

peft = pytest.importorskip("peft")
LORA = Lora(rank=4, alpha=8.0)


def adapters(trained: Student) -> dict[str, torch.Tensor]:
    named = trained.policy.named_parameters()
    return {name: trained.strategy.full(value).clone() for name, value in named if value.requires_grad}


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_a_hand_written_adapter(device, tied):
    trained, rollouts = make_student(device, tied=tied, lora=LORA, max_grad_norm=1e9), ragged_rollouts(1)
    advance(trained, range(1))  # until then B is 0, and so is the gradient of A
    leaves = {name: value.requires_grad_() for name, value in adapters(trained).items()}
    found: dict[str, torch.Tensor] = {}

    def keep(optimizer, args, kwargs):
        for name, value in trained.policy.named_parameters():
            if value.grad is not None:
                whole = value.grad.full_tensor() if isinstance(value.grad, DTensor) else value.grad
                found[name] = whole.clone()

    trained.optimizer.register_step_pre_hook(keep)
    norm = trained.update(rollouts, loss_tokens(rollouts), NLL).grad_norm

    plain = tiny_model(tied=tied)
    weights = {name: value.detach() for name, value in plain.named_parameters()}
    for name, a_rD in leaves.items():
        if ".lora_A." in name:
            layer = name.removeprefix("model.").removesuffix(".lora_A.default.weight")
            change = leaves[name.replace("lora_A", "lora_B")] @ a_rD * 2
            weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + change
    logp_N = plain_logps(lambda ids: functional_call(plain, weights, (ids,)), rollouts)
    (-logp_N.sum() / TOKENS).backward()
    assert found.keys() == leaves.keys() and len(leaves) == 2 * 2 * 7
    for name, leaf in leaves.items():
        assert (found[name] - leaf.grad).norm() / leaf.grad.norm() < 1e-4, name
    expected = torch.stack([leaf.grad.norm() for leaf in leaves.values()]).norm()
    assert norm == pytest.approx(float(expected), rel=1e-4)


def test_the_base_and_the_head_are_frozen_in_bfloat16(device):
    trained = make_student(device, lora=LORA, compute_dtype="bfloat16", learning_rate=1e-6)
    before = {name: value.detach().clone() for name, value in trained.model.named_parameters()}
    advance(trained, range(2))
    for name, value in trained.model.named_parameters():
        ours = "lora_" in name
        assert value.dtype == (torch.float32 if ours else torch.bfloat16), name
        moved = (value.detach().to_local() != before[name].to_local()).float().mean()
        assert moved > 0.5 if ours else moved == 0, name
        assert value.requires_grad == ours, name
    assert len(trained.optimizer.state) == 2 * 2 * 7


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_and_the_adapter_on_its_base_agree(tmp_path, device, tied):
    base = tmp_path / "base"
    tiny_model(tied=tied).save_pretrained(base)
    trained = make_student(device, tied=tied, lora=LORA)
    advance(trained, range(2))
    Checkpoints(tmp_path, keep=1).save(2, trained)
    stored = FileSystemReader(tmp_path / "step_00000002").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in stored if "param_groups" not in name)
    folder = trained.adapter(tmp_path / "adapter")
    written = sorted(path.name for path in folder.iterdir())
    assert written == ["adapter_config.json", "adapter_model.safetensors"]

    merged = tiny_model(tied=tied)
    weights = dict(trained.weights())
    assert weights.keys() == merged.state_dict().keys()
    merged.load_state_dict(weights)
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    ids, rollouts = torch.arange(2, 40)[None], ragged_rollouts(3)
    with torch.no_grad():
        expected = merged.eval()(ids).logits
        torch.testing.assert_close(adapted.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)
        with adapted.disable_adapter():
            assert (adapted(ids).logits - expected).abs().max() > 1e-2
        expected_N = plain_logps(merged, rollouts)
    torch.testing.assert_close(trained.logps(rollouts, 1.0), expected_N, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_a_run_has_its_base_wherever_the_runs_are(tmp_path, device, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model().save_pretrained("runs/base/export")
    trained = Student(
        AutoModelForCausalLM.from_pretrained("runs/base/export"), settings_of(lora=LORA), device
    )
    trained.adapter(Path("runs/teacher/export/adapter"))
    assert read_adapter("runs/teacher/export/adapter").base == "runs/base/export"
    Path("runs").rename("moved")
    assert read_adapter("moved/teacher/export/adapter").base == str(tmp_path / "moved/base/export")


def test_what_cannot_be_adapted_is_refused(device):
    for targets, got in ((["lm_head"], "'lm_head'"), (["q_proj", "nothing"], "'nothing', 'q_proj'")):
        with pytest.raises(ValueError, match=rf"got \[{got}\], expected names among \['down_proj'"):
            make_student(device, lora=Lora(rank=4, alpha=8.0, targets=targets))


def test_a_students_base_is_its_reference_where_it_has_adapters(device, tmp_path):
    """ranks_worker.py checks the values."""
    place = str(tmp_path)
    assert held_already(place, place, make_student(device, lora=LORA), None) is not None
    assert held_already("elsewhere", place, make_student(device, lora=LORA), None) is None
    assert held_already(place, place, make_student(device), None) is None


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_next"])
def test_experts_get_no_adapters_and_the_merged_weights_keep_their_names(device, name, caplog):
    """peft would apply gate_proj to the fused experts, whose adapters cannot be merged."""
    model = family(name)
    names = set(model.state_dict())
    trained = Student(model, settings_of(lora=LORA), device)
    assert {key for key, _ in trained.weights()} == names
    assert "lora: no adapters for the experts: down_proj, gate_proj, gate_up_proj" in caplog.text
    with pytest.raises(ValueError, match=r"got \['gate_proj'\], expected names among .*'o_proj'"):
        Student(family(name), settings_of(lora=Lora(targets=["gate_proj"])), device)


@pytest.mark.parametrize("name", ["jamba", "phimoe"])
def test_routers_get_no_adapters(device, name):
    """Theirs are linear layers: peft's would return a tensor, or be read as more logits of the router."""
    student = Student(family(name), settings_of(lora=LORA, router_aux_loss_coef=1.0), device)
    advance(student, range(1))
    assert not any("router" in key for key, value in student.model.named_parameters() if value.requires_grad)
