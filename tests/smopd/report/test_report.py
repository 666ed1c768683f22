"""Tables and the report: content, escaping, averages."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

from smopd.report.page import Report, write_report
from smopd.report.tables import Row, table

EVIL = '<script>alert("x")</script>[red]&|'
ROWS = [
    Row("GDPO", "gdpo", {"greedy/accuracy": 1.23456, "greedy/format": 0.5}),
    Row("SMOPD", "smopd", {"greedy/accuracy": math.nan}),
]
COLUMNS = ["greedy/accuracy", "greedy/format"]
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
TOKEN = {
    "text": EVIL,
    "p": 0.05,
    "log_ratios": [-1.0, 0.4],
    "teachers": [[[EVIL, 0.9]], [["b", 0.5], [EVIL + "\n", 0.25]]],
    "student": [["c", 0.125]],
}


class Page(HTMLParser):
    """A written report: source, tags with attributes, and text."""

    def __init__(self, path: Path, report: Report) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.seen = ""
        write_report(path, report)
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.seen += data


def test_tables_show_labels_as_they_are() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table([Row(EVIL, "r", {"x": 1.0})], ["x", "y"]))
    assert EVIL in capture.get() and "1.000" in capture.get() and " - " in capture.get()


def test_report_is_self_contained_and_escapes_everything(tmp_path: Path) -> None:
    line = {f"reward/{EVIL}/mean": 1.0, "kl": 0.1, "seconds/rollout": 2.0}
    report = Report(
        title=EVIL + "@BODY",
        caption=EVIL + "\n\nsecond",
        rows=[Row(EVIL, EVIL, {EVIL: 1.0})],
        columns=[EVIL],
        settings_yaml=f"name: {EVIL}",
        metrics={EVIL: [{"step": 1, **line}, {"step": 2, **line}]},
        samples={EVIL: [{"step": 1, "prompt": EVIL, "response": EVIL + "\ud800", "rewards": {EVIL: 0.5}}]},
        tokens={EVIL: [{"step": 2, "teachers": [EVIL, "two"], "prompt": EVIL, "tokens": [TOKEN]}]},
        teachers=[EVIL, "two"],
    )
    page = Page(tmp_path / "report.html", report)
    assert page.seen.count(EVIL) >= 19
    for tag, attributes in page.tags:
        assert tag != "script" and not attributes.keys() & {"src", "href", "onload"}
    assert POLICY in [attributes.get("content") for _, attributes in page.tags]
    assert "http:" not in page.source and "https:" not in page.source


def test_report_draws_the_finite_values_of_each_run(tmp_path: Path) -> None:
    key = "reward/a/mean"
    values = {1: 0.0, 2: None, 5: 2.0}
    metrics = {
        "one": [*({"step": step, key: value} for step, value in values.items()), {"step": 6, "other": 1.0}],
        "two": [{"step": 1, key: 1.0}],
        "none": [{"step": 1, key: math.nan}],
    }
    report = Report("t", rows=ROWS, columns=COLUMNS, metrics=metrics)
    text = Page(tmp_path / "report.html", report).source
    lines = dict(re.findall(r'<polyline class="(c\d)" points="([^"]*)"', text))
    assert set(lines) == {"c0", "c1"}
    (x0, y0), (x1, y1) = [tuple(map(float, point.split(","))) for point in lines["c0"].split()]
    assert x0 < x1 and y0 > y1
    assert "step 5" in text and "one: 2 at step 5" in text


def test_a_token_has_the_color_of_the_teacher_that_favors_it(tmp_path: Path) -> None:
    unknown = {"log_ratios": [None, None], "student": [["c", None]]}  # NaN in the file
    product = {"log_ratios": [0.4, -0.4], "reference": [["r", 0.5]], "p": 0.5}
    tokens = [TOKEN, {**TOKEN, "text": "\n", "log_ratios": [0.0, 0.01]}, {**TOKEN, **unknown}]
    tokens += [{**TOKEN, **product}, {"text": "the environment's"}]
    views = {"one": [{"step": 4, "teachers": ["A", "B"], "prompt": "p", "tokens": tokens}]}
    page = Page(tmp_path / "report.html", Report("t", tokens=views))
    found = re.findall(r'class="token (c\d)( unlikely)?" tabindex=0 style="--s:([\d.]+)"', page.source)
    share = 1 - math.exp(-0.4)
    assert found == [("c1", " unlikely", f"{2 * share:.2f}"), ("c0", "", f"{share:.2f}")]
    assert "class=given>the environment&#39;s<" in page.source
    for shown in ("c no number", "b 0.500", "c 0.125", "student", "↵", "B +0.40", "r 0.500"):
        assert shown in page.seen
