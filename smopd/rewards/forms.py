"""Forms of reward functions: ours, TRL's, verl's and verifiers'. Every argument is passed by name.

    f(prompts, completions, **columns)                                     ours and TRL's
    f(completions, answer), f(completion_ids, **kwargs), ...               TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)     verl's: one response per call
    f(completion, answer)                                                  verifiers': the same, as messages

A function without `**kwargs` and without an argument for responses is a factory, such as TRL's
get_soft_overlong_punishment. It is called once, with the setting `kwargs`, and returns a function of one of
these forms. A class is always a factory.

TRL passes a completion to a chat as messages, [{"role": "assistant", "content": text}]. We do so if the
setting `completions` is "messages", or if it is null and the function's first argument is `completions`. Such
a function receives all messages of a conversation with an environment. Others receive the text of all turns.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from smopd.engine.imports import import_function
from smopd.names import IDS_COLUMN, STEP_COLUMN

CompletionForm: TypeAlias = Literal["text", "messages"]
SINGLE = ("solution_str", "completion")
RESPONSES = ("completions", IDS_COLUMN, *SINGLE)
FACTORY = (
    f"it is a factory, which must not be `async def`, nor take **kwargs or any of {', '.join(RESPONSES)}; "
    "or call it in a module, `reward = ...`, and name that `reward`"
)


class BadSignature(ValueError):
    """A function can never score, for example because an argument is no column or it returns a function."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and its arguments. `accepts` is None if all columns are accepted as `**columns`."""

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    accepts: frozenset[str] | None
    needs: Sequence[str]
    single: bool
    """Whether the function is called once per response."""
    messages: bool

    @classmethod
    def load(
        cls, path: str, kwargs: Mapping[str, Any], completions: CompletionForm | None = None
    ) -> RewardFunction:
        """Import a function. Raise ValueError or BadSignature if it does not exist or cannot be called."""
        try:
            function = import_function(path)
        except ValueError as error:
            if str(error).startswith(repr(path)):  # not an error of the module itself
                raise BadSignature(str(error)) from None
            raise
        signature = _signature(path, function)
        if isinstance(function, type) or not _takes_responses(signature):
            text = f"{path}{signature} takes none of {', '.join(RESPONSES)}, and"
            try:
                signature.bind(**kwargs)
            except TypeError as error:
                raise BadSignature(f"{text} is not a factory of a function that does: {error}") from None
            if inspect.iscoroutinefunction(function):
                raise BadSignature(f"{text} is not a reward: {FACTORY}")
            function, kwargs = function(**kwargs), {}
            if not callable(function) or isinstance(function, type):
                kind = f"the class {function.__name__}" if callable(function) else type(function).__name__
                raise BadSignature(f"{text} is not a factory of a function that does: it returned {kind}")
            signature = _signature(f"{text} the function that it returned", function)
            if not _takes_responses(signature):
                raise BadSignature(f"{text} nor does the function that it returned: {signature}")
        takes_all = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
        variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        named = [each for each in signature.parameters.values() if each.kind not in variable]
        names = [each.name for each in named]
        needed = {each.name for each in named if each.default is each.empty}
        single = "completions" not in names and not set(SINGLE).isdisjoint(names)
        own = {"prompts", "completions", IDS_COLUMN}
        own |= {*SINGLE, "prompt", "extra_info"} if single else set()
        try:
            signature.bind_partial(**dict.fromkeys((own & set(names)) | kwargs.keys()))
        except TypeError as error:
            raise BadSignature(f"{path}{signature} cannot be called: {error}") from None
        accepts = None if takes_all and not single else frozenset(names)
        needs = [name for name in names if name in needed and name not in own | kwargs.keys()]
        messages = completions == "messages" or (completions is None and names[:1] == ["completions"])
        return cls(function, kwargs, accepts, needs, single, messages)

    def require_columns(self, columns: Collection[str]) -> None:
        """Raise BadSignature if a required argument is not a column of the data."""
        found = {*columns, "ground_truth"} if "reward_model" in columns else columns
        if missing := [name for name in self.needs if name not in found]:
            known = ", ".join(columns) or "none"
            text = f"takes {missing[0]!r}, which is not a column of the data; there are {known}"
            if missing[0] == STEP_COLUMN:
                text = f"takes {STEP_COLUMN!r} without a default, and evaluations have no step"
            raise BadSignature(text)

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        conversations: Sequence[Any] | None = None,
    ) -> Any:
        """Return what the function returns for R responses: R scores, or an awaitable of them."""
        rows = columns.get("reward_model", ())  # verl's column
        if rows and all(isinstance(row, Mapping) and "ground_truth" in row for row in rows):
            columns = {"ground_truth": [row["ground_truth"] for row in rows], **columns}
        talks = conversations or [None] * len(completions)
        said = [{"role": "assistant", "content": text} for text in completions]
        spoken = [talk or [message] for talk, message in zip(talks, said, strict=True)]
        if self.single:
            own = {"prompts": prompts, "completions": completions, "solution_str": completions}
            own |= {"prompt": prompts, "completion": spoken}
            return self._each({"extra_info": [{} for _ in completions], **columns, **own})
        shown: Sequence[Any] = completions
        if self.messages:
            as_text = [
                isinstance(prompt, str) and not talk for prompt, talk in zip(prompts, talks, strict=True)
            ]
            shown = [completions[i] if as_text[i] else spoken[i] for i in range(len(spoken))]
        given = {**columns, "prompts": prompts, "completions": shown}
        accepted = given if self.accepts is None else {n: v for n, v in given.items() if n in self.accepts}
        try:
            return self.function(**{**accepted, **self.kwargs})
        except TypeError as error:
            if "string indices" in str(error):
                text = "set `completions: messages` to get chat messages as in TRL"
                raise TypeError(f"{error}; {text}") from error
            raise

    def _each(self, given: dict[str, Sequence[Any]]) -> Any:
        names = [name for name in given if name in (self.accepts or ())]
        rows = zip(*(given[name] for name in names), strict=True)
        results = [self.function(**{**dict(zip(names, row, strict=True)), **self.kwargs}) for row in rows]
        if any(inspect.isawaitable(result) for result in results):
            return _awaited(results)
        return [_score(result) for result in results]


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except ValueError:  # some builtins
        raise BadSignature(f"{name} has no signature, expected a function written in Python") from None


def _takes_responses(signature: inspect.Signature) -> bool:
    given = signature.parameters.values()
    return any(each.kind is each.VAR_KEYWORD or each.name in RESPONSES for each in given)


async def _awaited(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return [_score(result) for result in await asyncio.gather(*results)]


def _score(result: Any) -> Any:
    """Return a result's score: the result itself, its `score` (verl) or its first item (ToolRL)."""
    if isinstance(result, Mapping):
        return result["score"]
    return result[0] if isinstance(result, (tuple, list)) else result
