"""Runs trl_worker on two ranks and compares its losses and parameters with one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.trl_worker import trained
from tests.ranks import on_ranks


def assert_steps_of_one_process(folder: Path, mode: str, what: str) -> str:
    """Three steps' losses and parameter changes; returns the class that wrapped the student."""
    words = ("-m", "tests.integrations.trl_worker", mode, what, str(folder))
    done = on_ranks(2, *words)
    assert done.returncode == 0, done.stderr[-4000:]
    both = torch.load(folder / f"{mode}.pt")
    one = trained(what, folder / "one", ranks=1)
    assert len(one["losses"]) == 3
    for name in ("losses", "kl"):
        assert both[name] == pytest.approx(one[name], rel=1e-5)
    assert both["change"].keys() == one["change"].keys()
    for name, expected in one["change"].items():
        scale = float(expected.abs().max())
        assert scale > 100 * one["rounding"][name], name
        atol = 1e-5 * scale + one["rounding"][name]
        torch.testing.assert_close(
            both["change"][name], expected, rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )
    return both["wrapped"]
