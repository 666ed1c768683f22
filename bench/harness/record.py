"""Where and with what a row was measured, and JSON lines of rows."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def surroundings(device: str) -> dict:
    """Commit, device, versions and threads: the same in every row of a run."""
    here = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
    }
    return here if device == "cpu" else here | {"cuda": torch.version.cuda}


def device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def slug(device: str) -> str:
    """A file name's part for this device and number of threads."""
    name = re.sub(r"[^a-z0-9]+", "-", device_name(device).lower()).strip("-")
    return name if device != "cpu" else f"{name}-{torch.get_num_threads()}t"


@functools.cache
def commit() -> str | None:
    """The checkout's commit, "-dirty" where files differ from it; SMOPD_COMMIT where there is no git."""
    if given := os.environ.get("SMOPD_COMMIT"):
        return given
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def teller(device: str, file: IO[str] | None = None) -> Callable[[dict], None]:
    """Prints a row with its surroundings, and keeps it in file."""

    def tell(row: dict) -> None:
        line = json.dumps(row | surroundings(device))
        print(line, flush=True)
        if file is not None:
            print(line, file=file, flush=True)

    return tell


def rows_of(paths: list[Path], broken: str = "raise") -> list[dict]:
    """All rows of the files. broken: "skip" leaves out lines that are no rows, of a process that was killed.

    Raises:
        ValueError: a line is not a row.
    """
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                if broken == "skip":
                    continue
                raise ValueError(f"{path}:{number}: not JSON ({error})") from None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: {type(row).__name__}, expected a row")
            rows.append(row)
    return rows


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
