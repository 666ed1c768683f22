"""Environments written for TRL, as `rollout.environment: trl`."""

import asyncio
import json
import sys
from types import ModuleType

import pytest

from smopd.integrations.tools import TrlTools


class Shop:
    def reset(self, **row: object) -> None:
        self.left = 2

    def buy(self, count: int) -> str:
        if count > self.left:
            raise ValueError("sold out")
        self.left -= count
        return f"{self.left} left"

    async def stock(self) -> int:
        return self.left

    def get_reward(self) -> float:
        return 1.0


def call(name: object, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_calls_are_answered_by_the_instance_of_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("shop")
    module.Shop = Shop  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop", module)
    tools = TrlTools("shop:Shop")
    one, other = (tools.begin({"prompt": "buy"}) for _ in range(2))

    def answers(state: object, text: str) -> list[str] | None:
        found = asyncio.run(tools.answer(state, {"role": "assistant", "content": text}))
        return found and [message["content"] for message in found if message["role"] == "tool"]

    assert answers(one, "I buy " + call("buy", count=2) + call("stock")) == ["0 left", "0"]
    assert answers(other, call("stock")) == ["2"]
    assert answers(one, "done") is None
    bad = [call("buy", count=1), call("buy"), call("steal"), call("get_reward"), call("__init__"), call(1)]
    for wrong in (*bad, "<tool_call>{", "<tool_call>[]</tool_call>"):
        (content,) = answers(one, wrong) or []
        assert content.startswith("{'error': "), wrong
