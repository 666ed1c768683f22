"""DeepSpeed ZeRO-2 and -3 on two ranks: resumes, clips and skips as FSDP2 does; its JSON is filled in.

That gradients and updates equal one process's is shown by tests/smopd/run/test_invariance.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from smopd.engine.settings import TrainSettings
from smopd.engine.student.deepspeed import configuration
from tests.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[2, 3], ids=["zero2", "zero3"])
def facts(request, tmp_path_factory):
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp(f"zero{request.param}")
    worker = str(Path(__file__).with_name("deepspeed_worker.py"))
    done = on_ranks(2, worker, str(folder), str(request.param))
    assert done.returncode == 0, done.stderr[-4000:]
    assert "[INFO]" not in done.stdout + done.stderr, "DeepSpeed's own log stays out of ours"
    return {**json.loads((folder / "facts.json").read_text()), "folder": folder}


@pytest.mark.parametrize("kind", ["resume", "resume_tied", "resume_bfloat16", "resume_lora"])
def test_going_on_from_a_checkpoint_is_bit_exact(facts, kind):
    assert facts[kind]


def test_the_norm_is_reported_before_clipping(facts):
    free, clipped, fsdp2 = facts["norms"]
    assert clipped == pytest.approx(free, rel=1e-6) and clipped == pytest.approx(fsdp2, rel=1e-5)
    assert clipped > 1e-3
    assert facts["clipped_as_fsdp2"] < 1e-4 and facts["clipped_moves_less"]


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(facts):
    assert facts["skipped"] and facts["unchanged"] and facts["goes_on"] and facts["stops_together"]


def test_a_rank_without_responses_takes_part(facts):
    assert facts["idle_rank"] and facts["idle_logps"]


def test_masters_are_fp32_under_bfloat16(facts):
    assert facts["masters_are_fp32"] and facts["frequencies_are_fp32"]
    assert facts["moved"] > 0.5


def test_exports_load_in_transformers(facts):
    loaded = AutoModelForCausalLM.from_pretrained(facts["folder"] / "export")
    expected = torch.load(facts["folder"] / "weights.pt")
    for name, value in loaded.state_dict().items():
        assert value.equal(expected[name]), name


def settings(**options) -> TrainSettings:
    return TrainSettings(learning_rate=1e-5, strategy="deepspeed", **options)


def test_auto_values_are_the_settings_own_or_deepspeeds(tmp_path):
    given = {
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto", "overlap_comm": False},
        "wall_clock_breakdown": False,
    }
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(given))
    found = configuration(settings(zero_stage=3, max_grad_norm=0.5, deepspeed_config=str(path)), CPU)
    assert found["bf16"] == {"enabled": True, "check_grad_overflow": True}
    assert found["gradient_clipping"] == 0.5
    assert found["gradient_accumulation_steps"] == found["train_micro_batch_size_per_gpu"] == 1
    assert found["communication_data_type"] == "fp32"
    assert found["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert found["wall_clock_breakdown"] is False
    assert not {"train_batch_size", "optimizer", "scheduler"} & found.keys()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization.stage is 3, the student's settings say 2"),
        ({"fp16": {"enabled": True}}, r"fp16.enabled is True, the student's settings say False"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}, "optimizer is the student's own"),
    ],
)
def test_a_configuration_that_contradicts_the_settings_is_refused(config, message, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        configuration(settings(deepspeed_config=str(path)), CPU)


def test_a_configuration_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"/no/such/file\.json cannot be read"):
        configuration(settings(deepspeed_config="/no/such/file.json"), CPU)


@pytest.mark.parametrize("stage", [2, 3])
def test_optimizer_state_leaves_the_gpu_alone(stage):
    offloading = settings(zero_stage=stage, offload_optimizer=True)
    there = configuration(offloading, torch.device("cuda"))
    assert there["zero_optimization"] == {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    assert there["zero_force_ds_cpu_optimizer"] is False, "torch's AdamW steps there too"
    assert configuration(offloading, CPU)["zero_optimization"] == {"stage": stage}
