"""Chapters on the merge: the mass of the teachers' top-kappa, ablations of the student, priority profiles."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from bench.study import figures, gradients
from bench.study.experiments import SHARES
from bench.study.figures import Axes
from bench.study.finished import KINDS, WINDOW, Chapter, Finished, Study, extremes, paired, plural, row
from bench.study.measures import Spread, curve, final, mean_of, spread, steps
from bench.study.verdicts import Verdict, above, alike, best, judge, no_lower
from smopd.config.schedule import BASE
from smopd.report.tables import Row, markdown
from smopd.run.folder import flat

KAPPAS = {4: "kappa_4", 8: "kappa_8", 16: "smopd_paper", 32: "kappa_32", 64: "kappa_64"}
PAPER = "smopd_paper"
ABLATED = (
    PAPER, "no_anchor", "lambda_0", "reverse_kl", "kappa_64", "sequence_gate", "token_gate", "merged",
)  # fmt: skip
TEACHERS = {"format_teacher": "Format teacher", "accuracy_teacher": "Accuracy teacher"}
PAPER_MASS = 0.994  # Fig. 3's text
LEAST_MASS = 0.99
TABLE_7 = "Table 7, 3B, where the format is not sparse"  # GDPO's is 97.5%
NARROW = 0.06  # App. E's "narrow band" of RLLA Mean
PROFILE_PROMPTS = 512  # a base rate of 0.2% is a handful of successes in 4,096 responses
PROFILE_ROLLOUTS = 8


def mass(study: Study, pages: Path) -> Chapter | None:
    """Fig. 3's form: the teachers' top-kappa mass over training, for several kappa."""
    done = study.finished("ablations")
    if not done.folders:
        return None
    panels = []
    found: list[str] = []
    verdicts: list[Verdict] = []
    for m, teacher in enumerate(done.settings.teachers.models):
        metric = _mass_of(m)
        drawn = {f"kappa {kappa}": curve(done.folders, run, metric, WINDOW) for kappa, run in KAPPAS.items()}
        panels.append((Axes(f"{teacher.reward} teacher", "step", "mass of its top kappa"), drawn))
        means = {
            kappa: spread([mean_of(folder / run, metric) for folder in done.folders])
            for kappa, run in KAPPAS.items()
        }
        shown = ", ".join(f"{value} at kappa {kappa}" for kappa, value in means.items() if value)
        found.append(f"{teacher.reward} teacher {shown}")
        verdicts += _mass_verdicts(done, PAPER, m)
    against = study.finished("conflict")
    for m, _ in enumerate(against.settings.teachers.models if against.folders else ()):
        verdicts += _mass_verdicts(against, "student_paper", m)
    figures.lines(pages / "mass.png", panels)
    kept = {
        kappa: spread([mean_of(folder / run, "teacher_mass") for folder in done.folders])
        for kappa, run in KAPPAS.items()
    }
    text = (
        "Each teacher's own top-kappa mass on the student's tokens. The kept target's mass, mean over "
        "training: "
        + ", ".join(f"kappa {kappa}: {value}" for kappa, value in kept.items() if value is not None)
        + ". The targets are pooled, so a token that both teachers name takes two of the kappa places. Of "
        "the ablations' runs below; the coverage and brevity teachers are those of the conflicting rewards."
        + _vocabulary(done)
    )
    return Chapter(
        "Teacher mass over training",
        text,
        verdicts,
        "mass.png",
        caption=f"Mass of the teacher's own top kappa, mean over training: {'; '.join(found)}.",
    )


def _mass_of(teacher: int) -> str:
    return f"teacher_{teacher}/top_kappa_mass"


def _mass_verdicts(done: Finished, run: str, teacher: int) -> list[Verdict]:
    """Fig. 3 is of conflicting rewards; its text says "approximately" and "throughout training"."""
    claim = f"Fig. 3: of the {done.settings.teachers.models[teacher].reward} teacher's mass the top 16 hold"
    every = [list(steps(folder / run, _mass_of(teacher)).values()) for folder in done.folders]
    means = [statistics.fmean(values) if values else None for values in every]
    lowest = [min(values, default=None) for values in every]
    return [
        *judge(f"{claim} {PAPER_MASS} or more, on average", means, low=PAPER_MASS),
        *judge(f"{claim} {LEAST_MASS} or more (bound ours) in every step", lowest, low=LEAST_MASS),
    ]


def _vocabulary(done: Finished) -> str:
    """Of how many tokens the kappa are, where the base model says so."""
    config = done.folders[0] / BASE / "export" / "config.json"
    if not config.exists():
        return ""
    return f" The vocabulary has {json.loads(config.read_text())['vocab_size']} tokens."


def ablations(study: Study, pages: Path) -> Chapter | None:
    """Students beside the paper's, and what the paper's ablations say."""
    done = study.finished("ablations")
    if not done.folders:
        return None
    columns = [f"{kind}/{name}" for kind in KINDS for name in ("accuracy", "format", "sum")]
    labels, students = done.labels, done.of_stage("merge")
    panels = []
    found = []
    for kind in KINDS:
        bars = {
            labels[run]: value
            for run in students
            if (value := final(done.folders, run, f"{kind}/sum")) is not None
        }
        panels.append((Axes(f"{kind} sum", "accuracy + format", ""), bars))
        if bars:
            found.append(f"{kind} sums go {extremes(bars)}; {done.leader(students, f'{kind}/sum')}")
    figures.bars(pages / "ablations.png", panels)
    negative = {
        labels[run]: spread([mean_of(folder / run, "kl/negative") for folder in done.folders])
        for run in (PAPER, "merged", "merged_tail")
        if run in labels
    }
    loop = done.settings.loop
    text = (
        f"{loop.prompts_per_step} prompts x {done.settings.rollout.group_size} rollouts, {loop.steps} steps. "
        f"All students have the same two teachers, of complementary rewards; “{labels[PAPER]}” is the "
        f"paper's, and the others differ from it in: {_changes(done)}. Comparisons are of sums.\n\n"
        f"{done.table(columns)}\nShare of tokens with a negative KL: "
        + ", ".join(f"“{label}” {value}" for label, value in negative.items() if value is not None)
        + "."
    )
    return Chapter(
        "Ablations of the student",
        text,
        _ablation_verdicts(done),
        "ablations.png",
        [done],
        f"Students: {'; '.join(found)}.",
    )


def _changes(done: Finished) -> str:
    """Each student's settings that are not the paper's student's."""
    paper = flat(done.settings.resolved(PAPER).model_dump(mode="json", exclude={"runs"}))
    found = []
    for run in done.of_stage("merge"):
        own = flat(done.settings.resolved(run).model_dump(mode="json", exclude={"runs"}))
        changed = [
            f"{key} {own.get(key)}" for key in sorted({*own, *paper}) if own.get(key) != paper.get(key)
        ]
        if changed:
            found.append(f"“{done.labels[run]}”: {', '.join(changed)}")
    return "; ".join(found)


