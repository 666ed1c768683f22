"""The study's chapters: each reads finished runs, draws its figure and says what they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smopd.cli import read_settings
from smopd.report.tables import Row, markdown
from smopd.study import figures, gradients, theory
from smopd.study.experiments import EXPERIMENTS, RATES, SHARES
from smopd.study.figures import Axes
from smopd.study.measures import Spread, curve, final, mean_of, seeds_of, spread, steps, take_off

BASE = "base"
KAPPAS = {4: "kappa_4", 8: "kappa_8", 16: "smopd_paper", 32: "kappa_32", 64: "kappa_64"}
WINDOW = 5  # steps that a drawn curve is the trailing mean of
PROFILE_PROMPTS = 512  # a base rate of 0.2% is a handful of successes in 4,096 responses


@dataclass(frozen=True)
class Chapter:
    """A section of docs/study.md. `figure` is the file's name, of an SVG beside the page."""

    title: str
    text: str
    figure: str | None = None


@dataclass(frozen=True)
class Finished:
    """One variant's finished seeds."""

    experiment: str
    folders: list[Path]

    @property
    def labels(self) -> dict[str, str]:
        """Run -> label, the base first, in the recipe's order."""
        settings = read_settings(str(EXPERIMENTS[self.experiment].path))
        return {BASE: "Base"} | {name: run.label or name for name, run in settings.runs.items()}

    def table(self, columns: Sequence[str]) -> str:
        """Means and deviations of the held-out evaluations."""
        rows = []
        for run, label in self.labels.items():
            found = {column: final(self.folders, run, column) for column in columns}
            known = {column: value for column, value in found.items() if value is not None}
            if known:
                means = {column: value.mean for column, value in known.items()}
                rows.append(
                    Row(label, run, means, {column: value.deviation for column, value in known.items()})
                )
        return markdown(rows, columns)


def finished(output: Path, experiment: str, variant: str = "base") -> Finished:
    return Finished(experiment, seeds_of(output / experiment / variant))


def figure_1(output: Path, pages: Path) -> Chapter | None:
    """Fig. 1(a) exactly, and the advantages' share by profile as Fig. 1(b) draws it."""
    rows = []
    for label, weights in {"balanced (0.5, 0.5)": (0.5, 0.5), "format (0.1, 0.9)": (0.1, 0.9)}.items():
        before, after = theory.figure_1a(weights)
        for when, values in (("before whitening", before), ("whitened", after)):
            shown = {f"response {i + 1}": float(value) for i, value in enumerate(values)}
            rows.append(Row(f"{label}, {when}", label, shown))
    text = (
        "Eight groups of four; the dense reward is 0, 1, 2, 3 in every group, the sparse one is 1 for the "
        "first response of one group and 0 elsewhere. Mean advantage of each response over the groups:\n\n"
        + markdown(rows, [f"response {i + 1}" for i in range(4)])
        + "\nBalanced weights push the response that earned the sparse reward down, because it is the worst "
        "on the dense one; the format profile turns its sign. This is arithmetic, and equal to the paper's."
    )
    return Chapter("Figure 1(a): who decides the gradient", text)


def signal(output: Path, pages: Path) -> Chapter | None:
    """The appendix's expected signal against the measured share of mixed groups."""
    points: dict[str, list[tuple[float, float]]] = {"measured, a step each": []}
    group_size = read_settings(str(EXPERIMENTS["density"].path)).rollout.group_size
    for variant in EXPERIMENTS["density"].variants:
        done = finished(output, "density", variant)
        for folder in done.folders:
            for run in done.labels:
                rates = steps(folder / run, "reward/format/mean")
                equal = steps(folder / run, "reward/format/zero_variance_groups")
                points["measured, a step each"] += [
                    (rate, 1 - equal[step]) for step, rate in rates.items() if 0 < rate < 1 and step in equal
                ]
    measured = points["measured, a step each"]
    if not measured:
        return None
    grid = [10 ** (-3 + 3 * i / 60) for i in range(61)]
    points["1 - p^G - (1-p)^G"] = [(rate, theory.mixed_groups(rate, group_size)) for rate in grid]
    axes = Axes("groups with a signal", "mean rate of the exact format", "share of mixed groups", log_x=True)
    figures.dots(pages / "signal.svg", [(axes, points)])
    excess = spread([theory.mixed_groups(rate, group_size) - share for rate, share in measured])
    text = (
        f"Over {len(measured)} training steps the share of mixed groups was {excess} below the formula's "
        f"(G = {group_size}). The formula takes every prompt to have the same rate; where prompts differ, "
        "fewer groups are mixed than it says."
    )
    return Chapter("The expected signal 1 - p^G - (1-p)^G", text, "signal.svg")


