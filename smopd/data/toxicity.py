"""The folder of the classifier of toxic comments, made once of its package's Keras weights and tokenizer.

The weights become safetensors with torch's names, the words JSON. The tokenizer is a pickle: it is read here
alone, by an unpickler that knows the four names in it. `smopd.rewards.toxicity` reads the folder.
"""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from smopd.data.fetch import FetchError

WEIGHTS = "model.safetensors"
WORDS = "words.json"
"""Word -> row of the embedding, from 1; row 0 is the padding."""
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


def write_classifier(weights: Path, tokenizer: Path, folder: Path) -> None:
    """Write WEIGHTS and WORDS into the folder.

    Args:
        weights: HDF5, as Keras 3 saves a model of an Embedding, a Bidirectional LSTM and two Dense layers.
        tokenizer: a pickled Keras Tokenizer.
    Raises:
        FetchError: the pickle asks for another name than those of a Tokenizer.
    """
    import h5py
    from safetensors.numpy import save_file

    with h5py.File(weights) as file:
        stored = {ours: np.asarray(file[f"layers/{theirs}"]) for ours, theirs in KERAS_NAMES.items()}
    arrays = {
        name: np.ascontiguousarray(array if name == EMBEDDING else array.T) for name, array in stored.items()
    }
    for end in ("", "_reverse"):  # torch has two biases, Keras one
        arrays[f"lstm.bias_hh_l0{end}"] = np.zeros_like(arrays[f"lstm.bias_ih_l0{end}"])
    save_file(arrays, folder / WEIGHTS)
    with tokenizer.open("rb") as pickled:
        ids = _Unpickler(pickled).load().word_index
    known = {word: number for word, number in ids.items() if number < len(arrays[EMBEDDING])}
    (folder / WORDS).write_text(json.dumps(known, ensure_ascii=False), encoding="utf-8")


class _Tokenizer:
    """Stands for Keras' Tokenizer: takes its attributes."""

    word_index: dict[str, int]


PICKLED_NAMES = {
    ("keras.src.legacy.preprocessing.text", "Tokenizer"): _Tokenizer,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "int"): int,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return PICKLED_NAMES[module, name]
        except KeyError:
            raise FetchError(f"the pickled tokenizer asks for {module}.{name}; nothing was run") from None
