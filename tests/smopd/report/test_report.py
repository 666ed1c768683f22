"""Tables and the report: what is shown, what is escaped, what is averaged."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from smopd.report.page import Report, write_report
from smopd.report.tables import Row, aggregate, markdown, table

EVIL = '<script>alert("x")</script>[red]&|'
ROWS = [
    Row("GDPO", "gdpo", {"greedy/accuracy": 1.23456, "greedy/format": 0.5}),
    Row("SMOPD", "smopd", {"greedy/accuracy": math.nan}, {"greedy/accuracy": 0.25}),
]
COLUMNS = ["greedy/accuracy", "greedy/format"]
VOID = {"meta", "path", "br"}


class Balanced(HTMLParser):
    """Fails on a tag that is not closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def parsed(path: Path) -> Balanced:
    page = Balanced()
    page.feed(path.read_text(encoding="utf-8"))
    assert page.open == []
    return page


def test_markdown() -> None:
    assert markdown(ROWS, COLUMNS).splitlines() == [
        "| run | greedy accuracy | greedy format |",
        "|---|---:|---:|",
        "| GDPO | 1.235 | 0.500 |",
        "| SMOPD | nan ± 0.250 | - |",
    ]
    assert "a\\|b" in markdown([Row("a|b", "r", {})], [])


def test_terminal_table_shows_labels_as_they_are() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table([Row(EVIL, "r", {"x": 1.0})], ["x"]))
    assert EVIL in capture.get() and "1.000" in capture.get()


def test_aggregate_is_the_mean_and_the_unbiased_deviation() -> None:
    seeds = [[Row("A", "a", {"x": value, "y": 1.0}), Row("B", "b", {"x": 0.0})] for value in (1.0, 2.0, 6.0)]
    seeds[1].reverse()
    a, b = aggregate(seeds)
    assert (a.label, a.run, a.values) == ("A", "a", {"x": 3.0, "y": 1.0})
    assert a.spread == pytest.approx({"x": math.sqrt(7.0), "y": 0.0})
    assert b.spread == {"x": 0.0}


def test_aggregate_refuses_seeds_that_differ() -> None:
    with pytest.raises(ValueError, match=r"result 1 has runs \['b'\], expected \['a'\]"):
        aggregate([[Row("A", "a", {})], [Row("B", "b", {})]])
    with pytest.raises(ValueError, match="'a' has columns"):
        aggregate([[Row("A", "a", {"x": 1.0})], [Row("A", "a", {})]])


POLICY = "default-src 'none'; style-src 'unsafe-inline'"
TOKEN = {
    "text": EVIL,
    "shares": [0.25, 0.75],
    "teachers": [[[EVIL, 0.9]], [["b", 0.5], [EVIL + "\n", 0.25]]],
    "student": [["c", 0.125]],
}


def test_report_is_self_contained_and_escapes_everything(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    line = {f"reward/{EVIL}/mean": 1.0, "kl": 0.1, "seconds/rollout": 2.0}
    report = Report(
        title=EVIL + "@BODY",
        caption=EVIL + "\n\nsecond",
        rows=[Row(EVIL, EVIL, {EVIL: 1.0})],
        columns=[EVIL],
        settings_yaml=f"name: {EVIL}",
        metrics={EVIL: [{"step": 1, **line}, {"step": 2, **line}]},
        samples={EVIL: [{"step": 1, "prompt": EVIL, "response": EVIL + "\ud800", "rewards": {EVIL: 0.5}}]},
        tokens={EVIL: [{"step": 2, "prompt": EVIL, "tokens": [TOKEN]}]},
        teachers=[EVIL, "two"],
    )
    write_report(path, report)
    page = parsed(path)
    assert "script" not in page.tags
    assert page.text.count(EVIL) >= 19
    assert not [value for name, value in page.attributes if name in ("src", "href", "onload")]
    assert ("content", POLICY) in page.attributes
    assert "http:" not in path.read_text(encoding="utf-8") and "https:" not in path.read_text(
        encoding="utf-8"
    )


def test_report_draws_the_finite_values_of_each_run(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    key = "reward/a/mean"
    metrics = {
        "one": [
            {"step": 1, key: 0.0},
            {"step": 2, key: None},
            {"step": 3, "other": 1.0},
            {"step": 5, key: 2.0},
        ],
        "two": [{"step": 1, key: 1.0}],
        "none": [{"step": 1, key: math.nan}],
    }
    write_report(path, Report("t", rows=ROWS, columns=COLUMNS, metrics=metrics))
    text = path.read_text(encoding="utf-8")
    parsed(path)
    lines = dict(re.findall(r'<polyline class="(c\d)" points="([^"]*)"', text))
    assert set(lines) == {"c0", "c1"}
    (x0, y0), (x1, y1) = [tuple(map(float, point.split(","))) for point in lines["c0"].split()]
    assert x0 < x1 and y0 > y1
    assert "step 5" in text and "nan" not in lines["c0"]
    assert "one: 2 at step 5" in text


def test_a_token_shows_whose_entries_its_target_holds(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    unknown = {"shares": [None, None], "student": [["c", None]]}  # NaN of a teacher, in the file
    tokens = [TOKEN, {**TOKEN, "text": "\n", "shares": [0.0, 0.0]}, {**TOKEN, **unknown}]
    write_report(
        path, Report("t", tokens={"one": [{"step": 4, "prompt": "p", "tokens": tokens}]}, teachers=["A", "B"])
    )
    text = path.read_text(encoding="utf-8")
    page = parsed(path)
    assert "linear-gradient(90deg,var(--k0) 0.0% 25.0%,var(--k1) 25.0% 100.0%)" in text
    assert text.count("--bar:") == 1, "an empty target has no bar"
    assert "c no number" in page.text
    assert "b 0.500" in page.text and "c 0.125" in page.text and "student" in page.text
    assert "↵" in page.text
