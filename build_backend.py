"""setuptools' build backend, which also requires torch if smopd._C will be compiled.

So `python -m build` and an isolated `pip install` build the extension. To save gigabytes, torch is not
downloaded for an sdist, for a build without a compiler, or if SMOPD_BUILD_EXT=0.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403 the other hooks


def torch_requirement() -> str:
    """Return the bound of torch in pyproject.toml, by a pattern: Python 3.10 has no TOML parser."""
    found = re.search(r'"(torch>=[^"]+)"', Path(__file__).with_name("pyproject.toml").read_text())
    assert found, "pyproject.toml names no torch"
    return found[1]


def has_compiler() -> bool:
    named = os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++"
    return shutil.which(named.split()[0]) is not None


def torch_for_the_extension() -> list[str]:
    mode = os.environ.get("SMOPD_BUILD_EXT", "auto")
    return [torch_requirement()] if mode == "1" or (mode != "0" and has_compiler()) else []


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + torch_for_the_extension()


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + torch_for_the_extension()
