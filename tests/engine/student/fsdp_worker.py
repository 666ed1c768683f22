"""What FSDP2 does on two ranks, one fact a key; run under torchrun by test_two_ranks.py. Argument: folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from smopd.engine import distributed
from smopd.engine.local.teachers import LocalTeachers, StudentsBase
from smopd.engine.settings import Lora, Packing
from tests.engine.student.deepspeed_worker import Facts, advance, equal, parameters, share
from tests.engine.tiny import VOCABULARY, tiny_model

FSDP2 = {"strategy": "fsdp2", "deepspeed_config": None}
LORA = {"lora": Lora(rank=4, alpha=8.0)}


def offload(facts: Facts) -> None:
    plain, offloaded = facts.student(**FSDP2), facts.student(**FSDP2, offload_optimizer=True)
    for student in (plain, offloaded):
        advance(student, range(3))
    facts.found["offload"] = equal(parameters(plain), parameters(offloaded))
    moved = parameters(facts.student(**FSDP2))
    facts.found["offload_trains"] = not equal(moved, parameters(offloaded))


def reference(facts: Facts) -> None:
    """A LoRA student's base, asked before the first update and after some."""
    student, twin, rollouts = (*(facts.student(**FSDP2, **LORA) for _ in range(2)), share(1))
    base = StudentsBase(student)
    said = []
    for _ in range(2):
        said.append(base.score(rollouts, 0, 0.7).token_logps_NM)
        for trained in (student, twin):
            advance(trained, range(2))
    base = LocalTeachers([tiny_model()], Packing(micro_batch_tokens=200), VOCABULARY)
    truth = base.score(rollouts, 0, 0.7).token_logps_NM
    mine = said[0].equal(said[1]) and torch.allclose(said[0], truth, rtol=0, atol=1e-5)
    facts.found["reference"] = distributed.gather_objects(mine) == [True, True]
    facts.found["reference_leaves_training_alone"] = equal(parameters(student), parameters(twin))


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with distributed.process_group() as device:
        facts = Facts(folder, 2, device)
        facts.resume("resume", **FSDP2)
        facts.resume("resume_tied_hsdp", **FSDP2, tied=True, shard_size=1)
        facts.resume("resume_lora", **FSDP2, **LORA)
        facts.resume("resume_offload", **FSDP2, offload_optimizer=True)
        facts.skip(**FSDP2)
        offload(facts)
        reference(facts)
        if distributed.rank() == 0:
            (folder / "facts.json").write_text(json.dumps(facts.found))


if __name__ == "__main__":
    main()
