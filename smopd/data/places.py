"""Where data lies: $SMOPD_DATA, otherwise the user's cache folder; and short names of what is in it.

A short name (`rlla/test`, `snips`; `python -m smopd.data` lists the data sets) may stand wherever a path of
data is asked for. It comes before a path and a hub id of the same letters: write ./snips for such a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_cache_path

from smopd.data.catalogue import short_names

VARIABLE = "SMOPD_DATA"


def data_folder() -> Path:
    """The folder of all data: $SMOPD_DATA, otherwise the user's cache folder of smopd."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else user_cache_path("smopd")


def is_short_name(given: str | os.PathLike[str]) -> bool:
    return os.fspath(given) in short_names()


def located(given: str | os.PathLike[str]) -> Path:
    """The path of a short name, or the given path itself, which may be absent.

    Raises:
        FileNotFoundError: a short name's file or folder is absent; says how it is fetched.
    """
    name = os.fspath(given)
    if not is_short_name(name):
        return Path(name).expanduser()
    place = data_folder() / short_names()[name]
    if not place.exists():
        raise FileNotFoundError(f"{name} is absent: no {place}{how_to_fetch(place)}")
    return place


def how_to_fetch(path: Path) -> str:
    """The end of an error message on an absent path: `; COMMAND fetches it`, or nothing outside the data.

    Args:
        path: absolute, or relative like the folder of all data.
    """
    folder = data_folder()
    name = path.relative_to(folder).parts[:1] if path.is_relative_to(folder) else ()
    if not name or name[0] not in short_names():
        return ""
    now = os.environ.get(VARIABLE) or "not set"
    return f"; `python -m smopd.data fetch {name[0]}` fetches it, or {VARIABLE} ({now}) names another folder"
