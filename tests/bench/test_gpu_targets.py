"""The table of targets, from rows as a run leaves them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.gpu import targets
from bench.gpu.targets import TARGETS

MAIN = {"benchmark": "smopd_loss", "case": "N8192-V151936-M2-kappa16-bf16"}
OURS = {"provider": "triton in place", "kind": "ours", "ceiling": "copy"}
MIXTURE = {"benchmark": "teacher_mixture", "case": "N8192-M2-kappa16-fp32", "provider": "triton"}


def line(rows: list[dict], number: str) -> str:
    """The table's first line of a target."""
    return next(line for line in targets.table(rows).splitlines() if line.startswith(f"| {number} |"))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: f"{target.number}-{target.case}")
def test_every_target_is_of_a_row_that_a_run_gives(target: targets.Target) -> None:
    benchmark = importlib.import_module(f"bench.{target.benchmark}").BENCHMARK
    assert target.case in [case.label for case in benchmark.cases["cuda"]]
    assert target.provider in [provider.name for provider in benchmark.providers]
    assert benchmark.launch_bound == (target.microseconds is not None)


@pytest.mark.parametrize(("share", "verdict"), [(0.861, "good"), (0.849, "**misses**")])
def test_a_share_of_the_ceiling(share: float, verdict: str) -> None:
    row = MAIN | OURS | {"ms": 1.5, "of_ceiling": share}
    cells = [cell.strip() for cell in line([row], "1").split("|")]
    assert cells[3:] == ["85%", "1.5", f"copy {1.5 * share:.4g}", f"{share:.1%}", "", verdict, ""]


def test_the_first_time_counts_and_the_ratio_is_that_beside_plain_pytorch() -> None:
    alone = MAIN | OURS | {"ms": 1.3, "of_ceiling": 0.9}
    beside = MAIN | OURS | {"ms": 1.4, "of_ceiling": 0.8, "times_eager": 12.0}
    assert "| 1.3 |" in line([alone, beside], "1") and "| 12 |" in line([alone, beside], "1")


@pytest.mark.parametrize(("graph_ms", "verdict"), [(0.0079, "good"), (0.0081, "**misses**")])
def test_microseconds_in_a_graph(graph_ms: float, verdict: str) -> None:
    row = MIXTURE | {"ms": 0.041, "graph_ms": graph_ms, "of_ceiling": 0.1, "ceiling": "launch"}
    assert f"| {graph_ms * 1e3:.3g} us (0.041) |" in line([row], "7") and verdict in line([row], "7")


def test_what_was_not_measured_says_why() -> None:
    assert "not measured" in line([], "8")
    refused = MAIN | OURS | {"refused": "kl is off"}
    assert "not measured kl is off" in line([refused], "1") and "kl is off" in targets.table([refused])


def test_counters_choices_and_the_machine_are_shown() -> None:
    rows = [
        {"benchmark": "machine", "kind": "machine", "l2_mib": 50.0, "device": "NVIDIA H100"},
        {"benchmark": "bandwidth", "case": "x", "provider": "copy", "ms": 1.6, "gb_per_s": 3000.0},
        {"kind": "counters", "case": "row kernel", "counters": {"dram read MB": 2500}},
        MAIN | {"kind": "sweep", "provider": "held 4", "ms": 1.25, "of_ceiling": 0.93},
        MAIN | {"kind": "sweep", "provider": "held 9", "left_out": "no such name"},
    ]
    text = targets.table(rows)
    for words in (
        "NVIDIA H100",
        "l2_mib: 50.0",
        "3000.0 GB/s",
        "dram read MB 2500",
        "held 4: 1.25 ms, 93.0%",
    ):
        assert words in text
    assert "held 9: no such name" in text


def test_the_command_prints_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(MAIN | OURS | {"ms": 1.3, "of_ceiling": 0.9}) + "\n")
    assert main(["targets", str(tmp_path / "rows.jsonl")]) == 0
    assert "| 1 | smopd_loss" in capsys.readouterr().out
    assert main(["targets"]) == 2
