"""An engine that sleeps: the memory that torch keeps for itself is given back before it wakes.

No CPU has a sleeping engine, so what it calls is recorded here.
"""

from __future__ import annotations

import pytest
import torch

from smopd.engine.settings import VllmSettings
from smopd.engine.vllm import engines as vllm


class Recorder:
    """An engine's calls, in order."""

    def __init__(self, calls: list) -> None:
        self.calls = calls

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))

    def collective_rpc(self, method: str, kwargs: dict) -> None:
        self.calls.append(method)

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list:
    calls: list = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(vllm, "Checked", lambda architecture, weights: NoWeights())
    return calls


class NoWeights(list):
    error = None


@pytest.fixture
def engine(calls: list, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder(calls)
    made = vllm._Made(recorder, VllmSettings(), architecture=None, holds="files", sleeps=True)  # type: ignore[arg-type]
    monkeypatch.setattr(vllm, "_engines", {("rollout",): made})
    return recorder


def test_the_cache_is_emptied_before_an_engine_wakes(engine: Recorder, calls: list) -> None:
    vllm.sleep(engine)
    vllm.sleep(engine)
    vllm.wake_up(engine)
    vllm.wake_up(engine)
    assert calls == [("sleep", 1), "empty", ("wake", "kv_cache", "weights")]


def test_and_before_its_weights_wake_for_new_ones(engine: Recorder, calls: list) -> None:
    vllm.sleep(engine)
    vllm.load(engine, [])
    assert calls == [("sleep", 1), "empty", ("wake", "weights"), "reload_weights", "reset"]
    calls.clear()
    vllm.wake_up(engine)
    assert calls == ["empty", ("wake", "kv_cache")]
