"""topk_logprobs on the CPU: ours on each backend beside torch.topk with logsumexp, kappa 16.

A row whose log-probabilities are off, or whose ids differ from a float64 sort with ties to the lower id, is
refused. Columns: median, p20 and p80 of the time, and the median's ratio to the eager form of the same run.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from smopd.kernels.dispatch import ENV
from smopd.ops import topk_logprobs

KAPPA = 16
CASES = [(256, 151_936, torch.float32), (256, 151_936, torch.bfloat16), (10_000, 265, torch.float32)]
SECONDS = 2.0  # a provider and case


def eager(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    top = logits_NV.topk(KAPPA, dim=-1)
    return top.indices, top.values.float() - logits_NV.float().logsumexp(-1, keepdim=True)


def ours(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    top = topk_logprobs(logits_NV, KAPPA)
    return top.ids_NS, top.logps_NS


@contextmanager
def backend(name: str | None):
    if name is not None:
        os.environ[ENV] = name
    try:
        yield
    finally:
        os.environ.pop(ENV, None)


def check(provider: str, run: Callable, logits_NV: Tensor) -> None:
    some_NV = logits_NV[:8]
    ids_NS, logps_NS = run(some_NV)
    order_NV = some_NV.double().sort(dim=-1, descending=True, stable=True).indices[:, :KAPPA]
    exact_NS = some_NV.double().log_softmax(-1).gather(-1, order_NV)
    torch.testing.assert_close(logps_NS.double(), exact_NS, rtol=0, atol=2e-5)
    if provider != "eager" and not torch.equal(ids_NS.long(), order_NV):
        raise AssertionError(f"{provider}: ids differ from a float64 sort with ties to the lower id")


def main() -> None:
    providers = {"eager": (eager, None), "reference": (ours, "reference"), "cpp": (ours, "cpp")}
    where = {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    for n_rows, vocabulary, dtype in CASES:
        torch.manual_seed(0)
        logits_NV = (torch.randn(n_rows, vocabulary) * 4).to(dtype)
        medians: dict[str, float] = {}
        for provider, (run, name) in providers.items():
            with backend(name):
                check(provider, run, logits_NV)
                timer = Timer(
                    "run(logits)", globals={"run": run, "logits": logits_NV}, num_threads=where["threads"]
                )
                times = torch.tensor(timer.blocked_autorange(min_run_time=SECONDS).times, dtype=torch.float64)
            median, low, high = (float(times.quantile(q)) for q in (0.5, 0.2, 0.8))
            medians[provider] = median
            row = {
                "case": f"N{n_rows}-V{vocabulary}-{str(dtype).removeprefix('torch.')}",
                "provider": provider,
                "ms": round(median * 1e3, 3),
                "p20_ms": round(low * 1e3, 3),
                "p80_ms": round(high * 1e3, 3),
                "times_eager": round(medians["eager"] / median, 2),
            }
            print(json.dumps(row | where), flush=True)
