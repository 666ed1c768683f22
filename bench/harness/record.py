"""JSON lines of rows, each with where and with what it was measured."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@functools.cache
def surroundings(device: str) -> dict:
    """Commit, device, driver, versions and threads: the same in every row of a run."""
    here = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
    }
    if device == "cpu":
        return here
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return here | {"cuda": torch.version.cuda, "driver": driver}


def device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def commit() -> str | None:
    """The checkout's commit, "-dirty" where files differ from it; SMOPD_COMMIT where there is no git."""
    if given := os.environ.get("SMOPD_COMMIT"):
        return given
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if head and changed else head


def _output(*command: str) -> str | None:
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
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


def rows_of(path: Path) -> list[dict]:
    """The rows of a file.

    Raises:
        ValueError: a line is not a row.
    """
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(dict(json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a row ({error})") from None
    return rows
