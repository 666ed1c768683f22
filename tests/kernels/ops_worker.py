"""One of the two gloo processes of test_ops_distributed.py."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from smopd.ops import (
    LossSettings,
    gd2po_advantages,
    gdpo_advantages,
    linear_smopd_loss,
    linear_topk_logprobs,
)


def advantages(case: dict, rank: int) -> dict[str, torch.Tensor]:
    mine = case["rank_R"] == rank
    args = (case["rewards"][mine], case["group"][mine])
    lengths = case["lengths"][mine]
    out = {}
    for whiten in ("responses", "tokens"):
        options = {"lengths_R": lengths, "whiten": whiten, "process_group": dist.group.WORLD}
        out[f"gdpo-{whiten}"] = gdpo_advantages(*args, **options)
        out[f"gd2po-{whiten}"] = gd2po_advantages(*args, **options)[0]
    return out


def vocabulary_parallel(case: dict, rank: int) -> dict[str, torch.Tensor]:
    first = case["first_shard"]
    cut = slice(0, first) if rank == 0 else slice(first, None)
    hidden = case["hidden"].clone().requires_grad_()
    weight = case["weight"][cut].clone().requires_grad_()
    bias = case["bias"][cut].clone().requires_grad_()
    out = {}
    for recompute in (False, True):
        loss, stats = linear_smopd_loss(
            hidden,
            weight,
            case["tokens"],
            LossSettings(entropy_coef=0.1),
            bias_V=bias,
            chunk_bytes=case["chunk_bytes"],
            recompute=recompute,
            tp_group=dist.group.WORLD,
        )
        grads = torch.autograd.grad(loss, (hidden, weight, bias))
        names = ("hidden", "weight", "bias")
        out |= {f"{name}-{recompute}": grad for name, grad in zip(names, grads, strict=True)}
        out |= {f"loss-{recompute}": loss.detach(), f"kl-{recompute}": stats.kl_N}
    top = linear_topk_logprobs(
        hidden,
        weight,
        9,
        token_ids_N=case["tokens"].token_ids_N,
        bias_V=bias,
        chunk_bytes=case["chunk_bytes"],
        tp_group=dist.group.WORLD,
    )
    return out | {"ids": top.ids_NS, "logps": top.logps_NS, "token_logp": top.token_logp_N}


def main() -> None:
    folder, rank = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    case = torch.load(f"{folder}/case.pt", weights_only=False)
    torch.save((advantages(case, rank), vocabulary_parallel(case, rank)), f"{folder}/out{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
