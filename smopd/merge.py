"""`python -m smopd.merge MODEL ... --base BASE --output FOLDER`: models of one base, merged by their weights.

Adapters of one base are merged as an adapter, unless `--full`. The guard belongs to a recipe (stage `merge`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from smopd import extra  # noqa: F401 says what to install

# isort: split
import tyro


@dataclass(frozen=True)
class Options:
    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Folders or hub ids of models with safetensors files, or folders of LoRA adapters."""
    output: Path
    """A new folder."""
    base: str | None = None
    """What the models were trained from; of adapters, their own where not given."""
    method: Literal["sum", "ties", "ram"] = "sum"
    """ties: the mean of those with the elected sign, of each entry; ram: of all that changed it."""
    scale: tuple[float, ...] = (1.0,)
    """Of each model's change, or one of all."""
    keep: tuple[float, ...] = (1.0,)
    """The share of each tensor's changes that stays, the largest by magnitude: one a model, or one of all."""
    exclude: tuple[str, ...] = ("",)
    """A pattern: tensors whose names match it stay the base's; one a model, or one of all."""
    full: bool = False
    """Adapters: write the base's weights with the change in them."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(
        Options, args=argv, prog="python -m smopd.merge", config=(tyro.conf.FlagCreatePairsOff,)
    )
    try:
        merge(options)
    except (ValueError, OSError) as error:
        print(f"smopd.merge: {error}", file=sys.stderr)
        return 2
    print(f"wrote {options.output}")
    return 0


def merge(options: Options) -> None:
    """Writes the merge; ValueError or OSError where it cannot."""
    n = len(options.models)
    given = [each_of(name, getattr(options, name), n) for name in ("scale", "keep", "exclude")]
    if wrong := [keep for keep in options.keep if not 0 < keep <= 1]:
        raise ValueError(f"--keep: got {wrong[0]:g}, expected a share over 0 and at most 1")
    if options.output.exists():
        raise ValueError(f"--output: {options.output} is there already, expected a new folder")

    from smopd.engine.weights.adapters import read_adapter
    from smopd.merging.vectors import Part, TaskVectors, merge_adapters

    parts = [Part(*part) for part in zip(*given, strict=True)]
    adapters = [found for path in options.models if (found := read_adapter(path)) is not None]
    if len(adapters) == n and not options.full:
        merge_adapters(adapters, parts, options.method, options.output, options.base)
        return
    base = options.base or (adapters[0].base if adapters else None)
    if base is None:
        raise ValueError("--base: not given, expected the model that the others were trained from")
    TaskVectors(base, options.models).write(options.output, parts, options.method)


def each_of(name: str, values: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    if len(values) not in (1, n):
        raise ValueError(f"--{name}: got {len(values)} values, expected one, or one for each of {n} models")
    return values * n if len(values) == 1 else values


if __name__ == "__main__":
    sys.exit(main())
