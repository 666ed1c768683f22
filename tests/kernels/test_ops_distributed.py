"""Two gloo processes give what one gives: whitening over ranks, and a head cut over the vocabulary."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from smopd.ops import LossSettings, gd2po_advantages, gdpo_advantages, linear_smopd_loss, linear_topk_logprobs
from tests.kernels import ops_truth

ROOT = Path(__file__).resolve().parents[2]
N, V, D = 11, 37, 5
DEADLINE_S = 180


def build_case(empty_rank: bool) -> dict:
    torch.manual_seed(0)
    group = torch.arange(10).repeat_interleave(torch.tensor([1, 2, 3, 4, 5, 6, 5, 4, 3, 2]))
    hidden, weight = torch.randn(N, D, dtype=torch.float64), torch.randn(V, D, dtype=torch.float64)
    bias = torch.randn(V, dtype=torch.float64)
    ids, logps = ops_truth.random_teachers(N, 2, V, 6, seed=2)
    return {
        "rewards": torch.randn(len(group), 2, dtype=torch.float64) + 5.0,
        "group": group,
        "lengths": torch.randint(1, 40, (len(group),)),
        "rank_R": torch.zeros_like(group) if empty_rank else group % 2,  # groups never straddle ranks
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "first_shard": 15,
        "chunk_bytes": 3 * V * 8,
        "tokens": ops_truth.random_tokens(
            N,
            V,
            hidden @ weight.T + bias,
            1.0,
            0,
            teacher_ids_NMS=ids,
            teacher_logps_NMS=logps,
            log_alpha=torch.tensor([0.5, 0.5], dtype=torch.float64).log(),
        ),
    }


@pytest.fixture(scope="module", params=[False, True], ids=["two-ranks", "one-rank-empty"])
def two_processes(request, tmp_path_factory):
    case = build_case(request.param)
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(case, folder / "case.pt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.ops_worker", str(folder)]
    workers = [
        subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=DEADLINE_S)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
    return case, [torch.load(folder / f"out{rank}.pt") for rank in range(2)]


def test_advantages_over_two_processes_equal_one(two_processes) -> None:
    case, results = two_processes
    for whiten in ("responses", "tokens"):
        options = {"lengths_R": case["lengths"], "whiten": whiten}
        whole = {
            "gdpo": gdpo_advantages(case["rewards"], case["group"], **options),
            "gd2po": gd2po_advantages(case["rewards"], case["group"], **options)[0],
        }
        for name, want in whole.items():
            got = torch.empty_like(want)
            for rank in range(2):
                got[case["rank_R"] == rank] = results[rank][0][f"{name}-{whiten}"]
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_head_cut_over_the_vocabulary_equals_the_whole(two_processes) -> None:
    case, results = two_processes
    leaves = [case[name].clone().requires_grad_() for name in ("hidden", "weight", "bias")]
    loss, stats = linear_smopd_loss(
        leaves[0], leaves[1], case["tokens"], LossSettings(entropy_coef=0.1), bias_V=leaves[2]
    )
    dhidden, dweight, dbias = torch.autograd.grad(loss, leaves)
    top = linear_topk_logprobs(
        leaves[0], leaves[1], 9, token_ids_N=case["tokens"].token_ids_N, bias_V=leaves[2]
    )
    first = case["first_shard"]
    for rank, (_, got) in enumerate(results):
        cut = slice(0, first) if rank == 0 else slice(first, None)
        for recompute in (False, True):
            want = {
                "loss": loss,
                "kl": stats.kl_N,
                "hidden": dhidden,
                "weight": dweight[cut],
                "bias": dbias[cut],
            }
            for name, value in want.items():
                torch.testing.assert_close(got[f"{name}-{recompute}"], value.detach(), rtol=1e-10, atol=1e-13)
        assert torch.equal(got["ids"], top.ids_NS)
        torch.testing.assert_close(got["logps"], top.logps_NS)
        torch.testing.assert_close(got["token_logp"], top.token_logp_N)
