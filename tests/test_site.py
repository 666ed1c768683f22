"""The site builds from the pages and the code, and every relative link is checked."""

from __future__ import annotations

import subprocess
import sys

from tests.ranks import ROOT, environment


def test_the_sources_have_every_setting_and_operation_and_only_links_that_lead_somewhere():
    from smopd import ops
    from smopd.config.errors import is_setting, schemas

    done = subprocess.run(
        [sys.executable, "docs/site.py"], cwd=ROOT, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    reference = ROOT / "build/docs/reference"
    settings = (reference / "settings.md").read_text()
    assert all(f"`{'.'.join(keys)}`" in settings for keys in schemas() if keys and is_setting(keys))
    operations = (reference / "operations.md").read_text()
    assert all(f"{name}(\n" in operations for name in ops.__all__ if name[0].islower())
