"""The site builds from the pages and the code, every relative link is checked, and metrics are listed."""

from __future__ import annotations

import re
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
    assert all(
        f"{name}(\n" in (reference / "operations.md").read_text() for name in ops.__all__ if name[0].islower()
    )


def test_every_metric_is_on_its_page():
    page = (ROOT / "docs/metrics.md").read_text()
    listed = set()
    for cell in re.findall(r"^\| (`.*?) \|", page, re.M):
        first = None
        for name in re.findall(r"`([^`]+)`", cell):  # `a/b`, `/c` stands for a/c
            first = first or name
            listed.add(f"{first.rsplit('/', 1)[0]}{name}" if name.startswith("/") else name)
    code = "".join((ROOT / file).read_text() for file in ("smopd/record/recorder.py", "smopd/loop.py"))
    written = re.findall(r'metrics\.(?:add|total)\(f?"([^"]+)"|values\["([^"]+)"\] =', code)
    for names in written:
        prefix = "".join(names).split("{")[0] or "reward/"
        assert any(name.startswith(prefix) for name in listed), names
