"""TRL's trainers with two teachers per token: a tiny Qwen2 model in the quickstart environment, on a CPU.

    python examples/trl_two_teachers.py distillation
    python examples/trl_two_teachers.py grpo
    PYTHONPATH=. python examples/trl_two_teachers.py measure     # time loss and gradient

For your own models, pass paths: model="Qwen/Qwen2.5-1.5B-Instruct", teacher_models=["…", "…"].
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

from smopd.integrations.trl import (
    SMOPDDistillationConfig,
    SMOPDDistillationTrainer,
    SMOPDGRPOConfig,
    SMOPDGRPOTrainer,
)
from smopd.rewards.rlla import accuracy_reward, format_reward
from smopd.worlds.models import world_model
from smopd.worlds.toy_world import prompts


def settings(folder: str, steps: int) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": 16,
        "max_completion_length": 32,
        "learning_rate": 3e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "bf16": torch.cuda.is_available(),
    }


def distillation(folder: str, steps: int) -> SMOPDDistillationTrainer:
    model, tokenizer = world_model(0)
    return SMOPDDistillationTrainer(
        model,
        [world_model(1)[0], world_model(2)[0]],
        SMOPDDistillationConfig(**settings(folder, steps), kappa=16, teacher_weights=[0.5, 0.5]),
        train_dataset=world(),
        processing_class=tokenizer,
    )


def grpo(folder: str, steps: int) -> SMOPDGRPOTrainer:
    model, tokenizer = world_model(0)
    return SMOPDGRPOTrainer(
        model,
        [partial(scored, accuracy_reward), partial(scored, format_reward)],
        [world_model(1)[0], world_model(2)[0]],
        SMOPDGRPOConfig(
            **settings(folder, steps),
            num_generations=8,
            opd_coef=1.0,
            advantage_estimator="gdpo",
            reward_weights=[0.5, 0.5],
        ),
        train_dataset=world(),
        processing_class=tokenizer,
    )


def world() -> Dataset:
    rows = prompts(n=64, seed=1)
    return Dataset.from_list([row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])


def scored(reward: Any, prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
    """Adapt an SMOPD reward to TRL, which passes chat completions as messages."""
    return reward(prompts, [messages[0]["content"] for messages in completions], **columns)


def sized(seed: int, vocabulary: int, hidden: int) -> Any:
    made, _ = world_model(seed, hidden_size=hidden, layers=2, heads=4)
    made.resize_token_embeddings(vocabulary, mean_resizing=False)
    return made


def host_and_ours(folder: str, vocabulary: int, hidden: int) -> dict[str, Any]:
    """Make TRL's trainers, and SMOPD's with one and two teachers."""
    shared = {"train_dataset": world(), "processing_class": world_model(0)[1]}
    run = settings(folder, 1)
    student, one, two = (lambda seed=seed: sized(seed, vocabulary, hidden) for seed in range(3))
    groups = run | {"num_generations": 2, "per_device_train_batch_size": 2}
    reward = partial(scored, accuracy_reward)

    def distill(*teachers: Any) -> Any:
        return SMOPDDistillationTrainer(student(), list(teachers), SMOPDDistillationConfig(**run), **shared)

    def group(*teachers: Any) -> Any:
        return SMOPDGRPOTrainer(student(), reward, list(teachers), SMOPDGRPOConfig(**groups), **shared)

    theirs = DistillationConfig(**run, beta=0.0)
    return {
        "TRL distillation, one teacher": DistillationTrainer(student(), one(), theirs, **shared),
        "SMOPD distillation, one teacher": distill(one()),
        "SMOPD distillation, two teachers": distill(one(), two()),
        "TRL GRPO, no teacher": GRPOTrainer(student(), reward, GRPOConfig(**groups), **shared),
        "SMOPD GRPO, one teacher": group(one()),
        "SMOPD GRPO, two teachers": group(one(), two()),
    }


def measure(rows: int, tokens: int, vocabulary: int, hidden: int, turns: int) -> None:
    """Measure time and peak memory of compute_loss and backward. The trainers alternate in one process."""
    from bench.harness.memory import peak_bytes

    def step(trainer: Any, batch: dict[str, Any]) -> None:
        trainer.model.zero_grad()
        trainer.compute_loss(trainer.model, dict(batch)).backward()

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, vocabulary, (rows, tokens + 16), generator=generator)
    ones = torch.ones_like(ids)
    batch = {
        "prompt_ids": ids[:, :16],
        "prompt_mask": ones[:, :16],
        "completion_ids": ids[:, 16:],
        "completion_mask": ones[:, 16:],
        "num_items_in_batch": torch.tensor(float(rows * tokens)),
        "advantages": torch.randn(rows, generator=generator),
        "old_per_token_logps": torch.full((rows, tokens), -math.log(vocabulary)),
    }
    with tempfile.TemporaryDirectory() as folder:
        trainers = host_and_ours(folder, vocabulary, hidden)
        seconds: dict[str, list[float]] = {name: [] for name in trainers}
        for trainer in trainers.values():
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = 1
        for turn in range(turns + 1):
            for name, trainer in trainers.items():
                started = time.perf_counter()
                step(trainer, batch)
                if turn:
                    seconds[name].append(time.perf_counter() - started)
        threads = torch.get_num_threads()
        print(f"{rows} x {tokens} tokens, V = {vocabulary}, D = {hidden}, fp32, {threads} threads")
        for name, trainer in trainers.items():
            trainer.model.zero_grad()
            peak = peak_bytes(partial(step, trainer, batch), str(trainer.model.device))
            shown = "not measured" if peak is None else f"{peak / 2**20:.0f} MiB"
            print(f"{name:34}  {statistics.median(seconds[name]):7.2f} s   peak {shown}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["distillation", "grpo", "measure"])
    parser.add_argument("--steps", type=int, default=3)
    for name, default in {"rows": 4, "tokens": 128, "vocabulary": 151_936, "hidden": 256, "turns": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="of measure")
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.rows, asked.tokens, asked.vocabulary, asked.hidden, asked.turns)
        return
    with tempfile.TemporaryDirectory() as folder:
        trainer = {"distillation": distillation, "grpo": grpo}[asked.what](folder, asked.steps)
        trainer.train()
        for row in trainer.state.log_history:
            if "opd/kl" in row:
                print(f"step {row['step']}: loss {row['loss']:.4f}, KL to the mixture {row['opd/kl']:.4f}")


if __name__ == "__main__":
    main()
