"""DeepSpeed ZeRO-2 and ZeRO-3 on two ranks resume, clip and skip as FSDP2 does; DeepSpeed's JSON file.

That gradients and updates equal one process's is shown by tests/smopd/run/test_invariance_deepspeed.py.
"""

import json

import pytest
import torch

from smopd.engine.settings import TrainSettings
from smopd.engine.student.deepspeed import configuration
from tests.engine.student.training import on_two_ranks
from tests.ranks import on_ranks

CPU = torch.device("cpu")


def test_both_stages_on_two_ranks(tmp_path):
    pytest.importorskip("deepspeed")
    said = on_two_ranks(tmp_path, "zero2", "zero3")
    assert "[INFO]" not in said, "DeepSpeed's own log stays out of ours"


ALONE = """
from smopd.engine import distributed
from tests.engine.student.training import advance, equal, make_student, parameters
with distributed.process_group() as device:
    student = make_student(device, strategy="deepspeed", zero_stage=3)
    before = parameters(student)
    advance(student, range(1))
    assert not equal(before, parameters(student))
"""


def test_zero_3_trains_in_one_process(tmp_path):
    pytest.importorskip("deepspeed")
    (tmp_path / "alone.py").write_text(ALONE)
    done = on_ranks(1, str(tmp_path / "alone.py"))
    assert done.returncode == 0, done.stderr[-4000:]


def settings(**options) -> TrainSettings:
    return TrainSettings(learning_rate=1e-5, strategy="deepspeed", **options)


def test_a_configuration_stands_beside_the_settings(tmp_path):
    given = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": False},
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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 3}}, r"zero_optimization.stage is 3, expected 2 as in the student"),
        ({"fp16": {"enabled": True}}, r"fp16.enabled is True, expected False as in"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is 4"),
        ({"optimizer": {"type": "AdamW"}}, "got optimizer, which smopd sets; remove it"),
        ([1], "cannot be read"),
    ],
)
def test_a_configuration_that_contradicts_the_settings_is_refused(config, message, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        configuration(settings(deepspeed_config=str(path)), CPU)
    with pytest.raises(ValueError, match=r"absent\.json cannot be read"):
        configuration(settings(deepspeed_config=str(tmp_path / "absent.json")), CPU)


def test_optimizer_state_leaves_the_gpu_alone():
    offloading = settings(zero_stage=3, offload_optimizer=True)
    there = configuration(offloading, torch.device("cuda"))
    assert there["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    assert there["zero_force_ds_cpu_optimizer"] is False, "torch's AdamW steps there too"
    assert configuration(offloading, CPU)["zero_optimization"] == {"stage": 3}
