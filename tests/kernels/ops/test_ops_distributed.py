"""Two gloo processes give what one gives: whitening over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smopd.ops import gd2po_advantages, gdpo_advantages


def build_case(empty_rank: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    group = torch.arange(10).repeat_interleave(torch.tensor([1, 2, 3, 4, 5, 6, 5, 4, 3, 2]))
    return {
        "rewards": torch.randn(len(group), 2, dtype=torch.float64) + 5.0,
        "group": group,
        "lengths": torch.randint(1, 40, (len(group),)),
        "rank_R": torch.zeros_like(group) if empty_rank else group % 2,  # groups never straddle ranks
    }


def advantages_of(case: dict[str, Tensor], whiten: str, mine: Any, process_group: Any) -> list[Tensor]:
    arguments = (case["rewards"][mine], case["group"][mine])
    options = {"lengths_R": case["lengths"][mine], "whiten": whiten, "process_group": process_group}
    return [gdpo_advantages(*arguments, **options), gd2po_advantages(*arguments, **options)[0]]


def rank_of_two(rank: int, folder: str, cases: list[dict[str, Tensor]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for case in cases:
        for whiten in ("responses", "tokens"):
            mine = case["rank_R"] == rank
            got = advantages_of(case, whiten, mine, dist.group.WORLD)
            for value, want in zip(got, advantages_of(case, whiten, slice(None), None), strict=True):
                torch.testing.assert_close(value, want[mine], rtol=1e-12, atol=1e-12)
    dist.destroy_process_group()


@pytest.mark.parametrize("empty_rank", [False, True], ids=["both", "one has none"])
def test_advantages_over_two_processes_equal_one(empty_rank: bool, tmp_path: Path) -> None:
    arguments = (str(tmp_path), [build_case(empty_rank)])
    torch.multiprocessing.spawn(rank_of_two, arguments, nprocs=2)
