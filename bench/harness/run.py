"""Runs a benchmark: inputs, checks, memory, then times in turns; a row for each provider.

A provider that is not here has a line that says why. A wrong result has a row that says what was wrong, and
no time.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from bench.harness.accuracy import judge, poisoned_memory
from bench.harness.memory import peak_bytes
from bench.harness.providers import absent, forced
from bench.harness.timing import Times, Turn, clock_for, graph_seconds, interleaved
from bench.harness.types import Benchmark, Case, Ceiling, Provider

SECONDS = {"cpu": 20.0, "cuda": 4.0}  # a case, all its providers together
GRAPH_BELOW_S = 1e-3  # a longer call has no launch gaps to speak of
SMOKE_ROWS = 64
CANNOT = "cannot serve this call"  # how a backend says that it has no kernel for a call


@dataclass(frozen=True)
class Options:
    """case_set: "cpu", "cuda", "quick", or, checked and not timed, "check" or "smoke" (cases_of).

    providers: which to keep, without: which not; by name, kind or backend.
    """

    device: str
    case_set: str
    seconds: float | None = None
    providers: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    deadline: float | None = None  # of time.monotonic()
    main_only: bool = False  # the main cases

    @property
    def timed(self) -> bool:
        return self.case_set not in ("check", "smoke")

    def wants(self, provider: Provider) -> bool:
        words = {provider.name, provider.kind, provider.backend}
        return not words & set(self.without) and (not self.providers or bool(words & set(self.providers)))


@dataclass(frozen=True)
class Entrant:
    """A provider that is here and right."""

    provider: Provider
    row: dict
    turn: Turn


def cases_of(benchmark: Benchmark, case_set: str) -> tuple[Case, ...]:
    """A case set's cases; of "smoke" the GPU's, with a few rows each: the kernels are the same."""
    if case_set != "smoke":
        return benchmark.cases[case_set]
    return tuple(replace(case, N=min(case.N, SMOKE_ROWS)) for case in benchmark.cases["cuda"])


def run_benchmarks(benchmarks: dict[str, Benchmark], options: Options, tell: Callable[[dict], None]) -> int:
    """Tells the rows of all cases, the main ones first; how many of ours were refused."""
    plan = [
        (name, case)
        for name, benchmark in benchmarks.items()
        for case in cases_of(benchmark, options.case_set)
        if case.main or not options.main_only
    ]
    refused = 0
    for name, case in sorted(plan, key=lambda entry: not entry[1].main):
        head = {"benchmark": name, "case": case.label}
        if options.deadline is not None and time.monotonic() > options.deadline:
            tell(head | {"left_out": "the time for the suite is over"})
            continue
        refused += _run_case(head, benchmarks[name], case, options, tell)
    return refused


def _run_case(
    head: dict, benchmark: Benchmark, case: Case, options: Options, tell: Callable[[dict], None]
) -> int:
    gc.collect()
    torch.manual_seed(0)
    device = options.device
    inputs = benchmark.inputs(case, device)
    truth = benchmark.truth(inputs)
    entrants, refused = [], 0
    for provider in filter(options.wants, benchmark.providers):
        row = head | {"provider": provider.name, "kind": provider.kind}
        if provider.note:
            row["computes"] = provider.note
        reason = absent(provider, case, device)
        if reason == "":
            continue
        if reason is None:
            reason, outcome = _admit(provider, inputs, truth, case, device)
        if reason is not None:
            tell(row | {"left_out": reason})
        elif "refused" in outcome:
            refused += provider.kind == "ours"
            tell(row | outcome)
        else:
            entrants.append(Entrant(provider, row | outcome, turn_of(provider, inputs)))
    if not options.timed:
        for entrant in entrants:
            tell(entrant.row)
        return refused
    _time(head, benchmark, benchmark.ceilings(inputs), entrants, case, options, tell)
    return refused


def turn_of(provider: Provider, inputs: Any) -> Turn:
    prepare = provider.prepare
    return Turn(
        run=provider.run,
        prepare=(lambda: inputs) if prepare is None else (lambda: prepare(inputs)),
        context=functools.partial(forced, provider.backend),
    )


def _admit(provider: Provider, inputs: Any, truth: dict, case: Case, device: str) -> tuple[str | None, dict]:
    """(why it is left out or None, its errors and memory, or why it is refused)."""
    turn = turn_of(provider, inputs)
    like = torch.empty(max(case.N, 1), max(case.V, 1), dtype=case.torch_dtype, device=device)
    try:
        with turn.context():
            prepared = turn.prepare()
            started = time.perf_counter()
            with poisoned_memory(like):
                outputs = turn.run(prepared)
            first_s = time.perf_counter() - started
            del prepared
            fault, errors, share = judge(provider, outputs, truth)
            del outputs
            if fault is not None:
                return None, {"refused": fault, "errors": _short(errors)}
            prepared = turn.prepare()
            peak = peak_bytes(lambda: turn.run(prepared), device)
    except torch.OutOfMemoryError:
        return "out of memory", {}
    except Exception as error:
        message = str(error).partition("\n")[0]
        if CANNOT in message:
            return f"{message.partition(':')[0]}: {message.partition(f'{CANNOT}: ')[2]}", {}
        reason = f"{type(error).__name__}: {message}"
        return (reason, {}) if provider.kind in ("peer", "compile") else (None, {"refused": reason})
    facts = {"errors": _short(errors), "of_bound": round(share, 3), "first_s": round(first_s, 3)}
    return None, facts | {"peak_mib": None if peak is None else round(peak / 2**20, 1)}


def _time(
    head: dict,
    benchmark: Benchmark,
    ceilings: list[Ceiling],
    entrants: list[Entrant],
    case: Case,
    options: Options,
    tell: Callable[[dict], None],
) -> None:
    clock = clock_for(options.device)
    turns = {ceiling.name: Turn(run=lambda _, run=ceiling.run: run()) for ceiling in ceilings}
    turns |= {entrant.provider.name: entrant.turn for entrant in entrants}
    seconds = SECONDS[options.device] if options.seconds is None else options.seconds
    for ceiling in ceilings:
        ceiling.run()  # as every provider has, when it was checked
    times = interleaved(turns, clock, seconds, case.repeats)
    for ceiling in ceilings:
        row = head | {"provider": ceiling.name, "kind": "ceiling"} | _milliseconds(times[ceiling.name])
        median = times[ceiling.name].median
        if ceiling.bytes:
            row["gb_per_s"] = round(ceiling.bytes / median / 1e9, 2)
        if ceiling.flops:
            row["gflop_per_s"] = round(ceiling.flops / median / 1e9, 1)
        tell(row)
    eager = next((times[e.provider.name].median for e in entrants if e.provider.kind == "eager"), None)
    for entrant in entrants:
        median = times[entrant.provider.name].median
        ratios: dict = {"times_eager": None if eager is None else _digits(eager / median)}
        if ceilings:
            share = times[ceilings[0].name].median / median
            ratios |= {"ceiling": ceilings[0].name, "of_ceiling": _digits(share)}
        if benchmark.launch_bound and options.device != "cpu" and median < GRAPH_BELOW_S:
            ratios |= _graph(entrant, clock)
        tell(entrant.row | _milliseconds(times[entrant.provider.name]) | ratios)


def _graph(entrant: Entrant, clock: Any) -> dict:
    try:
        return {"graph_ms": _digits(graph_seconds(entrant.turn, clock) * 1e3)}
    except Exception as error:  # whatever a capture that fails raises
        torch.cuda.synchronize()
        return {"graph_ms": None, "no_graph": str(error).splitlines()[0][:120]}


def _milliseconds(times: Times) -> dict:
    low, median, high = (_digits(value * 1e3) for value in times.quantiles())
    return {"ms": median, "p20_ms": low, "p80_ms": high, "repeats": len(times.seconds)}


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _short(errors: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{error:.3g}") for name, error in errors.items()}
