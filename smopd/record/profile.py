"""A trace of one training step by torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from pathlib import Path

from torch import profiler

from smopd.engine import distributed


@contextmanager
def profiled(folder: Path, step: int | None, done: int) -> Iterator[Callable[[], None]]:
    """Yield a function to call after each step; write the trace of `step`, counted from 1, to `folder`.

    `done` steps were taken before this command.
    """
    if step is None or step <= done:
        yield lambda: None
        return
    trace = folder / f"trace_step_{step}_rank_{distributed.rank()}.json.gz"
    before = step - done - 1
    schedule = profiler.schedule(wait=max(before - 1, 0), warmup=min(before, 1), active=1, repeat=1)

    folder.mkdir(parents=True, exist_ok=True)
    write = methodcaller("export_chrome_trace", str(trace))
    with profiler.profile(schedule=schedule, on_trace_ready=write) as profile:
        yield profile.step
