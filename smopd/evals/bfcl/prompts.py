"""How a model is asked a BFCL item: the chat of RLLA models, or BFCL's own for prompted models.

RLLA lists tools as number, name, description and properties, and puts the dialogue into one user message, in
our words or those of an RLLA file. BFCL lists functions as JSON, in the words of the package bfcl-eval.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from smopd.evals.bfcl.calls import Form
from smopd.evals.bfcl.official import Function, language_of, load_module
from smopd.evals.rlla import load_rlla_items

_LANGUAGES = {"python": "Python 3", "java": "Java 8", "javascript": "JavaScript"}
_FIRST_TOOL, _AFTER_TOOLS = "\n1. Name: ", "\n\n**Steps for Each Turn**"

# As ToolRL's handler for BFCL does at the end of each user record.
_RLLA_HINT = (
    "If no tool fits, or a required parameter is missing, say so without a tool call, or call the tool None. "
    "Otherwise make the tool call or calls that complete the task in this turn."
)


class Frame(NamedTuple):
    """What stands before and after the list of tools in a system message."""

    head: str
    tail: str


def frame(form: Form, words: str | None = None) -> Frame:
    """The frame of the system message.

    Args:
        words: a file of RLLA items whose words are taken, for the form rlla; None for ours.
    Raises:
        ValueError, FileNotFoundError: the file is absent or its first item lists no tools.
    """
    if form == "rlla":
        if words is not None:
            return _rlla_frame(Path(words).expanduser())
        ours = Path(__file__).with_name("rlla_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
        return Frame(*ours.split("{tools}"))
    if words is not None:
        raise ValueError(f"words {words!r}: the form bfcl asks in the words of bfcl-eval, expected none")
    prompts = load_module("constants/default_prompts.py")
    style = prompts.PROMPT_STYLE_TEMPLATES["classic"]
    asked = style["tool_call_no_tag"].format(
        output_format=prompts.OUTPUT_FORMAT_MAPPING["python"],
        param_types=prompts.PARAM_TYPE_MAPPING["python"],
    )
    marker = "\0"
    text = prompts.PROMPT_TEMPLATE_MAPPING["plaintext"].format(
        persona=style["persona"],
        task=style["task"],
        tool_call_format=asked,
        multiturn_behavior=style["multiturn_behavior"],
        available_tools=style["available_tools"].format(format="json", functions=marker),
    )
    head, _, tail = text.partition(marker)
    return Frame(head, tail)


def _rlla_frame(path: Path) -> Frame:
    system = load_rlla_items(path)[0].messages[0]["content"]
    head, tools, rest = system.partition(_FIRST_TOOL)
    _, steps, tail = rest.partition(_AFTER_TOOLS)
    if not tools or not steps:
        raise ValueError(f"{path}: the first item's system message lists no tools as RLLA does")
    return Frame(head, steps + tail)


def messages(
    question: Sequence[Mapping[str, str]],
    functions: Sequence[Function],
    category: str,
    form: Form,
    words: Frame,
    *,
    underscores: bool = False,
) -> tuple[dict[str, str], ...]:
    """The chat that asks one item; a system message of the question follows ours in the same message."""
    shown = shown_functions(functions, category, underscores=underscores)
    own = [message["content"] for message in question if message["role"] == "system"]
    talk = [message for message in question if message["role"] != "system"]
    if form == "bfcl":
        listed = words.head + json.dumps(shown, indent=4) + words.tail
        system = "\n\n".join([listed, *own])
        return ({"role": "system", "content": system}, *(dict(message) for message in talk))
    tools = "".join(
        f"\n{number}. Name: {function['name']}\nDescription: {function['description']}\n"
        f"Parameters: {json.dumps(function['parameters']['properties'])}"
        for number, function in enumerate(shown, start=1)
    )
    records = [
        f"<user> {message['content'].strip()}\n{_RLLA_HINT} </user>"
        if message["role"] == "user"
        else f"<response> {message['content'].strip()} </response>"
        for message in talk
    ]
    return (
        {"role": "system", "content": "\n\n".join([words.head + tools + words.tail, *own])},
        {"role": "user", "content": "\n".join(["**Dialogue Records History**", *records])},
    )


def shown_functions(
    functions: Sequence[Function], category: str, *, underscores: bool = False
) -> list[dict[str, Any]]:
    """The functions as described to a model: in Java and JavaScript every parameter is a string of source."""
    language = language_of(category)
    shown = []
    for described in functions:
        function = dict(described) if language == "python" else copy.deepcopy(dict(described))
        shown.append(function)
        if underscores:
            function["name"] = function["name"].replace(".", "_")
        function["description"] += f" It is a function of {_LANGUAGES[language]}."
        if language == "python":
            continue
        for declared in function["parameters"]["properties"].values():
            kind, inner = declared["type"], declared.pop("items", None)
            said = "value of any type" if kind == "any" else f"value of type {kind}"
            note = f" A string that holds the {_LANGUAGES[language]} source of a {said}"
            if inner is not None:
                note += f" with elements of type {inner['type']}"
            if inside := declared.pop("properties", None):
                note += f" with the entries {json.dumps(inside)}"
            declared["description"] = declared.get("description", "") + note + "."
            declared["type"] = "string"
    return shown
