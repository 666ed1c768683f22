"""Train a helpful and a harmless preference model, for rewards and the safety evaluation.

    python examples/train_preference_models.py --base Qwen/Qwen2.5-0.5B-Instruct --data PAIRS --steps 500

PAIRS has PKU-SafeRLHF's columns: prompt, response_0, response_1, better_response_id (for the helpful model)
and safer_response_id (for the harmless model). A higher score is better in both models, so their sign is 1.
Prompts of the evaluation sets are excluded. TRL's RewardTrainer trains both models, which then score held-out
pairs. Needs `pip install trl`. A CPU is enough for a small base.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tyro

from smopd.data.places import located
from smopd.data.sources import load_rows
from smopd.evals.safety import FILES, prompt_messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHOICES = {"helpful": "better_response_id", "harmless": "safer_response_id"}


@dataclass(frozen=True)
class Training:
    base: str
    """A causal language model with a chat template: a folder or hub id."""
    data: str
    """The pairs: a .jsonl, .jsonl.gz or .parquet file, or a hub id such as PKU-Alignment/PKU-SafeRLHF."""
    output: Path = Path("runs/preference_models")
    """Output folder, with subfolders helpful and harmless."""
    evaluation: tuple[str, ...] = ()
    """Sources whose prompts are excluded. Default: the safety evaluation's files in the folder of --data."""
    steps: int = 500
    """Updates per model."""
    batch_size: int = 32
    """Pairs per update."""
    learning_rate: float = 1e-5
    max_tokens: int = 2048
    """Maximum length of a chat with its response. Longer pairs are dropped."""
    held_out: int = 200
    """Minimum number of held-out pairs. All pairs of a prompt stay together."""
    pad_token: str | None = None
    """Pad token for tokenizers without one, such as Llama's. It must differ from the end token."""
    seed: int = 0


class Pair(NamedTuple):
    """A prompt with two responses."""

    prompt: tuple[dict[str, str], ...]
    responses: tuple[str, str]
    better: dict[str, int]
    """Model -> index of the preferred response."""


def main(argv: Sequence[str] | None = None) -> None:
    """Train both models. Bad arguments or data give one line on standard error and exit code 2."""
    options = tyro.cli(Training, args=argv, description=__doc__)
    try:
        pairs = without_evaluation(read_pairs(options.data), evaluation_sources(options))
        kept, held_out = split(pairs, options.held_out)
        tokenizer = prepared_tokenizer(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"train_preference_models: {error}", file=sys.stderr)
        sys.exit(2)
    for name in CHOICES:
        train(name, kept, tokenizer, options)
        if held_out:
            share = accuracy(name, held_out, options)
            print(f"{name}: prefers the better response of {share:.1%} of {len(held_out)} held-out pairs")


def read_pairs(source: str) -> list[Pair]:
    """Read the pairs of a source. Raises ValueError or FileNotFoundError."""
    pairs = []
    for index, row in enumerate(load_rows(source)):
        try:
            responses = (row["response_0"], row["response_1"])
            better = {name: int(row[column]) for name, column in CHOICES.items()}
            prompt = tuple(dict(message) for message in prompt_messages(row, source, index))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{source}: row {index}: {error!r}, expected PKU-SafeRLHF's columns") from None
        if not all(isinstance(text, str) for text in responses) or not set(better.values()) <= {0, 1}:
            raise ValueError(f"{source}: row {index}: expected two texts and choices of 0 or 1, got {better}")
        pairs.append(Pair(prompt, responses, better))
    return pairs


def evaluation_sources(options: Training) -> list[str]:
    if options.evaluation:
        return list(options.evaluation)
    folder = located(options.data).parent
    return [str(folder / file) for file in FILES.values() if (folder / file).is_file()]


def without_evaluation(pairs: Sequence[Pair], sources: Iterable[str]) -> list[Pair]:
    """Return the pairs whose prompts are in none of the sources, and print how many were dropped."""
    seen = {
        _key(prompt_messages(row, source, index))
        for source in sources
        for index, row in enumerate(load_rows(source))
    }
    kept = [pair for pair in pairs if _key(pair.prompt) not in seen]
    left_out = len(pairs) - len(kept)
    print(f"{len(pairs)} pairs, {left_out} left out: their prompts are among the {len(seen)} of evaluation")
    if not seen:
        print("no evaluation set was found: name them with --evaluation", file=sys.stderr)
    return kept


