"""TRL's trainers with teachers on two gloo ranks, DDP and FSDP2, take the steps of one process."""

import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from tests.integrations.trl_worker import assert_steps_of_one_process
from tests.ranks import ROOT

pytestmark = pytest.mark.slow


def test_two_ranks_take_the_steps_of_one(tmp_path: Path) -> None:
    wrapped = {"ddp": "DistributedDataParallel", "fsdp2": "FSDPQwen2ForCausalLM"}
    assert_steps_of_one_process(tmp_path, **wrapped)


@pytest.mark.parametrize("what", ["distillation", "grpo"])
def test_the_example_trains(
    what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trl_two_teachers.py", what, "--steps", "2"])
    runpy.run_path(str(ROOT / "examples" / "trl_two_teachers.py"), run_name="__main__")
    steps = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert len(steps) == 2 and all(float(line.rsplit(" ", 1)[1]) > 0 for line in steps)
