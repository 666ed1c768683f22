"""A small Qwen2 model with random weights and the tokenizer of the quickstart environment."""

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.qwen2 import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from smopd.worlds import toy_world

MIN_HEAD_DIM = 32  # the minimum of vLLM's CPU attention

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
WORLD_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def world_model(
    seed: int, *, pieces: Sequence[str] | None = None, vocab_size: int | None = None, **sizes: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a Qwen2 model in fp32, and a tokenizer whose tokens are `pieces` (None: those of toy_world).

    vocab_size: see `qwen2_model`. None means the tokenizer's size. sizes: other arguments of `qwen2_model`.
    """
    tokenizer = world_tokenizer(toy_world.vocabulary() if pieces is None else pieces)
    return qwen2_model(seed, tokenizer, vocab_size or len(tokenizer), **sizes), tokenizer


def world_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a fast tokenizer whose tokens are the given pieces. If several match, the longest is used.

    Text outside the pieces, such as spaces between words, has no tokens. Decoding concatenates tokens. The
    pieces are added tokens, because transformers loads every Qwen2 checkpoint with Qwen2Tokenizer's
    pre-tokenizer and decoder, and added tokens bypass both.
    """
    special = (PAD, UNK, BOS, EOS, SYSTEM, USER, ASSISTANT)
    names = {"pad_token": PAD, "unk_token": UNK, "bos_token": BOS, "eos_token": EOS}
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(special)},
        merges=[],
        **names,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=WORLD_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return tokenizer


def qwen2_model(
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    vocab_size: int,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    max_positions: int = 256,
    tie_embeddings: bool = False,
) -> PreTrainedModel:
    """Make a Qwen2 model in fp32 whose weights depend only on the seed.

    Args:
        vocab_size: number of embedding rows, at least the size of the tokenizer.
        hidden_size: a multiple of heads, at least 32 per head.
        kv_heads: a divisor of heads. None means heads.
        intermediate_size: size of the MLP. None means 3 * hidden_size.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    intermediate_size = 3 * hidden_size if intermediate_size is None else intermediate_size
    sizes = (layers, heads, kv_heads, intermediate_size, max_positions)
    if min(sizes) < 1:
        names = "layers, heads, kv_heads, intermediate_size and max_positions"
        raise ValueError(f"model: {names} are {', '.join(map(str, sizes))}, expected at least 1")
    if hidden_size % heads or hidden_size // heads < MIN_HEAD_DIM:
        expected = f"a multiple of heads = {heads} of at least {MIN_HEAD_DIM} per head"
        raise ValueError(f"model: hidden_size is {hidden_size}, expected {expected}")
    if heads % kv_heads:
        raise ValueError(f"model: kv_heads is {kv_heads}, expected a divisor of heads = {heads}")
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config).eval()
