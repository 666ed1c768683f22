"""Prints the peak memory, above its inputs, of one forward and backward of a linear head's loss on the CPU.

    python -m tests.kernels.head.memory_worker {rows,recompute,eager} N V D [--dtype D] [--chunk-bytes B]

One JSON line: bytes (results included) and seconds. A process measures once: the kernel's high-water mark of
resident memory, reset after a small call has loaded what a first call loads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import Tensor

from smopd.ops import LossTokens, linear_smopd_loss

N_SUPPORT = 16


def tokens_of(n_tokens: int, n_vocab: int) -> LossTokens:
    ids = torch.rand(n_tokens, N_SUPPORT).mul_(n_vocab // N_SUPPORT).long()
    ids += torch.arange(N_SUPPORT) * (n_vocab // N_SUPPORT)  # distinct
    weight = torch.full((n_tokens,), 1.0 / n_tokens)
    return LossTokens(
        token_ids_N=ids[:, 0].clone(),
        adv_N=torch.randn(n_tokens),
        pg_weight_N=weight,
        kl_weight_N=weight,
        target_ids_NS=ids,
        target_logps_NS=(0.9 * torch.rand(n_tokens, N_SUPPORT).softmax(-1)).log(),
    )


def eager(hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens) -> Tensor:
    """The same loss, and the entropy as a statistic, by a log-softmax over everything."""
    logq_NV = torch.nn.functional.linear(hidden_ND, weight_VD).float().log_softmax(-1)
    logp_N = logq_NV.gather(-1, tokens.token_ids_N[:, None])[:, 0]
    at_NS, target_NS = logq_NV.gather(-1, tokens.target_ids_NS), tokens.target_logps_NS
    rest_N, off_N = 1.0 - target_NS.exp().sum(-1), 1.0 - at_NS.exp().sum(-1)
    kl_N = (target_NS.exp() * (target_NS - at_NS)).sum(-1) + rest_N * (rest_N.log() - off_N.log())
    ratio_N = (logp_N - logp_N.detach()).exp()
    with torch.no_grad():
        (logq_NV.exp() * logq_NV).sum(-1)
    return (tokens.kl_weight_N * kl_N - tokens.pg_weight_N * tokens.adv_N * ratio_N).sum()


def step(
    form: str, chunk_bytes: int | None, hidden_ND: Tensor, weight_VD: Tensor, tokens: LossTokens
) -> float:
    if form == "eager":
        loss = eager(hidden_ND, weight_VD, tokens)
    else:
        options = {"recompute": form == "recompute", "chunk_bytes": chunk_bytes}
        loss, _ = linear_smopd_loss(hidden_ND, weight_VD, tokens, **options)
    loss.backward()
    return loss.item()


def status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"/proc/self/status has no {name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("form", choices=("rows", "recompute", "eager"))
    parser.add_argument("sizes", type=int, nargs=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--chunk-bytes", type=int)
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    for n_tokens, n_vocab, n_hidden in ((8, 64, 8), args.sizes):
        torch.manual_seed(0)
        tokens = tokens_of(n_tokens, n_vocab)
        hidden_ND = torch.randn(n_tokens, n_hidden).to(dtype).requires_grad_()
        weight_VD = torch.randn(n_vocab, n_hidden).mul_(n_hidden**-0.5).to(dtype).requires_grad_()
        Path("/proc/self/clear_refs").write_text("5")
        before, started = status("VmRSS"), time.perf_counter()
        loss = step(args.form, args.chunk_bytes, hidden_ND, weight_VD, tokens)
        seconds, peak = time.perf_counter() - started, status("VmHWM")
    print(json.dumps({"form": args.form, "bytes": peak - before, "seconds": round(seconds, 2), "loss": loss}))


if __name__ == "__main__":
    main()
