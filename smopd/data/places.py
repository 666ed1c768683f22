"""Where data lies: $SMOPD_DATA, otherwise the user's cache folder; and short names of what is in it.

A short name (`rlla/test`, `bfcl`; `python -m smopd.data` lists the data sets) may stand wherever a path is
asked for, `smollm2` where a recipe names its starting model and an evaluation its own. It comes before a path
and a hub id of the same letters: write ./bfcl for a folder of that name.
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


def here(name: str) -> bool:
    """Whether the file or folder of a short name is there."""
    return _place(name).exists()


def located(given: str | os.PathLike[str]) -> Path:
    """The path of a short name, or the given path itself, which may be absent.

    Raises:
        FileNotFoundError: a short name's file or folder is absent; says how it is fetched.
    """
    name = os.fspath(given)
    if not is_short_name(name):
        return Path(name).expanduser()
    if not here(name):
        raise FileNotFoundError(f"{name} is absent: no {_place(name)}{how_to_fetch(_place(name))}")
    return _place(name)


def model_place(given: str) -> str:
    """As `located`, of a model: what is no short name, a path or a hub id, stays as it is given."""
    return str(located(given)) if is_short_name(given) else given


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


def _place(name: str) -> Path:
    return data_folder() / short_names()[name]
