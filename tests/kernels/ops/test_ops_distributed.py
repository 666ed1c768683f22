"""Two gloo processes give what one gives: whitening over ranks. (A head in shards: test_linear_shards.py.)"""

from __future__ import annotations

import torch

from smopd.ops import gd2po_advantages, gdpo_advantages
from tests.kernels.ops import two_ranks


def build_case(empty_rank: bool) -> dict:
    torch.manual_seed(0)
    group = torch.arange(10).repeat_interleave(torch.tensor([1, 2, 3, 4, 5, 6, 5, 4, 3, 2]))
    return {
        "rewards": torch.randn(len(group), 2, dtype=torch.float64) + 5.0,
        "group": group,
        "lengths": torch.randint(1, 40, (len(group),)),
        "rank_R": torch.zeros_like(group) if empty_rank else group % 2,  # groups never straddle ranks
    }


def test_advantages_over_two_processes_equal_one(tmp_path) -> None:
    cases = [build_case(empty_rank=False), build_case(empty_rank=True)]
    results = two_ranks.run([("advantages", case, {}) for case in cases], tmp_path)
    for index, case in enumerate(cases):
        for whiten in ("responses", "tokens"):
            options = {"lengths_R": case["lengths"], "whiten": whiten}
            whole = {
                "gdpo": gdpo_advantages(case["rewards"], case["group"], **options),
                "gd2po": gd2po_advantages(case["rewards"], case["group"], **options)[0],
            }
            for name, want in whole.items():
                got = torch.empty_like(want)
                for rank in range(2):
                    got[case["rank_R"] == rank] = results[rank][index][f"{name}-{whiten}"]
                torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
