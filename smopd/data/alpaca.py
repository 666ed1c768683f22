"""Alpaca as prompts alone: the rows of the hub's tatsu-lab/alpaca, or of a file that has a prompt already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def prompt_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """`prompt`, one user message: the instruction and, where there is one, the input behind an empty line.

    The row's answer is left out. A row with a `prompt` keeps it, and nothing else.

    Raises:
        ValueError: neither a `prompt` nor the texts instruction and input.
    """
    if "prompt" in row:
        return {"prompt": row["prompt"]}
    instruction, added = row.get("instruction"), row.get("input")
    if not isinstance(instruction, str) or not isinstance(added, str):
        raise ValueError(f"expected a prompt, or the texts instruction and input, got {sorted(row)}")
    text = "\n\n".join(part.strip() for part in (instruction, added) if part.strip())
    return {"prompt": [{"role": "user", "content": text}]}
