"""Forms of reward functions: ours, TRL's and verl's. Every argument is passed by name.

    f(prompts, completions, **columns)                                     ours and TRL's
    f(completions, answer), f(completions, **kwargs), ...                  TRL's
    compute_score(data_source, solution_str, ground_truth, extra_info)     verl's: one response per call

TRL passes a completion to a chat as messages, [{"role": "assistant", "content": text}]. A function whose
first argument is `completions`, or whose `RewardSpec.completions` is "messages", gets this form too.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from smopd.engine.imports import import_function
from smopd.names import STEP_COLUMN

CompletionForm: TypeAlias = Literal["text", "messages"]
VERL = ("data_source", "solution_str", "ground_truth", "extra_info")


class BadSignature(ValueError):
    """A function that needs an argument which is not available, or takes no completions."""


@dataclass(frozen=True)
class RewardFunction:
    """A reward function and the arguments it takes.

    accepts: None if it takes all columns as `**columns`.
    columns: of the data; a column that is absent from all rows of a batch is passed as None.
    """

    function: Callable[..., Any]
    kwargs: Mapping[str, Any]
    accepts: frozenset[str] | None
    columns: Sequence[str]
    verl: bool
    messages: bool

    @classmethod
    def load(
        cls,
        path: str,
        kwargs: Mapping[str, Any],
        completions: CompletionForm | None = None,
        columns: Sequence[str] | None = None,
    ) -> RewardFunction:
        """Import a function and check its arguments; `columns` None leaves those of the data unchecked.

        Raises:
            ValueError: there is no such function.
            BadSignature: an argument is neither available nor in `kwargs`.
        """
        function = import_function(path)
        signature = inspect.signature(function)
        names = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        takes_all = len(names) < len(signature.parameters)
        verl = "solution_str" in names
        if not takes_all and not verl and "completions" not in names:
            raise BadSignature(f"{path}{signature} takes neither `completions` nor verl's `solution_str`")
        given = {"solution_str", "extra_info"} if verl else {"prompts", "completions"}
        given |= set(columns or ())
        if verl and "reward_model" in given:
            given.add("ground_truth")
        bind = signature.bind_partial if columns is None else signature.bind
        try:
            bind(**dict.fromkeys((given & set(names)) | kwargs.keys()))
        except TypeError as error:
            text = f"{path}{signature} cannot be called: {error}; available are {', '.join(sorted(given))}"
            if STEP_COLUMN in names:
                text += f"; {STEP_COLUMN} needs a default, as evaluations have none"
            raise BadSignature(text) from None
        return cls(
            function,
            kwargs,
            None if takes_all and not verl else frozenset(names),
            columns or (),
            verl,
            completions == "messages" or (completions is None and names[:1] == ["completions"]),
        )

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> Any:
        """Return what the function returns for R responses: R scores, or an awaitable of them."""
        n = len(completions)
        given: dict[str, Sequence[Any]] = {**dict.fromkeys(self.columns, [None] * n), **columns}
        if self.verl:
            return self._each({"extra_info": [{}] * n, **given, "solution_str": completions})
        shown: Sequence[Any] = completions
        if self.messages:
            shown = [
                text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
                for prompt, text in zip(prompts, completions, strict=True)
            ]
        given |= {"prompts": prompts, "completions": shown}
        accepted = given if self.accepts is None else {n: v for n, v in given.items() if n in self.accepts}
        try:
            return self.function(**{**accepted, **self.kwargs})
        except TypeError as error:
            if "string indices" in str(error):
                raise TypeError(
                    f"{error}; set `completions: messages` to get chat messages as TRL"
                ) from error
            raise

    def _each(self, given: dict[str, Sequence[Any]]) -> Any:
        """Call verl's form once per response."""
        if "reward_model" in given:
            given.setdefault("ground_truth", [row["ground_truth"] for row in given["reward_model"]])
        names = [name for name in VERL if name in given and name in (self.accepts or ())]
        rows = zip(*(given[name] for name in names), strict=True)
        results = [self.function(**{**dict(zip(names, row, strict=True)), **self.kwargs}) for row in rows]
        if any(inspect.isawaitable(result) for result in results):
            return _awaited(results)
        return [_score(result) for result in results]


async def _awaited(results: Sequence[Awaitable[Any]]) -> list[Any]:
    return [_score(result) for result in await asyncio.gather(*results)]


def _score(result: Any) -> Any:
    """Return the score of a result of verl's form, a number or a mapping with `score`."""
    return result["score"] if isinstance(result, Mapping) else result
