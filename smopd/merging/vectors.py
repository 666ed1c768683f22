"""Weight merges: sums of task vectors (model - base), tensor by tensor, from safetensors files.

This is task arithmetic (arXiv 2212.04089), optionally with the trim of TIES (arXiv 2306.01708).
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby, permutations
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME

from smopd.engine import distributed
from smopd.engine.models.loading import custom_code, place_of
from smopd.engine.student.checkpoint import whole_folder
from smopd.engine.weights.adapters import PREFIX, Adapter, read_adapter, same_place
from smopd.engine.weights.architecture import architecture_of, tensor, weight_files
from smopd.engine.weights.transport import on_cpu

log = logging.getLogger(__name__)
CONFIG = ("model_type", "hidden_act", "num_attention_heads", "num_key_value_heads", "rope_parameters")
"""Entries of a model's config that must equal those of the base."""
NOT_COPIED = (
    "*.safetensors", "*.bin*", "*.gguf", "*.onnx*", "*.h5", "*.msgpack", "*.pth", "onnx", "original", ".git",
    "*.partial", "manifest.*", "adapter", "optimizer*", "training_args*", "README.md",
)  # fmt: skip
ADAPTER_WEIGHTS = "adapter_model.safetensors"
UNPLAIN = ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out")  # read_adapter refuses others
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Part:
    """The part of one model's change (model - base) that a merge adds."""

    scale: float = 1.0
    """Factor of the change. 0 leaves the model out."""
    keep: float = 1.0
    """Share of each tensor's entries to keep. The entries with the largest magnitude are kept."""
    exclude: str = ""
    """A pattern (re.search). Tensors whose name matches keep the base's values. If empty, none does."""

    def takes(self, name: str) -> bool:
        """Return whether the merge uses the model's change of the tensor `name`."""
        return self.scale != 0 and not (self.exclude and re.search(self.exclude, name))


