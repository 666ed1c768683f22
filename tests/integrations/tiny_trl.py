"""TRL's trainers on the quickstart's small model: prompts, rewards, teachers, fixed ragged completions."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset

from smopd.integrations.trl import (
    SMOPDDistillationConfig,
    SMOPDDistillationTrainer,
    SMOPDGRPOConfig,
    SMOPDGRPOTrainer,
)
from smopd.small_models import world_model

PROMPTS = Dataset.from_dict(
    {"prompt": ["get the weather in Paris", "book a table", "play a song", "call Ada"]}
)
LONGEST = 6


def lengths(completions: list[str], **_: object) -> list[float]:
    return [float(len(text)) for text in completions]


def vowels(completions: list[str], **_: object) -> list[float | None]:
    return [float(sum(c in "aeiou" for c in text)) if text else None for text in completions]


def settings(folder: Path, **more: object) -> dict[str, object]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_completion_length": LONGEST,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_dropout": True,
        "gradient_checkpointing": False,
        **more,
    }


def distillation(folder: Path, teachers: list, **more: object) -> SMOPDDistillationTrainer:
    model, tokenizer = world_model(0)
    args = SMOPDDistillationConfig(**settings(folder, **more))
    return SMOPDDistillationTrainer(model, teachers, args, train_dataset=PROMPTS, processing_class=tokenizer)


def grpo(folder: Path, teachers: list, **more: object) -> SMOPDGRPOTrainer:
    model, tokenizer = world_model(0)
    args = SMOPDGRPOConfig(**settings(folder, num_generations=2, **more))
    rewards = [lengths, vowels]
    return SMOPDGRPOTrainer(model, rewards, teachers, args, train_dataset=PROMPTS, processing_class=tokenizer)


def hosts_own(trainer_class: type, args: object, *positional: object):
    model, tokenizer = world_model(0)
    return trainer_class(model, *positional, args, train_dataset=PROMPTS, processing_class=tokenizer)


def teacher(seed: int):
    """A model that is surer of its tokens than a random one."""
    model, _ = world_model(seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def completions(trainer, seed: int = 0, rows: int = 4) -> dict[str, torch.Tensor]:
    """Ragged completions as TRL hands them to its loss: left-padded prompts, right-padded completions."""
    generator = torch.Generator().manual_seed(seed)
    size = trainer.model.config.vocab_size
    prompt_mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])[:rows]
    completion_mask = (torch.arange(LONGEST) < torch.tensor([[6], [1], [4], [3]])[:rows]).long()
    return {
        "prompt_ids": torch.randint(5, size, (rows, 4), generator=generator) * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(5, size, (rows, LONGEST), generator=generator) * completion_mask,
        "completion_mask": completion_mask,
        "num_items_in_batch": torch.tensor(float(completion_mask.sum())),
    }


def loss_and_gradients(trainer, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
