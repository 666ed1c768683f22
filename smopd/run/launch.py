"""Start several local ranks for one command without torchrun."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType

from smopd.config.settings import Settings
from smopd.engine import process

PARENT = "SMOPD_LAUNCHED_BY"


def launch(module: str, arguments: list[str], processes: int) -> int:
    """Run `python -m module arguments` in `processes` ranks, at most one per GPU; return the exit status."""
    import torch
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if 0 < (gpus := torch.cuda.device_count()) < processes:
        print(f"processes: {gpus} for {gpus} GPU{'s' * (gpus > 1)}, not {processes}", flush=True)
        processes = gpus
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
    os.environ[PARENT] = str(os.getpid())
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id="smopd",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        signals_to_handle="SIGQUIT",  # of others it would kill the ranks half a minute after one
    )
    come: list[tuple[int, float]] = []

    def hand_on(number: int, frame: FrameType | None) -> None:
        again, now = bool(come), time.monotonic()
        if again and now - come[0][1] < process.SAME_SECONDS:
            return
        come.append((number, now))
        ranks = process.children(os.getpid())
        if not ranks:
            sys.exit(128 + number)
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL if again else signal.SIGTERM)

    for number in process.stop_signals():
        signal.signal(number, hand_on)
    try:
        elastic_launch(config, sys.executable)("-m", module, *arguments)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return 128 + come[0][0] if come else code if code > 0 else 128 - code
    return 0


def die_with_parent() -> None:
    """Let a rank that `launch` started die with its parent (Linux), so that no orphan keeps writing."""
    if PARENT in os.environ and sys.platform.startswith("linux"):
        process.die_with_parent(int(os.environ[PARENT]))


def with_processes(settings: Settings) -> Settings:
    """Return the settings with the number of processes that `launch` started, if it started this one."""
    if PARENT not in os.environ or "WORLD_SIZE" not in os.environ:
        return settings
    return settings.model_copy(update={"processes": int(os.environ["WORLD_SIZE"])})
