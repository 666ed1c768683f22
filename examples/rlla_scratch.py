"""A Qwen2 model with random weights and Qwen's tokenizer, for examples/rlla_scratch.yaml."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from tokenizers import normalizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode

from smopd.data.places import located
from smopd.worlds.models import qwen2_model

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


def qwen_vocab_model(
    seed: int, tokenizer_file: str | Path, **sizes: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Make a Qwen2 model in fp32 with Qwen's vocabulary of 151,936 rows.

    Args:
        tokenizer_file: see `qwen_tokenizer`.
        sizes: other arguments of `qwen2_model`. max_positions defaults to 4096.
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
