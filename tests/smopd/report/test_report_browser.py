"""A report in a real browser: what a model wrote does nothing. test_resume.py opens that of a real run."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from smopd.report.page import Report, write_report
from smopd.report.tables import Row
from tests.smopd.report.browser import BROWSER, HEIGHT, WIDTH, browse

CHANGED = "document.title='changed'"
EVIL = (
    f'</dd></pre></span><script>{CHANGED}</script><img src=x onerror="{CHANGED}">'
    f'<svg onload="{CHANGED}"></svg><a href="javascript:{CHANGED}">a</a>'
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")


@pytest.mark.slow
def test_model_output_is_inert_in_a_browser(tmp_path: Path) -> None:
    token = {"text": EVIL, "shares": [1.0], "teachers": [[[EVIL, 0.5]]], "student": [[EVIL, 0.5]]}
    write_report(
        tmp_path / "report.html",
        Report(
            title="what the page is called",
            caption=EVIL,
            rows=[Row(EVIL, "run", {"greedy/format": 0.5})],
            columns=["greedy/format"],
            settings_yaml=EVIL,
            metrics={"run": [{"step": step, "reward/format/mean": 0.1 * step} for step in range(5)]},
            samples={"run": [{"step": 1, "prompt": EVIL, "completion": EVIL, "rewards": {EVIL: 1.0}}]},
            tokens={"run": [{"step": 1, "prompt": EVIL, "tokens": [token]}]},
            teachers=[EVIL],
        ),
    )
    live = tmp_path / "live.html"
    live.write_text(f"<title>before</title><body>{EVIL}")
    assert "<title>changed</title>" in browse(live, "--dump-dom"), "the text is harmless by itself"

    seen = browse(tmp_path / "report.html", "--dump-dom")
    assert "<title>what the page is called</title>" in seen
    assert "<script" not in seen and "<img" not in seen and "<a " not in seen
    assert "&lt;script&gt;" in seen and "<svg" in seen

    picture = tmp_path / "report.png"
    browse(tmp_path / "report.html", f"--screenshot={picture}")
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG") and struct.unpack(">II", data[16:24]) == (WIDTH, HEIGHT)
