"""Atomic writes of files and folders. A new version is flushed to the disk and then renamed."""

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from smopd.engine.errors import Failure

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (
    errno.EROFS, errno.ESTALE, errno.EFBIG, errno.EIO, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG,
)  # fmt: skip
_NUMBER = re.compile(r"(?:\[Errno|os error) (\d+)")  # the error number in messages of torch and safetensors
_TORCH_WRITES = "PytorchStreamWriter failed"  # text of torch's C++ errors, which give no reason
_PROBE_BYTES = 1 << 16  # ours


class CannotWrite(Failure, RuntimeError):
    """A file cannot be written because the disk is full, read-only or gone, or because a limit is reached."""


class DamagedFile(Failure, ValueError):
    """A run's file whose content differs from what the run wrote."""


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Convert an exception inside the context to CannotWrite if the disk caused it."""
    try:
        yield
    except BaseException as error:  # torch's CheckpointException is only a BaseException
        if isinstance(error, CannotWrite):
            raise
        if (reason := _reason(error)) not in (*_FULL, *_REFUSED):  # test whether the disk is the cause
            reason = _small_write(path.parent) or reason
        if reason in _FULL:
            raise CannotWrite(f"{path}: no space left on the disk; make room and rerun to resume") from error
        if reason is not None:
            why = os.strerror(reason) if reason else "the write failed"
            raise CannotWrite(f"{path}: cannot be written ({why}); rerun to resume") from error
        raise


def _reason(error: BaseException | None) -> int | None:
    """Return the system's error number. If there is none, return 0 for a failed write of torch, else None."""
    if error is None:
        return None
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := _NUMBER.search(str(error)):
        return int(found[1])
    for number in (*_FULL, *_REFUSED):
        if os.strerror(number) in str(error):
            return number
    cause = _reason(error.__cause__ or error.__context__)
    return 0 if cause is None and _TORCH_WRITES in str(error) else cause


def _small_write(folder: Path) -> int | None:
    """Try a small write to `folder`. Return its error number, or None if it succeeds."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno
    return None


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace a file atomically. Even after CannotWrite, the file is whole. Only one process may write it."""
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
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
        flush(path.parent)


def read_json(path: Path, **fields: type) -> dict[str, Any]:
    """Return the object in a JSON file. `fields` names the required fields and their types.

    Raise DamagedFile if the file is not valid JSON, is not an object, or lacks a field of the required type.
    """
    try:
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("not an object")
        for name, kind in fields.items():
            if type(found.get(name)) is not kind:
                raise ValueError(f"{name} is {found.get(name)!r:.40}, expected {kind.__name__}")
        return found
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path}: is damaged ({error}); restore or remove it") from None


def empty_partial(final: Path) -> Path:
    """Create an empty folder beside `final`. The caller fills it and passes it to `replace_folder`."""
    partial = final.with_name(f"{final.name}.partial")
    _remove(partial)
    partial.mkdir(parents=True)
    return partial


def replace_folder(partial: Path, final: Path, *, flushed: bool = False) -> None:
    """Replace the folder `final` by `partial`. Unless `flushed`, flush `partial` to the disk first."""
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
    """Call fsync on a file or folder. Ignore EINVAL, which SMB, FUSE and others may return for folders."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)
