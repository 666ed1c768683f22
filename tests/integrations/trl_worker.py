"""A rank of TRL's trainer with two teachers, under torchrun: prints what came of it as a JSON line.

train   three steps on this rank's share of the prompts (DDP, or ZeRO-3 where a DeepSpeed config is given)
fsdp2   loss and gradients of fixed completions, the student and a teacher sharded over the ranks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.integrations.tiny_trl import completions, distillation, grpo, teacher


def train(folder: Path, deepspeed: str | None) -> dict[str, object]:
    trainer = grpo(folder, [teacher(1), teacher(2)], per_device_train_batch_size=2, deepspeed=deepspeed)
    trainer.train()
    steps = [row for row in trainer.state.log_history if "opd/kl" in row]
    return {"losses": [row["loss"] for row in steps], "kl": [row["opd/kl"] for row in steps]}


def fsdp2(folder: Path) -> dict[str, object]:
    trainer = distillation(folder, [teacher(1), teacher(2)])
    inputs = completions(trainer)
    for model in (trainer.model, trainer.teacher_models[0]):
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    gradients = {}
    for name, parameter in trainer.model.named_parameters():
        assert isinstance(parameter.grad, DTensor)
        gradients[name] = parameter.grad.full_tensor()  # FSDP averages: every rank had the same rows
    if dist.get_rank() == 0:
        torch.save({"loss": loss.detach(), "gradients": gradients}, folder / "sharded.pt")
    return {"losses": [float(loss.detach())]}


if __name__ == "__main__":
    what, folder, *config = sys.argv[1:]
    told = fsdp2(Path(folder)) if what == "fsdp2" else train(Path(folder), *(config or [None]))
    print(json.dumps({"rank": dist.get_rank(), **told}), flush=True)
    dist.destroy_process_group()
