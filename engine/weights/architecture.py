"""The weights that a vLLM engine needs: their names and shapes, and checked or stored streams of them."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from smopd.engine.errors import UnusableModel
from smopd.engine.models.loading import custom_code
from smopd.engine.models.sizes import ModelNumbers, numbers_of
from smopd.engine.student.checkpoint import file_digest

NOT_ARCHITECTURE = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")

HEADLESS = ("gemma2", "gemma3n")  # families whose tied head is not a separate weight in vLLM
DIGEST_LENGTH = 16  # ours: short enough for a message


class Architecture(NamedTuple):
    """Names and shapes of a model's weights in its files, including a tied head.

    identity: equal for models that can exchange weights.
    tied: names of the input embedding and the head if they share a tensor.
    in_files: converts a loaded model's weight to what files store, such as a tensor for each expert.
    """

    identity: str
    shapes: Mapping[str, torch.Size]
    tied: tuple[str, str] | None
    numbers: ModelNumbers
    in_files: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]


def architecture_of(path: str) -> Architecture:
    config = AutoConfig.from_pretrained(path, **custom_code())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **custom_code())

    def in_files(name: str, value: Tensor) -> Iterable[tuple[str, Tensor]]:
        return revert_weight_conversion(model, {name: value}).items()

    def name_of(module: nn.Module) -> str:
        (name,) = (name for name, each in model.named_modules() if each is module)
        ((stored_name, _),) = in_files(f"{name}.weight", torch.empty(0))
        return stored_name

    shapes = {name: value.shape for given in model.state_dict().items() for name, value in in_files(*given)}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = None
    if embedding.weight is head.weight:
        tied = (name_of(embedding), name_of(head))
        _require_tied(path, tied)
        if config.get_text_config().model_type in HEADLESS:
            del shapes[tied[1]]
    kept = {key: value for key, value in config.to_dict().items() if key not in NOT_ARCHITECTURE}
    identity = json.dumps(kept, sort_keys=True, default=str)
    return Architecture(identity, shapes, tied, numbers_of(model), in_files)


def _require_tied(path: str, tied: tuple[str, str]) -> None:
    """Raise UnusableModel if a tied head differs from the embedding in the files: vLLM ignores the head."""
    files = weight_files(path)
    if all(name in files for name in tied) and not torch.equal(*(tensor(files[name], name) for name in tied)):
        text = f"its config ties {tied[1]} to {tied[0]}, which differ in its files"
        raise UnusableModel(f"model {path}: {text}; expected tie_word_embeddings false in config.json")


class Checked:
    """A stream of weights in the form that files have. It ends at the first error, which it keeps in `error`.

    Raising the error would leave vLLM with half-loaded layers. vLLM silently skips weights in other forms.
    """

    def __init__(self, architecture: Architecture, weights: Iterable[tuple[str, Tensor]]):
        self.architecture, self.weights = architecture, weights
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from checked(self._in_files(), self.architecture.shapes, self.architecture.tied)
        except Exception as error:
            self.error = error

    def _in_files(self) -> Iterator[tuple[str, Tensor]]:
        shapes, tied = self.architecture.shapes, self.architecture.tied
        for name, value in self.weights:
            if name in shapes:
                yield name, value
            else:
                made = self.architecture.in_files(name, value)
                yield from (each for each in made if tied is None or each[0] != tied[1] or each[0] in shapes)
                del made
            del value  # frees it before the next one is made


def checked(
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, torch.Size],
    tied: tuple[str, str] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights, and a tied head exactly once. Raise ValueError if any weight is wrong or missing."""
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
                yield tied[1], value  # without this, vLLM would keep the old head
        del value  # frees it before the next one is made
    if missing:
        raise ValueError(f"load_weights: the stream lacks {len(missing)} weights, first {min(missing)!r}")


def stored(path: str, architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights in the files of a folder or hub id, file by file."""
    files = weight_files(path)
    if not files:
        raise FileNotFoundError(f"model {path}: has no safetensors files, expected some to replace weights")
    for name in sorted(files, key=files.__getitem__):
        if name in architecture.shapes:
            yield name, tensor(files[name], name)


def weight_files(path: str) -> dict[str, str]:
    """Map each weight of a folder or hub id to its local safetensors file. Without files, return {}."""
    single = file_at(path, SAFE_WEIGHTS_NAME)
    if single is not None:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    index = file_at(path, SAFE_WEIGHTS_INDEX_NAME)
    shards = {} if index is None else json.loads(Path(index).read_text())["weight_map"]
    here = {shard: str(cached_file(path, shard)) for shard in set(shards.values())}
    return {name: here[shard] for name, shard in shards.items()}


def file_at(path: str, name: str) -> str | None:
    """Return the local path of the file `name` in a folder or hub id, or None if there is no such file."""
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False)


def tensor(file: str, name: str) -> Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(name)


def identity(path: str) -> str:
    """Return a string that changes with the weight files' names, sizes or times. Return a hub id as it is."""
    folder = Path(path)
    if not folder.is_dir():
        return path
    states = [(file, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
    return repr((str(folder.resolve()), [(file.name, s.st_size, s.st_mtime_ns) for file, s in states]))


def weights_digest(path: str) -> str:
    """Return a digest of the weights and the config in a folder or hub id. This reads every byte."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        folder = Path(str(file_at(path, CONFIG_NAME))).parent
    kept = ("*.safetensors", "*.bin", CONFIG_NAME, "adapter_config.json")
    files = sorted({file for pattern in kept for file in folder.glob(pattern)})
    digests = [(file.name, file_digest(file)) for file in files]
    return hashlib.sha256(repr(digests).encode()).hexdigest()[:DIGEST_LENGTH]
