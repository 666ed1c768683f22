"""Logs of JSON lines that survive a killed process and can be cut after a step."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from smopd.engine.files import DamagedFile, flush, room_for, write_atomically


class JsonlLog:
    """An append-only file of JSON lines, each with an integer `step`.

    A killed process leaves at most one incomplete line at the end.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line, with null for NaN and infinities. Raises CannotWrite if the disk refuses it."""
        with room_for(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            append_line(self.path, _encoded(record))

    def replace(self, records: Sequence[dict[str, Any]]) -> None:
        """Replace all lines of the file with `records`, atomically."""
        write_atomically(self.path, b"".join(map(_encoded, records)))

    def flush(self) -> None:
        if self.path.exists():
            with room_for(self.path):
                flush(self.path)

    def read(self) -> list[dict[str, Any]]:
        """Return all complete lines. Raises DamagedFile if one of them is invalid."""
        return [record for _, record in self._lines()]

    def cut(self, after_step: int) -> None:
        """Remove the lines of steps after `after_step` and an incomplete last line, atomically.

        Raises:
            DamagedFile: a complete line is invalid. The file is then unchanged.
        """
        kept = b"".join(raw for raw, record in self._lines() if record["step"] <= after_step)
        if self.path.exists() and self.path.read_bytes() != kept:
            write_atomically(self.path, kept)

    def _lines(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        data = self.path.read_bytes() if self.path.exists() else b""
        for number, raw in enumerate(data.splitlines(keepends=True), 1):
            if not raw.endswith(b"\n"):
                return
            try:
                record = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise DamagedFile(f"{self.path}, line {number}: not JSON: {error}") from None
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise DamagedFile(f"{self.path}, line {number}: not an object with an integer `step`")
            yield raw, record


def append_line(path: Path, line: bytes) -> None:
    """Append a line. First remove an incomplete last line, which a kill or a full disk may have left."""
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line)


def _encoded(record: dict[str, Any]) -> bytes:
    return (json.dumps(_finite(record), allow_nan=False, default=str) + "\n").encode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
