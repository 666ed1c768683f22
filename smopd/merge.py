"""`smopd merge MODEL ... --base BASE --output FOLDER`: merge the weights of models or LoRA adapters."""

import re
import sys
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro

from smopd.record.progress import say_error
from smopd.run.failures import one_line


def main(argv: list[str] | None = None) -> int:
    with one_line("smopd.merge"):
        tyro.cli(merge, args=argv, prog="smopd merge", config=(tyro.conf.FlagCreatePairsOff,))
    return 0


def merge(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    output: Path,
    base: str | None = None,
    scale: tuple[float, ...] = (1.0,),
    keep: tuple[float, ...] = (1.0,),
    exclude: tuple[str, ...] = ("",),
) -> None:
    """Merge the weights of models that have the same base, without training.

    Args:
        models: Folders or hub ids of models with safetensors files, or LoRA adapter folders.
        output: A new folder.
        base: The model that all of `models` were trained from. Default for adapters: their own base.
        scale: Factor of each task vector: one per model, or one for all.
        keep: Share of each tensor's changes to keep (the largest): one per model, or one for all.
        exclude: Regular expression of tensor names to leave unchanged: one per model, or one for all.
    """
    if not models:
        raise ValueError("MODEL: none given, expected the models to merge")
    for name, values in {"scale": scale, "keep": keep, "exclude": exclude}.items():
        if len(values) not in (1, len(models)):
            raise ValueError(f"--{name}: got {len(values)} values, expected 1 or {len(models)}")
    if wrong := [share for share in keep if not 0 < share <= 1]:
        raise ValueError(f"--keep: got {wrong[0]:g}, expected a share in (0, 1]")
    if not all(abs(each) <= 1e9 for each in scale):
        raise ValueError(f"--scale: got {[*scale]}, expected numbers of at most 1e9")
    for pattern in exclude:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"--exclude: got {pattern!r}, expected a regular expression ({error})") from None
    if output.exists():
        raise ValueError(f"--output: {output} exists, expected a new folder")

    from smopd.engine.models.loading import load_tokenizer
    from smopd.engine.student.checkpoint import require_whole
    from smopd.engine.weights.adapters import read_adapter
    from smopd.merging.vectors import Part, TaskVectors
    from smopd.run.build import require_tokenizer

    adapters = [found for path in models if (found := read_adapter(path)) is not None]
    base = base or (adapters[0].base if adapters else None)
    if base is None:
        raise ValueError("--base: not given, expected the model that the others were trained from")
    for path in (base, *models):
        require_whole(Path(path))
    vectors = TaskVectors(base, models)
    try:
        tokenizer = load_tokenizer(base)
        for path in models:
            require_tokenizer(tokenizer, path, f"the base {base}")
    except (OSError, ValueError) as error:  # a model renamed reserved tokens, or the base has no tokenizer
        say_error(f"warning: {error}")
    for pattern in filter(None, exclude):
        if not any(re.search(pattern, name) for name in vectors.base.shapes):
            raise ValueError(f"--exclude: {pattern!r} matches no tensor of {base}")
    parts = map(Part, cycle(scale), cycle(keep), cycle(exclude))
    vectors.write(output, list(islice(parts, len(models))))
    print(f"wrote {output}")


if __name__ == "__main__":
    sys.exit(main())
