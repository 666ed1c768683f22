"""The weights that a vLLM engine must be given: names and shapes, checked streams, streams from files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from smopd.engine.models.sizes import ModelNumbers, numbers_of

NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True)
class Architecture:
    """What weights a model has."""

    identity: str
    """Equal for models whose weights can replace each other."""
    shapes: Mapping[str, torch.Size]
    """Of the state dict, a tied head included."""
    tied: tuple[str, str] | None
    """Names of the input embedding and of the head, where they are one tensor."""
    numbers: ModelNumbers


def architecture_of(path: str) -> Architecture:
    """The architecture of the causal language model at `path`, a folder or hub id. Reads no weights."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    names = {id(value): name for name, value in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = None
    if embedding.weight is head.weight:
        tied = (f"{names[id(embedding)]}.weight", f"{names[id(head)]}.weight")
    kept = {key: value for key, value in config.to_dict().items() if key not in NOT_ARCHITECTURE}
    return Architecture(json.dumps(kept, sort_keys=True, default=str), shapes, tied, numbers_of(model))


class Checked:
    """A stream of weights that ends where one is wrong or does not come, and keeps the reason in `error`.

    It raises nothing: an exception in the middle of vLLM's loading would leave half-built layers behind.
    """

    def __init__(self, architecture: Architecture, weights: Iterable[tuple[str, Tensor]]):
        self.architecture, self.weights = architecture, weights
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from checked(self.weights, self.architecture.shapes, self.architecture.tied)
        except Exception as error:
            self.error = error


def checked(
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    tied: tuple[str, str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """`weights`, one alive at a time; a head that is tied to the embedding comes once, right behind it.

    Raises:
        ValueError: a weight has no place in `shapes` or another shape; or at the end some are missing.
    """
    missing = set(shapes)
    for name, value in weights:
        if shapes.get(name) != value.shape:
            found = tuple(shapes[name]) if name in shapes else "no such weight"
            raise ValueError(f"load_weights: {name} has shape {tuple(value.shape)}, the engine has {found}")
        if not (tied and name == tied[1] and name not in missing):
            missing.discard(name)
            yield name, value
            if tied and name == tied[0] and tied[1] in missing:
                missing.discard(tied[1])
                yield tied[1], value  # vLLM keeps the old head where it does not come
        del value  # before the next one is made
    if missing:
        raise ValueError(f"load_weights: the stream lacks {len(missing)} weights, first {min(missing)!r}")


def stored(path: str, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """The weights in the safetensors files at `path`, one at a time, less what the architecture lacks."""
    places = weight_places(path)
    if not places:
        raise FileNotFoundError(f"model {path}: has no safetensors files, which replacing weights needs")
    for file_name in sorted(set(places.values())):
        with safe_open(cached_file(path, file_name), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                if name in architecture.shapes:
                    yield name, file.get_tensor(name)


def weight_places(path: str) -> dict[str, str]:
    """The safetensors file of each weight of a folder or hub id, by its name there; empty where none is."""
    single = file_at(path, SAFE_WEIGHTS_NAME)
    if single is not None:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    index = file_at(path, SAFE_WEIGHTS_INDEX_NAME)
    return {} if index is None else json.loads(Path(index).read_text())["weight_map"]


def file_at(path: str, name: str) -> str | None:
    """Where the file `name` of a folder or hub id is; None where it has none."""
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False)


def identity(path: str) -> str:
    """Differs where the weights at `path` do: its place, and what its files look like from outside."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    states = [(file, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return repr((str(folder.resolve()), [(file.name, s.st_size, s.st_mtime_ns) for file, s in states]))
