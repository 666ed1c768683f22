"""Downloads data sets with pooch: each file from its public repository, at one commit, checked by its sum."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import pooch
import requests

from smopd.data.catalogue import DataSet, File
from smopd.data.places import data_folder
from smopd.data.sources import load_rows
from smopd.engine.files import write_atomically

BASE_VARIABLE = "SMOPD_DATA_MIRROR"
GITHUB = "https://raw.githubusercontent.com"
"""OWNER/NAME/COMMIT/PATH below it is a file of a public repository."""
DOWNLOADS = "downloads"
"""Folder, in that of all data, of files that others are made of."""
RETRIES = 2  # ours
TIMEOUT_SECONDS = 60  # ours


class FetchError(Exception):
    """One file that could not be had, in a line."""


class Unreachable(FetchError):
    """No connection: no other file can be had either."""


def fetch(
    data_sets: Sequence[DataSet], *, folder: Path | None = None, base: str | None = None
) -> tuple[list[str], list[str]]:
    """Fetch what is absent of the data sets, with a progress bar where standard error is a terminal.

    Args:
        folder: of all data; None is `data_folder()`.
        base: of the URLs; None is $SMOPD_DATA_MIRROR, otherwise GITHUB.
    Returns:
        Lines on what failed, and lines on what has to be put there by hand, for no public file is known.
    """
    folder = data_folder() if folder is None else folder
    base = base or os.environ.get(BASE_VARIABLE) or GITHUB
    failures: list[str] = []
    by_hand: list[str] = []
    for file in (file for data_set in data_sets for file in data_set.files):
        try:
            if is_here(file, folder):
                continue
            if file.upstream is None:
                by_hand.append(
                    f"{file.path}: no public file is known that gives it; put it at {folder / file.path} by "
                    f"hand (unpacked, sha256 {file.rows_sha256})"
                )
            else:
                fetch_file(file, folder, base)
        except Unreachable as error:
            return [*failures, str(error)], by_hand
        except (FetchError, OSError) as error:
            failures.append(str(error))
    return failures, by_hand


def is_here(file: File, folder: Path) -> bool:
    """Whether the file is in place.

    Raises:
        FetchError: another file is.
    """
    path = folder / file.path
    if not path.is_file():
        return False
    expected = file.rows_sha256 or file.sha256 or file.git_sha1
    try:
        got = sum_of(path, file)
    except (OSError, EOFError) as error:
        raise FetchError(f"{path}: cannot be read ({error}); delete it to have it fetched") from None
    if got != expected:
        raise FetchError(f"{path}: has {got}, expected {expected}; delete it to have it fetched")
    return True


def fetch_file(file: File, folder: Path, base: str) -> None:
    """Download a file, or make it of the one that is downloaded.

    Raises:
        FetchError: it could not be had, or is another one.
        Unreachable: there is no connection.
    """
    upstream = str(file.upstream)
    arrived = file.path
    if file.rows_sha256:
        arrived = f"{DOWNLOADS}/{str(file.sha256)[:8]}_{upstream.rpartition('/')[2]}"
    url = f"{base.rstrip('/')}/{upstream}"
    known = {arrived: file.sha256 and f"sha256:{file.sha256}"}
    store = pooch.create(folder, base_url="", registry=known, urls={arrived: url}, retry_if_failed=RETRIES)
    try:
        bar = sys.stderr.isatty()
        store.fetch(arrived, downloader=pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT_SECONDS))
        if file.rows_sha256:
            _pack(folder / arrived, folder / file.path, file.rows_sha256)
            (folder / arrived).unlink()
        elif file.git_sha1 and (got := sum_of(folder / arrived, file)) != file.git_sha1:
            (folder / arrived).unlink()
            raise FetchError(f"has {got}, expected {file.git_sha1}; nothing was kept")
    except (FetchError, requests.RequestException, ValueError) as error:
        kind = Unreachable if isinstance(error, requests.ConnectionError) else FetchError
        again = ", and run this command again" if file.rows_sha256 else ""
        said = " ".join(str(error).split())
        raise kind(
            f"{file.path}: {url}: {said}; by hand: put the file of that URL at {folder / arrived} "
            f"({file.sha256 or file.git_sha1}){again}"
        ) from None


def sum_of(path: Path, file: File) -> str:
    """The sum by which the catalogue knows what lies at the path."""
    content = path.read_bytes()
    if file.rows_sha256:
        content = gzip.decompress(content)
    elif file.sha256 is None:
        return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()
    return hashlib.sha256(content).hexdigest()


def _pack(source: Path, target: Path, expected: str) -> None:
    rows = load_rows(str(source))
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
    if (got := hashlib.sha256(lines).hexdigest()) != expected:
        raise FetchError(f"its rows have sha256 {got}, expected {expected}")
    write_atomically(target, gzip.compress(lines, mtime=0))
