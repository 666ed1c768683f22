"""One call of ours at a size that is benchmarked, for a tool that watches: ncu, torch.profiler, a sweep.

python -m bench.gpu.calls smopd_loss N8192-V151936-M2-kappa16-bf16 "triton in place"
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass

import torch

from bench.harness.run import turn_of
from bench.harness.timing import Turn
from bench.harness.types import Benchmark, Case, Provider

PAPER = "N8192-V151936-M2-kappa16-bf16"
IN_PLACE = "triton in place"


@dataclass(frozen=True)
class Call:
    """A provider's call in one of a benchmark's cases for GPUs, each by its name."""

    benchmark: str
    case: str
    provider: str = "triton"

    def found(self) -> tuple[Benchmark, Case, Provider]:
        """Raises: ValueError, where one of the names is none (any more)."""
        benchmark = importlib.import_module(f"bench.{self.benchmark}").BENCHMARK
        cases = {case.label: case for case in benchmark.cases["cuda"]}
        providers = {provider.name: provider for provider in benchmark.providers}
        for kind, name, known in (("case", self.case, cases), ("provider", self.provider, providers)):
            if name not in known:
                raise ValueError(f"{self.benchmark} has no {kind} {name!r}, expected one of {list(known)}")
        return benchmark, cases[self.case], providers[self.provider]

    def turn(self) -> Turn:
        """Its inputs are made now, on the GPU."""
        benchmark, case, provider = self.found()
        torch.manual_seed(0)
        return turn_of(provider, benchmark.inputs(case, "cuda"))


def main(words: list[str]) -> None:
    turn = Call(*words).turn()
    with turn.context():
        turn.run(turn.prepare())
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
