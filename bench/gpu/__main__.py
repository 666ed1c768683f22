"""`make gpu`: three commands of at most 180 s each, for a GPU that is lent for a quarter of an hour.

    python -m bench.gpu 1      ceilings, correctness and the operations' times, then hardware counters
    python -m bench.gpu 2      what readers compare: eager, torch.compile, peers; whole training steps
    python -m bench.gpu 3      tests on the GPU, and NVIDIA's memcheck and racecheck
    python -m bench.gpu        all three; --dry-run says what would run, on any machine

Needs Python with torch, triton, pytest and pytest-benchmark; ncu and compute-sanitizer take part where they
are. Rows, logs and the table go to $OUT, or to bench/results. A job that hangs is killed at its limit.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PART_SECONDS = 180.0
TIMED_OUT = (124, 137)  # exit statuses of timeout(1)
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs")
BENCH = (*PYTEST, "bench")
CHECK = (*BENCH, "--smopd-check")
TOOLS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*")  # when not on PATH
LOSS = "smopd_loss-N8192-V151936-M2-kappa16-bf16-triton"
ROW_KERNELS = "regex:(row|split)_kernel"
METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sector_hit_rate.pct",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
)
SMALL = "(smopd_loss or topk or teacher or advantages) and triton and not linear"
TESTS = ("tests/kernels", "tests/smopd/record/test_metrics.py")


@dataclass(frozen=True)
class Job:
    """A process with a limit in seconds; not begun without its tool, or when the time of its part is over."""

    name: str
    command: tuple[str, ...]
    limit: float
    environment: dict[str, str] = field(default_factory=dict)
    tool: str | None = None


def sanitizer(check: str, which: str, **environment: str) -> Job:
    """compute-sanitizer over small shapes, which are held to float64 as well."""
    command = (
        "compute-sanitizer",
        "--tool",
        check,
        "--error-exitcode",
        "9",
        *CHECK,
        "--smopd-cases",
        "quick",
    )
    return Job(check, (*command, "-k", which), 60.0, environment, "compute-sanitizer")


PARTS: dict[str, tuple[Job, ...]] = {
    "1": (
        Job("check", (*CHECK, "-k", "triton"), 60.0),
        Job("times", (*BENCH, "--smopd-seconds", "1", "-k", "triton"), 120.0),
        Job(
            "counters",
            ("ncu", "--clock-control", "none", "--kernel-name", ROW_KERNELS, "--launch-count", "1",
             "--metrics", ",".join(METRICS), *CHECK, "-k", LOSS),
            45.0,
            tool="ncu",
        ),
    ),
    "2": (
        Job("step", (sys.executable, "-m", "smopd.train", "bench/training_step.yaml"), 90.0),
        Job("readers", (*BENCH, "--smopd-seconds", "1", "-k", "not reference and not teacher"), 120.0),
    ),
    "3": (
        Job(
            "tests",
            (*PYTEST, "-m", "gpu", "-n", "8", "--dist", "loadgroup", "-p", "bench.gpu.pytest_plugin", *TESTS),
            120.0,
        ),
        sanitizer("memcheck", SMALL, PYTORCH_NO_CUDA_MEMORY_CACHING="1"),
        sanitizer("racecheck", f"({SMALL}) and fp32"),
    ),
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """The exit status: 1 where a job went wrong or was not begun, 2 for wrong arguments or without a GPU."""
    dry = "--dry-run" in arguments
    chosen = [word for word in arguments if word != "--dry-run"] or list(PARTS)
    if unknown := [word for word in chosen if word not in PARTS]:
        print(f"error: {unknown[0]}: expected one of {', '.join(PARTS)} or --dry-run", file=sys.stderr)
        return 2
    if dry:
        for part in chosen:
            for job in PARTS[part]:
                print(f"{part}  {job.name}, at most {job.limit:.0f} s\n   {shlex.join(job.command)}")
        return 0
    import torch

    if not torch.cuda.is_available():
        print("error: no CUDA device is here; --dry-run needs none", file=sys.stderr)
        return 2
    folder = Path(os.environ.get("OUT") or Path("bench") / "results").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    results = [run_part(part, folder) for part in chosen]
    if (rows := folder / "rows.jsonl").exists():
        table = subprocess.run([sys.executable, "-m", "bench", str(rows)], capture_output=True, text=True)
        (folder / "table.md").write_text(table.stdout)
    return int(not all(results))


def run_part(part: str, folder: Path) -> bool:
    """Whether every job ended well; a part stops beginning jobs after `PART_SECONDS`."""
    ends, well = time.monotonic() + PART_SECONDS, True
    for job in PARTS[part]:
        left = min(job.limit, ends - time.monotonic())
        said = run(job, folder / f"{part}-{job.name}.log", folder / "rows.jsonl", left)
        print(f"{part} {job.name}: {said}", flush=True)
        well &= said.startswith(("ended well", "not here"))
    return well


def run(job: Job, log: Path, rows: Path, seconds: float) -> str:
    """How a job ended; what it printed is in the log."""
    first, *rest = job.command
    if job.tool:
        found = shutil.which(job.tool) or shutil.which(job.tool, path=":".join(places()))
        if found is None:
            return f"not here: {job.tool} is not installed"
        first = found
    if seconds < 1:
        return "not begun: the time of this part was over"
    environment = os.environ | {"SMOPD_BENCH_OUTPUT": str(rows)} | job.environment
    started = time.monotonic()
    limited = ["timeout", "-k", "5", f"{seconds:.0f}", first, *rest]  # ends the job's children too
    with log.open("wb") as file:
        code = subprocess.run(limited, stdout=file, stderr=file, env=environment).returncode
    after = f"after {time.monotonic() - started:.0f} s"
    if code in TIMED_OUT:
        return f"killed at its limit {after}, see {log.name}"
    return f"ended well {after}" if code == 0 else f"exit status {code} {after}, see {log.name}"


def places() -> list[str]:
    return [str(path) for tool in TOOLS for path in sorted(Path("/").glob(tool.lstrip("/")))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
