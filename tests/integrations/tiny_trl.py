"""TRL's trainers on the quickstart's small model: prompts, rewards, teachers, fixed ragged completions."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from smopd.integrations.trl import (
    SMOPDDistillationConfig,
    SMOPDDistillationTrainer,
    SMOPDGRPOConfig,
    SMOPDGRPOTrainer,
)
from smopd.worlds.models import world_model, world_tokenizer
from smopd.worlds.toy_world import vocabulary

PROMPTS = Dataset.from_dict(
    {"prompt": ["get the weather in Paris", "book a table", "play a song", "call Ada"]}
)
LONGEST = 6
ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -2.0])


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


def student_model(change: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    model, tokenizer = world_model(0)
    return change(model) if change else model, tokenizer


def distillation(
    folder: Path, teachers: list, student: Callable[[Any], Any] | None = None, **more: object
) -> SMOPDDistillationTrainer:
    model, tokenizer = student_model(student)
    args = SMOPDDistillationConfig(**settings(folder, **more))
    return SMOPDDistillationTrainer(model, teachers, args, train_dataset=PROMPTS, processing_class=tokenizer)


def grpo(
    folder: Path, teachers: list, student: Callable[[Any], Any] | None = None, **more: object
) -> SMOPDGRPOTrainer:
    model, tokenizer = student_model(student)
    args = SMOPDGRPOConfig(**settings(folder, num_generations=2, **more))
    rewards = [lengths, vowels]
    return SMOPDGRPOTrainer(model, rewards, teachers, args, train_dataset=PROMPTS, processing_class=tokenizer)


def hosts_own(
    trainer_class: type, args: object, *positional: object, student: Callable[[Any], Any] | None = None
) -> Any:
    model, tokenizer = student_model(student)
    return trainer_class(model, *positional, args, train_dataset=PROMPTS, processing_class=tokenizer)


def teacher(seed: int):
    """Return a random model with larger logits."""
    model, _ = world_model(seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    return model


def saved_teacher(folder: Path, pieces: Sequence[str] | None = None) -> Path:
    teacher(1).save_pretrained(folder)
    world_tokenizer(pieces or vocabulary()).save_pretrained(folder)
    return folder


def lora(model: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs peft (the lora extra)")
    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "up_proj"], r=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def completions(trainer, seed: int = 0, rows: int = 4) -> dict[str, torch.Tensor]:
    """Return ragged completions in TRL's form: left-padded prompts, right-padded completions."""
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


def with_old_logps(trainer: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the completions with log-probabilities of a different policy."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    with torch.no_grad():
        logits = trainer.model.eval()(input_ids=ids, attention_mask=mask).logits[:, -LONGEST - 1 : -1]
        logps = (logits / trainer.args.temperature).log_softmax(-1)
    logps = logps.gather(-1, inputs["completion_ids"][..., None])[..., 0]
    noise = torch.randn(logps.shape, generator=torch.Generator().manual_seed(3))
    return inputs | {"old_per_token_logps": logps + 0.4 * noise}


def assert_same_gradients(gradients: dict, expected: dict) -> None:
    for name, gradient in expected.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5 * scale + 1e-9)


def loss_and_gradients(trainer, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 2
    loss = trainer.compute_loss(trainer.model, dict(inputs))
    loss.backward()
    trained = {name: p.grad for name, p in trainer.model.named_parameters() if p.requires_grad}
    return loss.detach(), {name: gradient.clone() for name, gradient in trained.items()}
