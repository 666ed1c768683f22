"""A full disk is reported, and with free space the command resumes. Uses a small tmpfs."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.ranks import ROOT, environment

NAMESPACE = ["unshare", "--mount", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]


def in_a_namespace(command: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command with private mounts."""
    words = [*NAMESPACE, "sh", "-c", command]
    return subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True)


FILLED = """
import resource, subprocess, sys
from pathlib import Path
import torch
from smopd.engine import distributed
from smopd.engine.files import CannotWrite, write_atomically
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

def mount(option):
    subprocess.run(["mount", "-o", f"remount,{option}", disk], check=True)

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def refused(name, write, said):
    try:
        write()
    except CannotWrite as error:
        assert f"{disk}/" in str(error) and said in str(error), error
    else:
        raise AssertionError(f"{name} was written: {said}")

with distributed.process_group() as device:
    model, tokenizer = world_model(0)
    student = Student(model, TrainSettings(compute_dtype="float32"), device)
    checkpoints, log = Checkpoints(disk / "checkpoints", 1), JsonlLog(disk / "metrics.jsonl")
    log.write({"step": 1})
    (disk / "id").write_text("run")
    written = {
        "export": lambda: export(student, tokenizer, disk / "export", torch.float32),
        "step_00000001": lambda: checkpoints.save(1, student),
        "metrics.jsonl": lambda: [log.write({"step": 2, "x": "x" * 8192}) for _ in range(8)],
        "file": lambda: write_atomically(disk / "file", bytes(1 << 16)),
    }
    for name, write in written.items():
        for free in (0, 1 << 14, 250_000) if name[0] in "es" else (0, 1 << 14):
            leave(free)
            refused(name, write, f"{name}: no space left on the disk")
            filler.unlink()
            log.cut(1)
        write()
    for reason, (change, refuse, allow) in {
        "File too large": (limit, 1 << 13, resource.RLIM_INFINITY),
        "Read-only file system": (mount, "ro", "rw"),
    }.items():
        change(refuse)
        for name, write in written.items():
            refused(name, write, f"cannot be written ({reason})")
        change(allow)
        log.cut(1)
    assert checkpoints.restore(student)[0] == 1
"""


@pytest.mark.slow
def test_what_does_not_fit_is_named_and_resumes_with_room(tmp_path):
    if shutil.which("unshare") is None or in_a_namespace("mount -t tmpfs none /mnt").returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    (tmp_path / "filled.py").write_text(FILLED)
    (tmp_path / "disk").mkdir()
    run = f"exec {sys.executable} {tmp_path}/filled.py {tmp_path}/disk"
    done = in_a_namespace(f"mount -t tmpfs -o size=24m none {tmp_path}/disk && {run}")
    assert done.returncode == 0, done.stderr[-4000:]
