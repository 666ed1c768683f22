"""Adapter for the environments of verifiers 0.1 (`rollout.environment: verifiers`) and for their rows.

The environment's own rollout runs unchanged. Its client passes each prompt to the policy and waits.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from verifiers.clients import Client
from verifiers.types import Response, ResponseMessage, ToolCall

from smopd.integrations.tools import CALL

MODEL = "policy"
TOOL_FIELDS = ("name", "description", "parameters")


class Policy(Client):
    """The client of an environment's rollout, for one conversation."""

    def __init__(self) -> None:
        super().__init__(None)
        self.prompts: asyncio.Queue[Sequence[Any]] = asyncio.Queue()
        self.responses: asyncio.Queue[str] = asyncio.Queue()
        self.read = 0
        """Number of messages that the policy knows, including its next response."""
        self.rollout: asyncio.Task[Any] | None = None

    async def get_response(self, prompt: Sequence[Any], *_: Any, **__: Any) -> Response:
        self.prompts.put_nowait(prompt)
        text = await self.responses.get()
        calls = [_call(f"call_{i}", found) for i, found in enumerate(CALL.findall(text))] or None
        message = ResponseMessage(content=text, tool_calls=calls, finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model=MODEL, message=message)

    async def unread(self) -> list[Any] | None:
        """Return the environment's new messages, or None if its rollout ended. Raise the rollout's error."""
        assert self.rollout is not None
        asked = asyncio.create_task(self.prompts.get())
        await asyncio.wait({asked, self.rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            if (error := self.rollout.result()["error"]) is not None:
                raise error
            return None
        prompt, known = asked.result(), self.read
        self.read = len(prompt) + 1  # counts the response to come
        return list(prompt[known:])


Policy.__abstractmethods__ = frozenset()  # environments call only get_response


class Verifiers:
    """An environment of verifiers. Tool calls have the format of Qwen's and Hermes' templates (see `CALL`).

    Args:
        name, arguments: passed to `verifiers.load_environment`.
    """

    def __init__(self, name: str, **arguments: Any):
        self.environment = vf.load_environment(name, **arguments)

    async def begin(self, row: Mapping[str, Any]) -> Policy:
        state = Policy()
        example = {"example_id": 0, **row}
        state.rollout = asyncio.create_task(self.environment.rollout(example, state, MODEL, {}))
        try:
            first = await state.unread()
            if first is None or [_plain(each) for each in first] != [_plain(each) for each in row["prompt"]]:
                raise ValueError(f"the environment begins with {first!r:.200}, expected the row's prompt")
        except BaseException:
            await self.end(state)
            raise
        return state

    async def answer(self, state: Policy, message: Mapping[str, Any]) -> list[dict[str, str]] | None:
        state.responses.put_nowait(message["content"])
        found = await state.unread()
        return None if found is None else [_plain(each) for each in found]

    async def end(self, state: Policy) -> None:
        """Cancel the rollout, which then cleans up, unless it has ended."""
        assert state.rollout is not None
        state.rollout.cancel()
        await asyncio.wait({state.rollout})


def rows(name: str, evaluation: bool = False, **arguments: Any) -> Any:
    """Return an environment's rows, for `data.train.source` or `data.evaluation.source`."""
    environment = vf.load_environment(name, **arguments)
    found = environment.get_eval_dataset() if evaluation else environment.get_dataset()
    tools = [
        {"type": "function", "function": {key: getattr(each, key) for key in TOOL_FIELDS}}
        for each in getattr(environment, "tool_defs", None) or ()
    ]
    if not tools or "tools" in found.column_names:
        return found
    return found.add_column("tools", [json.dumps(tools)] * len(found))  # for the chat template


def _call(number: str, text: str) -> ToolCall:
    """Return the call in `text`. An invalid call has an empty name, so that the environment refuses it."""
    try:
        found = json.loads(text)
        return ToolCall(id=number, name=str(found["name"]), arguments=json.dumps(found["arguments"]))
    except (ValueError, LookupError, TypeError):
        return ToolCall(id=number, name="", arguments=text)


def _plain(message: Any) -> dict[str, str]:
    given = message if isinstance(message, Mapping) else message.model_dump()
    content = given["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    return {"role": given["role"], "content": text}
