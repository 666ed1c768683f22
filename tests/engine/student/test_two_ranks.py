"""FSDP2 on two ranks: resumes bit for bit, offloads, and scores a LoRA student's base.

That gradients and updates equal one process's is shown by tests/smopd/run/test_invariance.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import on_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("fsdp2")
    worker = str(Path(__file__).with_name("fsdp_worker.py"))
    done = on_ranks(2, worker, str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "facts.json").read_text())


@pytest.mark.parametrize("kind", ["resume", "resume_tied_hsdp", "resume_lora", "resume_offload"])
def test_going_on_from_a_checkpoint_is_bit_exact(facts, kind):
    assert facts[kind]


def test_offloaded_masters_train_as_the_others_do(facts):
    assert facts["offload"] and facts["offload_trains"]


def test_a_lora_student_gives_its_base_and_trains_as_if_it_had_not(facts):
    assert facts["reference"] and facts["reference_leaves_training_alone"]


def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_on_all(facts):
    assert facts["skipped"] and facts["unchanged"] and facts["goes_on"] and facts["stops_together"]
