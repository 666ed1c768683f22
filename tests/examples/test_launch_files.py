"""The launch template of Slurm: a warned job is queued again."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.ranks import ROOT

PROGRAMS = {
    "scontrol": 'if [ "$1" = show ]; then echo host0; echo host1; else echo "$@" >> calls; fi',
    "srun": 'shift; SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=16 "$@"',
    "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR:$MASTER_PORT $@" >> calls; exit $STATUS',
}


@pytest.mark.parametrize(("status", "again"), [(138, ["requeue 20007"]), (1, []), (0, [])])
def test_slurm_job(tmp_path, status, again):
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STATUS": str(status)}
    job = {"SLURM_JOB_ID": "20007", "SLURM_JOB_NODELIST": "host[0-1]"}
    words = ["bash", ROOT / "examples/launch/slurm.sbatch", "mine.yaml", "--name", "a b"]
    done = subprocess.run(words, cwd=tmp_path, env=path | job)
    assert done.returncode == (0 if again else status)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["3 1 16 host0:20007 -m smopd.train mine.yaml --name a b", *again]
