"""JSON lines that survive a kill and can be cut back to a step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from smopd.engine.files import flush, room_for, write_atomically


class DamagedLog(ValueError):
    """A line of a log is none that was written to it; says which."""


class JsonlLog:
    """A file of JSON lines that is only appended to, each with its integer `step`; a step may have several.

    A killed process leaves at most one torn line at the end. Whoever resumes calls `cut` before it writes.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def write(self, record: dict[str, Any]) -> None:
        """Appends one line; NaN and infinities become null.

        Raises:
            FullDisk: there is no room; at most a torn line is left, as by a kill.
        """
        text = json.dumps(_finite(record), allow_nan=False, default=str) + "\n"
        with room_for(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(text.encode("ascii"))

    def flush(self) -> None:
        """fsync; nothing where there is no file."""
        if self.path.exists():
            with room_for(self.path):
                flush(self.path)

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; none where there is no file.

        Raises:
            DamagedLog: a whole line is none of ours, named by its number.
        """
        return [record for _, record in self._lines()]

    def cut(self, after_step: int) -> None:
        """Drops the lines of later steps and a torn last line, atomically.

        Raises:
            DamagedLog: a whole line is none of ours, which no kill explains; the file is left alone.
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
                raise DamagedLog(f"{self.path}, line {number}: no JSON: {error}") from None
            if not isinstance(record, dict) or type(record.get("step")) is not int:
                raise DamagedLog(f"{self.path}, line {number}: no object with an integer `step`")
            yield raw, record


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
