"""Convert rows of the hub's tatsu-lab/alpaca, or rows with a column `prompt`, to prompts."""

from collections.abc import Mapping
from typing import Any


def prompt_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return only `prompt`: the row's own, or else its instruction and input as one user message.

    Raises:
        ValueError: the row has neither a `prompt` nor the strings `instruction` and `input`.
    """
    if "prompt" in row:
        return {"prompt": row["prompt"]}
    instruction, added = row.get("instruction"), row.get("input")
    if not isinstance(instruction, str) or not isinstance(added, str):
        raise ValueError(f"expected prompt, or the strings instruction and input, got {sorted(row)}")
    text = "\n\n".join(part.strip() for part in (instruction, added) if part.strip())
    return {"prompt": [{"role": "user", "content": text}]}
