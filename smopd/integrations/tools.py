"""Adapter for environments that are written for TRL's `environment_factory` (`rollout.environment: trl`)."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from smopd.engine.imports import import_function

CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
"""A tool call in the format of Qwen's and Hermes' templates: JSON with name and arguments."""
NOT_TOOLS = ("reset", "get_reward")


class TrlTools:
    """An environment whose tools are a class's public methods. Each conversation has its own instance.

    A response without a call ends the conversation. As in TRL, an exception in a tool becomes its result.

    Args:
        factory: import path of the class.
    """

    def __init__(self, factory: str):
        self.make = import_function(factory)
        methods = dict(inspect.getmembers(self.make, predicate=inspect.isfunction))
        self.tools = {name for name in methods if not name.startswith("_") and name not in NOT_TOOLS}

    def begin(self, row: Mapping[str, Any]) -> Any:
        state = self.make()
        if state.reset(**row) is not None:
            raise ValueError("reset returned an observation, expected None: the data holds the whole prompt")
        return state

    async def answer(self, state: Any, message: Mapping[str, Any]) -> list[dict[str, str]] | None:
        results = [await self._result(state, call) for call in CALL.findall(message["content"])]
        return [{"role": "tool", "content": str(result)} for result in results] or None

    async def _result(self, state: Any, text: str) -> Any:
        try:
            call = json.loads(text)
            if call["name"] not in self.tools:
                raise ValueError(f"no tool {call['name']!r}")
            tool = getattr(state, call["name"])
            if inspect.iscoroutinefunction(tool):
                return await tool(**call["arguments"])
            return await asyncio.to_thread(tool, **call["arguments"])
        except Exception as error:  # raised by an invalid call, or by the tool
            return {"error": f"{type(error).__name__}: {error}"}
