"""TRL's trainers with teachers on two gloo ranks: DDP, FSDP2's shards, DeepSpeed ZeRO-3."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from tests.integrations.tiny_trl import completions, distillation, loss_and_gradients, teacher
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def on_two_ranks(*arguments: str) -> list[dict]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "-m", "tests.integrations.trl_worker", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"rank"')]


def test_ddp_ranks_report_the_same_three_steps(tmp_path: Path) -> None:
    one, other = on_two_ranks("train", str(tmp_path))
    assert len(one["losses"]) == 3 and all(map(math.isfinite, one["losses"]))
    assert one["kl"] == other["kl"] and min(one["kl"]) > 0


def test_fsdp2_shards_give_the_gradients_of_one_process(tmp_path: Path) -> None:
    on_two_ranks("fsdp2", str(tmp_path))
    sharded = torch.load(tmp_path / "sharded.pt")
    trainer = distillation(tmp_path / "one", [teacher(1), teacher(2)])
    loss, gradients = loss_and_gradients(trainer, completions(trainer))
    ranks = 2  # TRL divides a rank's loss by its share of the tokens
    torch.testing.assert_close(sharded["loss"], loss * ranks, rtol=1e-5, atol=1e-7)
    for name, gradient in gradients.items():
        scale = ranks * float(gradient.abs().max())
        torch.testing.assert_close(sharded["gradients"][name], gradient * ranks, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.unproven
def test_zero_3_trains_three_steps(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed", reason="needs deepspeed (the deepspeed extra)")
    config = tmp_path / "zero3.json"
    config.write_text(
        json.dumps(
            {
                "zero_optimization": {"stage": 3},
                "train_micro_batch_size_per_gpu": "auto",
                "train_batch_size": "auto",
                "gradient_accumulation_steps": "auto",
            }
        )
    )
    one, other = on_two_ranks("train", str(tmp_path), str(config))
    assert len(one["losses"]) == 3 and all(map(math.isfinite, one["losses"]))
    assert one["kl"] == other["kl"] and min(one["kl"]) > 0
