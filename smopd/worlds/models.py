"""Small Qwen2 models from random weights, with tokenizers: factories that a recipe names by import path.

A factory is `factory(seed, **settings) -> (model, tokenizer)`: one for the quickstart's world, and one over
Qwen's own vocabulary. Both save and load as any Hugging Face checkpoint does; head_dim is at least 32 and the
tokenizer is a fast one, as vLLM wants them. The weights depend on the seed alone.
"""

import base64
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, normalizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import TikTokenConverter

from smopd.data.places import located
from smopd.worlds import toy_world

MIN_HEAD_DIM = 32  # vLLM's CPU attention takes no smaller head

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
    seed: int,
    *,
    pieces: Sequence[str] | None = None,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    intermediate_size: int | None = None,
    max_positions: int = 256,
    tie_embeddings: bool = False,
    kv_heads: int | None = None,
    vocab_size: int | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A Qwen2 model in fp32 whose tokens are pieces of text.

    Args:
        pieces: of `world_tokenizer`; None is the vocabulary of smopd.worlds.toy_world.
        hidden_size: a multiple of heads, at least 32 a head.
        intermediate_size: of the MLP; None is 3 * hidden_size.
        max_positions: the longest sequence, in tokens.
        kv_heads: of keys and values, a divisor of heads; None is heads.
        vocab_size: the model's rows; those beyond the tokenizer's ids decode to nothing. None: none are.
    Raises:
        ValueError: hidden_size does not fit heads, or a size is below 1 or not as above.
    """
    tokenizer = world_tokenizer(toy_world.vocabulary() if pieces is None else pieces)
    rows = len(tokenizer) if vocab_size is None else vocab_size
    model = _qwen2("world_model", seed, rows, tokenizer, hidden_size, layers, heads,
                   intermediate_size, max_positions, tie_embeddings, kv_heads)  # fmt: skip
    return model, tokenizer


def world_tokenizer(pieces: Sequence[str]) -> PreTrainedTokenizerFast:
    """A fast tokenizer whose tokens are the given pieces, longest first.

    Text outside the pieces, so also the spaces between words, has no tokens; decoding joins tokens by
    nothing: what is made of pieces alone is decoded exactly.

    transformers loads a Qwen2 checkpoint's tokenizer as Qwen2Tokenizer, whatever class its files name, with
    that class's own pre-tokenizer and decoder. Added tokens come before both, so the pieces are added tokens.
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
    seed: int,
    tokenizer_file: str | Path,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    intermediate_size: int | None = None,
    max_positions: int = 4096,
    tie_embeddings: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A Qwen2 model in fp32 with Qwen's vocabulary of 151,936 rows.

    Args:
        tokenizer_file: Qwen's BPE in tiktoken's form (qwen.tiktoken), or the short name `tokenizer/qwen`; see
            `qwen_tokenizer`.
        hidden_size, intermediate_size, max_positions: as for `world_model`.
    Raises:
        FileNotFoundError: tokenizer_file is absent.
        ValueError: hidden_size does not fit heads, a size is below 1, or the file is no tiktoken file.
    """
    tokenizer = qwen_tokenizer(tokenizer_file)
    model = _qwen2("qwen_vocab_model", seed, QWEN_VOCAB_SIZE, tokenizer, hidden_size, layers, heads,
                   intermediate_size, max_positions, tie_embeddings)  # fmt: skip
    return model, tokenizer


def qwen_tokenizer(tokenizer_file: str | Path) -> PreTrainedTokenizerFast:
    """Qwen's tokenizer from its ranks file, with ChatML's template: eos <|im_end|>, pad <|endoftext|>.

    Text is normalised to NFC first, as Qwen does.
    """
    path = located(tokenizer_file)
    if not path.is_file():
        raise FileNotFoundError(
            f"qwen_tokenizer: tokenizer_file {str(path)!r} is no file, expected Qwen's ranks (qwen.tiktoken)"
        )
    special = (ENDOFTEXT, IM_START, IM_END)
    backend = _RanksConverter(
        vocab_file=str(path), pattern=QWEN_PATTERN, extra_special_tokens=list(special)
    ).converted()
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
    """transformers' converter, reading the file itself: the package tiktoken is not needed for it."""

    @staticmethod
    def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
        ranks = {}
        for number, line in enumerate(Path(tiktoken_url).read_bytes().splitlines(), start=1):
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except ValueError as error:
                raise ValueError(
                    f"qwen_tokenizer: {tiktoken_url} line {number} is {line[:60]!r}, "
                    "expected a base64 token and its rank"
                ) from error
        return ranks


def _qwen2(
    who: str,
    seed: int,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerFast,
    hidden_size: int,
    layers: int,
    heads: int,
    intermediate_size: int | None,
    max_positions: int,
    tie_embeddings: bool,
    kv_heads: int | None = None,
) -> PreTrainedModel:
    sizes = {"layers": layers, "heads": heads, "max_positions": max_positions}
    if intermediate_size is not None:
        sizes["intermediate_size"] = intermediate_size
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{who}: {name} is {size}, expected at least 1")
    if hidden_size % heads or hidden_size // heads < MIN_HEAD_DIM:
        raise ValueError(
            f"{who}: hidden_size is {hidden_size}, expected a multiple of heads = {heads} "
            f"of at least {MIN_HEAD_DIM * heads} ({MIN_HEAD_DIM} a head)"
        )
    kv_heads = heads if kv_heads is None else kv_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{who}: kv_heads is {kv_heads}, expected a divisor of heads = {heads}")
    if vocab_size < len(tokenizer):
        raise ValueError(
            f"{who}: vocab_size is {vocab_size}, expected at least the tokenizer's {len(tokenizer)}"
        )
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or 3 * hidden_size,
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
        model = Qwen2ForCausalLM(config)
    return model.eval()