def _ablation_verdicts(done: Finished) -> list[Verdict]:
    verdicts: list[Verdict] = []
    anchor, kappas = "Table 3, there conflicting and kappa 32, here 16", "Table 4, there conflicting"
    for kind, said in KINDS.items():
        total = {run: done.values(run, f"{kind}/sum") for run in (*TEACHERS, *ABLATED)}
        teachers = best(*(total[run] for run in TEACHERS))
        student = total[PAPER]
        verdicts += [
            *above(f"{anchor}: the student is above OPD alone ({said})", student, total["no_anchor"]),
            *above(f"{anchor}: OPD alone is above both teachers ({said})", total["no_anchor"], teachers),
            *above(f"{anchor}: the student is above both teachers ({said})", student, teachers),
            *above(f"{anchor}: the student is above the anchor alone ({said})", student, total["lambda_0"]),
            *above(f"{kappas}: it is above the sampled reverse KL ({said})", student, total["reverse_kl"]),
        ]
        claim = f"{kappas}: kappa 64 is within {NARROW} of 16 (bound ours, App. E's; there 0.004) ({said})"
        verdicts += alike(claim, total["kappa_64"], student, NARROW)
        for gate in ("sequence", "token"):
            claim = f"Table 8, complementary: the {gate} gate is within {NARROW} (App. E) of uniform ({said})"
            verdicts += alike(claim, total[f"{gate}_gate"], student, NARROW)
        gates = best(total["sequence_gate"], total["token_gate"])
        verdicts += above(f"App. E: uniform mixing is above both gates ({said})", student, gates)
        claim = f"§3.2: the pooled and the merged mixture nearly coincide (to {NARROW}, our bound) ({said})"
        verdicts += alike(claim, total["merged"], student, NARROW)
    return verdicts


