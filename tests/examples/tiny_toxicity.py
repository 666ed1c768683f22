"""A tiny classifier of toxic comments, in the form of its package."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path
from types import ModuleType
from unittest import mock

import h5py
import numpy as np

from examples.real_model.toxicity import KERAS_NAMES

MEMBERS = ("toxic_classifier/model/model.weights.h5", "toxic_classifier/model/tokenizer.pickle")
WORDS = ("the", "dog", "is", "kind", "idiot", "don't", "über", "stupid", "rare")
ROWS = 9  # of the embedding: `rare` is beyond
WIDTH, HIDDEN, INNER, LABELS = 4, 3, 5, 6
SHAPES = dict(
    zip(
        KERAS_NAMES,
        [
            (ROWS, WIDTH),
            *[(WIDTH, 4 * HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN,)] * 2,
            *[(2 * HIDDEN, INNER), (INNER,), (INNER, LABELS), (LABELS,)],
        ],
        strict=True,
    )
)


def write_members(folder: Path) -> dict[str, np.ndarray]:
    """Write the weights and the tokenizer; returns the weights, as Keras has them, by torch's names."""
    rng = np.random.default_rng(0)
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    with h5py.File(folder / Path(MEMBERS[0]).name, "w") as file:
        for ours, theirs in KERAS_NAMES.items():
            file[f"layers/{theirs}"] = weights[ours]
    keras = ModuleType("keras.src.legacy.preprocessing.text")
    keras.Tokenizer = type("Tokenizer", (), {"__module__": keras.__name__})  # type: ignore[attr-defined]
    tokenizer = keras.Tokenizer()
    tokenizer.word_index = {word: number for number, word in enumerate(WORDS, 1)}
    tokenizer.word_counts, tokenizer.word_docs = OrderedDict(the=3), defaultdict(int, the=2)
    parents = {".".join(keras.__name__.split(".")[:n]): ModuleType("parent") for n in range(1, 5)}
    with mock.patch.dict(sys.modules, {**parents, keras.__name__: keras}):
        (folder / Path(MEMBERS[1]).name).write_bytes(pickle.dumps(tokenizer))
    return weights


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def keras_scores(weights: dict[str, np.ndarray], ids: list[int], length: int = 100) -> np.ndarray:
    """What Keras computes of one text in float64: gates in the order i, f, c, o; the padding is read too."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    inputs = w["embedding.weight"][[0] * (length - len(ids)) + ids]
    both = []
    for end, order in (("", 1), ("_reverse", -1)):
        h, c, states = np.zeros(HIDDEN), np.zeros(HIDDEN), []
        for x in inputs[::order]:
            gates = x @ w[f"lstm.weight_ih_l0{end}"] + h @ w[f"lstm.weight_hh_l0{end}"]
            i, f, g, o = np.split(gates + w[f"lstm.bias_ih_l0{end}"], 4)
            c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
            h = sigmoid(o) * np.tanh(c)
            states.append(h)
        both.append(np.array(states)[::order])
    top = np.concatenate(both, -1).max(0)
    inner = np.maximum(top @ w["dense.weight"] + w["dense.bias"], 0)
    return sigmoid(inner @ w["labels.weight"] + w["labels.bias"])
