"""`smopd push RUN REPO`: upload the exported model of a finished run to the Hugging Face Hub.

The upload contains the model, its card, the report and the recipe. `--dry-run` writes only RUN/push.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

from smopd import extra  # noqa: F401 reports missing packages

# isort: split
import tyro

from smopd.run.failures import one_line

WEIGHTS = "*.safetensors"


def main(argv: list[str] | None = None) -> int:
    no_pairs = (tyro.conf.FlagCreatePairsOff,)
    with one_line("smopd push"):  # an HTTP error of the hub is an OSError
        tyro.cli(push, args=argv, prog="smopd push", description=__doc__, config=no_pairs)
    return 0


def push(
    run: Annotated[Path, tyro.conf.Positional],
    repo: Annotated[str, tyro.conf.Positional],
    private: bool = False,
    dry_run: bool = False,
) -> None:
    """Write the folder and upload it in one commit.

    Args:
        run: Folder of the run, such as runs/quickstart/smopd.
        repo: Repository of the model, such as USER/NAME. It is created if it does not exist.
        private: Make a new repository private.
        dry_run: Write the folder and upload nothing.
    """
    folder = stage(run)
    print(f"wrote {folder}")
    if dry_run:
        return

    from huggingface_hub import HfApi

    hub = HfApi()
    message = f"{folder.parent.parent.name}/{folder.parent.name}"
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        print(f"pushed to {hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)}")
    except Exception as error:  # of the hub's library and of the HTTP client that it uses
        raise ValueError(f"cannot be pushed to {repo}: {' '.join(str(error).split())}") from error


def stage(run: Path) -> Path:
    """Create the folder RUN/push anew and return it. The weights are hard links to those of the export."""
    run = Path(os.path.abspath(run))  # keeps a link: its own parent is the recipe's folder
    recipe, folder = run.parent, run / "push"
    if not (run / "export" / "README.md").exists():
        raise ValueError(f"{run} has no export with a model card: finish it with `smopd train`")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / "export", folder, ignore=shutil.ignore_patterns(WEIGHTS))
    for weights in (run / "export").rglob(WEIGHTS):
        os.link(weights, folder / weights.relative_to(run / "export"))
    shutil.copyfile(recipe / "config.yaml", folder / "recipe.yaml")  # not config.json, which is the model's
    shutil.copyfile(recipe / "report.html", folder / "report.html")
    return folder


if __name__ == "__main__":
    sys.exit(main())
