"""What is read of ncu's output, as it prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.gpu import counters

WIDE = """==PROF== Connected to process 77
==PROF== Profiling "row_kernel" - 0: 0%....50%....100% - 3 passes
a line of the program
"ID","Process ID","Kernel Name","Block Size","dram__bytes_read.sum","gpu__time_duration.sum","{stall}"
"","","","","byte","nsecond","inst"
"0","77","row_kernel","(512, 1, 1)","2,489,319,424","1305152","3.25"
==PROF== Disconnected from process 77
"""
LONG = """"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","row_kernel","Command line profiler metrics","dram__bytes_read.sum","byte","2,489,319,424"
"0","row_kernel","Command line profiler metrics","gpu__time_duration.sum","nsecond","1305152"
"0","row_kernel","Command line profiler metrics","{stall}","inst","3.25"
"""
REFUSED = (
    "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n==WARNING== No kernels were profiled.\n"
)


@pytest.mark.parametrize("printed", [WIDE, LONG], ids=["a column a metric", "a line a metric"])
def test_values_are_read(printed: str) -> None:
    values = counters.parsed_values(printed.format(stall=counters.STALL.format("barrier")))
    shown = counters.named(values)
    assert shown == {"us": 1305.0, "DRAM read MB": 2489.0, "top stalls": "barrier 3.25"}


@pytest.mark.parametrize(
    ("printed", "status", "said"),
    [
        (WIDE.format(stall="x"), 0, {"us": 1305.0, "DRAM read MB": 2489.0}),
        (REFUSED, 1, "==ERROR== ERR_NVGPUCTRPERM - no permission"),
        ("", 1, "ncu printed nothing"),
    ],
)
def test_a_row_says_what_was_counted_or_why_not(
    printed: str, status: int, said: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(counters.record, "surroundings", lambda device: {"device": device})

    def ncu(kernel: str, call: object, metrics: list[str]) -> str:
        asked.append(metrics)
        return printed

    monkeypatch.setattr(counters, "_ncu", ncu)
    assert counters.main(["top-kappa stream", "--output", str(tmp_path / "rows")]) == status
    (row,) = map(json.loads, (tmp_path / "rows").read_text().splitlines())
    assert row["kind"] == "counters" and said in (row.get("counters"), row.get("left_out"))
    assert [len(metrics) for metrics in asked][1:] == ([] if status == 0 else [len(counters.METRICS)])


def test_the_clocks_are_left_alone_and_one_launch_is_watched() -> None:
    kernel, call = counters.WATCHED["row kernel, paper"]
    line = " ".join(counters.command(kernel, call, ["a", "b"]))
    assert "--clock-control none --kernel-name regex:^row_kernel$ --launch-count 1 " in line
    assert line.endswith(f"-m bench.gpu.calls smopd_loss {call.case} triton in place")
