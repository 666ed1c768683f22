"""Versions newer than the tests ran with are named."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from smopd.run import versions


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
