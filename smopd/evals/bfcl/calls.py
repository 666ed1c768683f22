"""Reads the calls of a response without evaluating anything, and writes calls as a response.

There are two forms. "rlla" is that of RLLA models, read as ToolRL's handler for BFCL reads it: the last
`<tool_call>` block, one JSON object with `name` and `parameters` a line. "bfcl" is BFCL's own for prompted
models: `[f(a=1), g(b="x")]`. bfcl-eval's reader of the latter evaluates some expressions.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from smopd.evals.bfcl.official import Answer, Call, Function, language_of
from smopd.evals.options import read_json

Form = Literal["rlla", "bfcl"]
FORMS: tuple[Form, ...] = ("rlla", "bfcl")
MAX_CHARS = 16_384  # ours: 1024 new tokens are about 5,000
MAX_DEPTH = 32  # ours: the answers are 4 deep
NO_CALL = "none"  # ToolRL: the tool to call where none fits
TOOL_THINK = "<think> The request needs the tools below. </think>"  # ours
NO_TOOL_THINK = "<think> No tool fits the request. </think>"  # ours

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_ATTEMPT = re.compile(r"\[|[\w$.]+\(")
_NAME = re.compile(r"\s*([A-Za-z_$][\w$]*(?:\.[A-Za-z_$][\w$]*)*)\s*\(")
_ARGUMENT = re.compile(r"\s*([A-Za-z_$][\w$]*)\s*=(?!=)\s*")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


def read_calls(response: str, form: Form, language: str = "python") -> list[Call]:
    """The calls of a response; none where it makes no attempt to call anything.

    In the form rlla, lines that are no call are passed over where another line is one. In the form bfcl one
    mistake spoils the response, as in BFCL.

    Raises:
        ValueError: the response attempts a call that cannot be read.
    """
    if form == "rlla":
        return _tagged_calls(response)
    text = response.rsplit("</think>", 1)[-1].strip("`\n ")
    if not _ATTEMPT.match(text):
        return []
    if len(text) > MAX_CHARS:
        raise ValueError(f"{len(text)} characters, expected at most {MAX_CHARS}")
    text = text if text.startswith("[") else "[" + text
    text = text if text.endswith("]") else text + "]"
    return _python_calls(text) if language == "python" else _source_calls(text[1:-1])


def write_calls(calls: Sequence[Call], form: Form, language: str = "python") -> str:
    """A response that makes the calls; without calls, one that declines."""
    if form == "bfcl":
        write = repr if language == "python" else _write_source
        written = [
            f"{call.name}({', '.join(f'{name}={write(value)}' for name, value in call.arguments.items())})"
            for call in calls
        ]
        return f"[{', '.join(written)}]" if calls else "None of the functions can be used."
    if not calls:
        return f"{NO_TOOL_THINK}\n<response> None of the tools can do this. </response>"
    lines = [json.dumps({"name": call.name, "parameters": call.arguments}) for call in calls]
    return "\n".join([TOOL_THINK, _OPEN, *lines, _CLOSE])


def perfect_calls(
    functions: Sequence[Function], answers: Sequence[Answer], category: str, *, underscores: bool = False
) -> list[Call]:
    """One call for each answer with the first allowed values; optional parameters without one are left out.

    Six of BFCL v4's 2,501 AST answers can be met by no call: live_multiple_862 and 964 ask for a parameter
    that the function lacks, live_simple_106 and 112 allow no value for required lists, and simple_java_36 and
    65 ask for a list of strings, numbers and booleans whose elements are read as text.
    """
    language = language_of(category)
    described = {function["name"]: function for function in reversed(functions)}
    calls = []
    for answer in answers:
        for name, allowed in answer.items():
            function = described.get(name, functions[0])
            declared, arguments = function["parameters"]["properties"], {}
            for parameter, values in allowed.items():
                given = [value for value in values if value != ""]
                if not given and parameter in function["parameters"]["required"]:
                    given = [""]
                if given and parameter in declared:
                    arguments[parameter] = _written(given[0], declared[parameter], language)
            shown = function["name"].replace(".", "_") if underscores else function["name"]
            calls.append(Call(shown, arguments))
    return calls


def _written(value: Any, declared: Mapping[str, Any], language: str) -> Any:
    """An allowed value as a call has it; in Java and JavaScript, its source."""
    kind, element = declared["type"], declared.get("items", {}).get("type")
    if isinstance(value, dict):  # key -> allowed values
        value = _first_of_each(value)
    elif element == "dict" and isinstance(value, list):
        value = [_first_of_each(item) if isinstance(item, dict) else item for item in value]
    if language == "java":
        return _java_source(value, kind, element)
    if language == "javascript" and not isinstance(value, str):
        return f"{value}n" if kind == "Bigint" else json.dumps(value, ensure_ascii=False)
    return value


def _first_of_each(option: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    allowed = {key: [value for value in values if value != ""] for key, values in option.items()}
    return {key: values[0] for key, values in allowed.items() if values}


def _java_source(value: Any, kind: str, element: str | None) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        items = [_quoted(item) if element in ("String", "char") else str(item) for item in value]
        items = [item + {"long": "L", "float": "f"}.get(element or "", "") for item in items]
        if kind == "Array":  # its strings keep the quotes that the answer has
            return f"new {element}[]{{{', '.join(map(str, value))}}}"
        return f"new ArrayList<>(Arrays.asList({', '.join(items)}))"
    if isinstance(value, dict):
        puts = " ".join(f'put("{key}", {_quoted(item)});' for key, item in value.items())
        return f"new HashMap<String, Object>() {{{{ {puts} }}}}"
    return value if isinstance(value, str) else f"{value}{ {'long': 'L', 'float': 'f'}.get(kind, '') }"


def _quoted(item: Any) -> str:
    if isinstance(item, bool):
        return str(item).lower()
    return f'"{item}"' if isinstance(item, str) else str(item)


def _write_source(value: str) -> str:
    """Quoted, unless it holds both quotes and so must be source that needs none."""
    quote = next((quote for quote in "\"'" if quote not in value), "")
    return f"{quote}{value}{quote}"


def _tagged_calls(response: str) -> list[Call]:
    block = response.rpartition(_OPEN)[2].split(_CLOSE, 1)[0] if _OPEN in response else ""
    if len(block) > MAX_CHARS:
        raise ValueError(f"a block of {len(block)} characters, expected at most {MAX_CHARS}")
    lines = [line for line in block.split("\n") if line.strip()]
    read = [call for call in map(_tagged_call, lines) if call is not None]
    if lines and not read:
        raise ValueError(f"no line of the block is a call, first {lines[0][:60]!r}")
    return [call for call in read if call.name.strip().lower() != NO_CALL]


def _tagged_call(line: str) -> Call | None:
    read = read_json(line)
    name, arguments = (read.get("name"), read.get("parameters")) if isinstance(read, dict) else (None, None)
    return Call(name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None


def _python_calls(text: str) -> list[Call]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an escape that Python does not know
            tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"no list of calls: {error}") from None
    return [_python_call(node) for node in (tree.elts if isinstance(tree, ast.List) else [tree])]


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call):
        raise ValueError(f"{type(node).__name__} where a call was expected")
    parts, function = [], node.func
    while isinstance(function, ast.Attribute):
        parts.append(function.attr)
        function = function.value
    if not isinstance(function, ast.Name):
        raise ValueError(f"{type(function).__name__} where a function's name was expected")
    parts.append(function.id)
    # As in BFCL, arguments without a name are not read.
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("** where a named argument was expected")
        arguments[keyword.arg] = _literal(keyword.value, MAX_DEPTH)
    return Call(".".join(reversed(parts)), arguments)


def _literal(node: ast.expr | None, levels: int) -> Any:
    """A literal's value; a bare name, as in BFCL, is a variable and stands for its own text."""
    if levels == 0:
        raise ValueError(f"values nested more than {MAX_DEPTH} deep")
    if isinstance(node, ast.Constant) and not isinstance(node.value, (bytes, complex)):
        return "..." if node.value is Ellipsis else node.value
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        number = node.operand
        if isinstance(number, ast.Constant) and type(number.value) in (int, float):
            return -number.value if isinstance(node.op, ast.USub) else number.value  # type: ignore[operator]
    if isinstance(node, ast.List):
        return [_literal(item, levels - 1) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_literal(item, levels - 1) for item in node.elts)
    if isinstance(node, ast.Dict):
        if not all(isinstance(key, (ast.Constant, ast.Name)) for key in node.keys):
            raise ValueError("a dict with another key than a literal")
        keys = [_literal(key, levels) for key in node.keys]
        return dict(zip(keys, [_literal(value, levels - 1) for value in node.values], strict=True))
    raise ValueError(f"{type(node).__name__} where a literal was expected")


