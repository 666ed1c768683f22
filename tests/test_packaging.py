"""The package imports in every state: from a clone, editable, from a wheel and an sdist, in and outside it.

The extension is compiled once, into the wheel that is built from the sdist; the other builds leave it out.
Nothing is downloaded: each state sees the running interpreter's torch and transformers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(sysconfig.get_paths()["purelib"])
PACKED = ["setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "CHANGELOG.md", "csrc"]
ROOMS = ["smopd", "kernels", "engine"]
PIP_OPTIONS = [
    "--no-deps",
    "--no-index",
    "--no-build-isolation",
    "--disable-pip-version-check",
    "--no-cache-dir",
]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# Where the modules of each room are found, without torch: seconds matter here.
FIND = """
import importlib.util
for name in ("smopd.ops", "smopd.kernels.types", "smopd.engine.types"):
    print(importlib.util.find_spec(name).origin)
"""
IMPORT = """
import sys
import smopd.ops, smopd.kernels.types, smopd.engine.types
assert "transformers" not in sys.modules
for module in (smopd.ops, smopd.kernels.types, smopd.engine.types):
    print(module.__file__)
"""
# What a checkout on sys.path could break: transformers probes for a package named `kernels`.
MODEL = """
from transformers.models.qwen2 import modeling_qwen2
from transformers.utils import is_kernels_available
assert getattr(sys.modules.get("kernels"), "__file__", None) or not is_kernels_available()
modeling_qwen2.Qwen2ForCausalLM(modeling_qwen2.Qwen2Config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
"""
OPERATION = """
import torch, smopd._C
assert torch.ops.smopd.topk_logprobs_cpu(torch.arange(5.0)[None], 2, None, 1.0)[0].tolist() == [[4, 3]]
"""


def run(
    *command: object, cwd: Path, expect: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with a clean PYTHONPATH; where `expect` is given, its exit status must be that."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SMOPD"))
    }
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )
    if expect is not None:
        assert done.returncode == expect, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def probe(python: Path | str, cwd: Path, *, code: str = FIND, **environment: str) -> set[Path]:
    """Run the code in a new process with cwd on sys.path; the package folders that it prints."""
    files = [Path(line) for line in run(python, "-c", code, cwd=cwd, **environment).stdout.split()]
    return {file.parent if file.name == "ops.py" else file.parents[1] for file in files}


def pip_install(source: Path, target: Path, *options: str, **environment: str) -> str:
    command = [
        sys.executable,
        "-m",
        "pip",
        "-v",
        "install",
        *PIP_OPTIONS,
        *options,
        "--target",
        target,
        source,
    ]
    done = run(*command, cwd=target.parent, **environment)
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources as git would give them: links kept, nothing built."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in [*PACKED, *ROOMS]:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
            shutil.copytree(source, copy / name, symlinks=True, ignore=ignored)
        elif source.exists():
            shutil.copy2(source, copy / name)
    return copy


@pytest.fixture
def fresh(checkout: Path, tmp_path: Path) -> Iterator[Path]:
    """A checkout of its own for a build that writes into it."""
    yield shutil.copytree(checkout, tmp_path / "fresh", symlinks=True)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    source = shutil.copytree(checkout, folder / "source", symlinks=True)
    run(sys.executable, "-c", BUILD, "build_sdist", folder, cwd=source, SMOPD_BUILD_EXT="0")
    (archive,) = folder.glob("smopd-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the sdist, with the extension where a compiler is found."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    run(sys.executable, "-c", BUILD, "build_wheel", folder, cwd=source)
    (built,) = folder.glob("smopd-*.whl")
    return built


def modules_in(folder: Path) -> set[str]:
    """The files that belong into the package, by their place in it."""
    found = set()
    for name in ROOMS:
        prefix = Path() if name == "smopd" else Path("smopd")
        for path in (folder / name).rglob("*"):
            linked = name == "smopd" and path.relative_to(folder / name).parts[0] in ROOMS
            shipped = path.suffix in {".py", ".yaml", ".jsonl"} or path.name in {"py.typed", "NOTICE"}
            if shipped and not linked:
                found.add(str(prefix / path.relative_to(folder)))
    return found


def test_clone_uninstalled(checkout: Path, outside: Path) -> None:
    assert probe(sys.executable, checkout, code=IMPORT + MODEL) == {checkout / "smopd"}
    assert probe(sys.executable, outside, PYTHONPATH=str(checkout)) == {checkout / "smopd"}


@pytest.mark.parametrize("mode", ["lenient", "strict", "compat"])
def test_editable(mode: str, fresh: Path, outside: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (environment / "lib" / version / "site-packages" / "running.pth").write_text(f"{SITE}\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *PIP_OPTIONS]
    run(*pip, "-C", f"editable_mode={mode}", "-e", fresh, cwd=outside, SMOPD_BUILD_EXT="0")
    assert probe(python, fresh) == {fresh / "smopd"}
    found = probe(python, outside, code=IMPORT if mode == "lenient" else FIND)
    if mode == "strict":  # links file by file in a build folder
        assert all(fresh in folder.parents for folder in found)
    else:
        assert found <= {fresh / "smopd", fresh}  # fresh/kernels/types.py is the same file without the link


def test_wheel_is_complete(wheel: Path, checkout: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if name.startswith("smopd/") and not name.endswith(".so")}
    assert packed == modules_in(checkout)
    if shutil.which(os.environ.get("CXX", "g++")):
        assert "smopd/_C.abi3.so" in names
        assert "-cp310-abi3-" in wheel.name


def test_wheel(wheel: Path, checkout: Path, outside: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip_install(wheel, target)
    code = IMPORT + OPERATION if (target / "smopd" / "_C.abi3.so").exists() else IMPORT
    assert probe(sys.executable, outside, code=code, PYTHONPATH=str(target)) == {target / "smopd"}
    assert probe(sys.executable, checkout, PYTHONPATH=str(target)) == {checkout / "smopd"}


def test_sdist(sdist: Path, outside: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip_install(sdist, target, SMOPD_BUILD_EXT="0")
    assert probe(sys.executable, outside, PYTHONPATH=str(target)) == {target / "smopd"}


def test_install_without_a_compiler_succeeds_and_says_so(fresh: Path, outside: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    output = pip_install(fresh, target, CC="/nonexistent/cc", CXX="/nonexistent/c++")
    assert "smopd._C was not built" in output and "reference backend" in output
    assert not list(target.rglob("_C*.so"))
    assert probe(sys.executable, outside, PYTHONPATH=str(target)) == {target / "smopd"}


def test_a_demanded_extension_fails_without_a_compiler(fresh: Path, tmp_path: Path) -> None:
    environment = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++", "SMOPD_BUILD_EXT": "1"}
    done = run(sys.executable, "-c", BUILD, "build_wheel", tmp_path, cwd=fresh, expect=None, **environment)
    assert done.returncode != 0
    assert "SMOPD_BUILD_EXT=1 demands it" in done.stderr


def test_build_without_torch_succeeds_and_says_so(fresh: Path, tmp_path: Path) -> None:
    """As in an isolated build: the build environment holds setuptools alone."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for found in [SITE / "_distutils_hack", *SITE.glob("setuptools*")]:
        (bare / found.name).symlink_to(found)
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    done = run(python, "-c", BUILD, "build_wheel", tmp_path, cwd=fresh, PYTHONPATH=str(bare))
    assert "torch >= 2.11 is not in the build environment" in done.stderr
    (built,) = tmp_path.glob("smopd-*.whl")
    assert built.name.endswith("-py3-none-any.whl")


TYPED = """
from smopd.engine.types import Rollout
from smopd.kernels.types import LossSettings
from smopd.ops import topk_logprobs

def version(rollout: Rollout) -> str:
    return rollout.policy_version

kappa: str = LossSettings().kappa
topk_logprobs(kappa="wrong")
"""


@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_see_the_rooms(checker: str, checkout: Path, wheel: Path, tmp_path: Path) -> None:
    """Both names of each room lead to its types: a line that misuses one is an error, at its place."""
    pip_install(wheel, tmp_path / "target")
    for place in (checkout, tmp_path / "target"):
        folder = tmp_path / f"user of {place.name}"
        folder.mkdir()
        (folder / "user.py").write_text(TYPED)
        if checker == "mypy":
            options = ["--no-site-packages", "--ignore-missing-imports", "--cache-dir", folder / "cache"]
            command = [sys.executable, "-m", "mypy", *options, "user.py"]
            printed = run(*command, cwd=folder, expect=1, MYPYPATH=str(place)).stdout
        else:
            settings = {"extraPaths": [str(place)], "typeCheckingMode": "standard"}
            (folder / "pyrightconfig.json").write_text(json.dumps(settings))
            command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "user.py"]
            printed = run(*command, cwd=folder, expect=1).stdout
        found = re.findall(r"user\.py:(\d+):.*error", printed)
        assert sorted(set(found), key=int) == ["7", "9", "10"], printed
