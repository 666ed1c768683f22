"""report.html: a self-contained page without scripts. Its template, page.html, escapes all text."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from smopd.engine.files import write_atomically
from smopd.record.alarms import alarms_of
from smopd.report.charts import Lines, colour, sections
from smopd.report.tables import Row, cell, heading

SAMPLED_STEPS = 12  # ours: evenly spaced steps of a run whose samples are shown
FAINTEST = 0.05  # ours: below, a token has no color
UNLIKELY = 0.1  # ours: probability below which a token is marked
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Report:
    """Content of the report. Metrics, samples, tokens and changes are lines of .jsonl files by run."""

    title: str
    caption: str = ""
    """An empty line begins a paragraph."""
    rows: Sequence[Row] = ()
    columns: Sequence[str] = ()
    settings_yaml: str = ""
    metrics: Mapping[str, Lines] = field(default_factory=dict)
    samples: Mapping[str, Lines] = field(default_factory=dict)
    tokens: Mapping[str, Lines] = field(default_factory=dict)
    changes: Mapping[str, Lines] = field(default_factory=dict)
    merges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """merge.json by run."""
    teachers: Sequence[str] = ()


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    names = {*report.metrics, *report.samples, *report.tokens, *report.merges, *report.changes}
    labels = {run: run for run in names} | {row.run: row.label for row in report.rows}
    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    pages.filters |= {"heading": heading, "visible": _visible, "plain": _plain}
    page = pages.get_template("page.html").render(
        report=report,
        labels=[labels[run] for run in report.metrics],
        alarms=[
            f"{labels[run]}, step {step}: {advice}"
            for run, lines in report.metrics.items()
            for step, advice in alarms_of(lines)
        ],
        changes=[
            f"{labels[run]}, from step {line['step']}: {line['setting']} was {line['was']}, now {line['now']}"
            for run, lines in report.changes.items()
            for line in lines
        ],
        starts=list(_starts(report.merges, labels)),
        sections=sections(report.metrics),
        phases=_phases(report.metrics, labels),
        tokens=list(_views(report, labels)),
        samples=[(labels[run], _by_step(lines)) for run, lines in report.samples.items() if lines],
        cell=cell,
        colour=colour,
    )
    write_atomically(path, page.encode("utf-8", "replace"))


def _starts(merges: Mapping[str, Mapping[str, Any]], labels: Labels) -> Iterator[dict[str, Any]]:
    """Return a table of the candidates of each guarded start, with the reason for each rejection."""
    for run, found in merges.items():
        if "chosen" not in found:  # the guard was interrupted
            continue
        rows = []
        for each in found["rows"]:
            verdict = "taken" if each["name"] == found["chosen"] else each["out"] or ""
            values = {**each["rewards"], "weighted sum": each["score"]}
            rows.append(Row(": ".join(filter(None, [each["name"], verdict])), each["name"], values))
        rollouts = f"{found['rollouts']} rollouts of training prompts each, before the first step."
        columns = [*found["weights"], "weighted sum"]
        yield {"about": f"{labels[run]}, {rollouts}", "rows": rows, "columns": columns}


def _phases(metrics: Mapping[str, Lines], labels: Labels) -> dict[str, Any]:
    """Return a table of the mean seconds of each phase of a step."""
    rows = []
    for run, lines in metrics.items():
        timed = [line for line in lines if any(name.startswith("seconds/") for name in line)]
        totals: dict[str, float] = defaultdict(float)
        for line in timed:
            for name, value in line.items():
                if name.startswith("seconds/"):
                    totals[name.removeprefix("seconds/")] += value or 0.0
        if totals:
            means = {name: total / len(timed) for name, total in totals.items()}
            rows.append(Row(labels[run], run, means | {"all": sum(means.values())}))
    columns = list(dict.fromkeys(name for row in rows for name in row.values if name != "all"))
    return {"rows": rows, "columns": [*columns, "all"]}


def _views(report: Report, labels: Labels) -> Iterator[dict[str, Any]]:
    """Return each recorded response."""
    for run, lines in report.tokens.items():
        met: Counter[int] = Counter()
        for line in lines:
            met[line["step"]] += 1
            yield {
                "title": f"{labels[run]}, step {line['step']}, response {met[line['step']]}",
                "open": line is lines[-1],
                "prompt": line["prompt"],
                "tokens": [
                    _token(token, [labels.get(name, name) for name in line["teachers"]])
                    for token in line["tokens"]
                ],
            }


def _token(token: Mapping[str, Any], teachers: Sequence[str]) -> dict[str, Any]:
    """Return the text, the models' top tokens, and the color of the teacher that favors the token most."""
    ratios = token.get("log_ratios", [])
    named = [f"{name} {_plain(ratio, '+.2f')}" for name, ratio in zip(teachers, ratios, strict=bool(ratios))]
    models = [*zip(named, token.get("teachers", []), strict=True)]
    models += [(name, token[name]) for name in ("reference", "student") if name in token]
    ratio, best = max(((ratio or 0.0, m) for m, ratio in enumerate(ratios)), default=(0.0, 0))
    # 1 - p_others / p_best, and for a product 1 - p_reference / p_best
    largest = 1.0 if "reference" in token else 1 - 1 / max(len(ratios), 2)
    strength = min(1.0, (1 - math.exp(-max(ratio, 0.0))) / largest)
    return {
        "text": token["text"],
        "models": models,
        "colour": colour(best) if strength >= FAINTEST else "",
        "strength": f"{strength:.2f}",
        "unlikely": (1.0 if token.get("p") is None else token["p"]) < UNLIKELY,
    }


def _by_step(lines: Lines) -> dict[int, list[Mapping[str, Any]]]:
    """Return the lines of about SAMPLED_STEPS steps, including the last."""
    steps = sorted({line["step"] for line in lines}, reverse=True)
    shown = sorted(steps[:: -(-len(steps) // SAMPLED_STEPS) or 1])
    return {step: [line for line in lines if line["step"] == step] for step in shown}


def _plain(value: object, form: str = ".4g") -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    return "no number" if value is None else f"{value:{form}}" if isinstance(value, float) else str(value)


def _visible(text: str) -> str:
    return text.replace("\n", "↵") or "∅"
