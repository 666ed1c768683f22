"""TRL's trainers with two teachers, three steps on two ranks compared with one process.

    -m tests.integrations.trl_worker FOLDER {ddp,fsdp2,zero3}...

Completions are greedy and advantages depend on the prompt, so that any number of ranks takes the same steps.
Rank 0 saves the results to FOLDER/MODE.pt.
"""

import os
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from smopd.integrations.trl import SMOPDGRPOTrainer
from tests.integrations.tiny_trl import distillation, grpo, saved_teacher, teacher
from tests.ranks import on_ranks

ROWS = 4
TRAINERS = ("distillation", "grpo")
ZERO_3 = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
FSDP_2 = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "cpu_ram_efficient_loading": True,  # teachers from paths are zeros on rank 1
}


class ByPrompt(SMOPDGRPOTrainer):
    """Advantages by prompt: the greedy responses of a group are equal, so that their rewards would cancel."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"advantages": batch["prompt_mask"].sum(1) / 3.0 - 1.0}


def own_teacher(folder: Path) -> Path:
    """Return the path of this rank's copy of the first teacher."""
    return folder / f"teacher_{os.environ['RANK']}"


def trained(what: str, folder: Path, ranks: int, **more: Any) -> dict[str, Any]:
    options = {
        "per_device_train_batch_size": ROWS // ranks,
        "generation_kwargs": {"do_sample": False},
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        **more,
    }
    first = str(own_teacher(folder.parent)) if "fsdp" in more else teacher(1)
    teachers = [first, teacher(2)]
    trainer = (grpo if what == "grpo" else distillation)(folder, teachers, **options)
    if what == "grpo":
        trainer.__class__ = ByPrompt
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    ulp = torch.finfo(torch.float32).eps
    trainer.train()
    after = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    steps = [row for row in trainer.state.log_history if "opd/kl" in row]
    return {
        "losses": [row["loss"] for row in steps],
        "kl": [row["opd/kl"] for row in steps],
        "rounding": {name: len(steps) * ulp * float(was.abs().max()) for name, was in before.items()},
        "change": {name: after[name].float() - was for name, was in before.items()} if after else {},
        "wrapped": type(trainer.model_wrapped).__name__,
    }


def assert_steps_of_one_process(folder: Path, **wrapped: str) -> None:
    """Compare both trainers' steps in each mode; `wrapped` names the class around the student by mode."""
    done = on_ranks(2, "-m", "tests.integrations.trl_worker", str(folder), *wrapped)
    assert done.returncode == 0, done.stderr[-4000:]
    for mode, name in wrapped.items():
        for what, both in torch.load(folder / f"{mode}.pt").items():
            assert both["wrapped"] == name
            assert_same_steps(both, of_one_process(what))


@cache
def of_one_process(what: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return trained(what, Path(folder), ranks=1)


def assert_same_steps(both: dict[str, Any], one: dict[str, Any]) -> None:
    assert len(one["losses"]) == 3
    for name in ("losses", "kl"):
        assert both[name] == pytest.approx(one[name], rel=1e-5)
    assert both["change"].keys() == one["change"].keys()
    for name, expected in one["change"].items():
        scale = float(expected.abs().max())
        assert scale > 100 * one["rounding"][name], name
        atol = 1e-5 * scale + one["rounding"][name]
        torch.testing.assert_close(
            both["change"][name], expected, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def shard_on_cpus() -> None:
    """Let accelerate use FSDP on gloo, although it requires accelerators."""
    started = PartialState.__init__

    def start(self: PartialState, *given: Any, **named: Any) -> None:
        started(self, *given, **named)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = start


def options_of(mode: str) -> dict[str, Any]:
    if mode == "zero3":
        import deepspeed

        # As in smopd.engine.deepspeed: skips a minute of compiling an inference operator.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        return {"deepspeed": ZERO_3}
    if mode == "fsdp2":
        shard_on_cpus()
        return {"fsdp": True, "fsdp_config": FSDP_2}
    return {}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    saved_teacher(own_teacher(folder))  # under FSDP, only rank 0 saves a whole folder
    for mode in sys.argv[2:]:
        AcceleratorState._reset_state(reset_partial_state=True)  # the process group stays
        options = options_of(mode)
        found = {what: trained(what, folder / "out", ranks=2, **options) for what in TRAINERS}
        if dist.get_rank() == 0:
            torch.save(found, folder / f"{mode}.pt")
    dist.destroy_process_group()
