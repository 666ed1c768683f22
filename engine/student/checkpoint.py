"""Atomic checkpoints and exports. A killed process leaves a complete folder or none."""

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedTokenizerBase

from smopd.engine import distributed
from smopd.engine.errors import Failure
from smopd.engine.files import DamagedFile, empty_partial, flush, replace_folder, room_for, write_atomically
from smopd.engine.student.optimizers import apply_settings
from smopd.engine.student.student import Student

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
MANIFEST_DIGEST = "manifest.sha256"
_PREFIX = "step_"
_NAME = re.compile(f"{_PREFIX}([0-9]{{8,}})")  # other names in the folder belong to the user
T = TypeVar("T")


class UnusableCheckpoint(Failure, RuntimeError):
    """A checkpoint that is damaged, or that this run cannot resume from."""


class Checkpoints:
    """The checkpoints of a run in `folder`, of which `confirm` keeps the last `keep`.

    Older checkpoints stay until `confirm` is called, because the newest weights may be finite but diverged.
    All methods except `confirm` are collective calls.
    """

    def __init__(self, folder: Path, keep: int):
        self.folder, self.keep = folder, keep
        self.newest = 0
        """Step of the newest checkpoint, or 0."""
        self.confirmed = 0
        """Step of the newest checkpoint for which `confirm` was called, or 0."""

    def save(self, step: int, student: Student, extra: Any = None) -> None:
        """Write a checkpoint with this rank's `extra` (numbers, texts, tensors)."""
        facts = {"step": step, "world_size": distributed.world_size(), "strategy": student.strategy.name}
        facts["run"] = distributed.on_rank0(self._run)
        process = {
            "updates": student.updates,
            "skipped": student.skipped,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state() if student.device.type == "cuda" else None,
            "extra": extra,
        }
        with whole_folder(self.folder / _name(step), facts) as partial:
            student.strategy.save(partial)
            torch.save(process, partial / f"process_{distributed.rank()}.pt")
        self.newest = step

    def confirm(self) -> None:
        """Remove old checkpoints. Call this after the newest checkpoint's weights gave finite results."""
        if self.confirmed == self.newest:
            return
        self.confirmed = self.newest
        if distributed.rank() == 0:
            for old in self._complete()[: -self.keep]:
                try:
                    shutil.rmtree(old)
                except OSError as error:  # such as a link, or a busy file on NFS
                    log.warning("%s: not removed: %s", old, error)

    def restore(self, student: Student, step: int | None = None) -> tuple[int, Any]:
        """Load the checkpoint of `step`, or the newest. With the same number of ranks, resume bit for bit.

        Return the step to resume from, or 0 without a checkpoint. Also return this rank's `extra`, or None if
        the number of ranks has changed. Raise UnusableCheckpoint if the checkpoint is damaged, or belongs to
        another run, another strategy or (DeepSpeed) another number of ranks.
        """
        found = self._complete() if step is None else [self.folder / _name(step)]
        newest = distributed.broadcast_object(found[-1] if found else None)
        if newest is None:
            return 0, None
        manifest = read_manifest(newest)
        step, ranks, kind = (manifest.get(name) for name in ("step", "world_size", "strategy"))
        strategy = student.strategy
        if newest.name != _name(step):
            raise UnusableCheckpoint(f"{newest}: contains step {step} instead; remove the folder to resume")
        run = manifest.get("run")
        if run not in (None, distributed.on_rank0(lambda: self._run(run))):
            raise UnusableCheckpoint(f"{newest}: is of another run; remove the folder to resume")
        if kind != strategy.name:
            text = f"was saved under {kind}, this run trains under {strategy.name} (strategy, zero_stage)"
            raise UnusableCheckpoint(f"{newest}: {text}; resume with the same, or start from an export")
        same_ranks = ranks == distributed.world_size()
        if not same_ranks and not strategy.reshards:
            text = f"was saved by {ranks} ranks, now {distributed.world_size()}; {kind} cannot reshard"
            raise UnusableCheckpoint(f"{newest}: {text}; resume with as many, or start from an export")
        own = f"process_{distributed.rank() if same_ranks else 0}.pt"
        try:
            strategy.restore(newest)
            process = torch.load(newest / own, weights_only=True)
        except (DamagedFile, OSError, CheckpointException) as error:  # a file may be gone by now
            why = str(error).strip().splitlines()[-1]  # a CheckpointException's text has tracebacks
            raise UnusableCheckpoint(f"{newest}: {why}; remove the folder to resume") from error
        apply_settings(student.optimizer, student.settings)
        if not same_ranks:
            log.warning("%s was saved by %s ranks: the run resumes, but not bit for bit", newest, ranks)
        student.updates, student.skipped = process["updates"], process["skipped"]
        torch.set_rng_state(process["rng"])
        if process["cuda_rng"] is not None and student.device.type == "cuda":
            torch.cuda.set_rng_state(process["cuda_rng"])
        self.newest = int(newest.name.removeprefix(_PREFIX))
        return self.newest, process["extra"] if same_ranks else None

    def _run(self, given: str | None = None) -> str:
        """Return the run's id. If the run has no id yet, store `given` or a new id."""
        file = self.folder.parent / "id"
        if not file.exists():
            write_atomically(file, (given or uuid4().hex).encode())
        return file.read_text()

    def _complete(self) -> list[Path]:
        return [self.folder / _name(step) for step in saved_steps(self.folder)]


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the complete checkpoints in `folder`, in order."""
    names = [_NAME.fullmatch(path.name) for path in folder.glob(f"{_PREFIX}*")]
    return sorted(int(name[1]) for name in names if name is not None)


def export(student: Student, tokenizer: PreTrainedTokenizerBase, folder: Path, dtype: torch.dtype) -> None:
    """Write safetensors, config, tokenizer, chat template and any LoRA adapter. This is a collective call."""
    with whole_folder(folder, {}) as partial:
        weights = {}
        for name, value in student.weights():
            if distributed.rank() == 0:
                weights[name] = value.detach().to("cpu", dtype)
        if distributed.rank() == 0:
            student.model.save_pretrained(partial, state_dict=weights)
            # save_pretrained writes the dtype of the fp32 model, not of `weights`
            config = partial / "config.json"
            values = json.loads(config.read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
            config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
            tokenizer.save_pretrained(partial)
        if student.lora is not None:
            student.adapter(partial / "adapter")


@contextmanager
def whole_folder(folder: Path, facts: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder, then add a manifest and rename it. Raise CannotWrite if the disk refuses."""
    with room_for(folder):
        partial = distributed.on_rank0(lambda: empty_partial(folder))
        yield partial
        distributed.barrier()
        write_manifest(partial, facts)
        if distributed.rank() == 0:
            replace_folder(partial, folder, flushed=True)
    distributed.barrier()


