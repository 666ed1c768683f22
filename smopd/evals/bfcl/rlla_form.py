"""BFCL's items as RLLA models know tools: how they are asked, and how calls are read and written.

As in ToolRL's handler for BFCL the system message lists the tools and the dialogue is one user message. Calls
stand in the last `<tool_call>` block, one JSON object a line. Nothing of a response is evaluated.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from smopd.evals.bfcl.official import Answer, Call, Function, language_of
from smopd.evals.responses import read_json
from smopd.evals.rlla import load_rlla_items

MAX_CHARS = 16_384  # ours: 1024 new tokens are about 5,000
NO_CALL = "none"  # ToolRL: the tool to call where none fits
TOOL_THINK = "<think> The request needs the tools below. </think>"  # ours
NO_TOOL_THINK = "<think> No tool fits the request. </think>"  # ours

TOOLS = "{tools}"  # in a template of the system message

_LANGUAGES = {"python": "Python 3", "java": "Java 8", "javascript": "JavaScript"}
_FIRST_TOOL, _AFTER_TOOLS = "\n1. Name: ", "\n\n**Steps for Each Turn**"
# At the end of each user record.
_HINT = (
    "If no tool fits, or a required parameter is missing, say so without a tool call, or call the tool None. "
    "Otherwise make the tool call or calls that complete the task in this turn."
)


def system_template(words: str | None = None) -> str:
    """The system message in the words of a file of RLLA items, or ours, with TOOLS for the list of tools.

    Raises:
        ValueError, FileNotFoundError: the file is absent or its first item lists no tools.
    """
    if words is None:
        return Path(__file__).with_name("rlla_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
    system = load_rlla_items(words)[0].messages[0]["content"]
    head, tools, rest = system.partition(_FIRST_TOOL)
    _, steps, tail = rest.partition(_AFTER_TOOLS)
    if not tools or not steps:
        raise ValueError(f"{words}: the first item's system message lists no tools as RLLA does")
    return head + TOOLS + steps + tail


def messages(
    question: Sequence[Mapping[str, str]], functions: Sequence[Function], category: str, template: str
) -> tuple[dict[str, str], ...]:
    """The chat that asks one item; a system message of the question follows ours in the same message."""
    tools = "".join(
        f"\n{number}. Name: {function['name']}\nDescription: {function['description']}\n"
        f"Parameters: {json.dumps(function['parameters']['properties'])}"
        for number, function in enumerate(shown_functions(functions, category), start=1)
    )
    system, records = [template.replace(TOOLS, tools)], ["**Dialogue Records History**"]
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
    """The functions as described to a model: in Java and JavaScript every parameter is a string of source."""
    language = language_of(category)
    shown = []
    for function in copy.deepcopy([*map(dict, functions)]):
        shown.append(function)
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


def read_calls(response: str) -> list[Call]:
    """The calls of a response, none where it attempts none; lines that are no call are passed over.

    Raises:
        ValueError: the response contains a call, but none of its lines can be parsed.
    """
    _, opened, block = response.rpartition("<tool_call>")
    block = block.split("</tool_call>", 1)[0] if opened else ""
    if len(block) > MAX_CHARS:
        raise ValueError(f"a block of {len(block)} characters, expected at most {MAX_CHARS}")
    lines = [line for line in block.split("\n") if line.strip()]
    read = [row for row in map(read_json, lines) if isinstance(row, dict)]
    calls = [
        Call(row["name"], row["parameters"])
        for row in read
        if isinstance(row.get("name"), str) and isinstance(row.get("parameters"), dict)
    ]
    if lines and not calls:
        raise ValueError(f"no line of the block is a call, first {lines[0][:60]!r}")
    return [call for call in calls if call.name.strip().lower() != NO_CALL]


def write_calls(calls: Sequence[Call]) -> str:
    """A response that makes the calls; without calls, one that declines."""
    if not calls:
        return f"{NO_TOOL_THINK}\n<response> None of the tools can do this. </response>"
    lines = [json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls]
    return "\n".join([TOOL_THINK, "<tool_call>", *lines, "</tool_call>"])


def perfect_calls(functions: Sequence[Function], answers: Sequence[Answer], category: str) -> list[Call]:
    """One call for each answer with the first allowed values; optional parameters without one are left out.

    Six of BFCL v4's 2,501 AST answers can be met by no call: live_multiple_862 and 964 ask for a parameter
    that the function lacks, live_simple_106 and 112 allow no value for required lists, and simple_java_36 and
    65 ask for a list of strings, numbers and booleans whose elements are read as text.
    """
    language = language_of(category)
    described = {function["name"]: function for function in reversed(functions)}
    calls = []
    for name, allowed in (pair for answer in answers for pair in answer.items()):
        function = described.get(name, functions[0])
        declared, arguments = function["parameters"]["properties"], {}
        for parameter, values in allowed.items():
            given = [value for value in values if value != ""]
            if not given and parameter in function["parameters"]["required"]:
                given = [""]
            if given and parameter in declared:
                arguments[parameter] = _written(given[0], declared[parameter], language)
        calls.append(Call(function["name"], arguments))
    return calls


def _written(value: Any, declared: Mapping[str, Any], language: str) -> Any:
    """An allowed value as a call has it; in Java and JavaScript, its source."""
    kind, element = declared["type"], declared.get("items", {}).get("type", "")
    if isinstance(value, dict):
        value = _first_of_each(value)
    elif element == "dict" and isinstance(value, list):
        value = [_first_of_each(item) if isinstance(item, dict) else item for item in value]
    if language == "java":
        return _java_source(value, kind, element)
    if language == "javascript" and not isinstance(value, str):
        return f"{value}n" if kind == "Bigint" else json.dumps(value, ensure_ascii=False)
    return value


def _first_of_each(allowed: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    given = {key: [value for value in values if value != ""] for key, values in allowed.items()}
    return {key: values[0] for key, values in given.items() if values}


def _java_source(value: Any, kind: str, element: str = "", quoted: bool = False) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"' if quoted else value
    if isinstance(value, list) and kind == "Array":  # its strings keep the quotes that the answer has
        return f"new {element}[]{{{', '.join(map(str, value))}}}"
    if isinstance(value, list):
        items = [_java_source(item, element, quoted=element in ("String", "char")) for item in value]
        return f"new ArrayList<>(Arrays.asList({', '.join(items)}))"
    if isinstance(value, dict):
        puts = [f'put("{key}", {_java_source(item, "", quoted=True)});' for key, item in value.items()]
        return f"new HashMap<String, Object>() {{{{ {' '.join(puts)} }}}}"
    return f"{value}{ {'long': 'L', 'float': 'f'}.get(kind, '') }"
