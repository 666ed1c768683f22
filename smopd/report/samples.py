"""What a run's policy said: samples by step, and responses token by token, for a page without scripts.

Everything that a model or a data set wrote is escaped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from smopd.report.charts import COLOURS, Lines, colour

SAMPLED_STEPS = 12  # ours: shown of a run, at even distances to the last


def samples_html(samples: Mapping[str, Lines], labels: Mapping[str, str]) -> str:
    """A list of responses with their rewards a run, by step.

    Args:
        samples: run -> lines of samples.jsonl.
    """
    parts = []
    for run, lines in samples.items():
        steps = "".join(
            f"<details><summary>step {step}</summary>{''.join(_sample(line) for line in found)}</details>"
            for step, found in _by_step(lines).items()
        )
        if steps:
            name = escape(labels.get(run, run))
            parts.append(f"<details><summary>{name}</summary>{steps}</details>")
    return "\n".join(["<h2>samples</h2>", *parts]) if parts else ""


def tokens_html(views: Mapping[str, Lines], teachers: Sequence[str], labels: Mapping[str, str]) -> str:
    """Each recorded response as spans: a bar under a token tells whose entries its target holds.

    Args:
        views: run -> lines of tokens.jsonl.
        teachers: their names, in the order of the records.
    """
    parts = []
    for run, lines in views.items():
        met: Counter[int] = Counter()
        for line in lines:
            met[line["step"]] += 1
            at = f"step {line['step']}, response {met[line['step']]}"
            title = f"{escape(labels.get(run, run))}, {at}"
            opened = " open" if line is lines[-1] else ""
            spans = "".join(_token(token, teachers) for token in line["tokens"])
            parts.append(
                f"<details{opened}><summary>{title}</summary>"
                f"<pre>{escape(line['prompt'])}</pre><p class=tokens>{spans}</p></details>"
            )
    if not parts:
        return ""
    keys = " ".join(
        f'<span class="key {colour(m)}"><i></i>{escape(name)}</span>' for m, name in enumerate(teachers)
    )
    told = (
        "Whose entries the target kept, by their share of its mass, and of a product how far each teacher "
        f"moved the token; hover it, or tab to it: {keys}"
    )
    return "\n".join([f"<h2>tokens</h2>\n<p>{told}</p>", *parts])


def _by_step(lines: Lines) -> dict[int, list[Mapping[str, Any]]]:
    """The lines of at most about SAMPLED_STEPS steps, the last among them."""
    steps = sorted({line["step"] for line in lines}, reverse=True)
    shown = sorted(steps[:: -(-len(steps) // SAMPLED_STEPS) or 1])
    return {step: [line for line in lines if line["step"] == step] for step in shown}


def _sample(line: Mapping[str, Any]) -> str:
    fields = "".join(
        f"<dt>{escape(str(name))}</dt><dd>{escape(_text(value))}</dd>"
        for name, value in line.items()
        if name != "step"
    )
    return f"<dl>{fields}</dl>"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _token(token: Mapping[str, Any], teachers: Sequence[str]) -> str:
    at, bars, changes = 0.0, [], token.get("changes", [])
    shares = token["shares"] if not changes else [_moved(change) / len(changes) for change in changes]
    for m, share in enumerate(share or 0.0 for share in shares):
        bars.append(f"var(--k{m % COLOURS}) {at:.1f}% {at + 100 * share:.1f}%")
        at += 100 * share
    bar = f' style="--bar:linear-gradient(90deg,{",".join(bars)})"' if at > 0 else ""
    named = [*teachers]
    for m, change in enumerate(changes):
        named[m] += " no number" if change is None else f" {change:+.2f}"
    said = [*zip(named, token["teachers"], strict=True)]
    said += [(name, token[name]) for name in ("reference", "student") if name in token]
    columns = "".join(
        f"<span class=said><b>{escape(name)}</b>"
        + "".join(f"<span>{_visible(text)} <i>{_probability(value)}</i></span>" for text, value in pairs)
        + "</span>"
        for name, pairs in said
    )
    shown = f"{_visible(token['text'])}<span class=tip>{columns}</span>"
    return f"<span class=token tabindex=0{bar}>{shown}</span>{'<br>' * token['text'].count(chr(10))}"


def _moved(change: float | None) -> float:
    """0 for no change, 1 for any number of nats; null in the file is no number."""
    return 0.0 if change is None else 1 - math.exp(-abs(change))


def _probability(value: float | None) -> str:
    return "no number" if value is None else f"{value:.3f}"  # null in the file


def _visible(text: str) -> str:
    return escape(text).replace("\n", "↵") or "∅"