class TaskVectors:
    """Task vectors of models: folders or hub ids with safetensors files, or folders of LoRA adapters.

    Raise FileNotFoundError if files are missing. Raise ValueError if a model's tensors differ from the base's
    in name or shape, if its config differs in CONFIG, or if an adapter is not plain LoRA or has another base.
    """

    def __init__(self, base: str, models: Sequence[str], device: torch.device | str = "cpu"):
        self.base, self.device = ModelFiles(base), torch.device(device)
        with reading(base):  # names of tied tensors that the files omit -> the stored name
            pairs = [*permutations(architecture_of(str(self.base.folder)).tied or (), 2)]
        self._tied = {name: other for name, other in pairs if name not in self.base.shapes}
        self.models: list[ModelFiles | Lora] = []
        for path in models:
            adapter = read_adapter(path)
            model = ModelFiles(path, pairs) if adapter is None else Lora(adapter)
            model.require_like(self.base, self._tied)
            self.models.append(model)

    def merged(self, chosen: Sequence[Part]) -> Iterator[tuple[str, Tensor]]:
        """Yield the merged tensors with the base's names and dtypes, on the device.

        If the merge is one whole model, its values are copied from its files. Integer tensors are the base's.
        """
        every = list(zip(self.models, chosen, strict=True))
        scaled = [(model, part) for model, part in every if part.scale]
        alone = scaled[0][0] if len(scaled) == 1 and scaled[0][1] == Part() else None
        for name in self.base.shapes:
            stored = self.base.read(name)
            value = stored.to(self.device)
            if stored.is_floating_point():
                if isinstance(alone, ModelFiles):
                    value = alone.read(name).to(value)
                else:
                    base = value.float()
                    changes = [(model.change(name, base), part) for model, part in every if part.takes(name)]
                    made = [(change, part) for change, part in changes if change is not None]
                    value = (base + combined(made)).to(stored.dtype) if made else value
                    del base, changes, made  # freed before the next tensor is read
            yield name, value

    def with_tied(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield `weights`, and repeat each tied tensor under all its names, as engines expect."""
        for name, value in weights:
            yield name, value
            for other, held in self._tied.items():
                if held == name:
                    yield other, value

    def write(self, folder: Path, chosen: Sequence[Part]) -> None:
        """Write the merge to `folder` atomically, with the base's configs and shards. All ranks call this."""

        def write(partial: Path) -> None:
            ignore = shutil.ignore_patterns(*NOT_COPIED)
            shutil.copytree(self.base.folder, partial, dirs_exist_ok=True, ignore=ignore)
            for place in (partial, *(each for each in partial.rglob("*") if each.is_dir())):
                with suppress(OSError):  # SMB and FUSE refuse it
                    place.chmod(place.stat().st_mode | 0o700)  # the base may be read-only
            merged = self.merged(chosen)
            for file, weights in groupby(merged, key=lambda weight: self.base.file_of[weight[0]]):
                tensors = {name: on_cpu(value) for name, value in weights}
                save_file(tensors, partial / Path(file).name, metadata={"format": "pt"})
                del tensors  # freed before the next file

        with whole_folder(folder, {}) as partial:
            distributed.on_rank0(lambda: write(partial))


def combined(changes: Sequence[tuple[Tensor, Part]]) -> Tensor:
    """Return the sum of the trimmed and scaled changes (fp32) of one tensor."""
    total = torch.zeros_like(changes[0][0])
    for change, part in changes:
        total.add_(trimmed(change, part.keep), alpha=part.scale)
    return total


def trimmed(change: Tensor, keep: float) -> Tensor:
    """Of n entries, keep the round(keep * n) with the largest magnitude. Set the others to 0."""
    n = round(keep * change.numel())
    if n >= change.numel():
        return change
    kept = change.abs().flatten().topk(n, sorted=False).indices
    return torch.zeros_like(change).flatten().index_fill_(0, kept, 1).view_as(change).mul_(change)


class ModelFiles:
    """The tensors of a saved model by name, read lazily."""

    def __init__(self, path: str, tied: Sequence[tuple[str, str]] = ()):
        """`tied` has pairs of names of one tensor. If the files have one of a pair, both names read it."""
        self.path, self.folder = path, folder_of(path)
        self.shapes: dict[str, tuple[int, ...]] = {}
        with reading(path):
            self.file_of = weight_files(str(self.folder))
            if not self.file_of:
                raise FileNotFoundError(f"{path}: has no safetensors files, expected a saved model")
            for file in sorted(set(self.file_of.values())):
                with safe_open(file, "pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  not a mapping
                        self.shapes[name] = tuple(opened.get_slice(name).get_shape())
        self._stored = {
            name: other for name, other in tied if name not in self.shapes and other in self.shapes
        }
        self.shapes |= {name: self.shapes[other] for name, other in self._stored.items()}

    def read(self, name: str) -> Tensor:
        name = self._stored.get(name, name)
        with reading(self.path):
            return tensor(self.file_of[name], name)

    def change(self, name: str, base: Tensor) -> Tensor | None:
        return self.read(name).to(base) - base

    def require_like(self, base: ModelFiles, tied: Mapping[str, str]) -> None:
        """Raise ValueError if tensors or config differ from the base's. Tied tensors may be stored twice."""
        for name, shape in base.shapes.items():
            if name not in self.shapes:
                raise ValueError(f"{self.path}: lacks the tensor {name}, which the base {base.path} has")
            if (own := self.shapes[name]) != shape:
                raise ValueError(f"{self.path}: {name} has shape {own}, the base {base.path} has {shape}")
        for name in self.shapes.keys() - base.shapes.keys():
            if name not in tied:
                raise ValueError(f"{self.path}: has the tensor {name}, which the base {base.path} lacks")
            if not torch.equal(self.read(name), self.read(tied[name])):
                raise ValueError(f"{self.path}: {name} differs from {tied[name]}, but the base ties them")
        ours, theirs = self.config(), base.config()
        for entry in sorted(ours.keys() & theirs.keys()):
            if ours[entry] != theirs[entry]:
                text = f"{entry} is {ours[entry]!r}, {theirs[entry]!r} in that of the base {base.path}"
                raise ValueError(f"{self.path}: in its config, {text}")
        matrices = [name for name, shape in base.shapes.items() if len(shape) > 1]
        for name in matrices[len(matrices) // 2 :][:1]:  # one matrix shows a wrong base
            stored = base.read(name)
            changed = self.read(name).float() - stored.float()
            if stored.is_floating_point() and stored.float().norm() < changed.norm():
                text = "%s: %s differs from that of %s by more than its norm; is this the model's base?"
                log.warning(text, self.path, name, base.path)

    def config(self) -> dict[str, Any]:
        """Return the entries of CONFIG that the model's config has."""
        if not (self.folder / CONFIG_NAME).is_file():
            return {}
        with reading(self.path):
            config = AutoConfig.from_pretrained(str(self.folder), **custom_code()).get_text_config()
        return {name: value for name in CONFIG if (value := getattr(config, name, None)) is not None}


class Lora:
    """A plain LoRA adapter in peft's format. It adds the scaled product B A to a layer's weight."""

    def __init__(self, adapter: Adapter):
        self.path, self.base, self.config = str(adapter.folder), adapter.base, adapter.config
        for name in UNPLAIN:
            if value := self.config.get(name):
                raise ValueError(f"{self.path}: {name} is {value!r}, expected none: only plain LoRA merges")
        if str(start := self.config.get("init_lora_weights")).lower().startswith(CHANGE_THE_BASE):
            raise ValueError(f"{self.path}: init_lora_weights is {start!r}, which changes the base's weights")
        self.rank, alpha = int(self.config["r"]), float(self.config["lora_alpha"])
        self.scale = alpha / (self.rank**0.5 if self.config.get("use_rslora") else self.rank)
        with reading(self.path):
            tensors = load_file(adapter.folder / ADAPTER_WEIGHTS)
            names = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
            self.halves = {name: [tensors.pop(_half(name, half)) for half in "AB"] for name in sorted(names)}
        if tensors:
            expected = f"{_half('LAYER', 'A')} and lora_B"
            raise ValueError(f"{self.path}: has the tensor {min(tensors)}, expected {expected}")

    def require_like(self, base: ModelFiles, tied: Mapping[str, str]) -> None:
        """Raise ValueError if this is not an adapter of the base."""
        if same_place(self.base) != same_place(base.path):
            raise ValueError(f"{self.path}: is an adapter of {self.base}, expected one of {base.path}")
        for layer, (a_rD, b_Dr) in self.halves.items():
            expected, has = (len(b_Dr), a_rD.shape[1]), base.shapes.get(f"{layer}.weight", "no such tensor")
            if has != expected:
                raise ValueError(f"{self.path}: adapts {layer}.weight as {expected}, the base has {has}")

    def change(self, name: str, base: Tensor) -> Tensor | None:
        halves = self.halves.get(name.removesuffix(".weight"))
        if halves is None:
            return None
        a_rD, b_Dr = (half.to(base) for half in halves)
        return (b_Dr @ a_rD).mul_(self.scale)


def _half(layer: str, half: str) -> str:
    return f"{PREFIX}{layer}.lora_{half}.weight"


def folder_of(path: str) -> Path:
    """Return a model's folder: `path` itself, or the folder in the hub's cache, downloaded if needed."""
    place = place_of(path)
    if Path(place).is_dir():
        return Path(place)
    return Path(snapshot_download(place, ignore_patterns=["*.bin", "*.pth", "*.gguf"]))


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Convert read errors to a ValueError that names the model."""
    try:
        yield
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: cannot be read ({error})") from error
