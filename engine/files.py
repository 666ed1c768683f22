"""Atomic writes of files and folders: flushed to the disk, then renamed."""

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
    """There is no space left on the disk."""


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Raise FullDisk for an error inside the context that comes from a full disk."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is not an Exception
        if not isinstance(error, FullDisk) and (_says_so(error) or _is_full(path.parent)):
            raise FullDisk(f"{path}: no space left on the disk; make room and rerun to resume") from error
        raise


def _says_so(error: BaseException | None) -> bool:
    if error is None:
        return False
    own = (isinstance(error, OSError) and error.errno in _FULL) or os.strerror(errno.ENOSPC) in str(error)
    return own or _says_so(error.__cause__ or error.__context__)


def _is_full(folder: Path) -> bool:
    """Return whether a small write fails; torch's C++ errors do not name their reason."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno in _FULL
    return False


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file atomically; after FullDisk the old one is unchanged. Call from one process at a time."""
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
    """Create an empty folder beside `final`, to fill and pass to `replace_folder`."""
    partial = final.with_name(f"{final.name}.partial")
    _remove(partial)
    partial.mkdir(parents=True)
    return partial


def replace_folder(partial: Path, final: Path, *, flushed: bool = False) -> None:
    """Flush `partial` to the disk unless `flushed`, and rename it to `final`."""
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
    """Call fsync on a file or folder. Some file systems (SMB, FUSE) refuse it for folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)
