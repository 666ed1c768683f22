"""`python -m bench gpu` and `gpu-peers`: runs a plan's jobs, keeps what comes, says how it went."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu import jobs, plan, targets
from bench.harness import record, report

PLANS = {"gpu": plan.gpu_jobs, "gpu-peers": plan.peer_jobs}
TABLES = {"gpu": targets.table, "gpu-peers": lambda rows: "\n".join(report.markdown(rows))}
FOLDER = "OUT"  # the variable that names the folder which comes back from a lent machine


def main(name: str, arguments: Sequence[str], benchmarks: Sequence[str]) -> int:
    """Writes FOLDER/<device>-<date>*, as it comes; with --dry-run says what would run.

    Returns:
        The exit status: 0, 1 where something is wrong or was not begun, 2 without a GPU.
    Raises:
        ValueError: arguments are not [--dry-run] [FOLDER].
    """
    words = [word for word in arguments if word != "--dry-run"]
    if len(words) > 1 or any(word.startswith("-") for word in words):
        raise ValueError(f"{name}: got {' '.join(arguments)}, expected [--dry-run] [FOLDER]")
    folder = Path(words[0] if words else os.environ.get(FOLDER) or Path("bench") / "results").absolute()
    has_gpu = torch.cuda.is_available()
    device = record.slug("cuda") if has_gpu else "DEVICE"
    to = plan.files(folder, f"{device}-{today()}{name.removeprefix('gpu')}")
    todo = PLANS[name](benchmarks, to)
    if len(words) < len(arguments):
        jobs.show(todo, plan.TOTAL_SECONDS)
        return 0
    if not has_gpu:
        print(f"error: no CUDA device is here, `make {name}` needs one (DRY_RUN=1 does not)", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    jobs.show(todo, plan.TOTAL_SECONDS)
    results = jobs.run_jobs(
        todo, plan.TOTAL_SECONDS, record.ROOT, jobs.Log(to.log), lambda: _write_table(name, to)
    )
    print(_write_table(name, to), flush=True)
    for state in (jobs.NOT_HERE, jobs.NOT_BEGUN, jobs.WRONG):
        if ended := [job for job, result in results.items() if result.state == state]:
            record.note(f"{state}: {', '.join(ended)}")
    record.note(f"rows are in {to.rows}, the tables in {to.table}, what the jobs printed in {to.log}")
    return int(any(result.state in (jobs.WRONG, jobs.NOT_BEGUN) for result in results.values()))


def today() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d")


def _write_table(name: str, to: plan.Files) -> str:
    """A row that a killed process left half written is not worth the table."""
    text = TABLES[name](record.rows_of([to.rows], broken="skip")) if to.rows.exists() else "no rows"
    to.table.write_text(text + "\n")
    return text
