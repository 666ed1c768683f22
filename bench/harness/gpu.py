"""What `make gpu` runs on a CUDA machine, with torch and triton alone: correctness and every benchmark.

Side by side every benchmark's hard shapes against float64, and `pytest -m gpu` where pytest is installed.
Then every benchmark's speed, one by one with nothing beside it; a provider that is wrong is refused before it
is timed. Each is a process of its own: a kernel that corrupts its process takes no other's result along. Once
the GPU answers, the whole ends in under eight minutes, whatever hangs.

The seconds are estimates: none of this was timed on a GPU.
"""

from __future__ import annotations

import datetime
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.harness import job_runner, record
from bench.harness.job_runner import Job

TOTAL_SECONDS = 440.0
CHECK, TIME = 1, 2  # the first timing's stage; each has its own
EXPECTED_TIMING_SECONDS = {
    "advantages": 10.0,
    "linear_smopd_loss": 40.0,
    "linear_topk_logprobs": 30.0,
    "smopd_loss": 40.0,
    "teacher_mixture": 15.0,
    "teacher_product": 12.0,
}
OTHER_TIMING_SECONDS = 18.0
LAST_CASE_SECONDS = 40.0  # of a case that was begun in time, torch.compile's part in it
TESTS = ("tests/kernels", "tests/smopd/record/test_metrics.py")
WORKERS = 8
NO_TESTS = 5  # pytest's exit status where none is marked


def main(arguments: Sequence[str], benchmarks: Sequence[str]) -> int:
    """Writes FOLDER/<device>-<date>.jsonl, or with --dry-run says what would run.

    Returns:
        The exit status: 0, 1 where something is wrong or was not begun, 2 without a GPU.
    Raises:
        ValueError: arguments are not [--dry-run] [FOLDER].
    """
    words = [word for word in arguments if word != "--dry-run"]
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise ValueError(f"gpu: got {' '.join(arguments)}, expected [--dry-run] [FOLDER]")
    folder = Path(words[0]).absolute() if words else Path("bench") / "results"
    has_gpu = torch.cuda.is_available()
    output = folder / f"{record.slug('cuda') if has_gpu else 'DEVICE'}-{today()}.jsonl"
    plan = jobs(benchmarks, output)
    if len(words) < len(arguments):
        job_runner.show(plan, TOTAL_SECONDS)
        return 0
    if not has_gpu:
        print("error: no CUDA device is here, `make gpu` needs one (DRY_RUN=1 does not)", file=sys.stderr)
        return 2
    results = job_runner.run_jobs(plan, TOTAL_SECONDS, record.ROOT)
    for state in (job_runner.NOT_HERE, job_runner.NOT_BEGUN, job_runner.WRONG):
        if names := [name for name, result in results.items() if result.state == state]:
            record.note(f"{state}: {', '.join(names)}")
    record.note(f"rows are in {output}; python -m bench table {output} shows them")
    return int(any(result.state in (job_runner.WRONG, job_runner.NOT_BEGUN) for result in results.values()))


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def jobs(benchmarks: Sequence[str], output: Path) -> list[Job]:
    """All jobs, in the order in which they are begun. output is absolute or of the checkout."""
    python = (sys.executable, "-m")
    to_file = ("--output", str(output))

    def check(name: str) -> Job:
        options = ("--check", "--device", "cuda", "--deadline", "100", *to_file)
        command = (*python, "bench", name, *options)
        return Job(CHECK, f"check {name}", command, 40.0, 140.0, {"OMP_NUM_THREADS": "2"})

    checks = [_tests(python), *(check(name) for name in benchmarks)]
    timings = []
    for stage, name in enumerate(benchmarks, TIME):
        expected = EXPECTED_TIMING_SECONDS.get(name, OTHER_TIMING_SECONDS)
        options = ("--device", "cuda", "--deadline", f"{expected:.0f}", *to_file)
        command = (*python, "bench", name, *options)
        timings.append(Job(stage, f"time {name}", command, expected, expected + LAST_CASE_SECONDS))
    return [*checks, *timings]


def _tests(python: tuple[str, ...]) -> Job:
    """Tests that are not begun in time are skipped, and counted."""
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    beside = ("-n", str(WORKERS), "--dist", "loadgroup") if importlib.util.find_spec("xdist") else ()
    options = ("-m", "gpu", "-q", "-p", "no:cacheprovider", *beside)
    return Job(
        CHECK,
        "pytest -m gpu",
        (*python, "pytest", *options, *TESTS),
        120.0,
        160.0,
        nothing=(NO_TESTS,),
        absent=f"{' and '.join(missing)} not installed" if missing else None,
    )
