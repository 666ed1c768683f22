"""Download data sets with pooch, from public repositories at fixed commits, and check their checksums."""

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pooch
import requests

from smopd.data.places import DataSet, File
from smopd.data.sources import load_rows
from smopd.engine.files import CannotWrite, write_atomically

BASE_VARIABLE = "SMOPD_DATA_MIRROR"
"""Environment variable with a base URL that replaces GITHUB."""
GITHUB = "https://raw.githubusercontent.com"
RETRIES = 2  # ours
TIMEOUT_SECONDS = 60  # ours


def fetch(data_sets: Sequence[DataSet], folder: Path) -> tuple[list[str], list[str]]:
    """Download the missing files of the data sets and check the others.

    Returns:
        Messages about failed files, and messages about missing files without a public source.
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
                    f"{file.path}: no public file is known; put it at {path} by hand "
                    f"(sha256 {file.rows_sha256} uncompressed)"
                )
            else:
                fetch_file(file, file.upstream, folder)
        except (ValueError, OSError, CannotWrite) as error:
            failures.append(f"{file.path}: {' '.join(str(error).split())}")
            if isinstance(error.__cause__, requests.ConnectionError):
                break  # the other downloads would fail too
    return failures, by_hand


def check(path: Path, file: File) -> None:
    """Raise ValueError if the checksum of the file at `path` differs from the catalogue's."""
    expected = file.rows_sha256 or file.sha256 or file.git_sha1
    try:
        got = sum_of(path, file)
    except (OSError, EOFError, zlib.error) as error:
        got = f"no checksum ({error})"
    if got != expected:
        raise ValueError(f"{path} has {got}, expected {expected}; delete it to download it again")


def fetch_file(file: File, upstream: str, folder: Path) -> None:
    """Download a file, and convert it if the catalogue says so. A ValueError describes the manual steps."""
    arrived, known = file.path, file.sha256 and f"sha256:{file.sha256}"
    if file.rows_sha256:
        arrived = f"downloads/{str(file.sha256)[:8]}_{upstream.rpartition('/')[2]}"
    url = f"{(os.environ.get(BASE_VARIABLE) or GITHUB).rstrip('/')}/{upstream}"
    hashes, urls = {arrived: known}, {arrived: url}
    store = pooch.create(folder, base_url="", registry=hashes, urls=urls, retry_if_failed=RETRIES)
    try:
        bar = sys.stderr.isatty()
        store.fetch(arrived, downloader=pooch.HTTPDownloader(progressbar=bar, timeout=TIMEOUT_SECONDS))
        if file.rows_sha256:
            _pack(folder / arrived, folder / file.path, file.rows_sha256)
            (folder / arrived).unlink()
        elif file.sha256 is None and (got := sum_of(folder / arrived, file)) != file.git_sha1:
            (folder / arrived).unlink()
            raise ValueError(f"has {got}, expected {file.git_sha1}; nothing was kept")
        with suppress(OSError):  # pooch's files are readable only by their owner; SMB and FUSE refuse it
            (folder / arrived).chmod(folder.stat().st_mode & 0o666)
    except (requests.RequestException, ValueError) as error:
        again = ", and run this command again" if file.rows_sha256 else ""
        raise ValueError(
            f"{url}: {error}; by hand: put the file of that URL at {folder / arrived} "
            f"({file.sha256 or file.git_sha1}){again}"
        ) from error


def sum_of(path: Path, file: File) -> str:
    """Return the checksum of the file at `path`, of the same kind as the checksum in `file`."""
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
