"""Launch templates and workflows: they parse and name what exists; a warned Slurm job is queued again."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import yaml

from tests.ranks import ROOT

LAUNCH, WORKFLOWS = ROOT / "examples/launch", ROOT / ".github/workflows"


@pytest.mark.parametrize(
    "path", [*LAUNCH.glob("*.yaml"), *WORKFLOWS.glob("*.yml")], ids=lambda path: path.name
)
def test_make_targets_and_modules_exist(path):
    text = path.read_text()
    assert isinstance(yaml.safe_load(text), dict)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"run: make ([\w-]+)", text)) <= targets
    for module in re.findall(r"-m,? (smopd[\w.]+)", text):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists()
    for file in re.findall(r"CONSTRAINTS=(\S+)", text):
        assert (ROOT / file).exists()


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu", "skypilot.yaml"])
def test_extras_exist(name):
    section = (
        (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]\n")[1].split("\n[")[0]
    )
    extras = re.findall(r"^([\w-]+) = \[", section, re.M)
    (named,) = re.findall(r'"[^"\s]*\[([\w,-]+)\]"', (LAUNCH / name).read_text())
    assert set(named.split(",")) <= set(extras)


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
    done = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", "mine.yaml", "--name", "a b"], cwd=tmp_path, env=path | job
    )
    assert done.returncode == (0 if again else status)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == ["3 1 16 host0:20007 -m smopd.train mine.yaml --name a b", *again]
