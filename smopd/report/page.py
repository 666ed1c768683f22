"""report.html: a self-contained page without scripts. Its template, page.html, escapes all text."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from smopd.engine.files import write_atomically
from smopd.names import without_controls, without_secrets
from smopd.record.alarms import alarms_of
from smopd.report.charts import Lines, overview, sections
from smopd.report.tables import PALETTE, Row, assign, cell, heading

SAMPLED_STEPS = 12  # ours: number of a run's steps whose samples are shown, evenly spaced
FAINTEST = 0.05  # ours: a token with a lower strength has no color
DECIMALS = 12  # ours: an advantage of 3e-18 is a rounding error
UNLIKELY = 0.1  # ours: probability below which a token is marked


@dataclass(frozen=True)
class Report:
    """Content of the report. Metrics, samples, tokens and changes are lines of each run's .jsonl files."""

    title: str
    caption: str = ""
    """An empty line separates two paragraphs."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Date, machine, command and the like."""
    rows: Sequence[Row] = ()
    held_out: str = "held-out prompts"
    """Numbers of prompts and responses that the rows average."""
    columns: Sequence[str] = ()
    rewards: Sequence[str] = ()
    settings_yaml: str = ""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Run -> its kind (see `kind` in summary.py)."""
    begins: Mapping[str, int] = field(default_factory=dict)
    """Wall-clock step at which each run starts."""
    metrics: Mapping[str, Lines] = field(default_factory=dict)
    samples: Mapping[str, Lines] = field(default_factory=dict)
    tokens: Mapping[str, Lines] = field(default_factory=dict)
    changes: Mapping[str, Lines] = field(default_factory=dict)
    merges: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Content of merge.json, by run."""
    teachers: Sequence[str] = ()
    """The teachers' models, in the recipe's order."""


def write_report(path: str | os.PathLike[str], report: Report) -> None:
    named = {*report.metrics, *report.samples, *report.tokens, *report.merges, *report.changes}
    taught = {name for lines in report.tokens.values() for line in lines for name in line["teachers"]}
    labels = {name: without_secrets(name) for name in (*named, *taught, *report.teachers)}
    labels |= {row.run: row.label for row in report.rows}
    kinds = dict(report.kinds) | dict.fromkeys(sorted(taught - set(report.kinds)), "specialize")
    kinds |= {run: "train" for run in report.metrics if run not in kinds}
    colours = assign(kinds)
    baselines = {run for run, kind in report.kinds.items() if kind.startswith("train")}
    later = any(report.begins.get(run) for run, kind in report.kinds.items() if not kind.startswith("train"))
    time = "steps, with teachers trained in parallel" if later else "steps"
    teachers = [labels[name] for name in report.teachers]
    pages = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    pages.filters |= {"heading": heading, "visible": _visible, "plain": _plain}
    page = pages.get_template("page.html").render(
        report=report,
        labels=labels,
        colours=colours,
        baselines=baselines if len(baselines) < len(report.kinds) else (),  # dashed, if other runs are shown
        palette=PALETTE,
        best=_best(report),
        alarms={run: due for run, lines in report.metrics.items() if (due := alarms_of(lines))},
        starts=list(_starts(report.merges, labels)),
        overview=list(overview(report.metrics, report.rewards, report.begins, time)),
        sections=list(sections(report.metrics, report.begins, time, teachers)),
        marked=lambda token, names: _token(token, [(labels[name], colours[name]) for name in names]),
        samples=[(labels[run], _by_step(lines)) for run, lines in report.samples.items() if lines],
        cell=cell,
    )
    write_atomically(path, without_controls(page).encode("utf-8", "replace"))


def _best(report: Report) -> dict[str, set[str]]:
    """Return the runs with the highest rounded value of each column, or no run if all values are equal."""
    found = {}
    for column in report.columns:
        values = {row.run: row.values.get(column) for row in report.rows}
        known = {run: round(v, 3) for run, v in values.items() if isinstance(v, float) and math.isfinite(v)}
        least = min(known.values(), default=0.0)
        found[column] = {run for run, value in known.items() if value == max(known.values()) > least}
    return found


def _starts(merges: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield one table per guarded start, with its candidates and the reason for each rejection."""
    for run, found in merges.items():
        if "chosen" not in found:  # the guard was interrupted
            continue
        rows = []
        for each in found["rows"]:
            verdict = "taken" if each["name"] == found["chosen"] else each["out"] or ""
            values = {**each["rewards"], "weighted sum": each["score"]}
            rows.append(Row(": ".join(filter(None, [each["name"], verdict])), each["name"], values))
        columns = [*found["weights"], "weighted sum"]
        yield {"label": labels[run], "rollouts": found["rollouts"], "rows": rows, "columns": columns}


def _token(token: Mapping[str, Any], teachers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return a token's text, the models' top tokens, and the color of the teacher that favors it most."""
    ratios, p = token.get("log_ratios", []), token.get("p")
    named = [f"{name} {_plain(ratio, '+.2f')}" for (name, _), ratio in zip(teachers, ratios, strict=False)]
    models = [*zip(named, token.get("teachers", []), strict=True)]
    if "student" in token:
        models.append(("student", token["student"]))
    ratio, best = max(((ratio or 0.0, m) for m, ratio in enumerate(ratios)), default=(0.0, 0))
    largest = 1 - 1 / max(len(ratios), 2)  # so strength is 1 - p_others / p_best, with the others' mean p
    strength = min(1.0, (1 - math.exp(-max(ratio, 0.0))) / largest)
    return {
        "text": token["text"],
        "models": models,
        "colour": teachers[best][1] if strength >= FAINTEST else "",
        "strength": f"{strength:.2f}",
        "unlikely": p is not None and p < UNLIKELY,
    }


def _by_step(lines: Lines) -> dict[int, list[Mapping[str, Any]]]:
    """Return the lines of about SAMPLED_STEPS steps, including the last."""
    steps = sorted({line["step"] for line in lines}, reverse=True)
    shown = sorted(steps[:: -(-len(steps) // SAMPLED_STEPS) or 1])
    return {step: [line for line in lines if line["step"] == step] for step in shown}


def _plain(value: object, form: str = ".4g") -> str:
    if isinstance(value, list):  # a list of chat messages
        return "\n\n".join(map(_plain, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(part)}" for name, part in value.items())
    if isinstance(value, float):
        return f"{round(value, DECIMALS) + 0.0:{form}}"  # + 0.0: no "-0"
    return "no number" if value is None else str(value)


def _visible(text: str, after_newline: str = "") -> str:
    return text.replace("\n", f"↵{after_newline}") or "∅"
