"""`smopd merge MODEL ... --base BASE --output FOLDER`: merge the weights of models or LoRA adapters."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro


@dataclass(frozen=True)
class Options:
    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders or hub ids of models with safetensors files, or LoRA adapter folders."""
    output: Path
    """A new folder."""
    base: str | None = None
    """The model that the others were trained from. Default for adapters: their own base."""
    method: Literal["sum", "ties", "ram"] = "sum"
    """Per entry: add the task vectors (sum), average those with the majority sign (ties) or not 0 (ram)."""
    scale: tuple[float, ...] = (1.0,)
    """Scale of each task vector, or one for all."""
    keep: tuple[float, ...] = (1.0,)
    """Share of each tensor's changes to keep, largest first: one per model, or one for all."""
    exclude: tuple[str, ...] = ("",)
    """Regular expression of tensor names to leave unchanged: one per model, or one for all."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(Options, args=argv, prog="smopd merge", config=(tyro.conf.FlagCreatePairsOff,))
    try:
        merge(options)
    except (ValueError, OSError) as error:
        print(f"smopd.merge: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.output}")
    return 0


def merge(options: Options) -> None:
    """Write the merged model."""
    n = len(options.models)
    given = [each_of(name, getattr(options, name), n) for name in ("scale", "keep", "exclude")]
    if wrong := [keep for keep in options.keep if not 0 < keep <= 1]:
        raise ValueError(f"--keep: got {wrong[0]:g}, expected a share in (0, 1]")
    if options.output.exists():
        raise ValueError(f"--output: {options.output} exists, expected a new folder")

    from smopd.engine.weights.adapters import read_adapter
    from smopd.merging.vectors import Part, TaskVectors

    parts = [Part(*part) for part in zip(*given, strict=True)]
    adapters = [found for path in options.models if (found := read_adapter(path)) is not None]
    base = options.base or (adapters[0].base if adapters else None)
    if base is None:
        raise ValueError("--base: not given, expected the model that the others were trained from")
    TaskVectors(base, options.models).write(options.output, parts, options.method)


def each_of(name: str, values: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    if len(values) not in (1, n):
        raise ValueError(f"--{name}: got {len(values)} values, expected 1 or {n}")
    return values * n if len(values) == 1 else values


if __name__ == "__main__":
    sys.exit(main())
