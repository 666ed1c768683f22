"""BFCL's declared types: what Python type a value must have, and how Java and JavaScript source is read.

In the Java and JavaScript categories every value is a string that holds source text. It is read as BFCL reads
it, by shape: text that does not have the shape of its declared type stays a string. Elements of lists are
what stands between commas, also inside quotes, and the strings of a Java array keep their quotes.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from typing import Any

PYTHON_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
JAVA_TYPES: Mapping[str, type] = {
    **dict.fromkeys(("byte", "short", "integer", "long"), int),
    **dict.fromkeys(("float", "double"), float),
    **dict.fromkeys(("char", "String", "any"), str),
    **dict.fromkeys(("Array", "ArrayList"), list),
    "boolean": bool,
    "HashMap": dict,
}
JAVASCRIPT_TYPES: Mapping[str, type] = {
    "String": str,
    "any": str,
    "integer": int,
    "Bigint": int,
    "float": float,
    "Boolean": bool,
    "array": list,
    "dict": dict,
}
TYPES = {"python": PYTHON_TYPES, "java": JAVA_TYPES, "javascript": JAVASCRIPT_TYPES}

_INTEGER = re.compile(r"-?\d{1,4000}")  # Python reads no longer ones
_DECIMAL = re.compile(r"-?\d+(?:\.\d+)?")
_EXPONENT = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_BOOLEANS = {"true": True, "false": False}

_AS_LIST = re.compile(r"new\s+ArrayList<\w*>\(Arrays\.asList\(")
_ARRAY_LIST = re.compile(r"new\s+ArrayList<\w*>\(\)")
_ADD = re.compile(r"add\(([^\n]+?)\)")
_ARRAY = re.compile(r"new\s+\w+\[\]\s*\{([^}\n]*)\}")
_HASH_MAP = re.compile(r"new\s+HashMap<.*?>\s*\(\)(?P<body>\s*\{\s*\{?\s*(?P<puts>[^}]*)\})?", re.DOTALL)
_LISTS = r"\s*\[[^\]\n]*\](?:\s*,\s*\[[^\]\n]*\])*\s*"
_LIST_OF_LISTS = re.compile(rf"\[{_LISTS}\]|new\s+Array\({_LISTS}\)")


def language_of(category: str) -> str:
    """python, java or javascript."""
    if "javascript" in category:
        return "javascript"
    return "java" if "java" in category else "python"


def java_value(text: str, declared: str, element: str | None = None) -> Any:
    """What Java source of a declared type stands for; `text` itself where it has another shape."""
    if declared in ("byte", "short", "integer"):
        return int(text) if _INTEGER.fullmatch(text) else text
    if declared == "long":
        return int(text[:-1]) if text[-1:] in ("l", "L") and _INTEGER.fullmatch(text[:-1]) else text
    if declared == "float":
        return float(text[:-1]) if text[-1:] in ("f", "F") and _EXPONENT.fullmatch(text[:-1]) else text
    if declared == "double":
        return float(text) if _EXPONENT.fullmatch(text) else text
    if declared == "boolean":
        return _BOOLEANS.get(text, text)
    if declared == "ArrayList":
        return _array_list(text, element)
    if declared == "Array":
        found = _ARRAY.search(text)
        if found is None:
            return text
        return [_element(item.strip(), element) for item in found[1].split(",") if item.strip()]
    return _hash_map(text) if declared == "HashMap" else text


def java_literal(text: str) -> Any:
    """What Java source without a declared type stands for: a literal, or else the text."""
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if text.startswith('"') and text.endswith('"'):
        return text[1:-1]
    for declared in ("long", "float"):
        if (value := java_value(text, declared)) != text:
            return value
    return _number(text)


def javascript_value(text: str, declared: str, element: str | None = None) -> Any:
    """What JavaScript source of a declared type stands for; `text` itself where it has another shape."""
    if declared == "String":
        return text[1:-1] if _quoted(text) else text
    if declared == "integer":
        return int(text) if _INTEGER.fullmatch(text) else text
    if declared == "Bigint":
        return int(text[:-1]) if text[-1:] == "n" and _INTEGER.fullmatch(text[:-1]) else text
    if declared == "float":
        return float(text) if _DECIMAL.fullmatch(text) else text
    if declared == "Boolean":
        return _BOOLEANS.get(text, text)
    if declared == "array":
        return _javascript_array(text.strip(), element)
    return _javascript_object(text.strip()) if declared == "dict" else text


def javascript_literal(text: str) -> Any:
    """What JavaScript source without a declared type stands for: a literal, or else the text."""
    text = text.strip()
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    return text[1:-1] if _quoted(text) else _number(text)


def _array_list(text: str, element: str | None) -> Any:
    if (start := _AS_LIST.search(text)) is not None:
        end = text.find("))", start.end() + 1)
        inner = text[start.end() : end]
        if end >= 0 and "\n" not in inner:
            return [_list_element(item.strip(), element) for item in inner.split(",")]
    for empty in _ARRAY_LIST.finditer(text):
        rest = text[empty.end() :].lstrip()
        if rest.startswith("{{") and (end := rest.find("}}", 3)) >= 0 and rest[2:end].strip():
            return [_list_element(item.strip(), element) for item in _ADD.findall(rest[2:end].strip())]
    return [] if _ARRAY_LIST.search(text) else text


def _list_element(text: str, element: str | None) -> Any:
    """As in an array, but strings and characters lose their quotes."""
    return text[1:-1] if element in ("String", "char") else _element(text, element)


def _element(text: str, element: str | None) -> Any:
    return java_literal(text) if element is None else java_value(text, element)


def _hash_map(text: str) -> Any:
    found = list(_HASH_MAP.finditer(text))
    for match in found:
        if match["body"] is not None:
            return {key: java_literal(value.strip()) for key, value in _puts(match["puts"])}
    return {} if found else text


def _puts(text: str) -> Iterator[tuple[str, str]]:
    """Key and value of each `put("KEY", VALUE)`, as `put\\("([^\\n]*?)",\\s*([^\\n]*?)\\)` finds them.

    That pattern takes the cube of the text's length where a model repeats itself.
    """
    ends = []  # of a key, with the beginning and the end of its value
    for comma in re.finditer('",\\s*', text):
        value, close = comma.end(), text.find(")", comma.end())
        if close >= 0 and text.find("\n", value, close) < 0:
            ends.append((comma.start(), value, close))
    place = 0
    while (put := text.find('put("', place)) >= 0:
        key = put + len('put("')
        place = key
        i = bisect_left(ends, (key,))
        if i < len(ends) and text.find("\n", key, ends[i][0]) < 0:
            end, value, close = ends[i]
            yield text[key:end], text[value:close]
            place = close + 1


def _javascript_array(text: str, element: str | None) -> Any:
    if (lists := _LIST_OF_LISTS.match(text)) is not None:
        inner = re.findall(r"\[([^\]\n]*)\]", lists[0])
        return [[javascript_literal(item) for item in each.strip(" [").split(",")] for each in inner]
    if text.startswith("["):
        end = text.find("]")
        inside = text[1:end]
    elif (start := re.match(r"new\s+Array\(", text)) is not None:
        end = text.find(")", start.end())
        inside = text[start.end() : end]
    else:
        return text
    if end < 0 or "\n" in inside:
        return text
    items = [item.strip() for item in inside.split(",")] if inside.strip() else []
    if element is None:
        return [javascript_literal(item) for item in items]
    return [javascript_value(item, element) for item in items]


def _javascript_object(text: str) -> Any:
    end = text.find("}")
    if not text.startswith("{") or end < 0 or "\n" in text[:end]:
        return text
    found: dict[str, Any] = {}
    inside, start = text[1:end], 0
    while (colon := inside.find(":", start)) >= 0:
        if colon == start:
            start += 1
            continue
        # A value ends at the first comma whose next piece, up to the comma after it, has a key.
        stop = inside.find(",", colon)
        while stop >= 0 and ":" not in inside[stop + 2 :].split(",", 1)[0]:
            stop = inside.find(",", stop + 1)
        stop = len(inside) if stop < 0 else stop
        key, value = inside[start:colon].strip().strip("'\""), inside[colon + 1 : stop].strip()
        if value.startswith("[") and value.endswith("]"):
            found[key] = _javascript_array(value, None)
        elif value.startswith("{") and value.endswith("}"):
            found[key] = _javascript_object(value)
        else:
            found[key] = javascript_literal(value.strip("'\""))
        start = stop + 1
    return found


def _quoted(text: str) -> bool:
    return any(text.startswith(quote) and text.endswith(quote) for quote in "\"'")


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