def curves(output: Path, pages: Path) -> Chapter | None:
    """Reward and format of every method while it trains, and the quickstart's table over these seeds."""
    done = finished(output, "curves")
    if not done.folders:
        return None
    panels = []
    for reward in ("accuracy", "format"):
        drawn = {
            label: curve(done.folders, run, f"reward/{reward}/mean", WINDOW)
            for run, label in done.labels.items()
            if run != BASE
        }
        axes = Axes(f"sampled {reward}", "step", f"mean {reward}")
        panels.append((axes, {label: line for label, line in drawn.items() if line}))
    figures.lines(pages / "curves.svg", panels)
    columns = [f"{kind}/{name}" for kind in ("greedy", "sampled") for name in ("accuracy", "format", "sum")]
    text = (
        f"64 prompts x 8 rollouts a step, {len(done.folders)} seeds, mean of the step's rollouts (trailing "
        f"mean of {WINDOW} steps, band of one deviation), and the held-out prompts at the end:\n\n"
        + done.table(columns)
        + "\n"
        + _takeoffs(done)
    )
    return Chapter("Reward and format of all methods", text, "curves.svg")


def density(output: Path, pages: Path) -> Chapter | None:
    """The base rate of the sparse reward against when and whether each method finds it."""
    started: dict[str, list[tuple[float, float]]] = {}
    ended: dict[str, list[tuple[float, float]]] = {}
    pairs = {"sooner": 0, "later": 0, "same": 0, "neither": 0}
    limit = 0
    for variant in EXPERIMENTS["density"].variants:
        done = finished(output, "density", variant)
        for folder in done.folders:
            measured = final([folder], BASE, "sampled/format")
            at = max(measured.mean if measured else 0.0, 1e-4)
            for run, label in done.labels.items():
                if run == BASE:
                    continue
                value = final([folder], run, "sampled/format")
                if value is not None:
                    ended.setdefault(label, []).append((at, value.mean))
                when = take_off(folder, run, "reward/format/mean")
                limit = max(limit, *steps(folder / run, "reward/format/mean"), 0)
                started.setdefault(label, []).append((at, float("nan") if when is None else float(when)))
            teacher, balanced = (
                take_off(folder, run, "reward/format/mean") for run in ("format_teacher", "gdpo")
            )
            pairs[_sooner(teacher, balanced)] += 1
    if not ended:
        return None
    never = limit * 1.08
    shown = {label: [(x, never if y != y else y) for x, y in points] for label, points in started.items()}
    figures.dots(
        pages / "density.svg",
        [
            (
                Axes(
                    "take-off (top band: never)", "base rate, sampled", "step at 50%", True, 0, limit * 1.15
                ),
                shown,
            ),
            (Axes("at the end", "base rate, sampled", "sampled format", True, -0.03, 1.03), ended),
        ],
    )
    rows = []
    for rate in RATES:
        done = finished(output, "density", f"rate_{rate:g}")
        values = {label: final(done.folders, run, "sampled/format") for run, label in done.labels.items()}
        known = {label: value for label, value in values.items() if value is not None}
        means, deviations = (
            {k: getattr(v, part) for k, v in known.items()} for part in ("mean", "deviation")
        )
        rows.append(Row(f"{rate:.2%} of demonstrations", f"{rate}", means, deviations))
    columns = list(dict.fromkeys(label for row in rows for label in row.values))
    text = (
        "16 prompts x 8 rollouts a step. Sampled format on held-out prompts at the end, by the share of the "
        "demonstrations that are in the exact format:\n\n" + markdown(rows, columns) + "\n"
        f"Of {sum(pairs.values())} paired runs the format teacher took off sooner than balanced GDPO in "
        f"{pairs['sooner']}, later in {pairs['later']}, at the same step in {pairs['same']}; neither did in "
        f"{pairs['neither']}."
    )
    return Chapter("How sparse may the sparse reward be", text, "density.svg")


