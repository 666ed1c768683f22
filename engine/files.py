"""Files and folders that a kill leaves whole: flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PROBE_BYTES = 1 << 16  # ours


class FullDisk(RuntimeError):
    """A disk has no room for what is to be written; says for what."""


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Within it `path` is written.

    Raises:
        FullDisk: that failed, and there is no room for more.
    """
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is no Exception
        if not isinstance(error, FullDisk) and (_says_so(error) or _is_full(path.parent)):
            raise FullDisk(f"{path}: no space left on the disk; make room and rerun to resume") from error
        raise


def _says_so(error: BaseException | None) -> bool:
    if error is None:
        return False
    own = (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in str(error)
    return own or _says_so(error.__cause__ or error.__context__)


def _is_full(folder: Path) -> bool:
    """Whether a little more fails: torch's C++ keeps the reason to itself."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in _FULL
    return False


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replaces a file: a reader or a kill meanwhile finds the old or the new one, whole. One writer.

    Raises:
        FullDisk: there is no room; the old one is still there.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    with room_for(path):
        path.parent.mkdir(parents=True, exist_ok=True)
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
    _remove(partial)
    partial.mkdir(parents=True)
    return partial


def replace_folder(partial: Path, final: Path, *, flushed: bool = False) -> None:
    """Flushes `partial` to the disk, unless that was done, and gives it its final name."""
    if not flushed:
        for path in partial.rglob("*"):
            if path.is_file():
                flush(path)
        flush(partial)
    _remove(final)
    os.replace(partial, final)
    flush(final.parent)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
