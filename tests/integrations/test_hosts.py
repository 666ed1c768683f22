"""Without its host an integration says what to install."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["trl", "verl"])
def test_without_its_host_an_integration_says_what_to_install(module: str) -> None:
    """In a process where the host's metadata cannot be found. test_nemo_rl.py has the other refusals."""
    code = (
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "def version(name):\n"
        f"    if name.replace('-', '_') == {module!r}: raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        f"import smopd.integrations.{module}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "which is not installed: pip install" in done.stderr.splitlines()[-1]
