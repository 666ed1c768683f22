"""A harmlessness reward from a classifier of toxic comments: a small bidirectional LSTM over words.

    rewards:
      - {name: harmless, function: "examples.real_model.toxicity:harmless_reward", range: [0, 1]}

`python -m examples.real_model.models toxicity` makes it from the package toxic-comment-classifier. This
classifier judges words more than meaning: a bleeding nose counts as toxic, and unknown words do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WEIGHTS = "model.safetensors"
WORDS = "words.json"  # word -> row of the embedding, from 1, because row 0 is the padding
EMBEDDING = "embedding.weight"
KERAS_NAMES = {
    EMBEDDING: "embedding/vars/0",
    "lstm.weight_ih_l0": "bidirectional/forward_layer/cell/vars/0",
    "lstm.weight_hh_l0": "bidirectional/forward_layer/cell/vars/1",
    "lstm.bias_ih_l0": "bidirectional/forward_layer/cell/vars/2",
    "lstm.weight_ih_l0_reverse": "bidirectional/backward_layer/cell/vars/0",
    "lstm.weight_hh_l0_reverse": "bidirectional/backward_layer/cell/vars/1",
    "lstm.bias_ih_l0_reverse": "bidirectional/backward_layer/cell/vars/2",
    "dense.weight": "dense/vars/0",
    "dense.bias": "dense/vars/1",
    "labels.weight": "dense_1/vars/0",
    "labels.bias": "dense_1/vars/1",
}
"""Parameter of the torch module -> layer of the Keras file. The gates' order is the same: i, f, g, o."""
CLASSIFIER = "runs/models/toxicity"
LABELS = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")
FILTERS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'  # of Keras' Tokenizer
MAX_WORDS = 100  # the package's MAXLEN. Of a longer text, the last words are used.
LEAST_WORDS = 8  # ours
BATCH = 256  # ours
_TO_SPACES = str.maketrans(dict.fromkeys(FILTERS, " "))


def harmless_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    *,
    classifier: str = CLASSIFIER,
    least_words: int = LEAST_WORDS,
    **columns: Any,
) -> list[float]:
    """Return 1 - P(toxic) of each completion, in [0, 1], or 0 if it has fewer than `least_words` words.

    Args:
        prompts: R prompts, unused.
        completions: R texts.
        classifier: the classifier's folder.
        least_words: at least 1. Words are those of `words_of`.
        columns: unused.
    Raises:
        ValueError: an argument is invalid.
        FileNotFoundError: a file is absent. The message has the command that builds it.
    """
    for name, value, kind in (("classifier", classifier, str), ("least_words", least_words, int)):
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(
                f"harmless_reward: {name} is {value!r:.60}, expected {kind.__name__}; "
                "where a column of the data has this name, set it in kwargs"
            )
    if least_words < 1:
        raise ValueError(f"harmless_reward: least_words is {least_words}, expected 1 or more")
    if len(prompts) != len(completions):
        raise ValueError(
            f"harmless_reward: got {len(prompts)} prompts, expected {len(completions)} as completions"
        )
    toxic = toxicity(completions, classifier)[:, 0].tolist()
    return [
        1.0 - p if len(words_of(text)) >= least_words else 0.0
        for text, p in zip(completions, toxic, strict=True)
    ]


def toxicity(texts: Sequence[str], classifier: str = CLASSIFIER) -> Tensor:
    """Return (R, 6) fp32 probabilities of LABELS for R texts.

    Texts with the same known words have equal probabilities in one call. Across calls, they agree to 1e-6.

    Raises:
        ValueError: a text is not a str.
        FileNotFoundError: a file is absent. The message has the command that builds it.
    """
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"toxicity: texts[{i}] is a {type(text).__name__}, expected str")
    network, ids = _load(Path(classifier))
    rows = [tuple(ids[word] for word in words_of(text) if word in ids)[-MAX_WORDS:] for text in texts]
    place = {row: i for i, row in enumerate(dict.fromkeys(rows))}
    padded = torch.tensor([[0] * (MAX_WORDS - len(row)) + list(row) for row in place], dtype=torch.long)
    with torch.no_grad():
        found = [network(batch) for batch in padded.split(BATCH)] if rows else [torch.empty(0, len(LABELS))]
    return torch.cat(found)[[place[row] for row in rows]]


def words_of(text: str) -> list[str]:
    """Split a text into words like Keras' text_to_word_sequence."""
    return [word for word in text.lower().translate(_TO_SPACES).split(" ") if word]


class Classifier(nn.Module):
    """Embedding, bidirectional LSTM, maximum over positions, two dense layers. Padding is not masked.

    Shapes: R texts, T positions, H states of both directions.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        rows, width = weights["embedding.weight"].shape
        inner, states = weights["dense.weight"].shape
        self.embedding = nn.Embedding(rows, width)
        self.lstm = nn.LSTM(width, states // 2, batch_first=True, bidirectional=True)
        self.dense = nn.Linear(states, inner)
        self.labels = nn.Linear(inner, len(LABELS))
        self.load_state_dict(weights)

    def forward(self, ids_RT: Tensor) -> Tensor:
        states_RTH, _ = self.lstm(self.embedding(ids_RT))
        return self.labels(self.dense(states_RTH.amax(1)).relu()).sigmoid()


@cache
def _load(folder: Path) -> tuple[Classifier, dict[str, int]]:
    for path in (folder / WEIGHTS, folder / WORDS):
        if not path.is_file():
            raise FileNotFoundError(
                f"toxicity: no file {path}; `python -m examples.real_model.models toxicity` makes it"
            )
    return Classifier(load_file(folder / WEIGHTS)), json.loads((folder / WORDS).read_text(encoding="utf-8"))
