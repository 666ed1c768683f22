"""Rows of a data set from files, a folder, a function or the hub. Rows of large files are read on access."""

import glob
import gzip
import inspect
import json
import os
import re
import shutil
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

from smopd.data.places import located
from smopd.engine.files import DamagedFile
from smopd.engine.hub import hub_responds
from smopd.engine.imports import IMPORT_PATH, import_function, user_code

Row: TypeAlias = "dict[str, Any]"

SOURCE_FORMS = (
    "a .jsonl, .json (both also .gz), .parquet, .csv or .arrow file, a pattern of such files, a folder of "
    "datasets.save_to_disk, a function as package.module:function, a short name of `python -m smopd.data`, "
    "or a hub data set as owner/name"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PATTERN = re.compile(r"[*?\[]")
JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
ARROW_SUFFIXES = (".parquet", ".csv", ".arrow")
FILE_SUFFIXES = (*JSON_SUFFIXES, *ARROW_SUFFIXES)


def load_rows(source: str, *, kwargs: Mapping[str, Any] | None = None) -> list[Row]:
    """Read all rows of a source into memory (see `open_rows`)."""
    return list(open_rows(source, kwargs=kwargs))


def open_rows(source: str, *, kwargs: Mapping[str, Any] | None = None) -> Sequence[Row]:
    """Return the rows of a source. Unless the result is a list, each row is read and checked on access.

    Args:
        source: one of SOURCE_FORMS. A .json file contains a list of objects, or JSON lines.
        kwargs: passed to a source that is a function, else to datasets.load_dataset (`split`: "train").
    Raises:
        FileNotFoundError: there is no such file or data set.
        ValueError: a row is not an object, a line is not JSON, or an argument does not fit the source.
    """
    options = dict(kwargs or {})
    if IMPORT_PATH.fullmatch(source) and not Path(source).exists():
        found = _call(source, options)
        if type(found).__module__.startswith("datasets."):
            return _arrow_rows(found)
        with user_code(source):
            found = list(found)
        return [checked_row(row, source, index) for index, row in enumerate(found)]
    path = located(source)
    if path.is_dir():
        return _read_arrow(path, (), **options)
    if path.is_file() or path.name.endswith(FILE_SUFFIXES) or _PATTERN.search(source):
        if options:
            raise ValueError(f"load_rows: source {source!r} is a file, which takes no kwargs")
        return _read_files(path)
    if not _HUB_ID.fullmatch(source) or path.parent.is_dir():
        raise FileNotFoundError(f"load_rows: no file {source!r}; a source is {SOURCE_FORMS}")
    return _read_hub(source, {"split": "train", **options})


def _read_files(path: Path) -> Sequence[Row]:
    """Return the rows of a file, or of all files that match a pattern, in order of their names."""
    matching = sorted(glob.glob(str(path), recursive=True))
    paths = [path] if path.is_file() else [*map(Path, matching)]
    if not paths:
        there = f"(looked for {path.absolute()}); a source is {SOURCE_FORMS}"
        raise FileNotFoundError(f"load_rows: no file {str(path)!r} {there}")
    kinds = {next((end for end in FILE_SUFFIXES if each.name.endswith(end)), each.suffix) for each in paths}
    if unknown := kinds - {*FILE_SUFFIXES}:
        kind = unknown.pop()
        raise ValueError(f"load_rows: file {str(path)!r} ends with {kind!r}; a source is {SOURCE_FORMS}")
    if len(kinds) > 1:
        raise ValueError(f"load_rows: {str(path)!r} matches files of the kinds {sorted(kinds)}, expected one")
    kind = kinds.pop()
    if kind in ARROW_SUFFIXES:
        return _read_arrow(path, paths)
    if kind.startswith(".jsonl"):
        return JsonLines(paths)
    listed = [_read_json(each) for each in paths]
    return JsonLines(paths) if None in listed else [row for rows in listed for row in rows or ()]


class JsonLines(Sequence[Row]):
    """Rows of files of JSON lines, read and parsed on access."""

    def __init__(self, paths: Sequence[Path]):
        self._paths, self._files = paths, list[Any]()
        self._places = array("Q")  # file, offset and length of each row
        for number, path in enumerate(paths):
            begin = 0
            with _unpacked(path) as file:
                for line in file:
                    if line.strip():
                        self._places.extend((number, begin, len(line)))
                    begin += len(line)
                opened = os.fdopen(os.dup(file.fileno()), "rb", buffering=0)
                self._files.append((opened, _state(opened)))

    def __len__(self) -> int:
        return len(self._places) // 3

    def __getitem__(self, index: Any) -> Any:
        number, begin, length = (self._places[3 * index + i] for i in range(3))
        file, before = self._files[number]
        if _state(file) != before:
            raise DamagedFile(f"{self._paths[number]}: was changed during its use; restore it to resume")
        line = os.pread(file.fileno(), length, begin).rstrip(b"\n")
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # a number is too long, or nesting is too deep
            why, text = str(error), line[:60].decode(errors="replace")
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg}: character {error.pos + 1}"
                text = line.decode()[max(0, error.pos - 40) : error.pos + 20]
            elif isinstance(error, UnicodeDecodeError):
                text = line[max(0, error.start - 40) : error.start + 20].decode(errors="replace")
            line_number = os.pread(file.fileno(), begin, 0).count(b"\n") + 1
            raise ValueError(
                f"{self._paths[number]}: line {line_number} is not JSON in UTF-8 ({why}): {text!r}"
            ) from error
        return checked_row(row, str(self._paths[number]), index)


