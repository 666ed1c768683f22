"""A rank of a TRL trainer with two teachers, under torchrun: three steps that any number of ranks take alike.

    -m tests.integrations.trl_worker {ddp,fsdp2,zero3} {distillation,grpo} FOLDER

Completions are greedy and advantages depend on the prompt, so that a step is the same however it is shared
out. Rank 0 writes what came of it to FOLDER/MODE.pt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType

from smopd.integrations.trl import SMOPDGRPOTrainer
from tests.integrations.tiny_trl import distillation, grpo, teacher

ROWS = 4
ZERO_3 = {
    "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
}
FSDP_2 = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}


class ByPrompt(SMOPDGRPOTrainer):
    """A group's greedy responses are equal, and rewards of their own would cancel."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        return batch | {"advantages": batch["prompt_mask"].sum(1) / 3.0 - 1.0}


def trained(what: str, folder: Path, ranks: int, **more: Any) -> dict[str, Any]:
    options = {
        "per_device_train_batch_size": ROWS // ranks,
        "generation_kwargs": {"do_sample": False},
        "optim": "sgd",
        "learning_rate": 0.5,
        "max_grad_norm": 0.0,
        **more,
    }
    teachers = [teacher(1), teacher(2)]
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


def shard_on_cpus() -> None:
    """accelerate turns FSDP on where there are accelerators; gloo's ranks pass for such here."""
    started = PartialState.__init__

    def start(self: PartialState, *given: Any, **named: Any) -> None:
        started(self, *given, **named)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = start


if __name__ == "__main__":
    mode, what, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    options: dict[str, Any] = {"ddp": {}, "zero3": {"deepspeed": ZERO_3}}.get(mode, {})
    if mode == "zero3":
        import deepspeed

        # As smopd.engine.deepspeed: else it compiles for a minute what serves inference alone.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    if mode == "fsdp2":
        shard_on_cpus()
        options = {"fsdp": True, "fsdp_config": FSDP_2}
    told = trained(what, folder / "out", ranks=2, **options)
    if dist.get_rank() == 0:
        torch.save(told, folder / f"{mode}.pt")
    dist.destroy_process_group()
