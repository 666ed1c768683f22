"""Chapters with all methods side by side: the quickstart's world, real utterances, rewards in conflict."""

from __future__ import annotations

from pathlib import Path

from bench.study import figures
from bench.study.figures import Axes, Dot
from bench.study.finished import KINDS, WINDOW, Chapter, Finished, Study, extremes
from bench.study.measures import Spread, final, mean_of, spread
from bench.study.snips import LEAST_COUNT, MOST_SLOTS
from bench.study.verdicts import Verdict, above, best, differences, judge, no_lower
from smopd.config.schedule import BASE

PAPER_CONFLICT = "0.7 and 0.3"  # §4.1
BASELINES = {"gdpo": "GDPO", "grpo": "GRPO", "gd2po": "GD2PO"}
RARE_FORMAT = 0.09  # the introduction's "below 9%"
COLUMNS = [f"{kind}/{name}" for kind in KINDS for name in ("accuracy", "format", "sum")]


def curves(study: Study, pages: Path) -> Chapter | None:
    """Reward and format of every method while it trains, and the quickstart's table over these seeds."""
    done = study.finished("curves")
    if not done.folders:
        return None
    _draw_training(done, pages / "curves.png")
    loop, group_size = done.settings.loop, done.settings.rollout.group_size
    text = (
        f"{loop.prompts_per_step} prompts x {group_size} rollouts a step. The curves are means of a step's "
        f"rollouts (trailing mean of {WINDOW} steps, band of one deviation), the table is of held-out "
        f"prompts at the end. {done.budget()}.\n\n{done.table(COLUMNS)}\n{_controls(done)}"
    )
    return Chapter(
        "Reward and format of all methods",
        text,
        rlla_verdicts(done),
        "curves.png",
        [done],
        _training_caption(done),
    )


def snips(study: Study, pages: Path) -> Chapter | None:
    """Real utterances."""
    done = study.finished("snips")
    if not done.folders:
        return None
    _draw_training(done, pages / "snips.png")
    text = (
        "Words of real users, intents as tools and slots as parameters, a model from scratch. Kept are "
        f"utterances of one to {MOST_SLOTS} slots whose words all occur {LEAST_COUNT} times or more in the "
        "benchmark's training files, so that few of its validation utterances are left to evaluate on, some "
        "of which are drawn twice and some of which were written the same in training. "
        f"{_format_rate(done)}{_headroom(done)}{done.budget()}.\n\n{done.table(COLUMNS)}\n{_controls(done)}"
    )
    return Chapter(
        "Real utterances: SNIPS", text, rlla_verdicts(done), "snips.png", [done], _training_caption(done)
    )


def _format_rate(done: Finished) -> str:
    warm_start = done.settings.warm_start
    if warm_start is None or "format_rate" not in warm_start.source.kwargs:
        return ""
    rate = warm_start.source.kwargs["format_rate"]
    return f"{rate:.2%} of the demonstrations are in the exact format. "


def _headroom(done: Finished) -> str:
    """How far training moved the dense reward at all."""
    base = done.values(BASE, "greedy/accuracy")
    moved = [
        found.mean
        for run in done.settings.runs
        if (found := spread(differences(done.values(run, "greedy/accuracy"), base))) is not None
    ]
    if not moved:
        return ""
    return (
        f"Greedy accuracy went from the base's by {min(moved):+.3f} to {max(moved):+.3f}: decoded greedily, "
        "this is a test of the format alone. "
    )


def conflict(study: Study, pages: Path) -> Chapter | None:
    """Two dense rewards against each other."""
    done = study.finished("conflict")
    if not done.folders:
        return None
    names = ("coverage", "brevity")
    panels = []
    for kind in KINDS:
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
    figures.dots(pages / "conflict.png", panels)
    silent = {
        name: spread(
            [mean_of(folder / "gdpo", f"reward/{name}/zero_variance_groups") for folder in done.folders]
        )
        for name in names
    }
    equal = ", ".join(f"{name} {value}" for name, value in silent.items() if value)
    own, other = done.settings.runs["coverage_teacher"].reward_weights or (0.5, 0.5)
    columns = [f"{kind}/{name}" for kind in KINDS for name in (*names, "sum")]
    text = (
        "Coverage: the share of the request's values that a response names. Brevity: 1 for silence, 0 at 160 "
        f"characters. The teachers' profiles are {own:g} and {other:g}; the paper's conflicting setting has "
        f"{PAPER_CONFLICT}. {done.budget()}.\n\n{done.table(columns)}\n"
        + (f"Share of GDPO's groups in which all rollouts earned the same: {equal}." if equal else "")
    )
    verdicts: list[Verdict] = []
    for kind, said in KINDS.items():
        student = done.values("student_paper", f"{kind}/sum")
        others = {name: done.values(name, f"{kind}/sum") for name in ("grpo", "gdpo", "gd2po")}
        teachers = best(*(done.values(f"{name}_teacher", f"{kind}/sum") for name in names))
        verdicts += [
            *above(f"Table 2: SMOPD's mean is above GRPO's ({said}, sum)", student, others["grpo"]),
            *above(f"Table 2: SMOPD's mean is above GDPO's ({said}, sum)", student, others["gdpo"]),
            *above(f"Table 2, two of three: it is above GD2PO's ({said}, sum)", student, others["gd2po"]),
            *above(f"§1: the student surpasses both teachers ({said}, sum)", student, teachers),
        ]
    return Chapter(
        "Two rewards in conflict", text, verdicts, "conflict.png", [done], _conflict_caption(done, names)
    )


