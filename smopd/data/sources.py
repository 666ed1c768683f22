"""Where rows of prompts come from: a file, a function by import path, or a data set here or of the hub."""

from __future__ import annotations

import gzip
import inspect
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from smopd.data.places import located, short_names
from smopd.engine.imports import IMPORT_PATH, import_function

Row: TypeAlias = "dict[str, Any]"

SOURCE_FORMS = (
    "a .jsonl, .json (both also .gz) or .parquet file, a function as package.module:function, "
    "a short name of `python -m smopd.data`, or a hub data set as owner/name"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILE_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def load_rows(source: str, *, kwargs: Mapping[str, Any] | None = None) -> list[Row]:
    """Read the rows of a source.

    Args:
        source: one of SOURCE_FORMS; a .json file holds a list of objects, or JSON lines.
        kwargs: passed to the function, or to datasets.load_dataset (`split`: "train" where not given).
    Raises:
        FileNotFoundError: there is no such file or data set.
        ValueError: a row is no object, a line no JSON, or an argument does not fit the source.
    """
    options = dict(kwargs or {})
    if source in short_names() or source.endswith(FILE_SUFFIXES) or Path(source).expanduser().is_file():
        if options:
            raise ValueError(f"load_rows: source {source!r} is a file, which takes no kwargs")
        found = _read_file(located(source))
    elif IMPORT_PATH.fullmatch(source):
        found = _call(source, options)
    elif _HUB_ID.fullmatch(source):
        found = _read_hub(source, {"split": "train", **options})
    else:
        raise FileNotFoundError(f"load_rows: no file {source!r}; a source is {SOURCE_FORMS}")
    return [checked_row(row, source, index) for index, row in enumerate(found)]


def _read_file(path: Path) -> Iterable[Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"load_rows: no file {str(path)!r} (looked for {path.absolute()}); a source is {SOURCE_FORMS}"
        )
    if path.name.endswith(".parquet"):
        return _read_parquet(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _read_json_lines(path)
    if path.name.endswith((".json", ".json.gz")):
        return _read_json(path)
    raise ValueError(f"load_rows: file {str(path)!r} has no known ending; a source is {SOURCE_FORMS}")


def _call(source: str, options: dict[str, Any]) -> Iterable[Any]:
    function = import_function(source)
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ValueError(f"{source}: cannot be called with {options}: {error}") from error
    found = function(**options)
    if isinstance(found, (str, Mapping)) or not isinstance(found, Iterable):
        raise ValueError(f"{source}: returned a {type(found).__name__}, expected rows")
    return found


def _lines(path: Path) -> Iterator[str]:
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            yield from lines
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text ({error})") from error


def _read_json_lines(path: Path) -> Iterator[Any]:
    for number, line in enumerate(_lines(path), start=1):
        if line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                why = getattr(error, "msg", error)  # a number too long, or nested too deep
                raise ValueError(f"{path}: line {number} is no JSON ({why}): {line[:60]!r}") from error


def _read_json(path: Path) -> Iterable[Any]:
    content = "".join(_lines(path))
    try:
        found = json.loads(content)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise ValueError(f"{path}: line {error.lineno} is no JSON ({error.msg})") from error
        return _read_json_lines(path)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(found, list):
        kind = type(found).__name__
        raise ValueError(f"{path}: holds one {kind}, expected a list of objects or JSON lines")
    return found


def _read_parquet(path: Path) -> Iterable[Any]:
    from pyarrow import ArrowInvalid, parquet

    try:
        return parquet.read_table(path).to_pylist()
    except ArrowInvalid as error:
        raise ValueError(f"{path}: is no parquet file ({error})") from error


def _read_hub(source: str, options: dict[str, Any]) -> Iterable[Any]:
    from datasets import load_dataset
    from datasets.exceptions import DatasetNotFoundError

    try:
        return load_dataset(source, **options)
    except (DatasetNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"load_rows: {source!r} is no file here and no data set that the hub gave ({error}); "
            f"a source is {SOURCE_FORMS}"
        ) from error


def checked_row(row: Any, source: str, index: int) -> Row:
    """The row as a dictionary of its own; ValueError where it is no object."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{source}: row {index} is a {type(row).__name__}, expected an object of columns")
    return dict(row)
