"""The package installs and imports from a clone, a wheel and an sdist, in a clean environment.

The wheel is built from the sdist. Its extension is the clone's, if that is newer than its sources, as the
compiler would make the same again. Nothing is downloaded: every environment sees this interpreter's torch and
transformers.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import smopd
from tests.smopd.recipes import ROOT, json_lines

pytestmark = pytest.mark.slow

SITE = Path(sysconfig.get_paths()["purelib"])
COMPILER = os.environ.get("CXX", "g++")
PIP_OPTIONS = """--no-deps --no-index --no-build-isolation --disable-pip-version-check --no-compile
    --no-cache-dir""".split()  # noqa: SIM905
ROOMS = ["smopd", "kernels", "engine"]
IMPORT = """
import sys
import smopd.ops, smopd.kernels.types, smopd.engine.types
assert "transformers" not in sys.modules
for module in (smopd.ops, smopd.kernels.types, smopd.engine.types):
    print(module.__file__)
"""


def run(*command: object, cwd: Path, expect: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command with a clean PYTHONPATH, and check its exit status."""
    ours = ("PYTHON", "SMOPD")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | environment
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=variables, capture_output=True, text=True)
    assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def has_compiler() -> bool:
    return shutil.which(COMPILER) is not None


def sources() -> list[Path]:
    """Return the files of the checkout that git would commit, without following links."""
    listing = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.split("\0")
    return sorted({Path(name) for name in names if name and os.path.lexists(ROOT / name)})


