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


def replace_folder(partial: Path, final: Path) -> None:
    """Flushes `partial` to the disk and gives it its final name."""
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
