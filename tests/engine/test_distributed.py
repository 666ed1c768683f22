"""Process groups and time-outs of a training process."""

import os
from pathlib import Path

import pytest

from smopd.engine.process import runs
from tests.patience import HANG_SECONDS
from tests.ranks import on_ranks, python

LEFT_TO_GLOO = """
import sys, torch, torch.distributed as dist
from smopd.engine.distributed import process_group
sys.setswitchinterval(100)  # seconds: a thread gets the GIL only when another releases it
with process_group():
    torch.kept = dist.group.WORLD  # as a device mesh does
    tensors = [torch.ones(1 << 16) for _ in range(200)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    del tensors, works
"""


@pytest.mark.slow
def test_gloo_that_still_frees_tensors_does_not_abort_the_end() -> None:
    ran = python("-c", LEFT_TO_GLOO)
    assert ran.returncode == 0, ran.stderr


def test_a_process_whose_name_is_cut_inside_a_character_runs() -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_bytes()
    comm.write_bytes("\u00fc".encode()[:1])
    try:
        assert runs(os.getpid())
    finally:
        comm.write_bytes(before.rstrip(b"\n"))


TWO = """
import os, time, torch, torch.distributed as dist
from smopd.engine import distributed
def number():
    open("calls", "a").write("called ")
    return 7
def fails():
    raise ValueError("row 3")
with distributed.process_group():
    assert distributed.on_rank0(number, of_host=True) == 7
    try:
        distributed.on_rank0(fails, of_host=True)
    except ValueError as error:
        print(f"raised {error}", flush=True)
    group = dist.new_group([0, 1])  # as of a device mesh
    distributed.barrier()
    for each in (None, group) if distributed.rank() == 0 else ():
        begun = time.monotonic()
        try:
            with distributed.collective_timeout(1.0):
                dist.all_reduce(torch.ones(1), group=each)
        except distributed.LostRank:
            print("waited", time.monotonic() - begun, flush=True)
    if distributed.rank() == 1:
        time.sleep(6)
    os._exit(0)
"""


@pytest.mark.slow
def test_one_rank_of_a_host_reads_for_all_and_who_waits_for_a_still_one_fails_in_time(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    ran = on_ranks(2, str(tmp_path / "two.py"), cwd=tmp_path)
    assert ran.stdout.count("raised row 3") == 2, ran.stderr
    assert (tmp_path / "calls").read_text() == "called "
    waited = [float(line.split()[1]) for line in ran.stdout.splitlines() if line.startswith("waited")]
    assert len(waited) == 2 and all(0.9 < seconds < HANG_SECONDS for seconds in waited)