def _source_calls(text: str) -> list[Call]:
    """Calls whose values are Java or JavaScript: each is kept as source, a lone string without quotes."""
    calls, position = [], 0
    while text[position:].strip():
        if (name := _NAME.match(text, position)) is None:
            raise ValueError(f"{text[position : position + 20]!r} where a call was expected")
        arguments: dict[str, Any] = {}
        position = name.end()
        while not text.startswith(")", position):
            end = _end_of_value(text, position)
            if (argument := _ARGUMENT.match(text, position, end)) is not None:
                value = text[argument.end() : end].strip()
                arguments[argument[1]] = value[1:-1] if _is_string(value) else value
            elif text[position:end].strip() == "" and text.startswith(",", end):
                raise ValueError("a comma where an argument was expected")
            position = end + 1 if text.startswith(",", end) else end
        calls.append(Call(name[1], arguments))
        position += 1
        rest = text[position:].lstrip()
        if rest and not rest.startswith(","):
            raise ValueError(f"{rest[:20]!r} where a comma was expected")
        position = len(text) - len(rest) + 1
    return calls


def _end_of_value(text: str, start: int) -> int:
    """Where the comma or the bracket stands that ends the value at `start`, outside quotes and brackets."""
    closing: list[str] = []
    position = start
    while position < len(text):
        letter = text[position]
        if letter in "\"'":
            position = _end_of_string(text, position)
        elif letter in _BRACKETS:
            closing.append(_BRACKETS[letter])
        elif letter == "<" and (text[position - 1].isalnum() or text[position - 1] in "_$"):
            closing.append(">")  # of a generic type
        elif closing and letter == closing[-1]:
            closing.pop()
        elif not closing and letter in ",)":
            return position
        position += 1
    raise ValueError("a call without an end")


def _end_of_string(text: str, start: int) -> int:
    position = start + 1
    while position < len(text) and text[position] != text[start]:
        position += 2 if text[position] == "\\" else 1
    return position


def _is_string(value: str) -> bool:
    return value[:1] in ("'", '"') and len(value) > 1 and _end_of_string(value, 0) == len(value) - 1
