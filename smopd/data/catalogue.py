"""The data sets that the project's recipes, suites and tests use: catalogue.yaml, read.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from smopd.names import nearest

ALIASES = {"safety": "safe"}
"""Other names of data sets on the command line: the suite's, where the folder has another."""


@dataclass(frozen=True)
class File:
    """A file of a data set.

    Attributes:
        path: inside the folder of all data.
        upstream: OWNER/NAME/COMMIT/PATH of the public file that it is or is made of; None: none is known.
        bytes, sha256, git_sha1: of the upstream file; the last is git's own sum (`git hash-object`).
        rows_sha256: where this file is packed JSON lines, the sum of the unpacked lines.
    """

    path: str
    upstream: str | None
    bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    rows_sha256: str | None = None


@dataclass(frozen=True)
class DataSet:
    """A data set: a folder of files. `names` are the short names of its files, without its own name."""

    name: str
    about: str
    licence: str
    source: str
    notice: str | None
    files: tuple[File, ...]
    names: Mapping[str, File]


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
    root = "/".join(entry[key] for key in ("repository", "commit", "under") if key in entry)
    files = {}
    for file, values in entry["files"].items():
        sums = {key: values[key] for key in values.keys() - {"from"}}
        upstream = f"{root}/{values.get('from', file)}" if sums.keys() & {"sha256", "git_sha1"} else None
        files[file] = File(f"{name}/{file}", upstream, **sums)
    return DataSet(
        name=name,
        about=entry["about"],
        licence=entry["licence"],
        source=f"github.com/{entry['repository']} at {entry['commit'][:12]}",
        notice=entry.get("notice"),
        files=tuple(files.values()),
        names={short: files[file] for short, file in entry.get("names", {}).items()},
    )
