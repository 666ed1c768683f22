"""The package imports in every state: from a clone, editable, from a wheel and an sdist, in and outside it.

The extension is compiled once, into the wheel that is built from the sdist; the other builds leave it out.
Nothing is downloaded: each state sees the running interpreter's torch and transformers.
"""

from __future__ import annotations

import configparser
import json
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

import smopd
from tests.strangers import (
    PIP_OPTIONS,
    ROOT,
    SITE,
    bare_environment,
    bare_variables,
    copy_sources,
    has_compiler,
    run,
    sources,
)
from tests.test_bounds import PROJECT

pytestmark = pytest.mark.slow

ROOMS = ["smopd", "kernels", "engine"]
BUILD = "import sys, build_backend; getattr(build_backend, sys.argv[1])(sys.argv[2])"
NEEDS = """
import json, sys, build_backend
print(json.dumps(getattr(build_backend, f"get_requires_for_build_{sys.argv[1]}")()))
"""
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
SERVED = """
import torch
from smopd.kernels.dispatch import backend_for
from smopd.ops import topk_logprobs
logits = torch.arange(5.0)[None]
assert topk_logprobs(logits, 2).ids_NS.tolist() == [[4, 3]]
print(backend_for("topk_logprobs", logits))
"""


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
    return copy_sources(tmp_path_factory.mktemp("checkout"))


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
def built(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `python -m build` makes of a checkout, but that it takes this environment's torch."""
    folder = tmp_path_factory.mktemp("built")
    source = shutil.copytree(checkout, folder / "source", symlinks=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source]
    run(*command, cwd=folder)
    return folder / "dist"


@pytest.fixture(scope="module")
def sdist(built: Path) -> Path:
    (archive,) = built.glob("smopd-*.tar.gz")
    return archive


@pytest.fixture(scope="module")
def unpacked(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        # Python has the filter from 3.10.12 and 3.11.4 on.
        archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = folder.iterdir()
    return source


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    """The wheel that was built from the sdist, with the extension where a compiler is found."""
    (wheel,) = built.glob("smopd-*.whl")
    return wheel


def modules_in(folder: Path) -> set[str]:
    """The files that belong into the package, by their place in it."""
    found = set()
    for name in ROOMS:
        prefix = Path() if name == "smopd" else Path("smopd")
        for path in (folder / name).rglob("*"):
            linked = name == "smopd" and path.relative_to(folder / name).parts[0] in ROOMS
            shipped = path.suffix in {".py", ".yaml", ".csv", ".txt", ".html"} or path.name == "py.typed"
            if shipped and not linked:
                found.add(str(prefix / path.relative_to(folder)))
    return found


def test_clone_uninstalled(checkout: Path, outside: Path) -> None:
    assert probe(sys.executable, checkout, code=IMPORT + MODEL) == {checkout / "smopd"}
    assert probe(sys.executable, outside, PYTHONPATH=str(checkout)) == {checkout / "smopd"}


@pytest.mark.parametrize("mode", ["lenient", "strict", "compat"])
def test_editable(mode: str, fresh: Path, outside: Path, tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "environment")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *PIP_OPTIONS]
    run(*pip, f"--config-settings=editable_mode={mode}", "-e", fresh, cwd=outside, SMOPD_BUILD_EXT="0")
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
    if has_compiler():
        assert "smopd/_C.abi3.so" in names


def test_wheel(wheel: Path, checkout: Path, outside: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    pip_install(wheel, target)
    code = IMPORT + OPERATION if (target / "smopd" / "_C.abi3.so").exists() else IMPORT
    assert probe(sys.executable, outside, code=code, PYTHONPATH=str(target)) == {target / "smopd"}
    assert probe(sys.executable, checkout, PYTHONPATH=str(target)) == {checkout / "smopd"}


FIRST_STEPS = ("--loop.steps", "2", "--loop.prompts_per_step", "4", "--warm_start.steps", "2")
FEW_ITEMS = (
    "--data.evaluation.kwargs.n",
    "4",
    "--warm_start.source.kwargs.n",
    "64",
    "--evaluation.samples",
    "0",
)
EVERY_RECIPE = """
from smopd.config.cli import parse
from smopd.config.recipe import builtin
print(*(recipe for recipe in builtin() if parse([recipe, "--dry-run"]).settings.runs))
"""


@pytest.mark.slow
def test_a_wheel_on_a_strangers_machine(wheel: Path, outside: Path, tmp_path: Path) -> None:
    """What the README shows works from the wheel, in an empty folder, for a user with nothing set."""
    python = bare_environment(tmp_path / "environment")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *PIP_OPTIONS, "--ignore-installed"]
    run(*pip, wheel, cwd=outside)
    smopd = python.with_name("smopd")

    def stranger(*command: object) -> str:
        words, variables = [str(word) for word in command], bare_variables(tmp_path / "home")
        done = subprocess.run(words, cwd=outside, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    recipes = sorted(path.stem for path in (ROOT / "smopd" / "recipes").glob("*.yaml"))
    listed = stranger(smopd, "train", "--list").splitlines()
    assert sorted(line for line in listed if line.strip() and not line.startswith(" ")) == recipes
    assert stranger(python, "-c", SERVED).strip() == ("cpp" if has_compiler() else "reference")
    (outside / "mine.py").write_text(
        "def ones(prompts, completions, **columns):\n    return [1.0] * len(prompts)\n"
    )
    mine = ("--rewards.1.function", "mine:ones", "--only", "gdpo", "--output", "out")
    stranger(smopd, "train", "quickstart", *FIRST_STEPS, *FEW_ITEMS, *mine)  # two processes, as it says
    lines = [json.loads(line) for line in (outside / "out/gdpo/metrics.jsonl").read_text().splitlines()]
    means = [line["reward/format/mean"] for line in lines if "loss/pg" in line]
    assert means == [1, 1]
    assert (outside / "out" / "report.html").is_file()
    assert stranger(python, "-c", EVERY_RECIPE).split() == recipes


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


def test_build_makes_two_files(built: Path) -> None:
    platform = sysconfig.get_platform().replace("-", "_")  # linux_x86_64
    tag = f"cp310-abi3-{platform}" if has_compiler() else "py3-none-any"
    names = sorted(path.name for path in built.iterdir())
    assert names == [f"smopd-{smopd.__version__}-{tag}.whl", f"smopd-{smopd.__version__}.tar.gz"]


def test_an_isolated_build_gets_torch_where_it_can_use_it(fresh: Path) -> None:
    """The same torch as the package's, for a wheel; none for an sdist or without a compiler."""
    (torch,) = PROJECT["dependencies"]

    def needs(kind: str, **environment: str) -> list[str]:
        printed = run(sys.executable, "-c", NEEDS, kind, cwd=fresh, **environment).stdout
        return list(json.loads(printed.splitlines()[-1]))

    no_compiler = {"CXX": "/nonexistent/c++"}
    assert needs("sdist", CXX=sys.executable) == []
    for kind in ("wheel", "editable"):
        assert needs(kind, CXX=sys.executable) == [torch]
        assert needs(kind, CXX=sys.executable, SMOPD_BUILD_EXT="0") == []
        assert needs(kind, **no_compiler) == []
        assert needs(kind, **no_compiler, SMOPD_BUILD_EXT="1") == [torch]


def test_installing_it_changes_no_other_program(wheel: Path) -> None:
    """An entry point of another program's would be loaded by it wherever both are installed."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt"))
        declared = configparser.ConfigParser()
        declared.read_string(archive.read(name).decode())
    assert {group: dict(declared[group]) for group in declared.sections()} == {
        "console_scripts": {"smopd": "smopd.__main__:console"}
    }


def test_an_sdist_holds_what_a_clone_holds(unpacked: Path) -> None:
    """Tests, examples, documentation and links too: what passes in one passes in the other."""
    files = {
        path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_symlink() or path.is_file()
    }
    made = {
        path for path in files if path.name in ("PKG-INFO", "setup.cfg") or "smopd.egg-info" in path.parts
    }
    assert files - made == {path for path in sources() if not path.parts[0].startswith(".")} - made
    for room in ("kernels", "engine"):
        assert (unpacked / "smopd" / room).readlink() == Path("..") / room


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
