"""Checkpoints that survive SIGKILL, and exports that transformers and vLLM load.

A checkpoint is written under a temporary name by torch's distributed checkpoint, flushed to the disk, listed
with checksums in a manifest, and only then renamed: a folder with its final name is whole. What does not
match its manifest is refused, never half loaded. Checkpoints are read with pickle underneath: load only your
own.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from transformers import PreTrainedTokenizerBase

from smopd.engine import distributed
from smopd.engine.student import Student

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"


class DamagedCheckpoint(RuntimeError):
    """A checkpoint's files do not match its manifest."""


class Checkpoints:
    """The last `keep` checkpoints of one run, in `folder`, named by their step.

    All methods are collective calls.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = keep

    def save(self, step: int, student: Student) -> None:
        final = self.folder / f"step_{step:08d}"
        partial = final.with_suffix(".partial")
        if distributed.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        distributed.barrier()
        model, optimizer = get_state_dict(student.policy, student.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=str(partial))
        torch.save(_process_state(student), partial / f"process_{distributed.rank()}.pt")
        distributed.barrier()
        if distributed.rank() == 0:
            write_manifest(partial, {"step": step, "world_size": distributed.world_size()})
            shutil.rmtree(final, ignore_errors=True)
            os.replace(partial, final)
            flush(self.folder)
            for old in self._complete()[: -self.keep]:
                shutil.rmtree(old)
        distributed.barrier()

    def restore(self, student: Student) -> int:
        """Loads the newest checkpoint, if there is one; returns the step to go on from (0 without one).

        Bit-exact on the number of ranks that saved it; on another number the parameters and optimiser state
        are resharded.

        Raises:
            DamagedCheckpoint: a file is missing or differs from its checksum.
        """
        found = self._complete()
        newest = Path(str(distributed.broadcast_object(str(found[-1]) if found else "")))
        if newest == Path():
            return 0
        manifest = read_manifest(newest)
        model, optimizer = get_state_dict(student.policy, student.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=str(newest))
        set_state_dict(
            student.policy,
            student.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        same_ranks = manifest["world_size"] == distributed.world_size()
        if not same_ranks:
            log.warning(
                "%s was saved by %d ranks, now %d: the run goes on, not bit for bit",
                newest, manifest["world_size"], distributed.world_size(),
            )  # fmt: skip
        process = torch.load(
            newest / f"process_{distributed.rank() if same_ranks else 0}.pt", weights_only=True
        )
        student.updates, student.skipped = process["updates"], process["skipped"]
        torch.set_rng_state(process["rng"])
        if process["cuda_rng"] is not None and student.device.type == "cuda":
            torch.cuda.set_rng_state(process["cuda_rng"])
        return int(manifest["step"])

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if path.suffix != ".partial")


def export(student: Student, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Writes safetensors, config, tokenizer and chat template to `folder`, whole or not at all.

    A collective call.
    """
    weights = {}
    for name, value in student.weights():
        if distributed.rank() == 0:
            weights[name] = value.detach().to("cpu", dtype)
    if distributed.rank() == 0:
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        student.model.save_pretrained(partial, state_dict=weights)
        # save_pretrained names the dtype of the fp32 masters, not that of the weights it was given
        config = partial / "config.json"
        values = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        tokenizer.save_pretrained(partial)
        replace_folder(partial, folder)
    distributed.barrier()


def replace_folder(partial: Path, final: Path) -> None:
    """Flushes `partial` to the disk and gives it its final name."""
    for path in partial.rglob("*"):
        if path.is_file():
            flush(path)
    flush(partial)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    flush(final.parent)


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Flushes every file of `folder` and lists them with their SHA-256."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            flush(path)
            files[str(path.relative_to(folder))] = _digest(path)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({**facts, "files": files}, indent=1))
    flush(manifest)
    flush(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, every file checked against it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(
            f"{folder}: no readable {MANIFEST} ({error}); remove the folder to go on"
        ) from error
    for name, digest in manifest["files"].items():
        path = folder / name
        found = _digest(path) if path.is_file() else "no such file"
        if found != digest:
            raise DamagedCheckpoint(
                f"{path}: SHA-256 is {found}, {MANIFEST} says {digest}; "
                f"remove {folder} to go on from the one before it"
            )
    return manifest


def flush(path: Path) -> None:
    """fsync of a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _process_state(student: Student) -> dict[str, Any]:
    cuda = torch.cuda.get_rng_state() if student.device.type == "cuda" else None
    return {
        "updates": student.updates,
        "skipped": student.skipped,
        "rng": torch.get_rng_state(),
        "cuda_rng": cuda,
    }
