"""Options and output of `pytest bench`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.harness import record
from bench.harness.record import DEVICE

ROWS = pytest.StashKey[list[dict]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("smopd")
    group.addoption("--smopd-cases", choices=("cpu", "cuda", "quick"), default=DEVICE, help="which sizes")
    group.addoption("--smopd-check", action="store_true", help="check 64 rows of each case, time nothing")
    group.addoption("--smopd-seconds", type=float, default=3.0, help="to time a provider of a case, about")
    group.addoption(
        "--smopd-output",
        type=Path,
        default=os.environ.get("SMOPD_BENCH_OUTPUT"),
        help="rows are appended to this file as JSON lines (default: $SMOPD_BENCH_OUTPUT)",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    if not config.getoption("benchmark_verbose", True):
        config.option.benchmark_quiet = True  # show only our table, which has the ceiling


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[dict], None]:
    """Return a function that stores a row with the machine and versions."""
    config = request.config

    def keep(row: dict) -> None:
        row = row | record.surroundings(DEVICE)
        config.stash[ROWS].append(row)
        if path := config.getoption("smopd_output"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")

    return keep


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if rows := config.stash[ROWS]:
        terminalreporter.section("operations")
        for line in record.table(rows):
            terminalreporter.write_line(line)
