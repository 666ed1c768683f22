"""Rows of benchmarks, as JSON lines with machine and versions, and as a Markdown table."""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

HEADER = ("operation and case", "provider", "ms", "p20 to p80", "x eager", "of ceiling", "MiB", "error")
"""error: the largest error except of gradients, in nats. For our linear heads, it is relative to the norm."""


@functools.cache
def surroundings(device: str) -> dict:
    """Return commit, device, driver, versions and threads."""
    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None
    here = {
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
    }
    if device == "cpu":
        return here
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
    return here | {"cuda": torch.version.cuda, "driver": driver}


def device_name(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    name = named[1] if named else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def commit() -> str | None:
    """Return SMOPD_COMMIT, or else the checkout's commit, with "-dirty" if tracked files differ."""
    described = ("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return os.environ.get("SMOPD_COMMIT") or _output(*described)


def _output(*command: str) -> str | None:
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def teller(device: str, file: IO[str] | None = None) -> Callable[[dict], None]:
    """Return a function that prints a row with its surroundings, and appends it to `file` if given."""

    def tell(row: dict) -> None:
        line = json.dumps(row | surroundings(device))
        print(line, flush=True)
        if file is not None:
            print(line, file=file, flush=True)

    return tell


def rows_of(path: Path) -> list[dict]:
    """Read the rows of a file. Raise ValueError if a line is not a row."""
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            rows.append(dict(json.loads(line)))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}:{number}: not a row ({error})") from None
    return rows


def table(rows: Sequence[dict]) -> Iterator[str]:
    """Yield a line with the machines, then the lines of a table."""
    keys = ("device", "threads", "torch", "triton", "driver", "python", "commit")
    places = dict.fromkeys(", ".join(f"{key} {row.get(key)}" for key in keys if row.get(key)) for row in rows)
    yield f"Measured with {'; '.join(places)}.\n"
    yield f"| {' | '.join(HEADER)} |"
    yield f"|---|---|{'---:|' * (len(HEADER) - 2)}"
    eager: dict[tuple, float] = {}
    for row in rows:
        if row.get("kind") == "eager" and row.get("of_ceiling"):
            eager.setdefault((row.get("benchmark"), row.get("case")), row["of_ceiling"])
    for row in rows:
        yield f"| {' | '.join(_cells(row, eager.get((row.get('benchmark'), row.get('case')))))} |"


def _cells(row: dict, eager: float | None) -> tuple[str, ...]:
    computes = f" ({row['computes']})" if "computes" in row else ""
    head = (f"{row.get('benchmark')} {row.get('case', '')}", f"{row.get('provider', '')}{computes}")
    for word in ("left_out", "refused"):
        if word in row:
            return (*head, f"{word.replace('_', ' ')}: {row[word]}", *[""] * (len(HEADER) - 3))
    share = row.get("of_ceiling")
    times = row.get("times_eager")  # only older rows have it
    if times is None and share and eager:  # each relative to its ceiling, so that the machine's load cancels
        times = share / eager
    errors = [error for name, error in row.get("errors", {}).items() if not name.startswith("d")]
    return (
        *head,
        _number(row.get("ms"))
        + (f" ({1e3 * row['graph_ms']:.3g} us in a graph)" if row.get("graph_ms") else ""),
        f"{_number(row['p20_ms'])} to {_number(row['p80_ms'])}" if "p20_ms" in row else "",
        _number(times),
        f"{share:.0%} of {row['ceiling']}" if share else "",
        _number(row.get("peak_mib")),
        _number(max(errors, default=None)),
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