def mass(output: Path, pages: Path) -> Chapter | None:
    """Fig. 3's form: the teachers' top-kappa mass over training, for several kappa."""
    done = finished(output, "ablations")
    if not done.folders:
        return None
    teachers = read_settings(str(EXPERIMENTS["ablations"].path)).teachers.models
    panels = []
    for m, teacher in enumerate(teachers):
        drawn = {
            f"kappa {kappa}": curve(done.folders, run, f"teacher_{m}/top_kappa_mass", WINDOW)
            for kappa, run in KAPPAS.items()
        }
        panels.append((Axes(f"{teacher.reward} teacher", "step", "mass of its top kappa"), drawn))
    figures.lines(pages / "mass.svg", panels)
    kept = {
        kappa: spread([mean_of(folder / run, "teacher_mass") for folder in done.folders])
        for kappa, run in KAPPAS.items()
    }
    text = (
        "Each teacher's own top-kappa mass on the student's tokens. The kept target's mass, mean over "
        "training: "
        + ", ".join(f"kappa {kappa}: {value}" for kappa, value in kept.items())
        + ". The targets are pooled, so a token that both teachers name takes two of the kappa places."
    )
    return Chapter("Teacher mass over training", text, "mass.svg")


def ablations(output: Path, pages: Path) -> Chapter | None:
    """Students that differ from the paper's in one thing."""
    done = finished(output, "ablations")
    if not done.folders:
        return None
    columns = ["greedy/accuracy", "greedy/format", "sampled/accuracy", "sampled/format", "sampled/sum"]
    values = {
        label: value
        for run, label in done.labels.items()
        if (value := final(done.folders, run, "sampled/sum")) is not None
    }
    figures.bars(pages / "ablations.svg", [(Axes("sampled sum", "accuracy + format", ""), values)])
    negative = {
        label: spread([mean_of(folder / run, "kl/negative") for folder in done.folders])
        for run, label in (
            ("smopd_paper", "pooled"),
            ("merged", "merged"),
            ("merged_tail", "merged with tail"),
        )
    }
    best = max(values, key=lambda label: values[label].mean)
    text = (
        "32 prompts x 8 rollouts, 80 steps; each student differs from the first in what its name says.\n\n"
        + done.table(columns)
        + f"\nThe best sampled sum is that of “{best}”, {values[best]}. Share of tokens with a negative KL: "
        + ", ".join(f"{label} {value}" for label, value in negative.items() if value is not None)
        + "."
    )
    return Chapter("Ablations of the student", text, "ablations.svg")


