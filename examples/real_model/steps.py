"""Time training steps of a pretrained model. Each trainer runs alone, in its own process.

python -m examples.real_model.steps --model FOLDER [--systems smopd trl ...] [--steps 4] [--turns 1]

All systems use the same prompts, rewards, rows and lengths, fp32 weights and OMP_NUM_THREADS threads. They
compute in fp32 unless the name says bf16. Each JSON line has the median seconds of a step (without the first)
and of its phases, the response tokens per step, and the peak resident memory of the process tree. Our step is
the sum of its phases. TRL's step is the time between the ends of two steps, and its time outside rollout and
rewards counts as the update. Use a warmed-up model (`runs/smollm2_snips/base/export`), so that responses are
as long as in training. Other arguments, such as --student.micro_batch_tokens 2048, go to smopd.train.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RECIPE = Path(__file__).parent / "recipes" / "steps.yaml"
OURS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "smopd": ("gdpo", ()),
    "smopd, bf16": ("gdpo", ("--student.compute_dtype", "bfloat16")),
    "smopd, vLLM": ("gdpo", ("--rollout.engine", "vllm")),
    "smopd, vLLM, bf16": ("gdpo", ("--rollout.engine", "vllm", "--student.compute_dtype", "bfloat16")),
    "smopd, two teachers": ("merge", ()),
    "smopd, two teachers, vLLM": ("merge", ("--rollout.engine", "vllm", "--teachers.engine", "vllm")),
}
"""System -> (run of steps.yaml, settings)."""
TRL = (
    "trl",
    "trl, bf16",
    "trl, vLLM",
    "trl with smopd, two teachers",
    "trl distillation",
    "trl distillation with smopd",
)
MACHINE = {
    "machine": platform.processor() or platform.machine(),
    "cpus": os.cpu_count(),
    "threads": os.environ.get("OMP_NUM_THREADS"),
    "packages": {name: version(name) for name in ("torch", "transformers")},
}
PHASES = ("rollout", "rewards", "old_logps", "teachers", "update", "sync")
EVERY = 0.2  # seconds between two measurements of memory


def main() -> int:
    systems = (*OURS, *TRL)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder with the model and its tokenizer")
    parser.add_argument("--systems", nargs="+", choices=systems, default=["smopd", "trl"], metavar="SYSTEM",
                        help=f"of: {'; '.join(systems)}")  # fmt: skip
    parser.add_argument("--steps", type=int, default=4, help="of each, the first of which is not counted")
    parser.add_argument("--turns", type=int, default=1, help="how often all systems are run, in turn")
    parser.add_argument("--output", type=Path, help="rows go to this file as well")
    chosen, settings = parser.parse_known_args()
    if chosen.steps < 2:
        parser.error(f"--steps is {chosen.steps}, expected 2 or more: the first is not counted")
    if settings and OURS.keys().isdisjoint(chosen.systems):
        parser.error(f"{settings[0]}: a setting of ours, and none of {', '.join(OURS)} is in --systems")
    resident(os.getpid())  # fails at once without psutil
    failed = 0
    with chosen.output.open("a") if chosen.output else nullcontext() as file:
        for turn in range(chosen.turns):
            for system in chosen.systems:
                row = measured(system, chosen, settings)
                failed += "error" in row
                line = json.dumps(
                    {"benchmark": "training_step", "turn": turn, "system": system} | row | MACHINE
                )
                print(line, flush=True)
                if file is not None:
                    print(line, file=file, flush=True)
    return 1 if failed else 0


def measured(system: str, chosen: argparse.Namespace, settings: Sequence[str]) -> dict[str, Any]:
    """Return the row of one system. If it failed, `error` is the last line of its output."""
    with TemporaryDirectory() as folder:
        if system in OURS:
            run, more = OURS[system]
            common = ["smopd.train", str(RECIPE), "--model.path", chosen.model, "--output", folder]
            common += settings
            if run == "merge":
                run_process([*common, "--only", "accuracy_teacher", "format_teacher"])
            steps = [f"--runs.{run}.set.loop.steps", str(chosen.steps)]
            code, text, peak = run_process([*common, "--only", run, *steps, *more])
            lines = Path(folder, run, "metrics.jsonl")
            rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
            rows = [row for row in rows if "seconds/update" in row]
        else:
            words = ["examples.real_model.trl", system, chosen.model, str(chosen.steps), folder]
            code, text, peak = run_process(words)
            rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"seconds/')]
        if code or len(rows) < chosen.steps:
            said = [line for line in text.splitlines() if line.strip()]
            return {"error": said[-1] if said else f"it said nothing; exit status {code}"}
    return summary(rows[1:]) | {"peak_mib": round(peak / 2**20)}


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    def median(name: str) -> float | None:
        values = [row[name] for row in rows if name in row]
        return round(statistics.median(values), 2) if values else None

    phases = {phase: value for phase in PHASES if (value := median(f"seconds/{phase}")) is not None}
    whole = [sum(row.get(f"seconds/{phase}", 0.0) for phase in PHASES) for row in rows]
    tokens = [row["tokens"] for row in rows]
    return {
        "seconds": round(statistics.median(whole), 2),
        "phases": phases,
        "response_tokens": round(statistics.fmean(tokens)),
        "ms_per_token": round(1e3 * sum(whole) / sum(tokens), 2),
        "steps": len(rows),
    }


def run_process(words: Sequence[str]) -> tuple[int, str, int]:
    """Run `python -m WORDS`. Return exit status, output and peak resident bytes of the process tree."""
    process = subprocess.Popen(
        [sys.executable, "-m", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
    )
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, resident(process.pid))
            time.sleep(EVERY)

    watcher = threading.Thread(target=watch)
    watcher.start()
    text, _ = process.communicate()
    watcher.join()
    return process.returncode, text, peak


def resident(root: int) -> int:
    """Return resident bytes of a process tree. Shared pages count once per process."""
    import psutil

    try:
        family = [psutil.Process(root), *psutil.Process(root).children(recursive=True)]
        return sum(each.memory_info().rss for each in family)
    except psutil.NoSuchProcess:
        return 0


if __name__ == "__main__":
    sys.exit(main())
