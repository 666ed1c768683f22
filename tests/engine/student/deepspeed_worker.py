"""What DeepSpeed's strategy does on two ranks, one fact a key; run under torchrun by test_deepspeed.py.

Arguments: a folder and the stage.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.settings import Lora, TrainSettings
from smopd.engine.student.checkpoint import Checkpoints, export
from smopd.engine.student.student import NonFiniteGradient, Student
from smopd.engine.types import Rollout
from smopd.ops import LossSettings, LossTokens
from smopd.worlds.models import world_model
from tests.engine.tiny import ragged_rollouts, tiny_model

NLL = LossSettings(opd_coef=0.0)


def loss_tokens(rollouts: list[Rollout], adv: float = 1.0) -> LossTokens:
    none = torch.zeros(0, dtype=torch.int64)
    token_ids_N = torch.cat([none, *(rollout.response_ids for rollout in rollouts)])
    n = len(token_ids_N)
    return LossTokens(
        token_ids_N=token_ids_N, adv_N=torch.full((n,), adv), pg_weight_N=torch.full((n,), 1 / 100)
    )


def share(seed: int) -> list[Rollout]:
    """This rank's rollouts, fewer on the second rank."""
    rollouts = ragged_rollouts(seed)
    return rollouts[:11] if distributed.rank() == 0 else rollouts[11:]


def advance(student: Student, seeds: range) -> None:
    for seed in seeds:
        rollouts = share(seed)
        student.update(rollouts, loss_tokens(rollouts), NLL)


def parameters(student: Student) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in student.weights()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(value.equal(b[name]) for name, value in a.items())


class Facts:
    def __init__(self, folder: Path, stage: int, device: torch.device):
        self.folder = folder
        self.stage = stage
        self.device = device
        self.found: dict[str, object] = {}

    def student(self, seed: int = 0, tied: bool = False, **options) -> Student:
        config = {
            "zero_optimization": {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": "auto"}
        }
        file = self.folder / f"deepspeed_{distributed.rank()}.json"
        file.write_text(json.dumps(config))
        values = {
            "learning_rate": 1e-2,
            "compute_dtype": "float32",
            "strategy": "deepspeed",
            "zero_stage": self.stage,
            "deepspeed_config": str(file),
            "micro_batch_tokens": 60,
            **options,
        }
        return Student(tiny_model(seed=seed, tied=tied), TrainSettings(**values), self.device)

    def resume(self, name: str, **options) -> None:
        straight, checkpoints = self.student(**options), Checkpoints(self.folder / name, keep=1)
        advance(straight, range(2))
        checkpoints.save(2, straight)
        advance(straight, range(2, 4))
        resumed = self.student(**options, **({} if "lora" in options else {"seed": 9}))
        step, _ = checkpoints.restore(resumed)
        advance(resumed, range(2, 4))
        exact = equal(parameters(resumed), parameters(straight))
        self.found[name] = exact and step == 2 and resumed.updates == 4

    def clip(self) -> None:
        rollouts = share(4)
        norms, moved = [], []
        for options in ({"max_grad_norm": 1e9}, {}, {"strategy": "fsdp2"}):
            # A large rate, so that the moves are far above the rounding of parameters of 1.
            large = {"max_grad_norm": 1e-3, "adam_eps": 1e-2, "learning_rate": 1.0}
            student = self.student(**{**large, **options})
            before = parameters(student)
            norms.append(student.update(rollouts, loss_tokens(rollouts), NLL).grad_norm)
            moved.append({name: value - before[name] for name, value in parameters(student).items()})
        self.found["norms"] = norms
        self.found["clipped_as_fsdp2"] = max(
            float((moved[1][name] - value).norm() / value.norm()) for name, value in moved[2].items()
        )
        self.found["clipped_moves_less"] = all(
            moved[1][name].norm() < moved[0][name].norm() for name in moved[0]
        )

    @mock.patch("smopd.engine.student.student.MAX_SKIPPED_UPDATES", 1)
    def skip(self, **options) -> None:
        student, rollouts = self.student(**options), share(3)
        before = parameters(student)
        bad = loss_tokens(rollouts, adv=math.nan if distributed.rank() == 1 else 1.0)
        update = student.update(rollouts, bad, NLL)
        self.found["skipped"] = distributed.gather_objects(update.skipped) == [True, True]
        self.found["unchanged"] = equal(parameters(student), before)
        advance(student, range(1))
        self.found["goes_on"] = student.skipped == 1 and not equal(parameters(student), before)
        told = ""
        try:
            student.update(rollouts, bad, NLL)
        except NonFiniteGradient as error:
            told = str(error)
        everywhere = distributed.gather_objects("2 updates were skipped, at most 1" in told)
        self.found["stops_together"] = everywhere == [True, True]

    def idle_rank(self) -> None:
        student = self.student()
        rollouts = ragged_rollouts(5) if distributed.rank() == 0 else []
        update = student.update(rollouts, loss_tokens(rollouts), NLL)
        single = distributed.gather_objects(update.micro_batches)
        self.found["idle_rank"] = single[0] == single[1] > 1 and math.isfinite(update.grad_norm)
        self.found["idle_logps"] = len(student.logps(rollouts, 1.0)) == len(loss_tokens(rollouts).token_ids_N)

    def masters(self) -> None:
        student = self.student(compute_dtype="bfloat16", learning_rate=1e-6)
        original = {name: value.detach() for name, value in tiny_model().state_dict().items()}
        before = parameters(student)
        self.found["masters_are_fp32"] = equal(before, original)
        buffers = [value.dtype == torch.float32 for value in student.policy.buffers()]
        self.found["frequencies_are_fp32"] = bool(buffers) and all(buffers)
        advance(student, range(1))
        after = parameters(student)
        moved = torch.cat([(after[name] != before[name]).flatten() for name in before])
        self.found["moved"] = float(moved.float().mean())

    def files(self) -> None:
        model, tokenizer = world_model(seed=0)
        settings = self.student().settings
        student = Student(model, settings, self.device)
        advance(student, range(1))
        export(student, tokenizer, self.folder / "export", torch.float32)
        weights = parameters(student)
        if distributed.rank() == 0:
            torch.save(weights, self.folder / "weights.pt")


def main() -> None:
    folder, stage = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    with distributed.process_group() as device:
        facts = Facts(folder, stage, device)
        facts.resume("resume")
        facts.resume("resume_tied", tied=True, gradient_checkpointing=True)
        facts.resume("resume_bfloat16", compute_dtype="bfloat16")
        facts.resume("resume_lora", lora=Lora(rank=4, alpha=8.0))
        facts.clip()
        facts.skip()
        facts.idle_rank()
        facts.masters()
        facts.files()
        if distributed.rank() == 0:
            (folder / "facts.json").write_text(json.dumps(facts.found))


if __name__ == "__main__":
    main()
