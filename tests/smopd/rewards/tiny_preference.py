"""Tiny preference models: random sequence classifiers over bytes, saved as any checkpoint is."""

from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForSequenceClassification, Qwen2Tokenizer

from examples.rlla_scratch import CHATML_TEMPLATE

END, PAD = "<|im_end|>", "<|endoftext|>"
PLAIN_TEMPLATE = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}"


def byte_tokenizer(*, template: str | None = CHATML_TEMPLATE) -> Qwen2Tokenizer:
    """One token a byte, and ChatML's three."""
    letters = [PAD, "<|im_start|>", END, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={letter: index for index, letter in enumerate(letters)},
        merges=[],
        unk_token=PAD,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = template
    return tokenizer


def config(tokenizer: Qwen2Tokenizer, *, labels: int = 1, positions: int = 512) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,  # heads of 32: vLLM on a CPU takes no smaller ones
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        num_labels=labels,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def save(folder: Path, tokenizer: Qwen2Tokenizer, seed: int = 0, *, labels: int = 1) -> PreTrainedModel:
    """A random model with `tokenizer` in `folder`; scores differ by about 1."""
    torch.manual_seed(seed)
    model = Qwen2ForSequenceClassification(config(tokenizer, labels=labels)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
