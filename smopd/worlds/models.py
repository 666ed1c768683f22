"""Small Qwen2 models with random weights and their tokenizers, as model factories for recipes.

A factory is `factory(seed, **settings) -> (model, tokenizer)`. One is for the quickstart environment, one has
Qwen's vocabulary. Both save and load as Hugging Face checkpoints and run in vLLM.
"""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, normalizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from smopd.data.places import located
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

QWEN_VOCAB_SIZE = 151_936  # the model's rows: the tokenizer's 151,646 ids and Qwen's padding
QWEN_PATTERN = (  # Qwen2's split pattern
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ENDOFTEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 151643 to 151645
CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def world_model(
    seed: int, *, pieces: Sequence[str] | None = None, **sizes: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a Qwen2 model in fp32 whose tokens are pieces of text.

    Args:
        pieces: see `world_tokenizer`; None is the vocabulary of smopd.worlds.toy_world.
        sizes: see `qwen2_model`.
    """
    tokenizer = world_tokenizer(toy_world.vocabulary() if pieces is None else pieces)
    return qwen2_model(seed, tokenizer, len(tokenizer), **sizes), tokenizer


def world_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a fast tokenizer whose tokens are the given pieces. Longer pieces win.

    Text outside the pieces, such as spaces between words, has no tokens. Decoding concatenates tokens. The
    pieces are added tokens, because transformers loads every Qwen2 checkpoint with Qwen2Tokenizer's
    pre-tokenizer and decoder, and added tokens bypass both.
    """
    special = (PAD, UNK, BOS, EOS, SYSTEM, USER, ASSISTANT)
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(special)},
        merges=[],
        pad_token=PAD,
        unk_token=UNK,
        bos_token=BOS,
        eos_token=EOS,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=WORLD_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    return tokenizer


def qwen_vocab_model(
    seed: int, tokenizer_file: str | Path, **sizes: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a Qwen2 model in fp32 with Qwen's vocabulary of 151,936 rows.

    Args:
        tokenizer_file: see `qwen_tokenizer`.
        sizes: see `qwen2_model`; max_positions defaults to 4096.
    """
    tokenizer = qwen_tokenizer(tokenizer_file)
    return qwen2_model(seed, tokenizer, QWEN_VOCAB_SIZE, **{"max_positions": 4096, **sizes}), tokenizer


def qwen_tokenizer(tokenizer_file: str | Path) -> PreTrainedTokenizerFast:
    """Make Qwen's tokenizer from a tiktoken file (qwen.tiktoken, or the short name `tokenizer/qwen`).

    Uses the ChatML template, eos <|im_end|>, pad <|endoftext|> and, like Qwen, NFC normalization.

    Raises:
        FileNotFoundError: the file is absent.
        ValueError: a line is not a base64 token and its rank.
    """
    path = located(tokenizer_file)
    if not path.is_file():
        raise FileNotFoundError(
            f"qwen_tokenizer: tokenizer_file {str(path)!r}: no such file, expected qwen.tiktoken"
        )
    special = [ENDOFTEXT, IM_START, IM_END]
    backend = _RanksConverter(str(path), pattern=QWEN_PATTERN, extra_special_tokens=special).converted()
    backend.normalizer = normalizers.NFC()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=IM_END,
        pad_token=ENDOFTEXT,
        extra_special_tokens=[IM_START],
        chat_template=CHATML_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


class _RanksConverter(TikTokenConverter):
    """transformers' converter without its dependency on tiktoken."""

    def extract_vocab_merges_from_model(
        self, tiktoken_url: str
    ) -> tuple[dict[str, int], list[tuple[str, str]]]:
        try:
            pairs = [line.split() for line in Path(tiktoken_url).read_bytes().splitlines()]
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        except ValueError as error:
            raise ValueError(
                f"qwen_tokenizer: {tiktoken_url}: {error}, expected a base64 token and its rank on each line"
            ) from error
        letters = bytes_to_unicode()
        text = {token: "".join(letters[byte] for byte in token) for token in ranks}
        merges = []
        for token in sorted(ranks, key=ranks.__getitem__):
            splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            known = [split for split in splits if split[0] in ranks and split[1] in ranks]
            known.sort(key=lambda split: (ranks[split[0]], ranks[split[1]]))
            merges += [(text[left], text[right]) for left, right in known]
        return {text[token]: rank for token, rank in ranks.items()}, merges


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
        kv_heads: a divisor of heads; None is heads.
        intermediate_size: size of the MLP; None is 3 * hidden_size.
    Raises:
        ValueError: a size is below 1 or does not fit heads.
    """
    kv_heads = heads if kv_heads is None else kv_heads
    intermediate_size = 3 * hidden_size if intermediate_size is None else intermediate_size
    if min(layers, heads, kv_heads, intermediate_size, max_positions) < 1:
        raise ValueError(
            f"model: layers, heads, kv_heads, intermediate_size and max_positions are {layers}, {heads}, "
            f"{kv_heads}, {intermediate_size} and {max_positions}, expected at least 1"
        )
    if hidden_size % heads or hidden_size // heads < MIN_HEAD_DIM:
        raise ValueError(
            f"model: hidden_size is {hidden_size}, expected a multiple of heads = {heads} "
            f"of at least {MIN_HEAD_DIM * heads} ({MIN_HEAD_DIM} per head)"
        )
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
