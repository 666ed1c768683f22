"""The jobs of `make gpu` and `make gpu-peers`, in the order of what one would miss most.

Ten minutes of a lent GPU: first what the machine can do, then whether each operation is right, then the times
that have targets, plain PyTorch's, the hardware's counters, the open choices, and at last all tests. Each is
a process of its own with a limit: a kernel that hangs or corrupts its process takes no other's result along.

The seconds are what an H200 took, rounded up by a fifth; estimates where it was not timed: plain PyTorch's
main cases, the checks, the peers, the trace.
"""

from __future__ import annotations

import glob
import importlib.util
import itertools
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.gpu import pytest_plugin
from bench.gpu.jobs import Job

TOTAL_SECONDS = 560.0
LAST_CASE_SECONDS = 15.0  # of a case that was begun in time
# What has a target (bench/gpu/targets.py), and what plain PyTorch's main cases take.
TIMED = {
    "smopd_loss": (14.0, 12.0),
    "linear_smopd_loss": (21.0, 13.0),
    "topk_logprobs": (9.0, 11.0),
    "linear_topk_logprobs": (9.0, 11.0),
    "teacher_mixture": (8.0, 9.0),
    "advantages": (6.0, 10.0),
    "topk_forward_kl": (10.0, 11.0),
}
OTHER_SECONDS = 11.0
# Those that have peers: these compile and tune themselves for as long as they like.
PEERS = {"linear_smopd_loss": 150.0, "smopd_loss": 60.0, "topk_logprobs": 40.0, "topk_forward_kl": 40.0}
TESTS = ("tests/kernels", "tests/smopd/record/test_metrics.py")
WORKERS = 8
RESTARTS = 64  # of workers: a CUDA error and a hang take one each
TEST_SECONDS = 75.0  # a worker whose test takes longer is ended: a test of many compilations takes a minute
_FEW = {"OMP_NUM_THREADS": "2"}  # of jobs side by side
NO_TESTS = 5  # pytest's exit status where none is marked
TOOLS = ("/usr/local/cuda/bin", *sorted(glob.glob("/opt/nvidia/nsight-compute/*")))  # when not on PATH
SANITIZER = "compute-sanitizer"
# A tool's benchmark, and the kernel that it looks at: torch's own are no business of ours.
SANITIZED = (
    *(("memcheck", name, "") for name in ("smopd_loss", "topk_logprobs", "teacher_mixture", "advantages")),
    ("racecheck", "smopd_loss", "row_kernel"),
    ("racecheck", "topk_logprobs", "select_kernel"),
    ("racecheck", "teacher_mixture", "_mixture_kernel"),
    ("racecheck", "advantages", "_runs_kernel"),
)
SANITIZER_STATUS = 9  # where it found something
COUNTED = (
    "row kernel, paper",
    "row kernel, default settings",
    "top-kappa stream",
    "top-kappa select, kappa 64",
    "advantages",
)


@dataclass(frozen=True)
class Files:
    """Where it all goes: rows of numbers, rows of tests, what jobs print, the tables, a trace."""

    rows: Path
    tests: Path
    log: Path
    table: Path
    trace: Path


def files(folder: Path, stem: str) -> Files:
    names = (".jsonl", "-tests.jsonl", ".log", ".md", "-trace.json.gz")
    return Files(*(folder / f"{stem}{name}" for name in names))


def gpu_jobs(names: Sequence[str], to: Files) -> list[Job]:
    """All jobs of `make gpu`. names: the benchmarks; to: paths that are absolute or of the checkout."""
    number = itertools.count(1)
    jobs = [_python(next(number), "machine", ("bench.gpu.machine", "--output", str(to.rows)), 11.0, 40.0)]
    jobs += list(_smoke(next(number), names, to))
    ours = ("--providers", "triton", "--seconds", "1.5")
    for name, (expected, _) in TIMED.items():
        jobs.append(_times(next(number), "time", name, expected, to, *ours))
    beside = ("--main", "--providers", "eager,triton", "--seconds", "1.5")
    for name in [*TIMED, *(name for name in names if name not in TIMED)]:
        expected = TIMED[name][1] if name in TIMED else OTHER_SECONDS
        jobs.append(_times(next(number), "eager", name, expected, to, *beside))
    jobs += [_counters(next(number), name, to) for name in COUNTED]
    jobs.append(_sweep(next(number), to))
    return [*jobs, *_tests(next(number), names, to)]


