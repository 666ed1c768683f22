"""Chapters on the sparse reward: who decides the gradient, how rare it may be, how often it is a signal."""

from __future__ import annotations

import statistics
from collections import Counter
from pathlib import Path

from bench.study import figures, theory
from bench.study.experiments import RATES
from bench.study.figures import Axes, Dot
from bench.study.finished import FORMAT, KINDS, Chapter, Finished, Study, budgets, row
from bench.study.measures import Spread, final, spread, steps, take_off
from bench.study.methods import RARE_FORMAT, teaser
from bench.study.verdicts import Verdict, above, alike, counted, differences, judge
from smopd.report.tables import Row, markdown

PROFILES = {"balanced (0.5, 0.5)": (0.5, 0.5), "format (0.1, 0.9)": (0.1, 0.9)}
EARNER = "the earner"
SIGNAL_BOUND = 0.02  # ours: of the share of mixed groups, what counts as equal to the formula
RARE, COMMON = "where p is below 0.1", "elsewhere"
RARE_RATE = 0.1  # ours: below, the paper's "vanishes linearly with the success rate"
PAPER_RATE = 0.0018  # of the study's, the one at which the paper's "below 9%" is asked: the quickstart's
COMMON_FORMAT = 0.9  # ours: from where on balanced GDPO's format is as Table 1's at 3B, where all have 97.5%
NARROW_FORMAT = 0.05  # ours: what counts as the same format
ACTIVE_FORMAT = 0.1  # ours: App. B's "bounded away from 0"; a group of 8 is then mixed in 57 cases of 100


def figure_1(study: Study, pages: Path) -> Chapter:
    """Fig. 1(a) exactly; Fig. 1(b)'s form of what has been run."""
    rows, bars, earned = [], {}, []
    for label, weights in PROFILES.items():
        before, after = theory.figure_1a(weights)
        for when, values in (("before whitening", before), ("whitened", after)):
            shown = {f"response {i + 1}": float(value) for i, value in enumerate(values.mean(0))}
            rows.append(Row(f"{label}, {when}", label, shown | {EARNER: float(values[0, 0])}))
        bars[label] = [Spread(float(value), 0.0, 1) for value in after.mean(0)]
        earned.append(float(after[0, 0]))
    groups = {
        str(i + 1): {label: values[i] for label, values in bars.items()} for i in range(theory.GROUP_SIZE)
    }
    advantages = Axes("(a) mean advantage, whitened", "response of the group", "advantage")
    panels, compared = teaser(study)
    figures.grouped(pages / "figure_1.png", [(advantages, groups), *panels])
    balanced, sparse = (values[0].mean for values in bars.values())
    text = (
        "(a) Eight groups of four; the dense reward is 0, 1, 2, 3 in every group, the sparse one is 1 for "
        "the first response of one group and 0 elsewhere. Mean advantage of each position over the "
        "groups, and that of the one response that earned the sparse reward:\n\n"
        + markdown(rows, [*(f"response {i + 1}" for i in range(theory.GROUP_SIZE)), EARNER])
        + "\n(b) Sums of the rewards in the settings below, one bar a method, where there are runs."
    )
    caption = (
        "(a) By arithmetic: the position that earns the sparse reward, in one group of eight, is the worst "
        f"on the dense one, and its mean whitened advantage goes from {balanced:+.4f} under balanced weights "
        f"to {sparse:+.4f} under the format profile; that of the one response that earned it from "
        f"{earned[0]:+.4f} to {earned[1]:+.4f}. The direction is the paper's; its source has no bars to "
        f"compare. {compared}"
    )
    title = "Figure 1: who decides the gradient"
    return Chapter(title, text, figure="figure_1.png", caption=caption.rstrip())


