"""The open choices of the kernels: the same call with one thing changed, a process each.

    python -m bench.gpu.sweep --output FILE [--only WORD]

A variant changes constants of modules, or options of a kernel's launch, by name; one that names what is not
there (any more) is left out and says so. First all are compiled at once and held to float64 on a few rows,
then those that are right are timed one by one, in turns with the ceiling.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu.calls import IN_PLACE, PAPER, Call
from bench.harness import record
from bench.harness.accuracy import judge
from bench.harness.run import SMOKE_ROWS, turn_of
from bench.harness.timing import Turn, clock_for, interleaved

SECONDS = 0.6  # of timing a variant
LIMIT_SECONDS = 25.0  # of a variant's process
TRITON, CHUNKS = "smopd.kernels.triton", "smopd.kernels.head.chunks"
ROW_BYTES = 151_936 * 2


@dataclass(frozen=True)
class Variant:
    """A call with one thing changed.

    Attributes:
        constants: "module:NAME" -> its value; "module:NAME" as a value stands for what is there.
        launches: "module:kernel" -> options of its launches that replace the launcher's.
    """

    call: Call
    label: str
    constants: Mapping[str, Any] = field(default_factory=dict)
    launches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def _rows(label: str, **options: Any) -> Variant:
    launches = {f"{TRITON}.loss:row_kernel": options} if options else {}
    return Variant(Call("smopd_loss", PAPER, IN_PLACE), label, launches=launches)


def _selection(kappa: int, n_warps: int) -> Variant:
    launches = {f"{TRITON}.topk:select_kernel": {"num_warps": n_warps}}
    call = Call("topk_logprobs", f"N8192-V151936-kappa{kappa}-bf16")
    return Variant(call, f"select warps {n_warps}", launches=launches)


def _scratch(n_bytes: int) -> Variant:
    call = Call("topk_logprobs", "N8192-V151936-kappa16-bf16")
    label = f"{n_bytes >> 20} MiB of keys between two launches"
    return Variant(call, label, {f"{TRITON}.topk:SCRATCH_BYTES": n_bytes})


def _chunks(n_rows: int) -> Variant:
    call = Call("linear_smopd_loss", "N8192-V151936-D2048-M2-kappa16-bf16")
    return Variant(call, f"chunks of at most {n_rows} rows", {f"{CHUNKS}:CHUNK_BYTES": n_rows * ROW_BYTES})


VARIANTS = (
    _rows("as it ships"),
    _rows("2 blocks held, 1 ahead", LAST=2, AHEAD=1, UNROLL=2),
    _rows("4 blocks held", LAST=4),
    *(_rows(f"unrolled {times} times", UNROLL=times) for times in (1, 3)),
    _rows("two programs of 8 warps", num_warps=8, L=256, maxnreg=128),
    replace(
        _rows("no hints to the cache"),
        constants={f"{TRITON}.row_kernel:load_block": "bench.gpu.unhinted:load_block"},
    ),
    *(_selection(64, n_warps) for n_warps in (1, 2, 4, 8)),
    *(_selection(16, n_warps) for n_warps in (1, 2, 4)),
    _scratch(1 << 30),
    *(_chunks(n_rows) for n_rows in (2048, 2816, 4096, 4224, 8192)),
)  # fmt: skip


class Relaunched:
    """A kernel whose launches have some options replaced."""

    def __init__(self, name: str, kernel: Any, options: Mapping[str, Any]) -> None:
        self._name, self._kernel, self._options = name, kernel, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **given: Any) -> Any:
            if unknown := sorted(self._options.keys() - given.keys()):
                raise KeyError(f"{self._name} is launched without {unknown}, expected one of {sorted(given)}")
            return self._kernel[grid](*arguments, **{**given, **self._options})

        return launch


def apply(variant: Variant) -> None:
    """Changes this process for good.

    Raises:
        AttributeError: a name is not there.
    """
    for name, value in variant.constants.items():
        module, attribute, _ = looked_up(name)
        there = looked_up(value)[2] if isinstance(value, str) and ":" in value else value
        setattr(module, attribute, there)
    for name, options in variant.launches.items():
        module, attribute, kernel = looked_up(name)
        setattr(module, attribute, Relaunched(name, kernel, options))


def looked_up(name: str) -> tuple[Any, str, Any]:
    """Module, attribute and value of "module:NAME"."""
    path, _, attribute = name.partition(":")
    module = importlib.import_module(path)
    return module, attribute, getattr(module, attribute)


def check(variant: Variant, path: Path) -> None:
    """Compiles the variant, and holds it to float64 on a few rows; ends with status 0 where it is right."""

    def outcome() -> dict | None:
        apply(variant)
        benchmark, case, provider = variant.call.found()
        torch.manual_seed(0)
        inputs = benchmark.inputs(replace(case, N=min(case.N, SMOKE_ROWS)), "cuda")
        turn = turn_of(provider, inputs)
        with turn.context():
            outputs = turn.run(turn.prepare())
        fault, _, _ = judge(provider, outputs, benchmark.truth(inputs))
        return None if fault is None else {"refused": fault}

    _told(variant, path, outcome)


def measure(variant: Variant, path: Path) -> None:
    def outcome() -> dict:
        apply(variant)
        benchmark, case, provider = variant.call.found()
        torch.manual_seed(0)
        inputs = benchmark.inputs(case, "cuda")
        bound = benchmark.ceilings(inputs)[0]
        turns = {"bound": Turn(run=lambda _: bound.run()), "ours": turn_of(provider, inputs)}
        times = interleaved(turns, clock_for("cuda"), SECONDS)
        ours, least = times["ours"].median, times["bound"].median
        return {"ms": float(f"{ours * 1e3:.4g}"), "of_ceiling": round(least / ours, 4), "ceiling": bound.name}

    _told(variant, path, outcome)


def _told(variant: Variant, path: Path, outcome: Callable[[], dict | None]) -> None:
    try:
        said = outcome()
    except Exception as error:
        said = {"left_out": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    if said is not None:
        with path.open("a") as file:
            record.teller("cuda", file)(head(variant) | said)
    if said is not None and "ms" not in said:
        raise SystemExit(1)


def head(variant: Variant) -> dict:
    call = variant.call
    return {"benchmark": call.benchmark, "case": call.case, "provider": variant.label, "kind": "sweep"}


def sweep(variants: Sequence[Variant], path: Path) -> int:
    """How many variants are wrong, cannot be, or do not end."""
    assert not torch.cuda.is_initialized()  # or a child could not use the device
    importlib.import_module(f"{TRITON}.loss")  # as torch once, and not in each child
    context = multiprocessing.get_context("fork")
    checks = [(variant, context.Process(target=check, args=(variant, path))) for variant in variants]
    for _, process in checks:
        process.start()
    ends = time.monotonic() + 2 * LIMIT_SECONDS
    right = [variant for variant, process in checks if _ended(variant, process, ends, path)]
    failed = len(variants) - len(right)
    for variant in right:
        process = context.Process(target=measure, args=(variant, path))
        process.start()
        failed += not _ended(variant, process, time.monotonic() + LIMIT_SECONDS, path)
    return failed


def _ended(variant: Variant, process: Any, ends: float, path: Path) -> bool:
    """Whether it ended well in time; it is killed if not."""
    process.join(max(0.0, ends - time.monotonic()))
    if process.exitcode is None:
        process.kill()
        process.join(1.0)
    if process.exitcode not in (0, 1):  # with 1 it has told why
        with path.open("a") as file:
            words = "it did not end" if process.exitcode in (None, -9) else f"exit status {process.exitcode}"
            record.teller("cpu", file)(head(variant) | {"left_out": words})
    return process.exitcode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.sweep", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="rows go to this file")
    parser.add_argument("--only", default="", help="variants whose benchmark, case or label holds this")
    parsed = parser.parse_args()
    chosen = [one for one in VARIANTS if parsed.only in f"{one.call.benchmark} {one.call.case} {one.label}"]
    failed = sweep(chosen, parsed.output)
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
