"""Chapters with all methods side by side: the quickstart's world, real utterances, rewards in conflict."""

from __future__ import annotations

from pathlib import Path

from bench.study import figures
from bench.study.figures import Axes, Dot
from bench.study.finished import KINDS, Finished, Study, budgets
from bench.study.measures import Spread, final
from bench.study.merging import against
from bench.study.page import Chapter
from bench.study.verdicts import Verdict, above, best, judge, no_lower

BASELINES = {"gdpo": "GDPO", "grpo": "GRPO", "gd2po": "GD2PO"}
RARE_FORMAT = 0.09  # the introduction's "below 9%"
COLUMNS = [f"{kind}/{name}" for kind in KINDS for name in ("accuracy", "format", "sum")]
CONFLICTING = ("coverage", "brevity")
TEASED = (
    "grpo", "gdpo", "gd2po", "smopd_paper", "student_paper", "smopd", "student", "sequential", "guarded",
)  # fmt: skip


def training(experiment: str, study: Study, pages: Path) -> Chapter | None:
    """Every method while it trains and at its end, in the toy world (`curves`) or on `snips`."""
    done = study.finished(experiment)
    if not done.folders:
        return None
    panels = [
        (Axes(f"sampled {reward}", "step", f"mean {reward}"), done.curves(f"reward/{reward}/mean"))
        for reward in ("accuracy", "format")
    ]
    figures.lines(pages / f"{experiment}.png", panels)
    header, rows = done.table(COLUMNS, {"half in the format at step": done.takeoffs()})
    return Chapter(experiment, header, rows, rlla_verdicts(done), [done], done.facts)


def conflict(variant: str, study: Study, pages: Path) -> Chapter | None:
    """Two dense rewards against each other, with teachers of one priority profile."""
    done = study.finished("conflict", variant)
    if not done.folders:
        return None
    name = "conflict" if variant == "base" else f"conflict_{variant}"
    own, other = done.settings.runs["coverage_teacher"].reward_weights or (0.5, 0.5)
    profiles = f"{own:g} and {other:g}"
    panels = []
    verdicts: list[Verdict] = []
    for kind, said in KINDS.items():
        points = {
            label: [
                Dot(x.mean, y.mean)
                for folder in done.folders
                if (x := final([folder], run, f"{kind}/brevity"))
                and (y := final([folder], run, f"{kind}/coverage"))
            ]
            for run, label in done.labels.items()
        }
        panels.append((Axes("held-out prompts, a dot a seed", f"{kind} brevity", f"{kind} coverage"), points))
        total = {run: done.values(run, f"{kind}/sum") for run in done.labels}
        student, teachers = total["student_paper"], best(*(total[f"{name}_teacher"] for name in CONFLICTING))
        of = f"with profiles of {profiles}, " if variant != "base" else ""
        for run in ("grpo", "gdpo", "gd2po"):
            claim = f"conflict: {of}SMOPD's sum is above {BASELINES[run]}'s ({said})"
            verdicts += above(claim, student, total[run])
        verdicts += above(f"surpass: {of}SMOPD's sum is above both teachers' ({said})", student, teachers)
    figures.dots(pages / f"{name}.png", panels)
    silent = {name: done.mean("gdpo", f"reward/{name}/zero_variance_groups") for name in CONFLICTING}
    facts = {
        "silent": ", ".join(f"{name} {value or 'unknown'}" for name, value in silent.items()),
        "profiles": profiles,
    }
    costs = {run: cost.critical_path for run, cost in budgets(done.settings).items()}
    columns = [f"{kind}/{name}" for kind in KINDS for name in (*CONFLICTING, "sum")]
    controls = (f"sequential_{name}" for name in CONFLICTING)
    more = {"critical path": costs, "sampled sum less the better sequential one's": against(done, *controls)}
    header, rows = done.table(columns, more)
    return Chapter(name, header, rows, verdicts, [done], facts)


def rlla_verdicts(done: Finished) -> list[Verdict]:
    """What Table 1 and its text say, of runs with an accuracy and a format reward."""
    verdicts = []
    for run in ("grpo", "gdpo"):
        if run in done.labels:
            claim = f"rare_format: {BASELINES[run]}'s format stays below 9% (greedy)"
            verdicts += judge(claim, done.values(run, "greedy/format"), high=RARE_FORMAT)
    for kind, said in KINDS.items():
        accuracy, exact, total = (
            {run: done.values(run, f"{kind}/{name}") for run in done.labels}
            for name in ("accuracy", "format", "sum")
        )
        claim = "teacher: the format teacher's"
        verdicts += [
            *above(f"{claim} format is above GDPO's ({said})", exact["format_teacher"], exact["gdpo"]),
            *no_lower(
                f"{claim} accuracy is not below GDPO's ({said})",
                accuracy["format_teacher"],
                accuracy["gdpo"],
            ),
        ]
        for run, method in BASELINES.items():
            if run in total:
                claim = f"sum: SMOPD's sum is above {method}'s ({said})"
                verdicts += above(claim, total["smopd_paper"], total[run])
        for name, values in (("accuracy", accuracy), ("format", exact)):
            claim = f"keeps: SMOPD keeps the {name} teacher's {name} ({said})"
            verdicts += no_lower(claim, values["smopd_paper"], values[f"{name}_teacher"])
    return verdicts


def teaser(study: Study) -> list[tuple[Axes, dict[str, dict[str, Spread]]]]:
    """Panels of Fig. 1(b)'s form: the sum of SMOPD and of the methods that it is compared with."""
    panels = []
    for experiment, title in (("curves", "toy world"), ("snips", "SNIPS"), ("conflict", "conflict")):
        done = study.finished(experiment)
        groups = {
            kind: {
                done.labels[run]: value
                for run in done.of_stage("control", "merge")
                if run in TEASED and (value := final(done.folders, run, f"{kind}/sum")) is not None
            }
            for kind in KINDS
        }
        if any(groups.values()):
            panels.append((Axes(f"(b) {title}", "", "sum of the rewards"), groups))
    return panels
