"""Chapters with all methods side by side: the quickstart's world, real utterances, rewards in conflict."""

from __future__ import annotations

from pathlib import Path

from smopd.runs import BASE
from smopd.study import figures
from smopd.study.figures import Axes, Dot
from smopd.study.finished import WINDOW, Chapter, Finished, Study
from smopd.study.measures import Spread, final, mean_of, spread
from smopd.study.verdicts import Verdict, above, best, differences, judge, no_lower

KINDS = ("greedy", "sampled")
RARE_FORMAT = 0.09  # the introduction's "below 9%"
COLUMNS = [f"{kind}/{name}" for kind in KINDS for name in ("accuracy", "format", "sum")]


def curves(study: Study, pages: Path) -> Chapter | None:
    """Reward and format of every method while it trains, and the quickstart's table over these seeds."""
    done = study.finished("curves")
    if not done.folders:
        return None
    _draw_training(done, pages / "curves.svg")
    loop, group_size = done.settings.loop, done.settings.rollout.group_size
    text = (
        f"{loop.prompts_per_step} prompts x {group_size} rollouts a step: mean of the step's rollouts "
        f"(trailing mean of {WINDOW} steps, band of one deviation), and the held-out prompts at the end:\n\n"
        f"{done.table(COLUMNS)}\n{done.takeoffs()}\n\n{_controls(done)}"
    )
    return Chapter("Reward and format of all methods", text, rlla_verdicts(done), "curves.svg", [done])


def snips(study: Study, pages: Path) -> Chapter | None:
    """Real utterances."""
    done = study.finished("snips")
    if not done.folders:
        return None
    _draw_training(done, pages / "snips.svg")
    text = (
        "Words of real users, intents as tools and slots as parameters, a model from scratch; held-out "
        f"utterances of the benchmark's validation files.\n\n{done.table(COLUMNS)}\n{done.takeoffs()}\n\n"
        f"{_controls(done)}"
    )
    return Chapter("Real utterances: SNIPS", text, rlla_verdicts(done), "snips.svg", [done])


def conflict(study: Study, pages: Path) -> Chapter | None:
    """Two dense rewards against each other."""
    done = study.finished("conflict")
    if not done.folders:
        return None
    points = {
        label: [
            Dot(x.mean, y.mean)
            for folder in done.folders
            if (x := final([folder], run, "sampled/brevity"))
            and (y := final([folder], run, "sampled/coverage"))
        ]
        for run, label in done.labels.items()
    }
    axes = Axes("held-out prompts, a dot a seed", "sampled brevity", "sampled coverage")
    figures.dots(pages / "conflict.svg", [(axes, points)])
    names = ("coverage", "brevity")
    silent = {
        name: spread(
            [mean_of(folder / "gdpo", f"reward/{name}/zero_variance_groups") for folder in done.folders]
        )
        for name in names
    }
    apart = {
        name: spread(
            differences(*(done.values(f"{teacher}_teacher", f"sampled/{name}") for teacher in names))
        )
        for name in names
    }
    findings = []
    if all(silent.values()):
        findings.append(
            "Share of GDPO's groups in which all rollouts earned the same: "
            + ", ".join(f"{name} {value}" for name, value in silent.items())
            + "."
        )
    if all(apart.values()):
        findings.append(
            "The coverage teacher less the brevity teacher, sampled: "
            + ", ".join(f"{name} {value:+}" for name, value in apart.items() if value)
            + "."
        )
    columns = [f"{kind}/{name}" for kind in KINDS for name in (*names, "sum")]
    text = (
        "Coverage: the share of the request's values that a response names. Brevity: 1 for silence, 0 at 160 "
        f"characters.\n\n{done.table(columns)}\n{' '.join(findings)}"
    )
    verdicts: list[Verdict] = []
    for kind in KINDS:
        student = done.values("student_paper", f"{kind}/sum")
        others = {name: done.values(name, f"{kind}/sum") for name in ("gdpo", "gd2po")}
        teachers = best(*(done.values(f"{name}_teacher", f"{kind}/sum") for name in names))
        verdicts += [
            *above(f"Table 2: SMOPD's mean is above GDPO's ({kind} sum)", student, others["gdpo"]),
            *above(f"Table 2, two of three models: … above GD2PO's ({kind} sum)", student, others["gd2po"]),
            *above(f"§1: the student surpasses both teachers ({kind} sum)", student, teachers),
        ]
    return Chapter("Two rewards in conflict", text, verdicts, "conflict.svg", [done])


def rlla_verdicts(done: Finished) -> list[Verdict]:
    """What Table 1 and its text say, of runs with an accuracy and a format reward."""
    greedy = {run: done.values(run, "greedy/format") for run in done.labels}
    verdicts = []
    for run in ("grpo", "gdpo"):
        if run in greedy:
            claim = f"§1: with balanced priorities {run.upper()}'s format stays below 9% (greedy)"
            verdicts += judge(claim, greedy[run], high=RARE_FORMAT)
    for kind in KINDS:
        accuracy, exact, total = (
            {run: done.values(run, f"{kind}/{name}") for run in done.labels}
            for name in ("accuracy", "format", "sum")
        )
        teachers = best(total["accuracy_teacher"], total["format_teacher"])
        verdicts += [
            *above(
                f"§4.2: the format teacher's format is above GDPO's ({kind})",
                exact["format_teacher"],
                exact["gdpo"],
            ),
            *no_lower(
                f"§4.2: … not at the cost of accuracy ({kind})", accuracy["format_teacher"], accuracy["gdpo"]
            ),
            *above(f"Table 1: SMOPD's sum is above GDPO's ({kind})", total["smopd_paper"], total["gdpo"]),
            *no_lower(
                f"§4.2: SMOPD keeps the format teacher's format ({kind})",
                exact["smopd_paper"],
                exact["format_teacher"],
            ),
            *above(
                f"§1: the student's sum surpasses both teachers' ({kind})", total["smopd_paper"], teachers
            ),
        ]
    return verdicts


def _controls(done: Finished) -> str:
    """What the paper has no row for, as differences of the sampled sum."""
    student = done.values("smopd_paper", "sampled/sum")
    found = []
    for run in ("sequential", "smopd"):
        apart = spread(differences(done.values(run, "sampled/sum"), student)) if run in done.labels else None
        if apart is not None:
            found.append(f"“{done.labels[run]}” {apart:+}")
    if not found:
        return ""
    return f"Not in the paper: sampled sum less that of “{done.labels['smopd_paper']}”: {', '.join(found)}."


def _draw_training(done: Finished, path: Path) -> None:
    panels = [
        (Axes(f"sampled {reward}", "step", f"mean {reward}"), done.curves(f"reward/{reward}/mean"))
        for reward in ("accuracy", "format")
    ]
    figures.lines(path, panels)


def teaser(study: Study) -> list[tuple[Axes, dict[str, dict[str, Spread]]]]:
    """Fig. 1(b)'s form: the sum of SMOPD and of the methods that it is compared with, a panel a setting."""
    panels = []
    for experiment, title in (("curves", "toy world"), ("snips", "SNIPS"), ("conflict", "conflict")):
        done = study.finished(experiment)
        runs = [run for run in done.of_stage("control", "merge") if run != BASE]
        groups = {
            kind: {
                done.labels[run]: value
                for run in runs
                if (value := final(done.folders, run, f"{kind}/sum")) is not None
            }
            for kind in KINDS
        }
        if any(groups.values()):
            panels.append((Axes(f"(b) {title}", "", "sum of the rewards"), groups))
    return panels