def _conflict_caption(done: Finished, names: tuple[str, ...]) -> str:
    found = []
    for kind in KINDS:
        for run in done.of_stage("merge"):
            ended = [
                f"{name} {value}" for name in names if (value := final(done.folders, run, f"{kind}/{name}"))
            ]
            gain = spread(differences(*(done.values(one, f"{kind}/sum") for one in (run, BASE))))
            if ended and gain:
                said = f"{', '.join(ended)}, its sum {gain:+} from the untrained base's"
                found.append(f"{kind}, “{done.labels[run]}” ended at {said}")
        found.append(done.leader(list(done.labels), f"{kind}/sum"))
    return _sentence("; ".join(part for part in found if part))


def rlla_verdicts(done: Finished) -> list[Verdict]:
    """What Table 1 and its text say, of runs with an accuracy and a format reward."""
    greedy = {run: done.values(run, "greedy/format") for run in done.labels}
    verdicts = []
    for run in ("grpo", "gdpo"):
        if run in greedy:
            claim = f"§1: with balanced priorities {run.upper()}'s format stays below 9% (greedy)"
            verdicts += judge(claim, greedy[run], high=RARE_FORMAT)
    for kind, said in KINDS.items():
        accuracy, exact, total = (
            {run: done.values(run, f"{kind}/{name}") for run in done.labels}
            for name in ("accuracy", "format", "sum")
        )
        verdicts += [
            *above(
                f"§4.2: the format teacher's format is above GDPO's ({said})",
                exact["format_teacher"],
                exact["gdpo"],
            ),
            *no_lower(
                f"§4.2: the format teacher's accuracy is not below GDPO's ({said})",
                accuracy["format_teacher"],
                accuracy["gdpo"],
            ),
            *(
                verdict
                for run, method in BASELINES.items()
                if run in total
                for verdict in above(
                    f"Table 1: SMOPD's sum is above {method}'s ({said})", total["smopd_paper"], total[run]
                )
            ),
            *no_lower(
                f"§4.2: SMOPD keeps the accuracy teacher's accuracy ({said})",
                accuracy["smopd_paper"],
                accuracy["accuracy_teacher"],
            ),
            *no_lower(
                f"§4.2: SMOPD keeps the format teacher's format ({said})",
                exact["smopd_paper"],
                exact["format_teacher"],
            ),
        ]
    return verdicts


def _controls(done: Finished) -> str:
    """What the paper has no row for, as differences of the sum."""
    found = []
    for run in [run for run in ("sequential", "smopd") if run in done.labels]:
        apart = {
            kind: spread(differences(*(done.values(one, f"{kind}/sum") for one in (run, "smopd_paper"))))
            for kind in KINDS
        }
        if all(apart.values()):
            said = ", ".join(f"{kind} {value:+}" for kind, value in apart.items() if value)
            found.append(f"“{done.labels[run]}” {said}")
    if not found:
        return ""
    return f"Not in the paper: sum less that of “{done.labels['smopd_paper']}”: {'; '.join(found)}."


def _training_caption(done: Finished) -> str:
    found = []
    for reward in ("accuracy", "format"):
        ended = {label: line[-1][1] for label, line in done.curves(f"reward/{reward}/mean").items()}
        if ended:
            found.append(f"{reward} {extremes(ended)}")
    return f"Each run's last steps: {'; '.join(found)}. {done.takeoffs()}"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def _draw_training(done: Finished, path: Path) -> None:
    panels = [
        (Axes(f"sampled {reward}", "step", f"mean {reward}"), done.curves(f"reward/{reward}/mean"))
        for reward in ("accuracy", "format")
    ]
    figures.lines(path, panels)


def teaser(study: Study) -> tuple[list[tuple[Axes, dict[str, dict[str, Spread]]]], str]:
    """Fig. 1(b)'s form: the sum of SMOPD and of the methods that it is compared with, a panel a setting.

    Returns:
        The panels, and a sentence on what they show.
    """
    panels = []
    found = []
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
            leaders = [leader for kind in KINDS if (leader := done.leader(runs, f"{kind}/sum"))]
            found.append(f"{title}: {', '.join(leaders)}")
    return panels, f"(b) {'; '.join(found)}." if found else ""
