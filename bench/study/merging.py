"""Chapters on what the paper leaves out: other ways to merge, other starts, and the controls beside them."""

from __future__ import annotations

from pathlib import Path

from bench.study import figures
from bench.study.figures import Axes, Dot
from bench.study.finished import KINDS, Finished, Study, budgets
from bench.study.measures import final, spread
from bench.study.page import Chapter
from bench.study.verdicts import best, differences

CONTROLS = {"merging": "sequential", "merging_three": "sequential_two", "merging_snips": "sequential"}
"""Of equal critical path, by experiment."""
WORLDS = {
    "merging": "quickstart's world",
    "merging_three": "three teachers",
    "merging_snips": "SNIPS",
    "conflict": "conflict",
}
TARGETS = ("mixture", "geometric", "product", "kept")
NOT_DRAWN = (
    "start", "start_mixture", "start_geometric", "weights_ties", "weights_ram", "second", "third",
)  # fmt: skip


def merging(experiment: str, study: Study, pages: Path) -> Chapter | None:
    """All ways to merge in one world, by what they cost and what they reach."""
    done = study.finished(experiment)
    if not done.folders:
        return None
    costs, control = budgets(done.settings), CONTROLS[experiment]
    panels = []
    for axis, kind in (("critical_path", "sampled"), ("total", "sampled"), ("critical_path", "greedy")):
        points = {
            done.labels[run]: [
                Dot(getattr(costs[run], axis), value)
                for value in done.values(run, f"{kind}/sum")
                if value is not None
            ]
            for run in done.of_stage("control", "merge")
            if run not in NOT_DRAWN and done.settings.resolved(run).loss.anchor_coef > 0
        }
        title = f"{kind}, {'one after the other' if axis == 'critical_path' else 'all together'}"
        panels.append((Axes(title, "training steps", "sum of the rewards", apart=1.2), points))
    figures.dots(pages / f"{experiment}.png", panels)
    more = {
        "critical path": {run: cost.critical_path for run, cost in costs.items()},
        "sampled sum less the control's": against(done, control),
    }
    rewards = (*(reward.name for reward in done.settings.rewards), "sum")
    header, rows = done.table([f"{kind}/{name}" for kind in KINDS for name in rewards], more)
    facts = done.facts | {"control": done.labels[control]}
    return Chapter(experiment, header, rows, done=[done], facts=facts)


def alone(study: Study, pages: Path) -> Chapter | None:
    """OPD without any reward, by its target."""
    every = {world: study.finished(name) for name, world in WORLDS.items()}
    every = {world: done for world, done in every.items() if done.folders}
    if not every:
        return None
    rows: list[list[object]] = []
    panels = []
    for kind in KINDS:
        groups = {
            world: {
                target: value
                for target in TARGETS
                if (value := final(done.folders, f"alone_{target}", f"{kind}/sum")) is not None
            }
            for world, done in every.items()
        }
        panels.append((Axes(f"{kind}, no reward in the loss", "", "sum of the rewards"), groups))
    figures.grouped(pages / "alone.png", panels)
    for world, done in every.items():
        for target in TARGETS:
            run = f"alone_{target}"
            if run in done.labels:
                sums = [final(done.folders, run, f"{kind}/sum") for kind in KINDS]
                kept = [
                    _share_kept(done, run, teacher.reward, teacher.model)
                    for teacher in done.settings.teachers.models
                ]
                rows.append([world, target, *sums, "; ".join(kept)])
    header = ["world", "target", *(f"{kind} sum" for kind in KINDS), "of each teacher's gain in its reward"]
    return Chapter("alone", header, rows)


def against(done: Finished, *controls: str) -> dict[str, str]:
    """Each run's sampled sum less that of the seed's best control, and in how many seeds it is above it."""
    control = best(*(done.values(name, "sampled/sum") for name in controls))
    found = {}
    for run in done.labels:
        apart = differences(done.values(run, "sampled/sum"), control)
        known = [each for each in apart if each is not None]
        if known and (run,) != controls:
            same = sum(each == 0 for each in known)
            found[run] = f"{spread(known):+}, above in {sum(each > 0 for each in known)} of {len(known)}"
            found[run] += f", the same in {same}" if same else ""
    return found


def _share_kept(done: Finished, run: str, reward: str, teacher: str) -> str:
    """How much of what a teacher gained in its reward over the base a run has, sampled; means over seeds."""
    found, base, theirs = (spread(done.values(name, f"sampled/{reward}")) for name in (run, "base", teacher))
    if found is None or base is None or theirs is None or theirs.mean == base.mean:
        return f"{reward} -"
    share = (found.mean - base.mean) / (theirs.mean - base.mean)
    return f"{reward} {round(share, 2) + 0.0:.0%}"  # no -0%
