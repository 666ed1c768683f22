"""A missing host, an unknown version and a changed function each have their own words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from smopd.integrations import hosts


def test_a_missing_host_is_named_with_what_to_install() -> None:
    with pytest.raises(
        ImportError, match=r"needs no-such-host, which is not installed: pip install 'no-such"
    ):
        hosts.require_host("no-such-host", "1.0", "2.0")


@pytest.mark.parametrize("installed", ["1.15.9", "1.17.0", "1.17.0.dev0", "2.0"])
def test_an_unknown_version_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(hosts, "version", lambda _: installed)
    with pytest.raises(ImportError, match=rf"knows the functions of trl>=1.16.0,<1.17; trl {installed} is"):
        hosts.require_host("trl", "1.16.0", "1.17")


@pytest.mark.parametrize("installed", ["1.16.0", "1.16.3"])
def test_a_known_version_is_returned(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    monkeypatch.setattr(hosts, "version", lambda _: installed)
    assert hosts.require_host("trl", "1.16.0", "1.17") == installed


def test_a_function_with_other_parameters_is_refused_by_name() -> None:
    def loss(model, inputs):
        return model, inputs

    hosts.require_parameters(loss, "model", "inputs")
    with pytest.raises(ImportError, match=r"loss has no parameter items; it has model, inputs"):
        hosts.require_parameters(loss, "inputs", "items")


@pytest.mark.parametrize("module", ["trl", "verl"])
def test_without_its_host_an_integration_says_what_to_install(module: str) -> None:
    """In a process where the host's metadata cannot be found."""
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