def _state(file: IO[bytes]) -> tuple[int, int]:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns


class ArrowRows(Sequence[Row]):
    """Rows of a `datasets.Dataset`, without the None values that Arrow adds to nested objects."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return {name: without_filled(value) for name, value in self._dataset[index].items()}

    def __iter__(self) -> Iterator[Row]:
        for row in self._dataset:
            yield {name: without_filled(value) for name, value in row.items()}


def _arrow_rows(dataset: Any) -> Sequence[Row]:
    """Return the rows of a data set. The rows of a stream are read into memory."""
    rows = ArrowRows(dataset)
    return rows if hasattr(dataset, "__len__") else list(rows)


def without_filled(value: Any) -> Any:
    """Remove None fields from a nested value. Arrow adds them to give objects of a column equal fields."""
    if isinstance(value, Mapping):
        return {name: without_filled(inner) for name, inner in value.items() if inner is not None}
    return [without_filled(inner) for inner in value] if isinstance(value, list) else value


def _call(source: str, options: dict[str, Any]) -> Iterable[Any]:
    function = import_function(source)
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ValueError(f"{source}: cannot be called with {options}: {error}") from error
    with user_code(source):
        found = function(**options)
    if isinstance(found, (str, Mapping)) or not isinstance(found, Iterable):
        raise ValueError(f"{source}: returned a {type(found).__name__}, expected rows")
    return found


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file. A .gz file is first unpacked into a temporary file."""
    with open(path, "rb") as file:
        if path.suffix != ".gz":
            yield file
            return
        with tempfile.TemporaryFile() as plain:
            try:
                with gzip.open(file) as packed:
                    shutil.copyfileobj(packed, plain)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise ValueError(f"{path}: cannot be unpacked ({error})") from error
            plain.seek(0)
            yield plain


def _read_json(path: Path) -> list[Row] | None:
    """Return the rows of a .json file that contains a list, or None if it contains JSON lines."""
    with _unpacked(path) as file:
        content = file.read().lstrip()
    if not content.startswith(b"["):
        return None
    try:
        found = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not JSON in UTF-8 ({error})") from error
    return [checked_row(row, str(path), index) for index, row in enumerate(found)]


def _read_arrow(path: Path, paths: Sequence[Path], **options: Any) -> Sequence[Row]:
    """Return the rows of files of one kind, a folder of data files, or a folder made by save_to_disk."""
    from datasets import Dataset, DatasetDict, concatenate_datasets, load_dataset, load_from_disk

    names, kind = [str(each) for each in paths], paths[0].suffix[1:] if paths else ""
    patterns, split = list(map(glob.escape, names)), options.pop("split", None)
    try:
        if kind == "arrow":
            return ArrowRows(concatenate_datasets([Dataset.from_file(name) for name in names]))
        if kind:
            return ArrowRows(load_dataset(kind, data_files=patterns, split="train"))
        if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            return _arrow_rows(load_dataset(str(path.absolute()), split=split or "train", **options))
        found = load_from_disk(path)
        if split not in (None, "train") and not isinstance(found, DatasetDict):
            options["split"] = split
        if options:
            raise ValueError(f"it takes no {next(iter(options))!r}")
        return ArrowRows(found[split or "train"] if isinstance(found, DatasetDict) else found)
    except Exception as error:  # pyarrow, pandas and datasets have different exceptions
        why = str(error.__cause__ or error).partition("\n")[0]
        raise ValueError(f"{path}: cannot be read, split {split or 'train'!r} ({why})") from error


def _read_hub(source: str, options: dict[str, Any]) -> Sequence[Row]:
    from datasets import config, load_dataset
    from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

    try:
        if not hub_responds() and not Path(config.HF_DATASETS_CACHE, source.replace("/", "___")).exists():
            raise ConnectionError("the hub cannot be reached, and its cache has no copy")
        return _arrow_rows(load_dataset(source, **options))
    except (RuntimeError, DatasetGenerationError) as error:  # a script, or files that cannot be read
        raise ValueError(f"{source}: cannot be read ({error.__cause__ or error})") from error
    except (DatasetNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"load_rows: {source!r} is neither a file here nor a data set on the hub ({error}); "
            f"a source is {SOURCE_FORMS}"
        ) from error


def checked_row(row: Any, source: str, index: int) -> Row:
    """Return the row as a new dictionary. Raise ValueError if it is not an object with texts as keys."""
    if not isinstance(row, Mapping):
        raise ValueError(f"{source}: row {index} is a {type(row).__name__}, expected an object of columns")
    if odd := [name for name in row if not isinstance(name, str)]:
        raise ValueError(f"{source}: row {index} has the column {odd[0]!r}, expected a text as its name")
    return dict(row)
