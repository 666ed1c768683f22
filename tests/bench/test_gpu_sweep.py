"""The open choices name what there is, and one that fails costs itself alone."""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
import types
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from bench.gpu import sweep
from bench.gpu.calls import Call
from bench.gpu.sweep import VARIANTS, Variant

LAUNCH_OPTIONS = {"num_warps", "num_stages", "maxnreg"}
CALL = Call("topk_logprobs", "N8192-V151936-kappa16-bf16")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.call.benchmark}-{variant.label}")
def test_what_a_variant_changes_is_there(variant: Variant) -> None:
    variant.call.found()
    for name, value in variant.constants.items():
        sweep.looked_up(name)
        if isinstance(value, str) and ":" in value:
            sweep.looked_up(value)
    for name, options in variant.launches.items():
        module, _, kernel = sweep.looked_up(name)
        assert options.keys() <= LAUNCH_OPTIONS | set(inspect.signature(kernel.fn).parameters)
        assert all(f"{option}=" in inspect.getsource(module) for option in options)


def test_rows_are_told_apart() -> None:
    heads = [tuple(sweep.head(variant).values()) for variant in VARIANTS]
    assert len(set(heads)) == len(heads) > 12


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A module with a constant, and a kernel that gives back what it was launched with."""

    class Kernel:
        arg_names = ("x",)

        def __getitem__(self, grid):
            return lambda *arguments, **options: (grid, arguments, options)

    module = types.SimpleNamespace(WARPS=4, kernel=Kernel())
    monkeypatch.setitem(sys.modules, "shop", module)
    return module


def test_constants_and_launches_are_replaced(shop: types.SimpleNamespace) -> None:
    sweep.apply(Variant(CALL, "", {"shop:WARPS": 8}, {"shop:kernel": {"num_warps": 2}}))
    assert shop.WARPS == 8 and shop.kernel.arg_names == ("x",)
    assert shop.kernel[3](1, num_warps=4, K=16) == (3, (1,), {"num_warps": 2, "K": 16})


def test_what_is_not_there_is_an_error_that_names_it(shop: types.SimpleNamespace) -> None:
    with pytest.raises(AttributeError, match="HELD"):
        sweep.apply(Variant(CALL, "", {"shop:HELD": 8}))
    sweep.apply(Variant(CALL, "", launches={"shop:kernel": {"AHEAD": 2}}))
    with pytest.raises(KeyError, match=r"shop:kernel is launched without \['AHEAD'\]"):
        shop.kernel[3](num_warps=4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forked")
def test_a_variant_that_fails_or_hangs_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its check or in its timing; of what is right there is a time."""
    monkeypatch.setattr(sweep.record, "surroundings", lambda device: {})
    monkeypatch.setattr(sweep, "LIMIT_SECONDS", 3.0)

    def check(variant: Variant, path: Path) -> None:
        if variant.label == "dies":
            os._exit(7)
        sweep._told(variant, path, lambda: {"refused": "ids differ"} if variant.label == "is wrong" else None)

    def measure(variant: Variant, path: Path) -> None:
        if variant.label == "hangs":
            time.sleep(600)
        sweep._told(variant, path, lambda: {"ms": 1.0 / len(variant.label.replace("raises", ""))})

    monkeypatch.setattr(sweep, "check", check)
    monkeypatch.setattr(sweep, "measure", measure)
    variants = [Variant(CALL, label) for label in ("dies", "is wrong", "hangs", "raises", "good")]
    assert sweep.sweep(variants, tmp_path / "rows") == 4
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    said = {row["provider"]: row.get("left_out") or row.get("refused") or row["ms"] for row in rows}
    assert said == {
        "dies": "exit status 7",
        "is wrong": "ids differ",
        "hangs": "it did not end",
        "raises": "ZeroDivisionError: float division by zero",
        "good": 0.25,
    }
