"""Tables and the report: content, escaping, averages."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from rich.console import Console

from smopd.config.schedule import count_steps
from smopd.report.page import Report, write_report
from smopd.report.summary import training_seconds
from smopd.report.tables import Row, table

EVIL = '<script>alert("x")</script>[red]&|'
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


def test_report_is_self_contained_and_escapes_everything(tmp_path: Path) -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table([Row(EVIL, "r", {"x": 1.0})], ["x", "y"]))
    assert EVIL in capture.get() and "1.000" in capture.get() and " - " in capture.get()
    line = {f"reward/{EVIL}/mean": 1.0, "kl": 0.1, "seconds/rollout": 2.0}
    own = {"rows": [Row(EVIL, EVIL, {EVIL: 1.0})], "columns": [EVIL], "settings_yaml": f"name: {EVIL}"}
    own |= {"rewards": [EVIL], "caption": EVIL + "\x1b[31m\n\nsecond", "teachers": [EVIL, "two"]}
    samples = [{"step": 1, "prompt": EVIL, "response": EVIL + "\ud800", "rewards": {EVIL: -3e-18}}]
    tokens = [{"step": 2, "teachers": [EVIL, "two"], "prompt": EVIL, "tokens": [TOKEN]}]
    lines = {"metrics": [{"step": 1, **line}, {"step": 2, **line}], "samples": samples, "tokens": tokens}
    own |= {kind: {EVIL: value} for kind, value in lines.items()}
    page = Page(tmp_path / "report.html", Report(EVIL + "@BODY", facts={EVIL: EVIL}, **own))
    assert page.seen.count(EVIL) >= 23 and "\x1b" not in page.source
    assert f"{EVIL} 0\n" in page.seen
    for tag, attributes in page.tags:
        assert tag != "script" and not attributes.keys() & {"src", "href", "onload"}
    assert POLICY in [attributes.get("content") for _, attributes in page.tags]
    assert "http:" not in page.source and "https:" not in page.source


def test_a_report_tells_no_password_of_a_teacher(tmp_path: Path) -> None:
    url = "http://me:hunter2@here:1"
    tokens = {"one": [{"step": 1, "teachers": [url], "prompt": "p", "tokens": [{"text": "a"}]}]}
    metrics = {"one": [{"step": 1, "kl": 0.1, "teacher_0/top_kappa_mass": 1.0}]}
    page = Page(tmp_path / "report.html", Report("t", metrics=metrics, tokens=tokens, teachers=[url]))
    assert "http://here:1" in page.seen and "here:1: probability of its top tokens" in page.seen
    assert "hunter2" not in page.source


def test_report_draws_the_finite_values_of_each_run(tmp_path: Path) -> None:
    key = "reward/a/mean"
    values = {1: 0.0, 2: None, 5: 2.0}
    metrics = {
        "one": [*({"step": step, key: value} for step, value in values.items()), {"step": 6, "other": 1.0}],
        "two": [{"step": 1, key: 1.0}],
        "none": [{"step": 1, key: math.nan}],
    }
    rows = [Row(name, name, {"a": value, "b": 1.0}) for name, value in {"x": 1.0, "y": 2.0}.items()]
    report = Report("t", rows=rows, columns=["a", "b"], rewards=["b"], metrics=metrics)
    page = Page(tmp_path / "report.html", report)
    best = [cell["data-name"] for _, cell in page.tags if cell.get("class") == "best"]
    assert best == ["A"], "of a column where not all tie"
    lines = polylines(page.source)
    assert set(lines) == {"one: 2 at 5", "two: 1 at 1"}
    (x0, y0), (x1, y1) = lines["one: 2 at 5"]
    assert x0 < x1 and y0 > y1


def polylines(text: str) -> dict[str, list[tuple[float, ...]]]:
    """Return the points of each curve by its title; of equal titles, the last."""
    found = re.findall(r'<title>([^<]*)</title>\s*<polyline points="([^"]*)"', text)
    return {name: [tuple(map(float, p.split(","))) for p in points.split()] for name, points in found}


def test_a_run_is_drawn_after_the_runs_that_it_needs(tmp_path: Path) -> None:
    needs = {"a": {"base"}, "b": {"base"}, "m": {"a", "b"}, "g": set()}
    steps = count_steps({"a": 4, "b": 6, "m": 3, "g": 9}, needs)
    assert steps["m"] == (3, 13, 9) and steps["g"] == (9, 9, 9)
    assert count_steps({"a": 4, "m": 3, "n": 2}, {"a": set(), "m": {"a"}, "n": {"m"}})["n"] == (2, 9, 9)
    assert training_seconds([{"seconds/update": 2.0, "seconds_overlapped/teachers": 1.0}]) == 2.0
    idle = {"opd_coef": 0.0, "seconds/teachers": 1e-4}
    metrics = {
        run: [
            {"step": step, "reward/x/mean": 0.0, "reward/y/mean": float(step), **idle}
            for step in range(1, at.own + 1)
        ]
        for run, at in steps.items()
    }
    begins = {run: at.wall_clock - at.own for run, at in steps.items()}
    report = Report("t", metrics=metrics, begins=begins, rewards=["x", "y"])
    text = Page(tmp_path / "r.html", report).source
    ends = {name[0]: points[-1][0] for name, points in polylines(text.split("<figure>")[2]).items()}
    assert ends["m"] == ends["g"] > ends["b"] > ends["a"]
    metrics = {"m": [{"step": 1, "kl": 0.1, **idle}]}
    taught = Page(tmp_path / "r.html", replace(report, kinds={"m": "weights"}, metrics=metrics)).source
    shown = [{*re.findall("<figcaption>(.*)<|>(steps,[^<]*)</text>", page)} for page in (text, taught)]
    own = {("Lambda", ""), ("Teachers (seconds)", ""), ("", "steps, with teachers trained in parallel")}
    assert own <= shown[1] and not own & shown[0], "only a run with teachers has them"


def test_a_token_has_the_color_of_the_teacher_that_favors_it(tmp_path: Path) -> None:
    unknown = {"log_ratios": [None, None], "student": [["c", None]]}  # NaN in the file
    tokens = [TOKEN, {**TOKEN, "text": "\n", "log_ratios": [0.0, 0.01]}, {**TOKEN, **unknown}]
    tokens += [{**TOKEN, "log_ratios": [0.4, -0.4], "p": 0.5}, {"text": "the environment's"}]
    views = {"one": [{"step": 4, "teachers": ["A", "B"], "prompt": "p", "tokens": tokens}]}
    page = Page(tmp_path / "report.html", Report("t", tokens=views))
    found = re.findall(r'class="token (\w+)( unlikely)?" tabindex=0 style="--s:([\d.]+)"', page.source)
    share = 1 - math.exp(-0.4)
    assert found == [("orange", " unlikely", f"{2 * share:.2f}"), ("blue", "", f"{2 * share:.2f}")]
    assert "class=given>the environment&#39;s<" in page.source
    for shown in ("c no number", "b 0.500", "c 0.125", "student", "↵", "B +0.40"):
        assert shown in page.seen