def split(pairs: Sequence[Pair], held_out: int) -> tuple[list[Pair], list[Pair]]:
    """Return the training pairs, and at least `held_out` held-out pairs with other prompts.

    Raises:
        ValueError: no training pair remains.
    """
    counts = Counter(_key(pair.prompt) for pair in pairs)
    held: set[tuple[str, ...]] = set()
    n = 0
    while n < held_out and counts:
        prompt, found = counts.popitem()  # of the remaining prompts, the one found last
        held.add(prompt)
        n += found
    if held_out < 0 or not counts:
        raise ValueError(f"--held-out is {held_out}, expected some of the {len(pairs)} pairs to train on")
    kept = [pair for pair in pairs if _key(pair.prompt) not in held]
    return kept, [pair for pair in pairs if _key(pair.prompt) in held]


def prepared_tokenizer(options: Training) -> PreTrainedTokenizerBase:
    """Load the base's tokenizer. Its pad token must not end chats, because scores are read before padding.

    Raises:
        ValueError, FileNotFoundError: the base has no tokenizer, no chat template, no such pad token, or
        fewer positions than --max-tokens.
    """
    from smopd.engine.models.loading import describe, load_tokenizer

    tokenizer = load_tokenizer(options.base)
    positions = describe(options.base, tokenizer)[0].max_position_embeddings
    if not 0 < options.max_tokens <= positions:
        raise ValueError(f"--max-tokens is {options.max_tokens}, expected 1 to the base's {positions}")
    if not tokenizer.chat_template:
        raise ValueError(f"--base {options.base}: its tokenizer has no chat template")
    if options.pad_token is not None:
        if options.pad_token not in tokenizer.get_vocab():
            raise ValueError(f"--pad-token {options.pad_token}: not in the vocabulary of {options.base}")
        tokenizer.pad_token = options.pad_token
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        raise ValueError(
            f"--base {options.base}: its pad token is {tokenizer.pad_token}, expected another than the end "
            "token; name an unused one with --pad-token"
        )
    return tokenizer


def train(name: str, pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerBase, options: Training) -> None:
    """Train one model from the base and save it with the tokenizer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, set_seed
    from trl import RewardConfig, RewardTrainer

    cuda = torch.cuda.is_available()
    set_seed(options.seed)  # for the new head
    model = AutoModelForSequenceClassification.from_pretrained(
        str(Path(options.base).expanduser()) if options.base.startswith("~") else options.base,
        num_labels=1,
        dtype=torch.float32,
    )
    folder = options.output / name
    settings = RewardConfig(
        output_dir=str(folder),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        max_length=options.max_tokens,
        seed=options.seed,
        use_cpu=not cuda,
        bf16=cuda,
        gradient_checkpointing=cuda,
        logging_steps=max(1, options.steps // 20),
        save_strategy="no",
        report_to="none",
    )
    trainer = RewardTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([preference(name, pair) for pair in pairs]),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(folder))
    tokenizer.save_pretrained(folder)
    print(f"{name}: trained on {len(trainer.train_dataset)} pairs, wrote {folder}")


def preference(name: str, pair: Pair) -> dict[str, Any]:
    better = pair.better[name]
    chosen, rejected = pair.responses[better], pair.responses[1 - better]
    return {
        "prompt": list(pair.prompt),
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


def accuracy(name: str, pairs: Sequence[Pair], options: Training) -> float:
    """Return the share of pairs whose preferred response scores higher, with `preference_reward`."""
    from smopd.rewards.preference_model import preference_reward

    prompts = [pair.prompt for pair in pairs]
    scores = [
        preference_reward(
            prompts,
            [pair.responses[which] for pair in pairs],
            model=str(options.output / name),
            max_tokens=options.max_tokens,
        )
        for which in (0, 1)
    ]
    right = 0
    for pair, first, second in zip(pairs, *scores, strict=True):
        if first is not None and second is not None:
            right += (second > first) if pair.better[name] else (first > second)
    return right / len(pairs)


def _key(messages: Iterable[Any]) -> tuple[str, ...]:
    return tuple(message["content"].strip() for message in messages)


if __name__ == "__main__":
    main()
