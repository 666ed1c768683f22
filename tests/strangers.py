"""The setup of a new user: a copy of the sources, and a clean environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_paths()["purelib"])
COMPILER = os.environ.get("CXX", "g++")
PIP_OPTIONS = """--no-deps --no-index --no-build-isolation --disable-pip-version-check
    --no-cache-dir""".split()  # noqa: SIM905


def run(
    *command: object, cwd: Path, expect: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with a clean PYTHONPATH, and check its exit status unless `expect` is None."""
    ours = ("PYTHON", "SMOPD")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )
    if expect is not None:
        assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def has_compiler() -> bool:
    return shutil.which(COMPILER) is not None


def sources() -> list[Path]:
    """Return the files of the checkout that git would commit, without following links."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({Path(name) for name in names if name and os.path.lexists(ROOT / name)})


def copy_sources(folder: Path) -> Path:
    """Copy the sources with links, without build products, and return the folder."""
    for path in sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


def bare_environment(folder: Path) -> Path:
    """Return the Python of a new environment with the same packages, except editable installs."""
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "running.pth").write_text(f"{SITE}\n")
    return folder / "bin" / "python"


def bare_variables(home: Path) -> dict[str, str]:
    """Return the environment variables of a new user with an empty home."""
    home.mkdir(exist_ok=True)
    machine = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name in machine}
    return {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1"}
