"""report.html: one file that loads nothing and runs nothing; all text in it is escaped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from smopd.engine.files import write_atomically
from smopd.record.alarms import alarms_of
from smopd.report.charts import Lines, charts
from smopd.report.samples import samples_html, tokens_html
from smopd.report.tables import Row, html_table


@dataclass(frozen=True)
class Report:
    """What a recipe left behind.

    Attributes:
        title, caption: the recipe's name and description; an empty line begins a paragraph.
        rows, columns: of the table.
        settings_yaml: the resolved settings.
        metrics, samples, tokens: run -> lines of metrics.jsonl, samples.jsonl and tokens.jsonl.
        merges: run -> merge.json, what its start was chosen from.
        teachers: their names, in the order of the token views.
    """

    title: str
    caption: str = ""
    rows: Sequence[Row] = ()
    columns: Sequence[str] = ()
    settings_yaml: str = ""
    metrics: Mapping[str, Lines] = field(default_factory=dict)
    samples: Mapping[str, Lines] = field(default_factory=dict)
    tokens: Mapping[str, Lines] = field(default_factory=dict)
    merges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    teachers: Sequence[str] = ()


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    labels = {row.run: row.label for row in report.rows}
    parts = [
        f"<h1>{escape(report.title)}</h1>",
        html_table(report.rows, report.columns),
        *(f"<p>{escape(text)}</p>" for text in report.caption.split("\n\n") if text.strip()),
        _alarms(report.metrics, labels),
        _merges(report.merges, labels),
        charts(report.metrics, labels),
        _phases(report.metrics, labels),
        tokens_html(report.tokens, report.teachers, labels),
        samples_html(report.samples, labels),
        f"<details><summary>settings</summary><pre>{escape(report.settings_yaml)}</pre></details>",
    ]
    head, between, end = _PAGE.split("@")
    page = head + escape(report.title) + between + "\n".join(part for part in parts if part) + end
    write_atomically(path, page.encode("utf-8", "replace"))


def _alarms(metrics: Mapping[str, Lines], labels: Mapping[str, str]) -> str:
    items = [
        f"<li>{escape(labels.get(run, run))}, step {step}: {escape(advice)}</li>"
        for run, lines in metrics.items()
        for step, advice in alarms_of(lines)
    ]
    return f"<h2>To know</h2><ul>{''.join(items)}</ul>" if items else ""


def _merges(merges: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """What each guarded start was chosen from: every candidate's rewards, and why it is out."""
    parts = []
    for run, found in merges.items():
        if "chosen" not in found:  # the guard was stopped
            continue
        rows = []
        for each in found["rows"]:
            verdict = "taken" if each["name"] == found["chosen"] else each["out"] or ""
            values = {**each["rewards"], "weighted sum": each["score"]}
            rows.append(Row(": ".join(filter(None, [each["name"], verdict])), each["name"], values))
        about = f"{found['rollouts']} rollouts of training prompts each, before the first step."
        parts.append(
            f"<p>{escape(labels.get(run, run))}, {about}</p>"
            + html_table(rows, [*found["weights"], "weighted sum"])
        )
    return f"<h2>Starts</h2>{''.join(parts)}" if parts else ""


def _phases(metrics: Mapping[str, Lines], labels: Mapping[str, str]) -> str:
    """Mean seconds of each phase of a step; a phase runs while another one waits only where it overlaps."""
    prefix, rows = "seconds/", []
    for run, lines in metrics.items():
        timed = [line for line in lines if any(name.startswith(prefix) for name in line)]
        names = dict.fromkeys(name for line in timed for name in line if name.startswith(prefix))
        means = {
            name.removeprefix(prefix): sum(line.get(name) or 0.0 for line in timed) / len(timed)
            for name in names
        }
        if means:
            rows.append(Row(labels.get(run, run), run, means | {"all": sum(means.values())}))
    columns = list(dict.fromkeys(name for row in rows for name in row.values if name != "all"))
    if not rows:
        return ""
    body = html_table(rows, [*columns, "all"])
    return f"<details><summary>seconds a step, by phase</summary>{body}</details>"


_PAGE = """<!DOCTYPE html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width,initial-scale=1">
<meta http-equiv=Content-Security-Policy content="default-src 'none'; style-src 'unsafe-inline'">
<title>@</title>
<style>
:root{color-scheme:light dark;--line:#8886;--k0:#3b82c4;--k1:#d9822b;--k2:#3a9d5d;--k3:#c94c4c;--k4:#8b62c9;
--k5:#8c6d4f;--k6:#cc69a8;--k7:#7a8a99;--k8:#b5a820;--k9:#2fa6ad}
body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:.8rem auto;padding:0 1rem}
h1{margin:.2rem 0 .4rem;font-size:1.6rem} h2{margin:1.2rem 0 .2rem;font-size:1.2rem} p{margin:.6rem 0}
table{border-collapse:collapse;display:block;overflow-x:auto}
th,td{padding:.1rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child{text-align:left;font-weight:normal} thead th{
font-weight:600!important;white-space:normal;vertical-align:bottom}
pre,dd{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.4 ui-monospace,monospace}
summary{cursor:pointer} details{margin:.6rem 0} details details{margin:.3rem 0 .3rem 1rem}
dl{border-left:2px solid var(--line);padding-left:1rem} dd{margin:0 0 .5rem}
.charts{display:flex;flex-wrap:wrap;gap:1rem} figure{margin:0;flex:1 1 20rem;max-width:34rem}
svg{width:100%;height:auto} svg text{font-size:11px;fill:currentColor;opacity:.8}
.axis{fill:none;stroke:currentColor;opacity:.5} polyline{fill:none;stroke:var(--c);stroke-width:1.6}
.key{margin-right:1rem;white-space:nowrap} .key i{display:inline-block;width:1.4em;height:3px;
margin-right:.4em;vertical-align:middle;background:var(--c)}
.c0{--c:var(--k0)}.c1{--c:var(--k1)}.c2{--c:var(--k2)}.c3{--c:var(--k3)}.c4{--c:var(--k4)}.c5{--c:var(--k5)}
.c6{--c:var(--k6)}.c7{--c:var(--k7)}.c8{--c:var(--k8)}.c9{--c:var(--k9)}
.tokens{font:14px/2 ui-monospace,monospace;overflow-wrap:anywhere}
.token{position:relative;white-space:pre-wrap;margin-right:1px;padding-bottom:5px;cursor:default;
background:var(--bar,none) bottom/100% 4px no-repeat}
.token:hover,.token:focus{outline:1px solid currentColor}
.tip{display:none;position:absolute;left:0;top:100%;z-index:1;gap:1.2rem;padding:.4rem .7rem;
font:12px/1.4 ui-monospace,monospace;border:1px solid var(--line);background:Canvas;color:CanvasText}
.token:hover .tip,.token:focus .tip{display:flex} .said{display:flex;flex-direction:column;white-space:nowrap}
.said span{display:flex;justify-content:space-between;gap:.8rem}
</style></head><body>
@
</body></html>
"""
