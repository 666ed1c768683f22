"""A line at the start of a run names versions newer than tested."""

from __future__ import annotations

from smopd.run import preflight


def test_versions_newer_than_tested_are_named(monkeypatch):
    installed = {**preflight.NEWEST_TESTED, "torch": f"{preflight.NEWEST_TESTED['torch']}.9+cpu"}
    monkeypatch.setattr(preflight, "version", installed.__getitem__)
    monkeypatch.setattr(preflight, "find_spec", lambda package: package != "triton" or None)
    assert preflight.newer_than_tested() is None
    installed["transformers"] = "5.999.1"
    assert preflight.newer_than_tested() == (
        f"newer than tested: transformers 5.999.1 (tested up to {preflight.NEWEST_TESTED['transformers']})"
    )
