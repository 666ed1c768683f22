"""`smopd push RUN REPO`: upload the exported model of a finished run to the Hugging Face Hub.

The folder has the model, its card, the report and the recipe. `--dry-run` only writes it to RUN/push.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro

from smopd.record.progress import say_error
from smopd.run.failures import MISTAKES

WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class Options:
    run: Annotated[Path, tyro.conf.Positional]
    """Folder of the run, such as runs/quickstart/smopd."""
    repo: Annotated[str, tyro.conf.Positional]
    """Repository of the model, such as USER/NAME. It is made if it does not exist."""
    private: bool = False
    """Make a new repository private."""
    dry_run: bool = False
    """Write the folder and upload nothing."""


def main(argv: list[str] | None = None) -> int:
    options = tyro.cli(
        Options, args=argv, prog="smopd push", description=__doc__, config=(tyro.conf.FlagCreatePairsOff,)
    )
    try:
        folder = stage(options.run)
        print(f"wrote {folder}")
        if not options.dry_run:
            print(f"pushed to {upload(folder, options)}")
    except MISTAKES as error:  # an HTTP error of the hub is an OSError
        say_error(f"smopd push: {error}")
        return 2
    return 0


def stage(run: Path) -> Path:
    """Return RUN/push, made anew. Its weights are hard links to the export's."""
    run, recipe, folder = run.resolve(), run.resolve().parent, run.resolve() / "push"
    if not (run / "export" / "README.md").exists():
        raise ValueError(f"{run} has no export with a model card: finish it with `smopd train`")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / "export", folder, ignore=shutil.ignore_patterns(WEIGHTS))
    for weights in (run / "export").glob(WEIGHTS):
        os.link(weights, folder / weights.name)
    shutil.copyfile(recipe / "config.yaml", folder / "recipe.yaml")  # config.json is the model's
    shutil.copyfile(recipe / "report.html", folder / "report.html")
    return folder


def upload(folder: Path, options: Options) -> str:
    """Upload the folder in one commit, and return its address."""
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(options.repo, private=options.private, exist_ok=True)
    message = f"{options.run.resolve().parent.name}/{options.run.resolve().name}"
    return str(hub.upload_folder(repo_id=options.repo, folder_path=folder, commit_message=message))


if __name__ == "__main__":
    sys.exit(main())