def write_manifest(folder: Path, facts: dict[str, Any]) -> None:
    """Flush every file of `folder`, and write a manifest of SHA-256 sums. This is a collective call."""
    manifest, digest = folder / MANIFEST, folder / MANIFEST_DIGEST
    digests = {}
    for path in _share(sorted(path for path in folder.rglob("*") if path.is_file())):
        if path not in (manifest, digest):
            with suppress(OSError):  # SMB and FUSE refuse it
                path.chmod(folder.stat().st_mode & 0o666)  # safetensors lets only the owner read its files
            flush(path)
            digests[str(path.relative_to(folder))] = file_digest(path)
    gathered = distributed.gather_objects(digests)
    if distributed.rank() == 0:
        files = {name: found for part in gathered for name, found in part.items()}
        manifest.write_text(json.dumps({**facts, "files": dict(sorted(files.items()))}, indent=1))
        digest.write_text(f"{file_digest(manifest)}  {MANIFEST}\n")
        for path in (manifest, digest, folder):
            flush(path)


def read_manifest(folder: Path, remove: str = "remove the folder to resume") -> dict[str, Any]:
    """Verify every file of `folder` and return its manifest. Error messages end with `remove`."""
    try:
        content = (folder / MANIFEST).read_bytes()
        expected = (folder / MANIFEST_DIGEST).read_text().split()[:1]
        if [hashlib.sha256(content).hexdigest()] != expected:
            raise UnusableCheckpoint(f"{folder}: {MANIFEST} does not match {MANIFEST_DIGEST}; {remove}")
        manifest = json.loads(content)
        files = {folder / str(name): str(digest) for name, digest in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnusableCheckpoint(f"{folder}: no readable {MANIFEST} ({error}); {remove}") from error
    damaged = []
    for path, digest in _share(list(files.items())):
        found = file_digest(path) if os.path.isfile(path) else "no such file"
        if found != digest:
            damaged.append(f"{path}: SHA-256 is {found}, {MANIFEST} says {digest}; {remove}")
    for first in chain.from_iterable(distributed.gather_objects(damaged)):
        raise UnusableCheckpoint(first)
    return dict(manifest)


def require_whole(export: Path) -> None:
    """Raise UnusableCheckpoint if an export has a manifest and differs from it. This is a collective call."""
    export = export.expanduser()
    if distributed.on_rank0((export / MANIFEST_DIGEST).exists):
        read_manifest(export, "to repeat its run, remove the run's folder")


def _name(step: object) -> str:
    return f"{_PREFIX}{step!s:0>8}"


def _share(items: Sequence[T]) -> Sequence[T]:
    return items[distributed.rank() :: distributed.world_size()]


def file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
