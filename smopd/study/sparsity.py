"""Chapters on the sparse reward: who decides the gradient, how rare it may be, how often it is a signal."""

from __future__ import annotations

import statistics
from pathlib import Path

from smopd.config import Settings
from smopd.report.tables import Row, markdown
from smopd.runs import BASE
from smopd.study import figures, theory
from smopd.study.experiments import RATES
from smopd.study.figures import Axes, Dot
from smopd.study.finished import FORMAT, Chapter, Finished, Study, row
from smopd.study.measures import Spread, final, finals, spread, steps, take_off
from smopd.study.methods import RARE_FORMAT, teaser
from smopd.study.verdicts import above, counted, differences, judge

PROFILES = {"balanced (0.5, 0.5)": (0.5, 0.5), "format (0.1, 0.9)": (0.1, 0.9)}
SIGNAL_BOUND = 0.02  # ours: of the share of mixed groups, what counts as equal to the formula
LOWEST_RATE = 1e-4  # where a base rate of 0 among its samples is drawn


def figure_1(study: Study, pages: Path) -> Chapter:
    """Fig. 1(a) exactly; Fig. 1(b)'s form of what has been run."""
    rows, bars = [], {}
    for label, weights in PROFILES.items():
        before, after = theory.figure_1a(weights)
        for when, values in (("before whitening", before), ("whitened", after)):
            shown = {f"response {i + 1}": float(value) for i, value in enumerate(values)}
            rows.append(Row(f"{label}, {when}", label, shown))
        bars[label] = [Spread(float(value), 0.0, 1) for value in after]
    groups = {
        str(i + 1): {label: values[i] for label, values in bars.items()} for i in range(theory.GROUP_SIZE)
    }
    advantages = Axes("(a) mean advantage, whitened", "response of the group", "advantage")
    figures.grouped(pages / "figure_1.svg", [(advantages, groups), *teaser(study)])
    balanced, sparse = (values[0].mean for values in bars.values())
    answer = "agrees" if balanced < 0 < sparse else "contradicts"
    text = (
        "(a) Eight groups of four; the dense reward is 0, 1, 2, 3 in every group, the sparse one is 1 for "
        "the first response of one group and 0 elsewhere. Mean advantage of each response over the "
        "groups:\n\n"
        + markdown(rows, [f"response {i + 1}" for i in range(theory.GROUP_SIZE)])
        + "\nThe response that earned the sparse reward is the worst on the dense one. Its whitened "
        f"advantage is {balanced:+.4f} under balanced weights and {sparse:+.4f} under the format profile, by "
        f"arithmetic: this {answer} {'with ' if answer == 'agrees' else ''}the paper's figure. (b) Sums of "
        "the rewards in the settings below, one bar a method, where there are runs."
    )
    return Chapter("Figure 1: who decides the gradient", text, figure="figure_1.svg")


def signal(study: Study, pages: Path) -> Chapter | None:
    """The appendix's expected signal against the measured share of mixed groups."""
    every = study.variants("density")
    measured: list[tuple[float, float]] = []
    per_seed: dict[str, list[float]] = {}
    for done in every.values():
        group_size = done.settings.rollout.group_size
        for folder in done.folders:
            for run in done.labels:
                rates = steps(folder / run, FORMAT)
                equal = steps(folder / run, "reward/format/zero_variance_groups")
                found = [(rate, 1 - equal[at]) for at, rate in rates.items() if 0 < rate < 1 and at in equal]
                measured += found
                per_seed.setdefault(folder.name, []).extend(
                    theory.mixed_groups(rate, group_size) - share for rate, share in found
                )
    shortfalls: list[float | None] = [statistics.fmean(found) for found in per_seed.values() if found]
    if not shortfalls:
        return None
    grid = [10 ** (-3 + 3 * i / 60) for i in range(61)]
    points = {
        "measured, a step each": [Dot(*point) for point in measured],
        "1 - p^G - (1-p)^G": [Dot(rate, theory.mixed_groups(rate, group_size)) for rate in grid],
    }
    axes = Axes("groups with a signal", "mean rate of the exact format", "share of mixed groups", log_x=True)
    figures.dots(pages / "signal.svg", [(axes, points)])
    text = (
        f"Over {len(measured)} training steps (G = {group_size}) the share of mixed groups was below the "
        f"formula's by {spread(shortfalls)} on average; the ± is over the seeds' averages, not over steps. "
        "The formula takes every prompt to have the same rate; where prompts differ, fewer groups are mixed "
        "than it says."
    )
    claim = f"App. B: the share of mixed groups is 1 - p^G - (1-p)^G (to {SIGNAL_BOUND})"
    verdicts = judge(claim, shortfalls, low=-SIGNAL_BOUND, high=SIGNAL_BOUND)
    return Chapter(
        "The expected signal 1 - p^G - (1-p)^G", text, verdicts, "signal.svg", list(every.values())
    )