def peer_jobs(names: Sequence[str], to: Files) -> list[Job]:
    """All jobs of `make gpu-peers`: what is not installed has a row that says so."""
    number = itertools.count(1)
    jobs = [_python(next(number), "machine", ("bench.gpu.machine", "--output", str(to.rows)), 11.0, 40.0)]
    jobs.append(
        _python(
            next(number),
            "trace",
            ("bench.gpu.trace", "--output", str(to.rows), "--trace", str(to.trace)),
            *(15.0, 45.0),
        )
    )
    for name, expected in PEERS.items():
        beside = ("--providers", "peer,triton", "--seconds", "3")
        jobs.append(_times(next(number), "peers", name, expected, to, *beside))
    return jobs


def _python(stage: int, name: str, module: Sequence[str], expected: float, limit: float, **more) -> Job:
    return Job(stage, name, (sys.executable, "-m", *module), expected, limit, **more)


def _smoke(stage: int, names: Sequence[str], to: Files) -> Iterator[Job]:
    """Each operation at a few rows of the real sizes; what is compiled here is not compiled again later."""
    for name in names:
        options = ("--smoke", "--device", "cuda", "--providers", "triton", "--output", str(to.rows))
        yield _python(stage, f"smoke {name}", ("bench", name, *options), 21.0, 75.0, environment=_FEW)

    yield from (_sanitizer(stage, *words) for words in SANITIZED)


def _sanitizer(stage: int, check: str, name: str, kernel: str) -> Job:
    """Hard shapes, held to float64 as well; every tensor is an allocation of its own, with an end."""
    found = tool(SANITIZER)
    watch = ("--kernel-name", f"kns={kernel}") if kernel else ()
    options = ("--tool", check, *watch, "--error-exitcode", str(SANITIZER_STATUS))
    bench = (sys.executable, "-m", "bench", name, "--check", "--device", "cuda", "--providers", "triton")
    environment = {**_FEW, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if check == "memcheck" else _FEW
    absent = None if found else f"{SANITIZER} is not installed"
    line = (found or SANITIZER, *options, *bench)
    return Job(stage, f"{check} {name}", line, 24.0, 75.0, environment, absent=absent)


def _counters(stage: int, name: str, to: Files) -> Job:
    command = ("bench.gpu.counters", name, "--output", str(to.rows))
    absent = None if tool("ncu") else "ncu is not installed"
    return _python(stage, f"counters of {name}", command, 16.0, 45.0, absent=absent)


def _sweep(stage: int, to: Files) -> Job:
    """Its children use the device, so that it may not ask the driver itself."""
    environment = {**_FEW, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    command = ("bench.gpu.sweep", "--output", str(to.rows))
    return _python(stage, "sweep", command, 65.0, 130.0, environment=environment)


def _times(stage: int, kind: str, name: str, expected: float, to: Files, *options: str) -> Job:
    limit = 1.5 * expected + LAST_CASE_SECONDS
    deadline = ("--deadline", f"{limit - LAST_CASE_SECONDS:.0f}")
    command = ("bench", name, "--device", "cuda", *options, *deadline, "--output", str(to.rows))
    return _python(stage, f"{kind} {name}", command, expected, limit)


def _tests(stage: int, names: Sequence[str], to: Files) -> Iterator[Job]:
    """Side by side: all tests, those of huge memory, the benchmarks' hard shapes. Cut when the time is up."""
    yield _pytest(stage, "pytest -m gpu", "gpu and not huge", WORKERS, to)
    yield _pytest(stage, "pytest -m huge", "gpu and huge", 1, to)
    for name in names:
        options = ("--check", "--device", "cuda", "--providers", "ours", "--output", str(to.rows))
        yield _python(stage, f"check {name}", ("bench", name, *options), 40.0, 140.0, environment=_FEW)


def _pytest(stage: int, name: str, marks: str, workers: int, to: Files) -> Job:
    """Tests that are not begun in time are skipped, and counted."""
    missing = [word for word in ("pytest", "hypothesis") if importlib.util.find_spec(word) is None]
    several = ("-n", str(workers), "--dist", "loadgroup", "--max-worker-restart", str(RESTARTS))
    beside = several if importlib.util.find_spec("xdist") else ()
    command = ("pytest", "-m", marks, "-q", "-p", "no:cacheprovider", "-p", pytest_plugin.__name__, *beside)
    return _python(
        stage,
        name,
        (*command, *TESTS),
        155.0,
        400.0,
        environment={pytest_plugin.ROWS: str(to.tests), pytest_plugin.SECONDS: f"{TEST_SECONDS:.0f}"},
        nothing=(NO_TESTS,),
        absent=f"{' and '.join(missing)} not installed" if missing else None,
    )


def tool(name: str) -> str | None:
    """Where one of NVIDIA's command-line tools is."""
    return shutil.which(name) or shutil.which(name, path=":".join(TOOLS))
