"""TRL's trainers with teachers under DeepSpeed ZeRO-3: two gloo ranks take the steps of one process."""

from pathlib import Path

import pytest

pytest.importorskip("trl", reason="needs trl (the trl extra)")
pytest.importorskip("deepspeed", reason="needs deepspeed (the deepspeed extra)")

from tests.integrations.trl_worker import assert_steps_of_one_process


def test_zero_3_takes_the_steps_of_one_process(tmp_path: Path) -> None:
    assert_steps_of_one_process(tmp_path, zero3="DeepSpeedEngine")