def density(study: Study, pages: Path) -> Chapter | None:
    """The base rate of the sparse reward against when and whether each method finds it."""
    every = study.variants("density")
    if not every:
        return None
    settings = next(iter(every.values())).settings
    budget = budgets(settings)
    started: dict[str, list[Dot]] = {}
    ended: dict[str, list[Dot]] = {}
    pairs = {"sooner": 0, "later": 0, "same": 0, "neither": 0}
    for done in every.values():
        for folder in done.folders:
            measured = final([folder], BASE, "sampled/format")
            at = max(measured.mean if measured else 0.0, LOWEST_RATE)
            for run, (own, _) in budget.items():
                value = final([folder], run, "sampled/format")
                if value is None:
                    continue
                when = take_off(folder, run, FORMAT)
                reached = Dot(at, float(own if when is None else when), when is not None)
                started.setdefault(done.labels[run], []).append(reached)
                ended.setdefault(done.labels[run], []).append(Dot(at, value.mean))
            pairs[_sooner(*(take_off(folder, run, FORMAT) for run in ("format_teacher", "gdpo")))] += 1
    limits = tuple(sorted({own for own, _ in budget.values()}))
    axes = Axes("take-off (open: not by its last step)", "base rate, sampled", "own step at 50%", log_x=True)
    axes = axes._replace(bottom=0, top=1.08 * limits[-1], marks=limits)
    end = Axes("at the end", "base rate, sampled", "sampled format", log_x=True, bottom=-0.03, top=1.03)
    figures.dots(pages / "density.svg", [(axes, started), (end, ended)])
    rows = [
        row(
            f"{rate:.2%} of demonstrations",
            f"{rate}",
            {
                label: final(done.folders, run, "sampled/format")
                for run, label in done.labels.items()
                if run in budget or run == BASE
            },
        )
        for rate in RATES
        for done in _at_rate(every, rate)
    ]
    columns = list(dict.fromkeys(label for one in rows for label in one.values))
    labels = next(iter(every.values())).labels
    text = (
        f"{settings.loop.prompts_per_step} prompts x {settings.rollout.group_size} rollouts a step. The left "
        "panel counts a run's own steps, and an open mark stands at a run's last step where half of the "
        "samples were not in the exact format by then; the budgets differ (dashed): "
        + "; ".join(
            f"{labels[run]} {own}" + (f" after {before} of the runs that it needs" if before else "")
            for run, (own, before) in budget.items()
        )
        + ". The steps of the runs that a run needs are not in its own. A base model without an exact "
        f"response among its samples is drawn at {LOWEST_RATE:.2%}. Sampled format on held-out prompts at "
        "the end, by the share of the demonstrations that are in the exact format:\n\n"
        + markdown(rows, columns)
        + _same_compute(every, labels["gdpo_long"])
    )
    pairing = "sooner in {sooner}, later in {later}, at the same step in {same}, neither in {neither}"
    verdicts = counted(
        "§1: a sparse reward's teacher takes off sooner than balanced GDPO",
        pairs["sooner"],
        pairs["later"],
        pairing.format(**pairs),
    )
    for rate in RATES:
        for done in _at_rate(every, rate):
            student, balanced = (
                finals(done.folders, run, "sampled/format") for run in ("smopd_paper", "gdpo")
            )
            where, most = f"at {rate:.2%} (sampled)", RARE_FORMAT
            verdicts += [
                *judge(f"§1: balanced GDPO's format stays below {most:.0%}, {where}", balanced, high=most),
                *above(f"Table 1: SMOPD's format is above GDPO's, {where}", student, balanced),
            ]
    return Chapter("How sparse may the sparse reward be", text, verdicts, "density.svg", list(every.values()))


def _same_compute(every: dict[str, Finished], label: str) -> str:
    """The student against balanced GDPO with the steps of both stages, which the paper leaves out."""
    found = [
        f"{apart:+} at {rate:.2%}"
        for rate in RATES
        for done in _at_rate(every, rate)
        if (
            apart := spread(
                differences(*(done.values(run, "sampled/format") for run in ("smopd_paper", "gdpo_long")))
            )
        )
    ]
    if not found:
        return ""
    return f"\nNot in the paper: the paper's student less “{label}”, sampled format: {', '.join(found)}."


def _at_rate(every: dict[str, Finished], rate: float) -> list[Finished]:
    done = every.get(f"rate_{rate:g}")
    return [done] if done else []


def budgets(settings: Settings) -> dict[str, tuple[int, int]]:
    """Run -> its own steps, and those of the runs that it needs: its teachers and what it starts from."""
    needed: dict[str, set[str]] = {}
    own = {run: settings.resolved(run).loop.steps for run in settings.runs}
    for name, run in settings.runs.items():
        direct = {run.init} if run.init in own else set()
        if run.stage == "merge":
            direct |= {teacher.model for teacher in settings.resolved(name).teachers.models} & set(own)
        needed[name] = direct.union(*(needed[other] for other in direct))
    return {run: (own[run], sum(own[other] for other in needed[run])) for run in own}


def _sooner(teacher: int | None, balanced: int | None) -> str:
    if teacher is None and balanced is None:
        return "neither"
    if teacher == balanced:
        return "same"
    return "sooner" if balanced is None or (teacher is not None and teacher < balanced) else "later"