def bare_environment(folder: Path) -> Path:
    """Return the Python of a new environment with the same packages, except editable installs."""
    venv.create(folder, with_pip=False, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (folder / "lib" / version / "site-packages" / "running.pth").write_text(f"{SITE}\n")
    return folder / "bin" / "python"


def bare_variables(home: Path) -> dict[str, str]:
    """Return the environment variables of a new user with an empty home."""
    machine = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name in machine}
    return {**kept, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1"}


def packages(cwd: Path, **environment: str) -> set[Path]:
    """Return the package folders that a new process in `cwd` imports from."""
    files = map(Path, run(sys.executable, "-c", IMPORT, cwd=cwd, **environment).stdout.splitlines())
    return {file.parent if file.name == "ops.py" else file.parents[1] for file in files}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with links, in a path with a space, without build products."""
    folder = tmp_path_factory.mktemp("check out")
    for path in sources():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path, follow_symlinks=False)
    return folder


COMPILE = f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n'  # half the time
KNOWN = """#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in *.so) cp "{}" "$2";; *) : > "$2";; esac
"""


@pytest.fixture(scope="module")
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The result of `python -m build`."""
    folder = tmp_path_factory.mktemp("built")
    source = shutil.copytree(checkout, folder / "source", symlinks=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source]
    compiled = ROOT / "smopd/_C.abi3.so"
    made_of = [ROOT / "setup.py", *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    known = compiled.exists() and compiled.stat().st_mtime > max(path.stat().st_mtime for path in made_of)
    (folder / "cxx").write_text(KNOWN.format(compiled) if known else COMPILE)
    (folder / "cxx").chmod(0o755)
    run(*command, cwd=folder, **({"CXX": str(folder / "cxx")} if has_compiler() else {}))
    platform = sysconfig.get_platform().replace("-", "_")  # linux_x86_64
    tag = f"cp310-abi3-{platform}" if has_compiler() else "py3-none-any"
    names = sorted(path.name for path in (folder / "dist").iterdir())
    assert names == [f"smopd-{smopd.__version__}-{tag}.whl", f"smopd-{smopd.__version__}.tar.gz"]
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The wheel built from the sdist, with the extension if there is a compiler."""
    (wheel,) = built.glob("smopd-*.whl")
    return wheel


def modules_in(folder: Path) -> set[str]:
    """Return the files of the package by their path in it."""
    kinds = {".py", ".yaml", ".csv", ".txt", ".html", ".md", ".typed"}
    paths = [path for room in ROOMS for path in (folder / room).rglob("*") if path.suffix in kinds]
    inside = [path.relative_to(folder) for path in paths]
    return {str(path if path.parts[0] == "smopd" else "smopd" / path) for path in inside}


def test_a_clone_that_is_not_installed(checkout: Path) -> None:
    assert packages(checkout) == {checkout / "smopd"}


def test_the_wheel_is_complete_and_changes_no_other_program(wheel: Path, checkout: Path) -> None:
    """No entry points of other programs, which would load our code."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        declared = archive.read(entry_points).decode().split()
    packed = {name for name in names if name.startswith("smopd/") and not name.endswith(".so")}
    assert packed == modules_in(checkout)
    assert not has_compiler() or "smopd/_C.abi3.so" in names
    assert declared == ["[console_scripts]", "smopd", "=", "smopd.__main__:console"]


def test_the_sdist_holds_what_a_clone_holds(built: Path, tmp_path: Path) -> None:
    """Including tests, examples, documentation and links."""
    (archive,) = built.glob("smopd-*.tar.gz")
    with tarfile.open(archive) as opened:
        # Python has the filter since 3.10.12 and 3.11.4.
        opened.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (unpacked,) = tmp_path.iterdir()
    found = (path for path in unpacked.rglob("*") if path.is_symlink() or path.is_file())
    files = {path.relative_to(unpacked) for path in found}
    kinds = ("PKG-INFO", "setup.cfg")
    made = {path for path in files if path.name in kinds or "smopd.egg-info" in path.parts}
    assert files - made == {path for path in sources() if not path.parts[0].startswith(".")} - made
    for room in ("kernels", "engine"):
        assert (unpacked / "smopd" / room).readlink() == Path("..") / room


SMALL = """
loop: {steps: 2, prompts_per_step: 4}
warm_start: {steps: 2, source: {kwargs: {n: 64}}}
data: {evaluation: {kwargs: {n: 4}}}
evaluation: {samples: 0}
"""
SERVED = """
import torch
from smopd.kernels.dispatch import backend_for
from smopd.ops import topk_logprobs
logits = torch.arange(5.0)[None]
assert topk_logprobs(logits, 2).ids_NS.tolist() == [[4, 3]]
print(backend_for("topk_logprobs", logits))
"""
COMMAND = f"""
import runpy, sys
from smopd.config.cli import parse
from smopd.config.recipe import builtin
print(*(recipe for recipe in builtin() if parse([recipe, "--dry-run"]).settings.runs))
{SERVED}
sys.path.remove("")
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_wheel_on_a_strangers_machine(wheel: Path, tmp_path: Path) -> None:
    """The README works from the wheel, in an empty folder, for a new user."""
    outside = tmp_path / "out side"
    outside.mkdir()
    python = bare_environment(tmp_path / "environment")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *PIP_OPTIONS, "--ignore-installed"]
    run(*pip, wheel, cwd=outside)
    recipes = sorted(path.stem for path in (ROOT / "smopd" / "recipes").glob("*.yaml"))
    (outside / "mine.py").write_text("ones = lambda prompts, completions, **columns: [1.0] * len(prompts)\n")
    (outside / "small.yaml").write_text(f"extends: quickstart\n{SMALL}")
    mine = ("--rewards.1.function", "mine:ones", "--only", "gdpo", "--output", "out", "--processes", "1")
    words = [str(python), "-c", COMMAND, str(python.with_name("smopd")), "train", "small.yaml", *mine]
    (tmp_path / "home").mkdir()
    variables = bare_variables(tmp_path / "home")
    done = subprocess.run(words, cwd=outside, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    resolved, served, *_ = done.stdout.splitlines()
    assert resolved.split() == recipes and served == ("cpp" if has_compiler() else "reference")
    lines = json_lines(outside / "out/gdpo/metrics.jsonl")
    assert [line["reward/format/mean"] for line in lines if "loss/pg" in line] == [1, 1]
    assert (outside / "out" / "report.html").is_file()


def test_without_a_compiler_the_reference_serves_unless_the_extension_is_demanded(checkout, tmp_path):
    fresh = shutil.copytree(checkout, tmp_path / "fresh", symlinks=True)
    target, no_compiler = tmp_path / "target", {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    build = [sys.executable, "setup.py", "build_ext"]
    demanded = run(*build, cwd=fresh, expect=1, SMOPD_BUILD_EXT="1", **no_compiler)
    assert "SMOPD_BUILD_EXT=1 demands it" in demanded.stderr
    pip = [sys.executable, "-m", "pip", "-v", "install", *PIP_OPTIONS, "--target", target, fresh]
    done = run(*pip, cwd=tmp_path, **no_compiler)
    assert "smopd._C was not built" in done.stdout + done.stderr
    assert not list(target.rglob("_C*.so"))
    assert packages(tmp_path, PYTHONPATH=str(target)) == {target / "smopd"}


NEEDS = """
import build_backend
print(build_backend.get_requires_for_build_wheel(), build_backend.get_requires_for_build_sdist())
"""


def test_an_isolated_build_gets_torch_where_it_can_use_it(checkout: Path) -> None:
    """Its version bound is that of the package's only dependency."""
    project = (ROOT / "pyproject.toml").read_text()
    (torch,) = re.findall(r'^dependencies = \["(torch>=[\d.]+)"\]', project, re.MULTILINE)
    for compiler, needs in {sys.executable: f"['{torch}'] []", "/nonexistent/c++": "[] []"}.items():
        printed = run(sys.executable, "-c", NEEDS, cwd=checkout, CXX=compiler).stdout
        assert printed.splitlines()[-1] == needs