def profiles(study: Study, pages: Path) -> Chapter | None:
    """Teachers of several priority profiles: what their gradients are made of, and what is learned."""
    every = study.variants("profiles")
    if not every:
        return None
    runs = {**TEACHERS, PAPER: "Student"}
    factors = [gradient_factor(base, seed) for seed, base in sorted(_bases(every).items())]
    silent = factors.count(0.0)
    rows: list[Row] = []
    ended: dict[str, dict[str, dict[float, Spread]]] = {
        kind: {label: {} for label in runs.values()} for kind in KINDS
    }
    for share in SHARES:
        if (done := every.get(f"share_{share:g}")) is None:
            continue
        nominal = share / (1 - share)
        found = {
            "ratio of the weights": Spread(nominal, 0.0, 1),
            "times the factor": spread([None if factor is None else nominal * factor for factor in factors]),
        }
        for kind, series in ended.items():
            for run, label in runs.items():
                found[f"{label}, {kind} format"] = value = final(done.folders, run, f"{kind}/format")
                if value is not None:
                    series[label][share] = value
            found[f"Student, {kind} sum"] = final(done.folders, PAPER, f"{kind}/sum")
        rows.append(row(f"({1 - share:.2g}, {share:g})", f"{share}", found))
    axes = Axes("at the end", "share of a teacher's own reward", "", bottom=-0.03, top=1.03)
    panels = [
        (axes._replace(y=f"{kind} format"), {label: list(points.items()) for label, points in series.items()})
        for kind, series in ended.items()
    ]
    figures.lines(pages / "profiles.png", panels)
    against_gdpo = _against_gdpo(every, study.finished("ablations"))
    text = (
        "How much of the policy gradient each reward has: the norm of the format reward's part over that of "
        f"the accuracy reward's, on {PROFILE_PROMPTS} prompts x {PROFILE_ROLLOUTS} responses of the base "
        "model. Both parts are linear in their weights, so it is the ratio of the weights times one factor, "
        f"measured once a seed: {spread(factors)}"
        + (f", which is 0 in {plural(silent, 'seed')}: no group there was mixed" if silent else "")
        + ". The paper speaks of the expected gradient; the noise of a sampled one adds to both norms. The "
        "row (0.1, 0.9) is the ablations' student again"
        + ".\n\n"
        + markdown(rows, list(dict.fromkeys(column for one in rows for column in one.values)))
        + ("" if against_gdpo else "\nThe paper's claim that merging beats GDPO at 0.7 is not compared.")
    )
    claim = "§3.1: 9x the weight is 9x the gradient (the factor is 1, to 10%, our bound)"
    verdicts = [
        *judge(claim, factors, low=0.9, high=1.1),
        *_profile_verdicts(every),
        *against_gdpo,
    ]
    return Chapter(
        "Priority profiles", text, verdicts, "profiles.png", list(every.values()), _profile_caption(ended)
    )


def gradient_factor(base: Path, seed: int) -> float | None:
    """The format reward's gradient over the accuracy reward's with equal weights; None where that is 0."""
    sampled = gradients.sample(base, PROFILE_PROMPTS, PROFILE_ROLLOUTS, seed)
    dense, sparse = gradients.contributions(base, sampled, (0.5, 0.5))
    return sparse / dense if dense else None


def _bases(every: dict[str, Finished]) -> dict[int, Path]:
    """The base models by seed; the variants of one seed share theirs."""
    return {
        int(folder.name.removeprefix("seed_")): folder / BASE / "export"
        for done in every.values()
        for folder in done.folders
    }


def _profile_caption(ended: dict[str, dict[str, dict[float, Spread]]]) -> str:
    """What the format ended at with the least and the most skewed profile."""
    found = []
    for kind, series in ended.items():
        shown = []
        for label, points in series.items():
            if points:
                ends = dict.fromkeys((min(points), max(points)))
                said = " and ".join(f"{points[share]} at {share:g}" for share in ends)
                shown.append(f"{label.lower()} {said}")
        if shown:
            found.append(f"{kind} {', '.join(shown)}")
    return f"Final format: {'; '.join(found)}."


def _profile_verdicts(every: dict[str, Finished]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    least, moderate, strong = (every.get(f"share_{share}") for share in ("0.6", "0.7", "0.9"))
    for kind, said in KINDS.items():
        if least and strong:
            formats = paired(f"{kind}/format", (strong, "format_teacher"), (least, "format_teacher"))
            claim = f"§3.1: more weight, more format: the teacher of 0.9 over that of 0.6 ({said})"
            verdicts += above(claim, *formats)
        if moderate:
            total = {run: moderate.values(run, f"{kind}/sum") for run in (PAPER, *TEACHERS)}
            claim = f"{TABLE_7}: the moderate student (0.7) is above both its teachers ({said})"
            verdicts += above(claim, total[PAPER], best(*(total[run] for run in TEACHERS)))
        if moderate and strong:
            claim = f"{TABLE_7}: the moderate student is no lower than the aggressive one (0.9) ({said})"
            verdicts += no_lower(claim, *paired(f"{kind}/sum", (moderate, PAPER), (strong, PAPER)))
    return verdicts


def _against_gdpo(every: dict[str, Finished], ablated: Finished) -> list[Verdict]:
    """The moderate student against the ablations' anchor alone: GDPO with the same base and steps."""
    if (moderate := every.get("share_0.7")) is None:
        return []
    return [
        verdict
        for kind, said in KINDS.items()
        for verdict in above(
            f"{TABLE_7}: the moderate student is above GDPO, here the ablations' lambda 0 ({said})",
            *paired(f"{kind}/sum", (moderate, PAPER), (ablated, "lambda_0")),
        )
    ]
