"""The launch templates and GitHub's workflows: they are read, and their commands are called or dry-run."""

import os
import re
import shlex
import subprocess
from importlib.metadata import metadata
from typing import Any

import pytest
import yaml

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


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


def test_the_targets_of_the_workflows_exist():
    files = [read(f".github/workflows/{name}.yml") for name in ("check", "test", "wheels")]
    jobs = [job for file in files for job in file["jobs"].values()]
    commands = [shlex.split(step["run"]) for job in jobs for step in job["steps"] if "run" in step]
    targets = [words for program, *words in commands if program == "make"]
    assert len(targets) > 2
    for words in targets:
        subprocess.run(["make", "-n", *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_the_jobs_of_kubernetes_and_skypilot_train(tmp_path):
    (tmp_path / "torchrun").write_text('#!/bin/bash\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    pod = read("examples/launch/k8s-job.yaml")["spec"]["template"]["spec"]["containers"][0]
    sky = read("examples/launch/skypilot.yaml")
    nodes = {"NUM_NODES": "1", "NODE_RANK": "0", "NUM_GPUS_PER_NODE": "8", "NODE_IPS": "10.0.0.1"}
    own = {f"SKYPILOT_{name}": value for name, value in nodes.items()} | sky["envs"]
    own |= {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for words in ([*pod["command"], *pod["args"]], ["bash", "-eu", "-c", sky["run"]]):
        said = subprocess.run(words, env=own, capture_output=True, text=True, check=True).stdout
        launch, _, command = said.partition(" -m smopd.train ")
        assert "--nproc-per-node 8" in launch and re.fullmatch(r"\S+ --output /runs/\S+\n", command)


def test_images_install_extras_that_exist():
    extras = set(metadata("smopd").get_all("Provides-Extra") or ())
    for name in ("Dockerfile", "Dockerfile.cpu"):
        asked = re.findall(r"smopd\[([\w,]+)\]", (ROOT / "examples/launch" / name).read_text())
        assert asked and {extra for each in asked for extra in each.split(",")} <= extras
