"""The data sets that the project's recipes, suites and tests use, their short names, and their folder.

A short name (`rlla/test`, `snips`; `python -m smopd.data` lists the data sets) may stand wherever a path of
data is asked for. It comes before a path and a hub id of the same letters: write ./snips for such a folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from platformdirs import user_cache_path

from smopd.names import nearest

VARIABLE = "SMOPD_DATA"
ALIASES = {"safety": "safe"}
"""The suite's name for a data set, on the command line."""


@dataclass(frozen=True)
class File:
    """A file of a data set: its path in the folder of all data, and its sums."""

    path: str
    upstream: str | None
    """OWNER/NAME/COMMIT/PATH of the public file that it is or is made of; None: none is known."""
    bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    """Of the upstream file, as the two before; git's own sum (`git hash-object`)."""
    rows_sha256: str | None = None
    """Where this file is packed JSON lines: of the unpacked lines."""


@dataclass(frozen=True)
class DataSet:
    """A data set: a folder of files. `names` are the short names of its files, without its own name."""

    name: str
    about: str
    licence: str
    source: str
    notice: str | None
    files: tuple[File, ...]
    names: Mapping[str, str]


@cache
def catalogue() -> dict[str, DataSet]:
    """The data sets by name, from catalogue.yaml."""
    text = Path(__file__).with_name("catalogue.yaml").read_text(encoding="utf-8")
    return {name: _data_set(name, entry) for name, entry in yaml.safe_load(text).items()}


def _data_set(name: str, entry: Mapping[str, Any]) -> DataSet:
    root = "/".join(entry[key] for key in ("repository", "commit", "under") if key in entry)
    files = []
    for file, values in entry["files"].items():
        sums = {key: values[key] for key in values.keys() - {"from"}}
        known = "sha256" in sums or "git_sha1" in sums
        upstream = f"{root}/{values.get('from', file)}" if known else None
        files.append(File(f"{name}/{file}", upstream, **sums))
    return DataSet(
        name=name,
        about=entry["about"],
        licence=entry["licence"],
        source=f"github.com/{entry['repository']} at {entry['commit'][:12]}",
        notice=entry.get("notice"),
        files=tuple(files),
        names=entry.get("names", {}),
    )


def data_set(name: str) -> DataSet:
    """The data set of a name, or of another name in ALIASES; ValueError says which there are."""
    known = catalogue()
    found = known.get(ALIASES.get(name, name))
    if found is None:
        hint = nearest(name, (*known, *ALIASES)) or "; there are " + ", ".join(known)
        raise ValueError(f"no data set {name!r}{hint}")
    return found


@cache
def short_names() -> dict[str, str]:
    """Short name -> path inside the folder of all data: `rlla/test`, and of a whole folder `rlla`."""
    found = {name: name for name in catalogue()}
    for each in catalogue().values():
        found |= {f"{each.name}/{short}": f"{each.name}/{file}" for short, file in each.names.items()}
    return found


def is_short_name(given: str | os.PathLike[str]) -> bool:
    return os.fspath(given) in short_names()


def data_folder() -> Path:
    """The folder of all data: $SMOPD_DATA, otherwise the user's cache folder of smopd."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else user_cache_path("smopd")


def located(given: str | os.PathLike[str]) -> Path:
    """The path of a short name, or the given path itself, which may be absent.

    Raises:
        FileNotFoundError: what a short name stands for is absent; says how it is fetched.
    """
    name = os.fspath(given)
    if not is_short_name(name):
        return Path(name).expanduser()
    place = data_folder() / short_names()[name]
    if not place.exists():
        raise FileNotFoundError(f"{name} is absent: no {place}{how_to_fetch(place)}")
    return place


def how_to_fetch(path: Path) -> str:
    """The end of an error message on an absent path: `; COMMAND fetches it`, or nothing outside the data."""
    folder = data_folder()
    name = path.relative_to(folder).parts[:1] if path.is_relative_to(folder) else ()
    if not name or name[0] not in catalogue():
        return ""
    now = os.environ.get(VARIABLE) or "not set"
    return f"; `python -m smopd.data fetch {name[0]}` fetches it, or {VARIABLE} ({now}) names another folder"
