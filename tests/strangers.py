"""What a stranger has: the sources alone, and an environment that knows nothing of this checkout."""

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
PIP_OPTIONS = [
    "--no-deps",
    "--no-index",
    "--no-build-isolation",
    "--disable-pip-version-check",
    "--no-cache-dir",
]


def run(
    *command: object, cwd: Path, expect: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with a clean PYTHONPATH; where `expect` is given, its exit status must be that."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SMOPD"))
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    if expect is not None:
        assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def has_compiler() -> bool:
    return shutil.which(os.environ.get("CXX", "g++")) is not None


def sources() -> list[Path]:
    """The files of the checkout as git would commit them now, from its root; links are not followed."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({Path(name) for name in names if name and os.path.lexists(ROOT / name)})


def copy_sources(folder: Path) -> Path:
    """A copy of the sources in the folder, links kept, nothing built; the folder."""
    for path in sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


def bare_environment(folder: Path) -> Path:
    """The Python of a new environment that has what this one has installed, but for links to checkouts."""
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "running.pth").write_text(f"{SITE}\n")
    return folder / "bin" / "python"


def bare_variables(home: Path) -> dict[str, str]:
    """The variables of a new user, whose home is empty."""
    home.mkdir(exist_ok=True)
    machine = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name in machine}
    return {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1"}
