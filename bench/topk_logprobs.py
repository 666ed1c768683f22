"""topk_logprobs on the CPU: ours on each backend beside torch.topk with logsumexp, kappa 16.

A row whose log-probabilities are off, or whose ids differ from a float64 sort with ties to the lower id, is
refused and says why; so does a backend that is not there. Columns: median, p20 and p80 of the time, and the
median's ratio to the eager form and its share of the ceiling, one read of the logits, of the same run.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

from smopd.kernels.dispatch import ENV, cpp_unavailable
from smopd.ops import topk_logprobs

Provider: TypeAlias = Callable[[Tensor], "tuple[Tensor, Tensor]"]
Times: TypeAlias = "tuple[float, float, float]"

KAPPA = 16
CASES = [(256, 151_936, torch.float32), (256, 151_936, torch.bfloat16), (10_000, 265, torch.float32)]
SECONDS = 2.0  # a provider and case
CHECKED_ROWS = 8
TOLERANCE = 2e-5  # nats


def eager(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    top = logits_NV.topk(KAPPA, dim=-1)
    return top.indices, top.values.float() - logits_NV.float().logsumexp(-1, keepdim=True)


def ours(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    top = topk_logprobs(logits_NV, KAPPA)
    return top.ids_NS, top.logps_NS


PROVIDERS: dict[str, tuple[Provider, str | None]] = {
    "eager": (eager, None),
    "reference": (ours, "reference"),
    "cpp": (ours, "cpp"),
}
"""Name -> what is timed, and the backend that it is forced to."""


def main() -> int:
    """Prints a JSON line a row; 1 where a row was refused."""
    here = {"cpu": cpu_name(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    providers = dict(PROVIDERS)
    if why_not := cpp_unavailable():
        del providers["cpp"]
        tell({"provider": "cpp", "left_out": why_not})
    refused = 0
    for n_rows, vocabulary, dtype in CASES:
        torch.manual_seed(0)
        logits_NV = (torch.randn(n_rows, vocabulary) * 4).to(dtype)
        case = f"N{n_rows}-V{vocabulary}-{str(dtype).removeprefix('torch.')}"
        ceiling = seconds(read, logits_NV)
        tell({"case": case, "provider": "read"} | milliseconds(ceiling) | here)
        medians: dict[str, float] = {}
        for provider, (run, backend) in providers.items():
            row = {"case": case, "provider": provider}
            with forced(backend):
                reason = fault(run, logits_NV[:CHECKED_ROWS], exact_ids=provider != "eager")
                if reason is not None:
                    refused += 1
                    tell(row | {"refused": reason} | here)
                    continue
                times = seconds(run, logits_NV)
            median = medians[provider] = times[1]
            ratios = {
                "times_eager": round(medians["eager"] / median, 2) if "eager" in medians else None,
                "of_ceiling": round(ceiling[1] / median, 3),
            }
            tell(row | milliseconds(times) | ratios | here)
    return 1 if refused else 0


def fault(run: Provider, logits_NV: Tensor, exact_ids: bool) -> str | None:
    """None where `run` is right on these rows, else what is wrong."""
    ids_NS, logps_NS = run(logits_NV)
    order_NS = logits_NV.double().sort(dim=-1, descending=True, stable=True).indices[:, :KAPPA]
    exact_NS = logits_NV.double().log_softmax(-1).gather(-1, order_NS)
    error = float((logps_NS.double() - exact_NS).abs().max())
    if not error <= TOLERANCE:
        return f"log-probabilities are off by up to {error:.3g} nats, expected at most {TOLERANCE:g}"
    if exact_ids and not torch.equal(ids_NS.long(), order_NS):
        return "ids differ from a float64 sort with ties to the lower id"
    return None


def read(logits_NV: Tensor) -> Tensor:
    """Touches every byte once; 16-bit logits are read in pairs, their sum means nothing."""
    return logits_NV.flatten().view(torch.float32).sum()


def seconds(run: Callable[[Tensor], object], logits_NV: Tensor) -> Times:
    """p20, median and p80 of the time of one call."""
    timer = Timer(
        "run(logits)", globals={"run": run, "logits": logits_NV}, num_threads=torch.get_num_threads()
    )
    times = torch.tensor(timer.blocked_autorange(min_run_time=SECONDS).times, dtype=torch.float64)
    low, median, high = times.quantile(torch.tensor([0.2, 0.5, 0.8], dtype=torch.float64)).tolist()
    return low, median, high


def milliseconds(times: Times) -> dict[str, float]:
    low, median, high = (round(value * 1e3, 3) for value in times)
    return {"ms": median, "p20_ms": low, "p80_ms": high}


@contextmanager
def forced(backend: str | None) -> Iterator[None]:
    before = os.environ.get(ENV)
    if backend is not None:
        os.environ[ENV] = backend
    try:
        yield
    finally:
        os.environ.pop(ENV, None)
        if before is not None:
            os.environ[ENV] = before


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def tell(row: dict) -> None:
    print(json.dumps(row), flush=True)
