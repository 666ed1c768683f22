"""Downloads data sets with pooch: each file from its public repository, at one commit, checked by its sum."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import pooch
import requests

from smopd.data.places import DataSet, File
from smopd.data.sources import load_rows
from smopd.engine.files import write_atomically

BASE_VARIABLE = "SMOPD_DATA_MIRROR"
"""Base of the URLs instead of GITHUB."""
GITHUB = "https://raw.githubusercontent.com"
RETRIES = 2  # ours
TIMEOUT_SECONDS = 60  # ours


def fetch(data_sets: Sequence[DataSet], folder: Path) -> tuple[list[str], list[str]]:
    """Fetch what is absent of the data sets, with a progress bar where standard error is a terminal.

    Returns:
        Lines on what failed, and lines on what has to be put there by hand, for no public file is known.
    """
    failures: list[str] = []
    by_hand: list[str] = []
    for file in (file for data_set in data_sets for file in data_set.files):
        path = folder / file.path
        try:
            if path.is_file():
                check(path, file)
            elif file.upstream is None:
                by_hand.append(
                    f"{file.path}: no public file is known that gives it; put it at {path} by hand "
                    f"(unpacked, sha256 {file.rows_sha256})"
                )
            else:
                fetch_file(file, file.upstream, folder)
        except (ValueError, OSError) as error:
            failures.append(f"{file.path}: {' '.join(str(error).split())}")
            if isinstance(error.__cause__, requests.ConnectionError):
                break  # no other file can be had either
    return failures, by_hand


def check(path: Path, file: File) -> None:
    """Raise ValueError where another file than the catalogue's lies at the path."""
    expected = file.rows_sha256 or file.sha256 or file.git_sha1
    try:
        got = sum_of(path, file)
    except (OSError, EOFError, zlib.error) as error:
        got = f"no sum ({error})"
    if got != expected:
        raise ValueError(f"{path} has {got}, expected {expected}; delete it to have it fetched")


def fetch_file(file: File, upstream: str, folder: Path) -> None:
    """Download a file, or make it of the upstream one; ValueError says what to put where by hand."""
    arrived, known = file.path, file.sha256 and f"sha256:{file.sha256}"
    if file.rows_sha256:
        arrived = f"downloads/{str(file.sha256)[:8]}_{upstream.rpartition('/')[2]}"
    url = f"{(os.environ.get(BASE_VARIABLE) or GITHUB).rstrip('/')}/{upstream}"
    store = pooch.create(
        folder, base_url="", registry={arrived: known}, urls={arrived: url}, retry_if_failed=RETRIES
    )
    try:
        bar = sys.stderr.isatty()
        store.fetch(arrived, downloader=pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT_SECONDS))
        if file.rows_sha256:
            _pack(folder / arrived, folder / file.path, file.rows_sha256)
            (folder / arrived).unlink()
        elif file.sha256 is None and (got := sum_of(folder / arrived, file)) != file.git_sha1:
            (folder / arrived).unlink()
            raise ValueError(f"has {got}, expected {file.git_sha1}; nothing was kept")
    except (requests.RequestException, ValueError) as error:
        again = ", and run this command again" if file.rows_sha256 else ""
        raise ValueError(
            f"{url}: {error}; by hand: put the file of that URL at {folder / arrived} "
            f"({file.sha256 or file.git_sha1}){again}"
        ) from error


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
        raise ValueError(f"its rows have sha256 {got}, expected {expected}")
    write_atomically(target, gzip.compress(lines, mtime=0))
