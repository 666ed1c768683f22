"""FSDP2 on two ranks: resumes bit for bit, offloads, and scores a LoRA student's base.

That gradients and updates equal one process's is shown by tests/smopd/run/test_invariance.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG_SECONDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("fsdp2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "tests/engine/student/fsdp_worker.py"), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("kind", ["resume", "resume_tied_hsdp", "resume_lora", "resume_offload"])
def test_going_on_from_a_checkpoint_is_bit_exact(facts, kind):
    assert facts[kind]


def test_offloaded_masters_train_as_the_others_do(facts):
    assert facts["offload"] and facts["offload_trains"]


def test_a_lora_student_gives_its_base_and_trains_as_if_it_had_not(facts):
    assert facts["reference"] and facts["reference_leaves_training_alone"]
