"""One of the two gloo processes of test_ops_distributed.py and test_linear_shards.py."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from smopd.ops import gd2po_advantages, gdpo_advantages, linear_smopd_loss, linear_topk_logprobs


def advantages(case: dict, rank: int) -> dict[str, Tensor]:
    mine = case["rank_R"] == rank
    args = (case["rewards"][mine], case["group"][mine])
    lengths = case["lengths"][mine]
    out = {}
    for whiten in ("responses", "tokens"):
        options = {"lengths_R": lengths, "whiten": whiten, "process_group": dist.group.WORLD}
        out[f"gdpo-{whiten}"] = gdpo_advantages(*args, **options)
        out[f"gd2po-{whiten}"] = gd2po_advantages(*args, **options)[0]
    return out


def linear_loss(case: dict, rank: int, options: dict[str, Any]) -> dict[str, Any]:
    start, stop = sum(case["sizes"][:rank]), sum(case["sizes"][: rank + 1])
    hidden = case["hidden"].clone().requires_grad_()
    weight = case["weight"][start:stop].clone().requires_grad_()
    bias = case["bias"][start:stop].clone().requires_grad_()
    main_grad = None
    if case["main_grad"]:
        main_grad = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    loss, stats = linear_smopd_loss(
        hidden,
        weight,
        case["tokens"],
        case["settings"],
        bias_V=bias,
        tp_group=dist.group.WORLD,
        main_grad_VD=main_grad,
        **options,
    )
    (case["upstream"] * loss).backward()
    dweight = weight.grad if main_grad is None else main_grad
    return {
        "loss": loss.detach(),
        "stats": stats,
        "hidden": hidden.grad,
        "weight": dweight,
        "bias": bias.grad,
    }


def linear_topk(case: dict, rank: int, options: dict[str, Any]) -> Any:
    start, stop = sum(case["sizes"][:rank]), sum(case["sizes"][: rank + 1])
    return linear_topk_logprobs(
        case["hidden"],
        case["weight"][start:stop],
        token_ids_N=case["token_ids"],
        bias_V=case["bias"][start:stop],
        tp_group=dist.group.WORLD,
        **options,
    )


SERVE = {"loss": linear_loss, "topk": linear_topk}


def main() -> None:
    folder, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    cases = torch.load(f"{folder}/cases.pt", weights_only=False)
    results = []
    for kind, case, options in cases:
        if kind == "advantages":
            results.append(advantages(case, rank))
        else:
            results.append([SERVE[kind](case, rank, options) for _ in range(2)])
    torch.save(results, f"{folder}/out{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
