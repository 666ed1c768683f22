"""BFCL's items in RLLA's form: the prompt of an item, and the calls in a response.

As in ToolRL's handler for BFCL, the system message lists the tools, and the user message is the dialogue. The
calls are in a response's last `<tool_call>` block, one JSON object per line. They are parsed, never executed.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smopd.evals.bfcl.official import Call, Function, language_of
from smopd.evals.responses import is_call, read_json

MAX_CHARS = 16_384  # ours: 1024 new tokens have about 5,000 characters
NO_CALL = "none"  # ToolRL: the name of the tool to call if no tool fits
SYSTEM = Path(__file__).with_name("rlla_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
TOOLS = "{tools}"  # the placeholder in SYSTEM

_LANGUAGES = {"python": "Python 3", "java": "Java 8", "javascript": "JavaScript"}
# The text at the end of each user record.
_HINT = (
    "If no tool fits, or a required parameter is missing, say so without a tool call, or call the tool None. "
    "Otherwise make the tool call or calls that complete the task in this turn."
)


def messages(
    question: Sequence[Mapping[str, str]], functions: Sequence[Function], category: str
) -> tuple[dict[str, str], ...]:
    """Return the chat for one item. A system message in `question` is appended to ours."""
    tools = "".join(
        f"\n{number}. Name: {function['name']}\nDescription: {function['description']}\n"
        f"Parameters: {json.dumps(function['parameters']['properties'])}"
        for number, function in enumerate(shown_functions(functions, category), start=1)
    )
    system, records = [SYSTEM.replace(TOOLS, tools)], ["**Dialogue Records History**"]
    for message in question:
        if message["role"] == "system":
            system.append(message["content"])
        elif message["role"] == "user":
            records.append(f"<user> {message['content'].strip()}\n{_HINT} </user>")
        else:
            records.append(f"<response> {message['content'].strip()} </response>")
    return (
        {"role": "system", "content": "\n\n".join(system)},
        {"role": "user", "content": "\n".join(records)},
    )


def shown_functions(functions: Sequence[Function], category: str) -> list[dict[str, Any]]:
    """Return the functions as the prompt shows them. Java and JavaScript parameters are source strings."""
    language = language_of(category)
    shown = []
    for function in copy.deepcopy([*map(dict, functions)]):
        shown.append(function)
        function["description"] += f" It is a function of {_LANGUAGES[language]}."
        if language == "python":
            continue
        for declared in function["parameters"]["properties"].values():
            kind, inner = declared["type"], declared.pop("items", None)
            shown_kind = "value of any type" if kind == "any" else f"value of type {kind}"
            note = f" A string that holds the {_LANGUAGES[language]} source of a {shown_kind}"
            if inner is not None:
                note += f" with elements of type {inner['type']}"
            if inside := declared.pop("properties", None):
                note += f" with the entries {json.dumps(inside)}"
            declared["description"] = declared.get("description", "") + note + "."
            declared["type"] = "string"
    return shown


def read_calls(response: str) -> list[Call]:
    """Return a response's calls. Other lines are skipped. Raise ValueError if all lines are skipped."""
    _, opened, block = response.rpartition("<tool_call>")
    block = block.split("</tool_call>", 1)[0] if opened else ""
    if len(block) > MAX_CHARS:
        raise ValueError(f"block has {len(block)} characters, expected at most {MAX_CHARS}")
    lines = [line for line in block.split("\n") if line.strip()]
    calls = [Call(row["name"], row["parameters"]) for row in map(read_json, lines) if is_call(row)]
    if lines and not calls:
        raise ValueError(f"block has no line with a call, first line {lines[0][:60]!r}")
    return [call for call in calls if call.name.strip().lower() != NO_CALL]
