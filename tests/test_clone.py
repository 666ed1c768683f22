"""A clone in another place: another user's, with a space in its path, no data beside it and nothing built."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.patience import HANG_SECONDS
from tests.strangers import bare_environment, bare_variables, copy_sources

LIGHT = ("tests/smopd/config/test_recipes.py", "tests/test_readme.py", "-k", "resolves or readme or dry_run")


@pytest.mark.slow
def test_recipes_and_pages_hold_in_a_clone_elsewhere(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        clone = copy_sources(tmp_path / "an empty folder" / "smopd")
        python = bare_environment(tmp_path / "environment")
        done = subprocess.run(
            [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *LIGHT],
            cwd=clone,
            env=bare_variables(tmp_path / "home"),
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
        )
    finally:
        os.umask(before)
    said = f"{shlex.join(LIGHT)}\n{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, said
    assert " passed" in done.stdout and "skipped" not in done.stdout and "failed" not in done.stdout, said
