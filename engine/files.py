"""Files and folders that a kill leaves whole: flushed to the disk, then renamed. Imports no torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces a file: a reader or a kill meanwhile finds the old or the new one, whole. One writer."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    flush(path.parent)


def empty_partial(final: Path) -> Path:
    """A new folder beside `final`, to be filled and then given to `replace_folder`."""
    partial = final.with_name(f"{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def replace_folder(partial: Path, final: Path, *, flushed: bool = False) -> None:
    """Flushes `partial` to the disk, unless that was done, and gives it its final name."""
    if not flushed:
        for path in partial.rglob("*"):
            if path.is_file():
                flush(path)
        flush(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    flush(final.parent)


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
