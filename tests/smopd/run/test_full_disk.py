"""A disk without room, a tmpfs of its own: it is named, and with room the same command goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.smopd.recipes import ROOT, environment

MOUNT = "mount -t tmpfs -o size={size} none {folder} && exec {command}"
NAMESPACE = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]


def mounts() -> bool:
    check = [*NAMESPACE, "sh", "-c", "mount -t tmpfs none /mnt"]
    return shutil.which("unshare") is not None and subprocess.run(check, capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not mounts(), reason="this machine lets nobody mount a tmpfs"),
]

FILLED = """
import sys
from pathlib import Path
import torch
from smopd.engine import distributed
from smopd.engine.files import FullDisk, write_atomically
from smopd.engine.settings import TrainSettings
from smopd.engine.student.checkpoint import Checkpoints, export
from smopd.engine.student.student import Student
from smopd.record.files import JsonlLog
from smopd.worlds.models import world_model

disk = Path(sys.argv[1])
filler = disk / "filler"

def leave(free):
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            file.truncate(max(0, file.tell() - free))

with distributed.process_group() as device:
    model, tokenizer = world_model(0)
    student = Student(model, TrainSettings(compute_dtype="float32"), device)
    checkpoints, log = Checkpoints(disk / "checkpoints", 1), JsonlLog(disk / "metrics.jsonl")
    log.write({"step": 1})
    written = {
        "export": lambda: export(student, tokenizer, disk / "export", torch.float32),
        "step_00000001": lambda: checkpoints.save(1, student),
        "metrics.jsonl": lambda: [log.write({"step": 2, "x": "x" * 8192}) for _ in range(8)],
        "file": lambda: write_atomically(disk / "file", bytes(1 << 16)),
    }
    for name, write in written.items():
        for free in (0, 1 << 14, 100_000, 250_000) if name[0] in "es" else (0, 1 << 14):
            leave(free)
            try:
                write()
            except FullDisk as error:
                said = str(error)
                assert said.startswith(f"{disk}/") and f"{name}: no space left on the disk" in said, said
            else:
                raise AssertionError(f"{name} was written into {free} bytes")
            filler.unlink()
            log.cut(1)
        write()
    assert checkpoints.restore(student)[0] == 1
    assert log.read() == [{"step": 1}]
"""


def test_what_does_not_fit_is_named_and_goes_on_with_room(tmp_path):
    script = tmp_path / "filled.py"
    script.write_text(FILLED)
    disk = tmp_path / "disk"
    disk.mkdir()
    inner = MOUNT.format(size="24m", folder=disk, command=f"{sys.executable} {script} {disk}")
    ran = subprocess.run(
        [*NAMESPACE, "sh", "-c", inner], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
