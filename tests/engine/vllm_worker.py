"""Runs under torchrun: a sharded student trains and its weights go to vLLM, which samples before and after.

Saves what each rank sampled and the weights of the student. Arguments: a folder with a saved model for each
of TIED, and the degree of tensor parallelism.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from smopd.engine import distributed
from smopd.engine.student import Student
from smopd.engine.sync import synchronise
from smopd.engine.types import Lora, Rollout, Sampling, TrainSettings, VllmSettings
from smopd.engine.vllm_rollout import VllmRollout
from smopd.ops import LossSettings, LossTokens
from tests.engine.tiny import END, ragged_rollouts

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (30, 31), (40,)]
TIED = {"untied": False, "tied": True}
ADAPTERS = "adapters"
"""Of the untied model: a LoRA student whose adapter alone is sent."""
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0, max_new_tokens=10),
    "sampled": Sampling(n=2, temperature=0.7, max_new_tokens=10, seed=3),
}


def train(student: Student) -> None:
    """One large step on other responses on each rank."""
    rollouts = ragged_rollouts(distributed.rank())
    token_ids_N = torch.cat([rollout.response_ids for rollout in rollouts])
    n = len(token_ids_N)
    tokens = LossTokens(token_ids_N=token_ids_N, adv_N=torch.ones(n), pg_weight_N=torch.full((n,), 1 / n))
    student.update(rollouts, tokens, LossSettings(opd_coef=0.0))


def sample(rollouts: VllmRollout) -> dict[str, list[Rollout]]:
    """Prompts are dealt out: the ranks have different numbers of them."""
    mine = range(distributed.rank(), len(PROMPTS), distributed.world_size())
    return {
        name: rollouts.generate([PROMPTS[i] for i in mine], list(mine), sampling)
        for name, sampling in SAMPLINGS.items()
    }


def run(folder: Path, settings: VllmSettings, device: torch.device) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    lora = Lora(settings.max_lora_rank, 16.0) if settings.max_lora_rank else None
    student = Student(model, TrainSettings(learning_rate=2e-2, compute_dtype="float32", lora=lora), device)
    rollouts = VllmRollout(folder, [END], settings)
    before = sample(rollouts)
    for _ in range(1 if lora is None else 3):  # at first an adapter's B is 0
        train(student)
    synchronise(student, rollouts, 1)
    assert lora is None or rollouts._adapter is not None
    weights = {name: value.detach().clone() for name, value in student.weights()}
    return {"before": before, "after": sample(rollouts), "weights": weights}


def main() -> None:
    folder, parallel = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    settings = VllmSettings(kv_cache_bytes=32 << 20, max_model_len=64, tensor_parallel_size=parallel)
    with distributed.process_group() as device:
        results = {name: run(folder / name, settings, device) for name in TIED}
        if parallel == 1:
            results[ADAPTERS] = run(folder / "untied", replace(settings, max_lora_rank=8), device)
        torch.save(results, folder / f"rank{distributed.rank()}.pt")
        distributed.barrier()


if __name__ == "__main__":
    main()
