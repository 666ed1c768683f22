"""Adapters: gradients of a hand-written one, a frozen base, files that peft loads, merged weights."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from smopd.engine import distributed
from smopd.engine.local.teachers import held_already, load_teachers
from smopd.engine.settings import Lora, Packing, TrainSettings
from smopd.engine.student.checkpoint import Checkpoints, export
from smopd.engine.student.student import Student
from smopd.ops import LossSettings
from smopd.worlds.models import world_model
from tests.engine.student.test_student import loss_tokens, parameters
from tests.engine.tiny import ragged_rollouts, tiny_model

peft = pytest.importorskip("peft")
LORA = Lora(rank=4, alpha=8.0)
NLL = LossSettings(opd_coef=0.0)


@pytest.fixture(scope="module", autouse=True)
def device():
    with distributed.process_group() as device:
        yield device


def student(device, *, lora: Lora = LORA, tied: bool = False, **options) -> Student:
    values = {"learning_rate": 1e-2, "compute_dtype": "float32", "max_grad_norm": 1e9, **options}
    return Student(tiny_model(tied=tied), TrainSettings(lora=lora, **values), device)


def advance(trained: Student, seeds: range) -> None:
    for seed in seeds:
        rollouts = ragged_rollouts(seed)
        trained.update(rollouts, loss_tokens(rollouts), NLL)


def adapters(trained: Student) -> dict[str, torch.Tensor]:
    named = trained.policy.named_parameters()
    return {name: trained.strategy.full(value).clone() for name, value in named if value.requires_grad}


def nll(logits_of, rollouts) -> torch.Tensor:
    logps = []
    for rollout in rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
        logits = logits_of(ids)[0, len(rollout.prompt_ids) - 1 : -1]
        logps.append(logits.log_softmax(-1).gather(-1, rollout.response_ids[:, None])[:, 0])
    return -torch.cat(logps).mean()


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_a_hand_written_adapter(device, tied):
    trained, rollouts = student(device, tied=tied), ragged_rollouts(1)
    advance(trained, range(1))  # until then B is 0, and so is the gradient of A
    leaves = {name: value.requires_grad_() for name, value in adapters(trained).items()}
    found: dict[str, torch.Tensor] = {}

    def keep(optimizer, args, kwargs):
        for name, value in trained.policy.named_parameters():
            if value.grad is not None:
                found[name] = (
                    value.grad.full_tensor() if isinstance(value.grad, DTensor) else value.grad.clone()
                )

    trained.optimizer.register_step_pre_hook(keep)
    norm = trained.update(rollouts, loss_tokens(rollouts), NLL).grad_norm

    plain = tiny_model(tied=tied)
    weights = {name: value.detach() for name, value in plain.named_parameters()}
    for name, a_rD in leaves.items():
        if ".lora_A." in name:
            layer = name.removeprefix("model.").removesuffix(".lora_A.default.weight")
            weights[f"{layer}.weight"] = (
                weights[f"{layer}.weight"] + leaves[name.replace("lora_A", "lora_B")] @ a_rD * 2
            )
    nll(lambda ids: functional_call(plain, weights, (ids,)).logits, rollouts).backward()
    assert found.keys() == leaves.keys() and len(leaves) == 2 * 2 * 7
    for name, leaf in leaves.items():
        assert (found[name] - leaf.grad).norm() / leaf.grad.norm() < 1e-4, name
    assert norm == pytest.approx(
        float(torch.stack([v.grad.norm() for v in leaves.values()]).norm()), rel=1e-4
    )


def test_the_base_and_the_head_are_frozen(device):
    trained = student(device)
    before = {name: value.detach().clone() for name, value in trained.model.named_parameters()}
    advance(trained, range(2))
    for name, value in trained.model.named_parameters():
        moved = not torch.equal(value.detach().to_local(), before[name].to_local())
        assert moved == ("lora_" in name) == value.requires_grad, name
    assert trained.model.get_output_embeddings().weight.grad is None
    assert len(trained.optimizer.state) == 2 * 2 * 7


@pytest.mark.parametrize("tied", [False, True])
def test_merged_weights_and_the_adapter_on_its_base_agree(tmp_path, device, tied):
    base = tmp_path / "base"
    tiny_model(tied=tied).save_pretrained(base)
    trained = student(device, tied=tied)
    advance(trained, range(2))
    folder = trained.adapter(tmp_path / "adapter")
    assert sorted(path.name for path in folder.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]

    merged = tiny_model(tied=tied)
    weights = dict(trained.weights())
    assert weights.keys() == merged.state_dict().keys()
    merged.load_state_dict(weights)
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    ids = torch.arange(2, 40)[None]
    with torch.no_grad():
        expected = merged.eval()(ids).logits
        torch.testing.assert_close(adapted.eval()(ids).logits, expected, rtol=1e-5, atol=1e-5)
        with adapted.disable_adapter():
            assert (adapted(ids).logits - expected).abs().max() > 1e-2

    rollouts = ragged_rollouts(3)
    mean = -trained.logps(rollouts, 1.0).mean()
    with torch.no_grad():
        torch.testing.assert_close(nll(lambda ids: merged(ids).logits, rollouts), mean, rtol=1e-5, atol=1e-5)


def test_a_bfloat16_base_with_fp32_adapters(device):
    trained = student(device, compute_dtype="bfloat16", learning_rate=1e-6)
    for name, value in trained.model.named_parameters():
        assert value.dtype == (torch.float32 if "lora_" in name else torch.bfloat16), name
    before = adapters(trained)
    advance(trained, range(1))
    after = adapters(trained)
    moved = torch.cat([(after[name] != before[name]).flatten() for name in before if "lora_B" in name])
    assert moved.float().mean() > 0.5


def test_going_on_from_a_checkpoint_is_bit_exact_and_leaves_the_base_out(tmp_path, device):
    straight, checkpoints = student(device), Checkpoints(tmp_path, keep=1)
    advance(straight, range(2))
    checkpoints.save(2, straight)
    advance(straight, range(2, 4))
    resumed = student(device)
    assert checkpoints.restore(resumed) == (2, None)
    advance(resumed, range(2, 4))
    expected = parameters(straight)
    for name, value in parameters(resumed).items():
        assert value.equal(expected[name]), name
    stored = FileSystemReader(tmp_path / "step_00000002").read_metadata().state_dict_metadata
    assert all("lora_" in name for name in stored if "param_groups" not in name)


def test_dropout_is_on_in_updates_and_off_in_log_probabilities(device):
    trained, rollouts = student(device, lora=Lora(rank=4, alpha=8.0, dropout=0.5)), ragged_rollouts(2)
    advance(trained, range(3))
    plain_N = trained.logps(rollouts, 1.0)
    assert torch.equal(plain_N, trained.logps(rollouts, 1.0))
    seen_N = trained.update(rollouts, loss_tokens(rollouts), NLL).stats.logp_N
    assert (seen_N - plain_N).abs().max() > 1e-3


def test_exports_are_merged_with_the_adapter_beside(tmp_path, device):
    model, tokenizer = world_model(seed=0)
    settings = TrainSettings(
        learning_rate=1e-2,
        compute_dtype="float32",
        lora=Lora(rank=2, alpha=4.0, targets=["q_proj", "v_proj"]),
    )
    trained = Student(model, settings, device)
    advance(trained, range(1))
    expected = parameters(trained)
    export(trained, tokenizer, tmp_path / "export", torch.float32)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    for name, value in loaded.state_dict().items():
        assert value.equal(expected[name]), name
    assert peft.PeftConfig.from_pretrained(tmp_path / "export/adapter").target_modules == {"q_proj", "v_proj"}


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            Lora(rank=4, alpha=8.0, targets=["lm_head"]),
            r"lora.targets: got \['lm_head'\], expected names among \['down_proj'",
        ),
        (Lora(rank=4, alpha=8.0, targets=["q_proj", "nothing"]), "nothing"),
    ],
)
def test_what_cannot_be_adapted_is_refused(device, lora, message):
    with pytest.raises(ValueError, match=message):
        student(device, lora=lora)


def test_a_student_without_adapters_writes_none(tmp_path, device):
    trained = Student(tiny_model(), TrainSettings(learning_rate=1e-2, compute_dtype="float32"), device)
    with pytest.raises(ValueError, match="trains all parameters"):
        trained.adapter(tmp_path / "adapter")


def test_the_reference_of_a_trained_student_is_its_base(device, tmp_path):
    """The first forward is without adapters: a sharded model must not remember that."""
    trained, rollouts = student(device), ragged_rollouts(1)
    tiny_model().save_pretrained(tmp_path / "base")
    reference = held_already(tmp_path / "base", str(tmp_path / "base"), trained, None)
    before = reference.score(rollouts, 0, 0.7).token_logps_NM[:, 0]
    advance(trained, range(2))
    after = reference.score(rollouts, 0, 0.7).token_logps_NM[:, 0]
    assert after.equal(before)
    assert not torch.allclose(trained.logps(rollouts, 0.7), after, atol=1e-2)
    whole = load_teachers(
        [tmp_path / "base"], Packing(micro_batch_tokens=200), trained.vocabulary, torch.float32
    )
    expected = whole.score(rollouts, 0, 0.7).token_logps_NM[:, 0]
    torch.testing.assert_close(after, expected, rtol=0, atol=1e-5)
    assert held_already(tmp_path, str(tmp_path / "base"), trained, None) is None
    with pytest.raises(ValueError, match="kappa is 4, expected 0"):
        reference.score(rollouts, 4, 1.0)


def test_a_student_without_adapters_has_no_base(device, tmp_path):
    whole = Student(tiny_model(), TrainSettings(learning_rate=1e-2, compute_dtype="float32"), device)
    assert held_already(tmp_path, str(tmp_path), whole, None) is None
    with pytest.raises(ValueError, match="trains all parameters"):
        whole.logps(ragged_rollouts(1), 1.0, adapters=False)
