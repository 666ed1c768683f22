"""The catalogue of data sets, their short names, and the data folder.

A short name such as `rlla/test` or `snips` is allowed wherever a data path is. It takes precedence over a
path or hub id of the same name. Write ./snips for a local folder.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from platformdirs import user_cache_path

VARIABLE = "SMOPD_DATA"


@dataclass(frozen=True)
class File:
    """A file of a data set, with its path in the data folder and its checksums."""

    path: str
    upstream: str | None
    """OWNER/NAME/COMMIT/PATH of the public file, or None if there is no public file."""
    bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    """The hash that `git hash-object` prints."""
    rows_sha256: str | None = None
    """Checksum of the uncompressed JSON lines, for a file that is converted to gzipped JSON lines."""


@dataclass(frozen=True)
class DataSet:
    """A folder of files. `names` maps a file's short name, such as `test` of `rlla/test`, to the file."""

    name: str
    about: str
    licence: str
    source: str
    files: tuple[File, ...]
    notice: str | None = None
    names: Mapping[str, str] = field(default_factory=dict)


@cache
def catalogue() -> dict[str, DataSet]:
    """Return the data sets of catalogue.yaml by name."""
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
    source = f"github.com/{entry['repository']} at {entry['commit'][:12]}"
    own = {key: entry[key] for key in ("about", "licence", "notice", "names") if key in entry}
    return DataSet(name, source=source, files=tuple(files), **own)


@cache
def short_names() -> dict[str, str]:
    """Return short name -> path in the data folder, for files (`rlla/test`) and folders (`rlla`)."""
    found = {name: name for name in catalogue()}
    for each in catalogue().values():
        found |= {f"{each.name}/{short}": f"{each.name}/{file}" for short, file in each.names.items()}
    return found


def data_folder() -> Path:
    """Return the data folder: $SMOPD_DATA, or smopd's folder in the user's cache."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else user_cache_path("smopd")


def located(given: str | os.PathLike[str]) -> Path:
    """Return the path that a short name stands for, or else the given path, which may not exist.

    Raises:
        FileNotFoundError: the data of a short name is absent. The message has the command that fetches it.
    """
    name = os.fspath(given)
    if name not in short_names():
        return Path(name).expanduser()
    place = data_folder() / short_names()[name]
    if not place.exists():
        raise FileNotFoundError(f"{name} is absent: no {place}{how_to_fetch(place)}")
    return place


def how_to_fetch(path: Path) -> str:
    """Return `; COMMAND fetches it` for a message about an absent path, or "" for a path of no data set."""
    folder = data_folder()
    name = path.relative_to(folder).parts[:1] if path.is_relative_to(folder) else ()
    if not name or name[0] not in catalogue():
        return ""
    now = os.environ.get(VARIABLE) or "not set"
    return f"; `python -m smopd.data fetch {name[0]}` fetches it, or {VARIABLE} ({now}) names another folder"