def signal(study: Study, pages: Path) -> Chapter | None:
    """The appendix's expected signal against the measured share of mixed groups."""
    every = study.variants("density")
    measured: list[tuple[float, float]] = []
    excess: dict[str, dict[str, list[float]]] = {RARE: {}, COMMON: {}}
    for done in every.values():
        group_size = done.settings.rollout.group_size
        responses = group_size * done.settings.loop.prompts_per_step
        # With more steps the same run begins the same.
        again = {("gdpo_long", at) for at in range(done.settings.resolved("gdpo").loop.steps + 1)}
        for folder in done.folders:
            for run in done.labels:
                equal = steps(folder / run, "reward/format/zero_variance_groups")
                for at, rate in steps(folder / run, FORMAT).items():
                    successes = round(rate * responses)
                    if at in equal and 1 < successes < responses - 1 and (run, at) not in again:
                        mixed = 1 - equal[at]
                        expected = theory.mixed_groups_given(successes, responses, group_size)
                        seeds = excess[RARE if rate < RARE_RATE else COMMON]
                        seeds.setdefault(folder.name, []).append(mixed - expected)
                        measured.append((rate, mixed))
    if not measured:
        return None
    per_seed = {
        band: [statistics.fmean(found) for found in seeds.values()] for band, seeds in excess.items() if seeds
    }
    by_rate: dict[float, list[float]] = {}
    for rate, mixed in sorted(measured):
        by_rate.setdefault(rate, []).append(mixed)
    curves = {
        "measured": [(rate, mean) for rate, shares in by_rate.items() if (mean := spread(shares))],
        "1 - p^G - (1-p)^G": [
            (rate, Spread(theory.mixed_groups(rate, group_size), 0.0, 1)) for rate in by_rate
        ],
    }
    axes = Axes("groups with a signal", "mean rate of the exact format", "share of mixed groups", log_x=True)
    figures.lines(pages / "signal.png", [(axes, curves)])
    caption = (
        "Measured share of mixed groups less the expected one: "
        + ", ".join(f"{spread(found):+} {band}" for band, found in per_seed.items())
        + "; the ± is over the seeds' averages, not over steps."
    )
    text = (
        f"{len(measured)} training steps of G = {group_size}, those with two successes and two failures or "
        f"more among their {responses} responses (the group of a single one is mixed whatever p is), of the "
        "runs of the sweep above. A step's p is its own rate; the curve is the mean over the steps with the "
        "same p, its band one deviation over them. They are compared with the formula's expectation given "
        "how many of the step's responses succeeded, for which the steps that are left out make no "
        "difference. The formula takes every prompt to have the same p; where prompts differ, fewer groups "
        "are mixed."
    )
    verdicts: list[Verdict] = []
    for band, found in per_seed.items():
        claim = (
            f"App. B: the share of mixed groups is 1 - p^G - (1-p)^G {band} (to {SIGNAL_BOUND}, our bound)"
        )
        verdicts += judge(claim, found, low=-SIGNAL_BOUND, high=SIGNAL_BOUND, sign="+")
    return Chapter("The expected signal 1 - p^G - (1-p)^G", text, verdicts, "signal.png", caption=caption)


def density(study: Study, pages: Path) -> Chapter | None:
    """The base rate of the sparse reward against when and whether each method finds it."""
    every = study.variants("density")
    if not every:
        return None
    first = next(iter(every.values()))
    _draw_density(every, pages / "density.png")
    text = (
        f"{first.settings.loop.prompts_per_step} prompts x {first.settings.rollout.group_size} rollouts a "
        "step. The left panel counts a run's own steps, and an open mark stands at a run's last step where "
        "half of the samples were not in the exact format by then; the budgets differ (dashed). The dots of "
        f"one rate are moved apart by method. {first.budget()}. Format on held-out prompts at the end, by "
        "the share of the demonstrations that are in the exact format; the sampled one is counted in "
        f"{first.settings.evaluation.samples} samples a prompt, which tell a base's rate no better than to "
        "a tenth of a percent:\n\n"
        + "\n".join(_ended(every, kind) for kind in KINDS)
        + _same_compute(every, first.labels.get("gdpo_long", ""))
    )
    verdicts = [
        *_race(
            "§4.2, by a measure of ours: a sparse reward's teacher takes off sooner than balanced GDPO",
            every,
            "format_teacher",
        ),
        *_race(
            f"App. B, by a measure of ours: the student has {ACTIVE_FORMAT:.0%} of its samples in the exact "
            "format, in its own steps, sooner than balanced GDPO",
            every,
            "smopd_paper",
            ACTIVE_FORMAT,
        ),
    ]
    for done in _at_rate(every, PAPER_RATE):
        claim = f"§1: balanced GDPO's format stays below {RARE_FORMAT:.0%}, at {PAPER_RATE:.2%} (greedy)"
        verdicts += judge(claim, done.values("gdpo", "greedy/format"), high=RARE_FORMAT)
    for kind, said in KINDS.items():
        for rate in RATES:
            for done in _at_rate(every, rate):
                student, balanced = (done.values(run, f"{kind}/format") for run in ("smopd_paper", "gdpo"))
                greedy = spread(done.values("gdpo", "greedy/format"))
                if greedy is not None and greedy.mean >= COMMON_FORMAT:
                    claim = f"Table 1, 3B: SMOPD's format is GDPO's (to {NARROW_FORMAT}, our bound)"
                    verdicts += alike(f"{claim}, at {rate:.2%} ({said})", student, balanced, NARROW_FORMAT)
                else:
                    claim = f"Table 1, 1.5B: SMOPD's format is above GDPO's, at {rate:.2%} ({said})"
                    verdicts += above(claim, student, balanced)
    return Chapter(
        "How sparse may the sparse reward be",
        text,
        verdicts,
        "density.png",
        list(every.values()),
        _density_caption(every),
    )