def profiles(output: Path, pages: Path) -> Chapter | None:
    """Teachers of several priority profiles: what their gradients are made of, and what is learned."""
    runs = {
        "format_teacher": "Format teacher",
        "accuracy_teacher": "Accuracy teacher",
        "smopd_paper": "Student",
    }
    rows: list[Row] = []
    ended: dict[str, list[tuple[float, Spread]]] = {label: [] for label in runs.values()}
    for share in SHARES:
        done = finished(output, "profiles", f"share_{share:g}")
        if not done.folders:
            continue
        ratios = []
        for seed, folder in enumerate(done.folders):
            base = folder / BASE / "export"
            sampled = gradients.sample(base, PROFILE_PROMPTS, 8, seed)
            dense, sparse = gradients.contributions(base, sampled, (1 - share, share))
            ratios.append(sparse / dense if dense else None)
        found = {
            "nominal ratio": Spread(share / (1 - share), 0.0, 1),
            "measured ratio": spread(ratios),
            **{label: final(done.folders, run, "sampled/format") for run, label in runs.items()},
        }
        known = {column: value for column, value in found.items() if value is not None}
        for label in runs.values():
            if label in known:
                ended[label].append((share, known[label]))
        means, deviations = (
            {k: getattr(v, part) for k, v in known.items()} for part in ("mean", "deviation")
        )
        rows.append(Row(f"({1 - share:.2g}, {share:g})", f"{share}", means, deviations))
    if not rows:
        return None
    axes = Axes(
        "sampled format at the end", "share of a teacher's own reward", "sampled format", bottom=0, top=1
    )
    figures.lines(pages / "profiles.svg", [(axes, ended)])
    text = (
        "The paper takes the ratio of the weights for the ratio of the gradients, which it is where both "
        f"rewards vary in every group. Measured on the base model, {PROFILE_PROMPTS} prompts x 8: the norm "
        "of the format reward's part of the policy gradient over the accuracy reward's, under the format "
        "teacher's profile; and the sampled format at the end:\n\n"
        + markdown(rows, ["nominal ratio", "measured ratio", *runs.values()])
    )
    return Chapter("Priority profiles", text, "profiles.svg")


def conflict(output: Path, pages: Path) -> Chapter | None:
    """Two dense rewards against each other."""
    done = finished(output, "conflict")
    if not done.folders:
        return None
    columns = [f"sampled/{name}" for name in ("coverage", "brevity", "sum")]
    points = {
        label: [
            (x.mean, y.mean)
            for folder in done.folders
            if (x := final([folder], run, "sampled/brevity"))
            and (y := final([folder], run, "sampled/coverage"))
        ]
        for run, label in done.labels.items()
    }
    axes = Axes("held-out prompts, a dot a seed", "sampled brevity", "sampled coverage")
    figures.dots(pages / "conflict.svg", [(axes, points)])
    text = (
        "Coverage: the share of the request's values that a response names. Brevity: 1 for silence, 0 at 160 "
        "characters. Neither is sparse, so nothing drowns; what is left of the method is the compromise.\n\n"
        + done.table(columns)
    )
    return Chapter("Two rewards in conflict", text, "conflict.svg")


def snips(output: Path, pages: Path) -> Chapter | None:
    """Real utterances."""
    done = finished(output, "snips")
    if not done.folders:
        return None
    columns = [f"{kind}/{name}" for kind in ("greedy", "sampled") for name in ("accuracy", "format", "sum")]
    panels = []
    for reward in ("accuracy", "format"):
        drawn = {
            label: curve(done.folders, run, f"reward/{reward}/mean", WINDOW)
            for run, label in done.labels.items()
            if run != BASE
        }
        panels.append(
            (
                Axes(f"sampled {reward}", "step", f"mean {reward}"),
                {k: line for k, line in drawn.items() if line},
            )
        )
    figures.lines(pages / "snips.svg", panels)
    text = (
        "Words of real users, intents as tools and slots as parameters, a model from scratch; held-out "
        "utterances of the benchmark's validation files.\n\n" + done.table(columns) + "\n" + _takeoffs(done)
    )
    return Chapter("Real utterances: SNIPS", text, "snips.svg")


CHAPTERS: Mapping[str, Callable[[Path, Path], Chapter | None]] = {
    function.__name__: function
    for function in (figure_1, curves, density, signal, mass, ablations, profiles, conflict, snips)
}


def _takeoffs(done: Finished) -> str:
    """When the format's sampled mean first reached one half, by run and seed."""
    found = []
    for run, label in done.labels.items():
        if run == BASE:
            continue
        reached = [take_off(folder, run, "reward/format/mean") for folder in done.folders]
        found.append(f"{label}: " + ", ".join("never" if at is None else str(at) for at in reached))
    return "First step with half of the samples in the exact format, by seed: " + "; ".join(found) + "."


def _sooner(teacher: int | None, balanced: int | None) -> str:
    if teacher is None and balanced is None:
        return "neither"
    if teacher == balanced:
        return "same"
    return "sooner" if balanced is None or (teacher is not None and teacher < balanced) else "later"
