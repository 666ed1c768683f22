"""The run directory: whose it is, what it was made with, and which of its pieces are finished."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml

from smopd import __version__
from smopd.config import Settings
from smopd.engine import distributed
from smopd.progress import write_atomically
from smopd.recipe import write_yaml

PACKAGES = ("torch", "transformers", "tokenizers", "triton", "vllm", "numpy", "pydantic")


class Busy(RuntimeError):
    """Another command is writing to the directory."""


class OtherSettings(RuntimeError):
    """The directory holds a run that was made with other settings."""


@contextmanager
def claimed(folder: Path, settings: Settings) -> Iterator[None]:
    """Holds the directory for this command: makes it, or checks that it was made with the same settings.

    The lock goes with the process, however it ends. A collective call.

    Raises:
        Busy: another command holds it.
        OtherSettings: names each setting that differs; nothing is touched.
    """
    with ExitStack() as held:
        if distributed.rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / ".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"{folder}: another command is at work there; wait, or give another --output"
                ) from None
            compare(folder / "config.yaml", settings)
            write_atomically(folder / "config.yaml", write_yaml(settings).encode())
            write_atomically(folder / "environment.json", json.dumps(environment(), indent=1).encode())
        distributed.barrier()
        yield


def compare(config: Path, settings: Settings) -> None:
    """Raises OtherSettings where `config` holds others than `settings`, the directory's own name apart."""
    if not config.exists():
        return
    before = flat(yaml.safe_load(config.read_text()))
    now = flat(yaml.safe_load(write_yaml(settings)))
    changed = [key for key in sorted({*before, *now} - {"output"}) if before.get(key) != now.get(key)]
    if changed:
        lines = [f"  {key}: was {before.get(key)!r}, now {now.get(key)!r}" for key in changed]
        raise OtherSettings(
            f"{config.parent} holds a run with other settings; give another --output, or remove it\n"
            + "\n".join(lines)
        )


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted path -> value."""
    parts: Iterable[tuple[Any, Any]]
    if isinstance(value, dict) and value:
        parts = value.items()
    elif isinstance(value, list) and value:
        parts = enumerate(value)
    else:
        return {prefix: value}
    return {
        path: inner
        for key, part in parts
        for path, inner in flat(part, f"{prefix}.{key}" if prefix else str(key)).items()
    }


def environment() -> dict[str, Any]:
    """Versions, machine and command line of this process."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "smopd": __version__,
        "python": platform.python_version(),
        "packages": versions,
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "world_size": distributed.world_size(),
        "command": sys.argv,
    }


def mark_done(folder: Path, facts: dict[str, Any]) -> None:
    """The last act of a piece; a collective call."""
    if distributed.rank() == 0:
        write_atomically(folder / "done.json", json.dumps(facts).encode())
    distributed.barrier()