def _race(claim: str, every: dict[str, Finished], run: str, level: float = 0.5) -> list[Verdict]:
    """How often the run's samples reached the level sooner than balanced GDPO's, over rates and seeds."""
    ran = Counter(
        _sooner(*(take_off(folder, one, FORMAT, level) for one in (run, "gdpo")))
        for done in every.values()
        for folder in done.folders
    )
    said = f"sooner in {ran['sooner']}, later in {ran['later']}, at the same step in {ran['same']}"
    return counted(claim, ran["sooner"], ran["later"], f"{said}, neither in {ran['neither']}")


def _draw_density(every: dict[str, Finished], path: Path) -> None:
    budget = budgets(next(iter(every.values())).settings)
    started: dict[str, list[Dot]] = {}
    ended: dict[str, dict[str, list[Dot]]] = {kind: {} for kind in KINDS}
    rated = [(rate, done) for rate in RATES for done in _at_rate(every, rate)]
    for at, done in rated:
        for folder in done.folders:
            for run, (own, _) in budget.items():
                when = take_off(folder, run, FORMAT)
                reached = Dot(at, float(own if when is None else when), when is not None)
                for kind, series in ended.items():
                    if (value := final([folder], run, f"{kind}/format")) is not None:
                        series.setdefault(done.labels[run], []).append(Dot(at, value.mean))
                if final([folder], run, "sampled/format") is not None and not done.continues(run):
                    started.setdefault(done.labels[run], []).append(reached)
    limits = tuple(sorted({own for own, _ in budget.values()}))
    x = "share of the demonstrations"
    axes = Axes("take-off (open: not by its last step)", x, "own step at 50%", log_x=True)
    panels = [(axes._replace(bottom=0, top=1.08 * limits[-1], marks=limits), started)]
    end = Axes("at the end", x, "", log_x=True, bottom=-0.03, top=1.03)
    panels += [(end._replace(y=f"{kind} format"), series) for kind, series in ended.items()]
    figures.dots(path, panels)


def _ended(every: dict[str, Finished], kind: str) -> str:
    """The table of the final format, a row a rate; empty where there is none."""
    rows = [
        row(
            f"{rate:.2%} of demonstrations",
            f"{rate}",
            {label: final(done.folders, run, f"{kind}/format") for run, label in done.labels.items()},
        )
        for rate in RATES
        for done in _at_rate(every, rate)
    ]
    columns = list(dict.fromkeys(label for one in rows for label in one.values))
    return f"{kind.capitalize()}:\n\n{markdown(rows, columns)}" if columns else ""


def _density_caption(every: dict[str, Finished]) -> str:
    """From which rate on balanced GDPO finds the format, and the students' distance to it at each rate."""
    rated = [(rate, done) for rate in RATES for done in _at_rate(every, rate)]
    found = []
    for kind in KINDS:
        shown = []
        for run in ("smopd_paper", "smopd"):
            apart = {
                rate: spread(differences(*(done.values(one, f"{kind}/format") for one in (run, "gdpo"))))
                for rate, done in rated
            }
            said = ", ".join(f"{value:+} at {rate:.2%}" for rate, value in apart.items() if value)
            if said:
                shown.append(f"“{rated[0][1].labels[run]}” {said}")
        if shown:
            found.append(f"{kind} {'; '.join(shown)}")
    level = [
        f"{value} at {rate:.2%}"
        for rate, done in rated
        if (value := final(done.folders, "gdpo", "greedy/format"))
    ]
    return f"Balanced GDPO's greedy format is {', '.join(level)}. Format less GDPO's: {'. '.join(found)}."


def _same_compute(every: dict[str, Finished], label: str) -> str:
    """The student against balanced GDPO with the steps of both stages, which the paper leaves out."""
    found = []
    for kind in KINDS:
        apart = {
            rate: spread(
                differences(*(done.values(run, f"{kind}/format") for run in ("smopd_paper", "gdpo_long")))
            )
            for rate in RATES
            for done in _at_rate(every, rate)
        }
        said = ", ".join(f"{value:+} at {rate:.2%}" for rate, value in apart.items() if value)
        if said:
            found.append(f"{kind} {said}")
    if not found:
        return ""
    return f"\nNot in the paper: the paper's student less “{label}”, format: {'; '.join(found)}."


def _at_rate(every: dict[str, Finished], rate: float) -> list[Finished]:
    done = every.get(f"rate_{rate:g}")
    return [done] if done else []


def _sooner(teacher: int | None, balanced: int | None) -> str:
    if teacher is None and balanced is None:
        return "neither"
    if teacher == balanced:
        return "same"
    return "sooner" if balanced is None or (teacher is not None and teacher < balanced) else "later"
