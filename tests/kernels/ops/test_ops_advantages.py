"""Whitening over ranks; conformance/test_advantages.py has the values."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smopd.ops import gd2po_advantages, gdpo_advantages
from tests.kernels import backends
from tests.patience import HANG_SECONDS
from tests.ranks import forks

GENERATOR = torch.Generator().manual_seed(0)
REWARDS = torch.randn(23, 3, generator=GENERATOR)
GROUP = torch.randint(0, 4, (23,), generator=GENERATOR)
LENGTHS = torch.randint(0, 50, (23,), generator=GENERATOR)


def advantages_of(at: str, mine: Tensor, whiten: str, process_group: Any = None) -> list[Tensor]:
    shard, lengths = (REWARDS[mine].to(at), GROUP[mine].to(at)), LENGTHS[mine].to(at)
    options = {"lengths_R": lengths, "whiten": whiten, "process_group": process_group}
    return [gdpo_advantages(*shard, **options).cpu(), gd2po_advantages(*shard, **options)[0].cpu()]


def rank_of_two(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    timeout, where = timedelta(seconds=HANG_SECONDS), f"file://{store}"
    dist.init_process_group(
        "nccl" if backends.GPU else "gloo", where, timeout=timeout, rank=rank, world_size=2
    )
    at = f"cuda:{rank}" if backends.GPU else "cpu"
    for backend, last in (("reference", 2), ("reference", 4), ("triton", 2), ("triton", 4)):
        os.environ["SMOPD_BACKEND"] = backend
        mine = (last > GROUP) == (rank == 0)  # with last = 4 rank 1 has no responses
        for whiten in ("responses", "tokens"):
            got = advantages_of(at, mine, whiten, dist.group.WORLD)
            whole = advantages_of(at, torch.ones_like(mine), whiten)
            for value, want in zip(got, whole, strict=True):
                torch.testing.assert_close(value, want[mine], rtol=1e-6, atol=1e-9)
    dist.destroy_process_group()


def test_two_ranks_whiten_together(tmp_path: Path) -> None:
    backends.need("triton")
    if backends.GPU and torch.cuda.device_count() < 2:
        pytest.skip("two ranks take two GPUs")
    forks(rank_of_two, (str(tmp_path / "store"),), nprocs=2)
