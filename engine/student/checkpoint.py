"""Checkpoints that survive SIGKILL, and exports that transformers and vLLM load.

A checkpoint is written under a temporary name by the student's strategy (torch's distributed checkpoint, or
DeepSpeed's), flushed to the disk, listed with checksums in a manifest that has one of its own, and only then
renamed: a folder with its final name is whole. What does not match its manifest is refused, never half
loaded. The checksums answer accidents, not attackers: load only checkpoints of your own (SECURITY.md). With
adapters a checkpoint holds them alone, not the base. Exports have the same manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from smopd.engine import distributed
from smopd.engine.files import empty_partial, flush, replace_folder, room_for
from smopd.engine.student.strategy import UnreadableState
from smopd.engine.student.student import Student

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
T = TypeVar("T")


class UnusableCheckpoint(RuntimeError):
    """A checkpoint that this run cannot go on from; says why."""


class DamagedCheckpoint(UnusableCheckpoint):
    """A checkpoint's files do not match its manifest."""


class Checkpoints:
    """The last `keep` checkpoints of one run, in `folder`, named by their step.

    All methods are collective calls.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder = folder
        self.keep = keep
        self.newest = 0
        """The step of the newest one; 0 where there is none."""

    def save(self, step: int, student: Student, extra: Any = None) -> None:
        """extra: of this rank; numbers, strings, tensors, and lists, tuples and dicts of them.

        Raises:
            FullDisk: there is no room.
        """
        final = self.folder / _name(step)
        ranks, kind, own = distributed.world_size(), student.strategy.name, f"process_{distributed.rank()}.pt"
        with room_for(final):
            partial = distributed.on_rank0(lambda: empty_partial(final))
            student.strategy.save(partial)
            torch.save(_process_state(student) | {"extra": extra}, partial / own)
            distributed.barrier()
            write_manifest(partial, {"step": step, "world_size": ranks, "strategy": kind})
            if distributed.rank() == 0:
                replace_folder(partial, final, flushed=True)
        if distributed.rank() == 0:
            for old in self._complete()[: -self.keep]:
                shutil.rmtree(old)
        self.newest = step
        distributed.barrier()

    def restore(self, student: Student) -> tuple[int, Any]:
        """Loads the newest checkpoint, if there is one.

        Returns:
            The step to go on from and what `save` was given beside it; 0 and None without a checkpoint, None
            on another number of ranks.

        Bit-exact on the number of ranks that saved it; on another number FSDP2 reshards the parameters and
        the optimiser state, and DeepSpeed refuses.

        Raises:
            DamagedCheckpoint: a file is missing or differs from its checksum.
            UnusableCheckpoint: another strategy saved it, or another number of ranks where that matters.
        """
        found = self._complete()
        newest = Path(str(distributed.broadcast_object(str(found[-1]) if found else "")))
        if newest == Path():
            return 0, None
        manifest = read_manifest(newest)
        facts = (manifest.get("step"), manifest.get("world_size"), manifest.get("strategy"))
        if not isinstance(facts[0], int) or not isinstance(facts[1], int) or not isinstance(facts[2], str):
            raise DamagedCheckpoint(f"{newest}: {MANIFEST} is no checkpoint's; remove the folder to go on")
        if newest.name != _name(facts[0]):
            raise DamagedCheckpoint(
                f"{newest}: {MANIFEST} is of step {facts[0]}, expected the folder's; remove it to go on"
            )
        strategy = student.strategy
        if manifest["strategy"] != strategy.name:
            raise UnusableCheckpoint(
                f"{newest}: was saved under {manifest['strategy']}, this run trains under {strategy.name} "
                "(student.strategy, zero_stage); go on with the same, or start from an export"
            )
        same_ranks = manifest["world_size"] == distributed.world_size()
        if not same_ranks and not strategy.reshards:
            raise UnusableCheckpoint(
                f"{newest}: was saved by {manifest['world_size']} ranks, now {distributed.world_size()}, and "
                f"{strategy.name} cannot redistribute it; go on with as many, or start from an export"
            )
        try:
            strategy.restore(newest)
        except UnreadableState as error:
            raise DamagedCheckpoint(f"{newest}: {error}; remove the folder to go on") from error
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
        self.newest = int(manifest["step"])
        return self.newest, process["extra"] if same_ranks else None

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if path.suffix != ".partial")


def export(student: Student, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Writes safetensors, config, tokenizer and chat template to `folder`, whole or not at all.

    Adapters are merged into the weights, and stand beside them in `folder`/adapter. A collective call.

    Raises:
        FullDisk: there is no room.
    """
    with room_for(folder):
        partial = distributed.on_rank0(lambda: empty_partial(folder))
        weights = {}
        for name, value in student.weights():
            if distributed.rank() == 0:
                weights[name] = value.detach().to("cpu", dtype)
        if distributed.rank() == 0:
            student.model.save_pretrained(partial, state_dict=weights)
            # save_pretrained names the dtype of the fp32 masters, not that of the weights it was given
            config = partial / "config.json"
            values = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
            tokenizer.save_pretrained(partial)
        if student.lora is not None:
            student.adapter(partial / "adapter")
        distributed.barrier()
        write_manifest(partial, {})
        if distributed.rank() == 0:
            replace_folder(partial, folder, flushed=True)
    distributed.barrier()


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Flushes every file of `folder`, and lists them with their SHA-256; the ranks share the reading."""
    digests, own = {}, (folder / MANIFEST, folder / MANIFEST_DIGEST)
    for path in _share(sorted(path for path in folder.rglob("*") if path.is_file() and path not in own)):
        flush(path)
        digests[str(path.relative_to(folder))] = _digest(path)
    gathered = distributed.gather_objects(digests)
    if distributed.rank() == 0:
        files = {name: digest for part in gathered for name, digest in part.items()}
        manifest, digest = own
        manifest.write_text(json.dumps({**facts, "files": dict(sorted(files.items()))}, indent=1))
        digest.write_text(f"{_digest(manifest)}  {MANIFEST}\n")
        flush(manifest)
        flush(digest)
        flush(folder)


def read_manifest(folder: Path, remove: str = "remove the folder to go on") -> dict[str, Any]:
    """The manifest of `folder`, it and every file checked; the ranks share the reading.

    remove: what to do where it is damaged.

    Raises:
        DamagedCheckpoint: what is there is not what was written.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
        expected = (folder / MANIFEST_DIGEST).read_text().split()[:1]
        if [hashlib.sha256(content).hexdigest()] != expected:
            raise DamagedCheckpoint(f"{folder}: {MANIFEST} is not the one of {MANIFEST_DIGEST}; {remove}")
        manifest = json.loads(content)
        files = {folder / str(name): str(digest) for name, digest in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{folder}: no readable {MANIFEST} ({error}); {remove}") from error
    damaged = []
    for path, digest in _share(list(files.items())):
        found = _digest(path) if os.path.isfile(path) else "no such file"
        if found != digest:
            damaged.append(f"{path}: SHA-256 is {found}, {MANIFEST} says {digest}; {remove}")
    for said in distributed.gather_objects(damaged):
        if said:
            raise DamagedCheckpoint(said[0])
    return dict(manifest)


def require_whole(export: Path) -> None:
    """Checks an exported model against its manifest, where it has one; a collective call.

    Raises:
        DamagedCheckpoint: a file is missing or differs from its checksum.
    """
    if distributed.on_rank0((export / MANIFEST_DIGEST).exists):
        read_manifest(export, "its run has to be done again: remove the run's folder")


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _share(items: Sequence[T]) -> Sequence[T]:
    """This rank's part of `items`."""
    return items[distributed.rank() :: distributed.world_size()]


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
