"""Chapters on the merge: the mass of the teachers' top-kappa, ablations of the student, priority profiles."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from bench.study import figures, gradients
from bench.study.experiments import SHARES
from bench.study.figures import Axes
from bench.study.finished import KINDS, WINDOW, Finished, Study, paired, plural
from bench.study.measures import Spread, curve, final, spread, steps
from bench.study.methods import COLUMNS
from bench.study.page import Chapter
from bench.study.verdicts import Verdict, above, alike, best, judge, no_lower
from smopd.config.schedule import BASE
from smopd.run.folder import flat

KAPPAS = {4: "kappa_4", 8: "kappa_8", 16: "smopd_paper", 32: "kappa_32", 64: "kappa_64"}
PAPER = "smopd_paper"
ABLATED = (
    PAPER, "no_anchor", "lambda_0", "reverse_kl", "kappa_64", "sequence_gate", "token_gate", "merged",
)  # fmt: skip
TEACHERS = {"format_teacher": "Format teacher", "accuracy_teacher": "Accuracy teacher"}
PAPER_MASS = 0.994  # Fig. 3's text
LEAST_MASS = 0.99
NARROW = 0.06  # App. E's "narrow band" of RLLA Mean
PROFILE_PROMPTS = 512  # a base rate of 0.2% is a handful of successes in 4,096 responses
PROFILE_ROLLOUTS = 8


def mass(study: Study, pages: Path) -> Chapter | None:
    """Fig. 3's form: the teachers' top-kappa mass over training, for several kappa."""
    done = study.finished("ablations")
    if not done.folders:
        return None
    panels = []
    verdicts: list[Verdict] = []
    columns = {}
    for m, teacher in enumerate(done.settings.teachers.models):
        drawn = {
            f"kappa {kappa}": curve(done.folders, run, _mass_of(m), WINDOW) for kappa, run in KAPPAS.items()
        }
        panels.append((Axes(f"{teacher.reward} teacher", "step", "mass of its top kappa"), drawn))
        columns[f"{teacher.reward} teacher"] = _mass_of(m)
        verdicts += _mass_verdicts(done, PAPER, m)
    against = study.finished("conflict")
    for m, _ in enumerate(against.settings.teachers.models if against.folders else ()):
        verdicts += _mass_verdicts(against, "student_paper", m)
    figures.lines(pages / "mass.png", panels)
    columns["kept target"] = "teacher_mass"
    rows = [
        [kappa, *(done.mean(run, metric) for metric in columns.values())] for kappa, run in KAPPAS.items()
    ]
    return Chapter("mass", ["kappa", *columns], rows, verdicts, facts={"vocabulary": _vocabulary(done)})


def _mass_of(teacher: int) -> str:
    return f"teacher_{teacher}/top_kappa_mass"


def _mass_verdicts(done: Finished, run: str, teacher: int) -> list[Verdict]:
    """Fig. 3 is of conflicting rewards; its text says "approximately" and "throughout training"."""
    claim = f"mass: of the {done.settings.teachers.models[teacher].reward} teacher's mass the top 16 hold"
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
    return str(json.loads(config.read_text())["vocab_size"]) if config.exists() else "an unknown number of"


def ablations(study: Study, pages: Path) -> Chapter | None:
    """Students beside the paper's, and what the paper's ablations say."""
    done = study.finished("ablations")
    if not done.folders:
        return None
    panels = []
    for kind in KINDS:
        sums = {run: final(done.folders, run, f"{kind}/sum") for run in done.of_stage("merge")}
        bars = {done.labels[run]: value for run, value in sums.items() if value is not None}
        panels.append((Axes(f"{kind} sum", "accuracy + format", ""), bars))
    figures.bars(pages / "ablations.png", panels)
    negative = {run: done.mean(run, "kl/negative") for run in (PAPER, "merged", "merged_tail")}
    header, rows = done.table(COLUMNS, {"differs in": _changes(done), "tokens of KL below 0": negative})
    return Chapter("ablations", header, rows, _ablation_verdicts(done), [done], done.facts)


def _changes(done: Finished) -> dict[str, str]:
    """Each student's settings that are not the paper's student's."""
    paper, *others = (
        flat(done.settings.resolved(run).model_dump(mode="json", exclude={"runs"}))
        for run in (PAPER, *done.of_stage("merge"))
    )
    found = {}
    for run, own in zip(done.of_stage("merge"), others, strict=True):
        changed = [key for key in sorted({*own, *paper}) if own.get(key) != paper.get(key)]
        found[run] = ", ".join(f"{key} {own.get(key)}" for key in changed) or "nothing"
    return found


def _ablation_verdicts(done: Finished) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for kind, said in KINDS.items():
        total = {run: done.values(run, f"{kind}/sum") for run in (*TEACHERS, *ABLATED)}
        teachers = best(*(total[run] for run in TEACHERS))
        student, alone = total[PAPER], total["no_anchor"]
        gates = best(total["sequence_gate"], total["token_gate"])
        kappa = f"kappa 64 is within {NARROW} (our bound, App. E's) of 16, in the paper within 0.004"
        mixture = f"the merged mixture is within {NARROW} (our bound) of the pooled one"
        gate = f"gate is within {NARROW} (App. E) of uniform"
        verdicts += [
            *above(f"parts: the student is above OPD alone ({said})", student, alone),
            *above(f"parts: OPD alone is above both teachers ({said})", alone, teachers),
            *above(f"parts: the student is above both teachers ({said})", student, teachers),
            *above(f"parts: the student is above the anchor alone ({said})", student, total["lambda_0"]),
            *above(
                f"divergence: forward KL is above the sampled reverse KL ({said})",
                student,
                total["reverse_kl"],
            ),
            *alike(f"divergence: {kappa} ({said})", total["kappa_64"], student, NARROW),
            *alike(f"gates: the sequence {gate} ({said})", total["sequence_gate"], student, NARROW),
            *alike(f"gates: the token {gate} ({said})", total["token_gate"], student, NARROW),
            *above(f"gates: uniform mixing is above both gates ({said})", student, gates),
            *alike(f"mixture: {mixture} ({said})", total["merged"], student, NARROW),
        ]
    return verdicts


def profiles(study: Study, pages: Path) -> Chapter | None:
    """Teachers of several priority profiles: what their gradients are made of, and what is learned."""
    every = study.variants("profiles")
    if not every:
        return None
    runs = {**TEACHERS, PAPER: "Student"}
    factors = [gradient_factor(base, seed) for seed, base in sorted(_bases(every).items())]
    silent = factors.count(0.0)
    rows: list[list[object]] = []
    ended: dict[str, dict[str, dict[float, Spread]]] = {
        kind: {label: {} for label in runs.values()} for kind in KINDS
    }
    for share in SHARES:
        if (done := every.get(f"share_{share:g}")) is None:
            continue
        nominal = share / (1 - share)
        times = spread([None if factor is None else nominal * factor for factor in factors])
        found: list[object] = [f"({1 - share:.2g}, {share:g})", f"{nominal:.3f}", times]
        for kind, series in ended.items():
            for run, label in runs.items():
                found.append(value := final(done.folders, run, f"{kind}/format"))
                if value is not None:
                    series[label][share] = value
            found.append(final(done.folders, PAPER, f"{kind}/sum"))
        rows.append(found)
    header = ["weights", "ratio of the weights", "times the factor"]
    header += [
        f"{label}, {kind} {name}"
        for kind in KINDS
        for label, name in (*((label, "format") for label in runs.values()), ("Student", "sum"))
    ]
    axes = Axes("at the end", "share of a teacher's own reward", "", bottom=-0.03, top=1.03)
    panels = [
        (axes._replace(y=f"{kind} format"), {label: list(points.items()) for label, points in series.items()})
        for kind, series in ended.items()
    ]
    figures.lines(pages / "profiles.png", panels)
    against_gdpo = _against_gdpo(every, study.finished("ablations"))
    uncompared = "" if against_gdpo else " The paper's claim that merging beats GDPO at 0.7 is not compared."
    none = f", which is 0 in {plural(silent, 'seed')}: no group there was mixed" if silent else ""
    facts = {
        "prompts": PROFILE_PROMPTS,
        "rollouts": PROFILE_ROLLOUTS,
        "factor": f"{spread(factors)}{none}",
        "uncompared": uncompared,
    }
    claim = "weights: 9 times the weight is 9 times the gradient (the factor is 1, to 10%, our bound)"
    verdicts = [*judge(claim, factors, low=0.9, high=1.1), *_profile_verdicts(every), *against_gdpo]
    return Chapter("profiles", header, rows, verdicts, list(every.values()), facts)


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


def _profile_verdicts(every: dict[str, Finished]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    least, moderate, strong = (every.get(f"share_{share}") for share in ("0.6", "0.7", "0.9"))
    for kind, said in KINDS.items():
        if least and strong:
            formats = paired(f"{kind}/format", (strong, "format_teacher"), (least, "format_teacher"))
            claim = f"weights: the format teacher of 0.9 is above that of 0.6 in its format ({said})"
            verdicts += above(claim, *formats)
        if moderate:
            total = {run: moderate.values(run, f"{kind}/sum") for run in (PAPER, *TEACHERS)}
            claim = f"moderate: the moderate student (0.7) is above both its teachers ({said})"
            verdicts += above(claim, total[PAPER], best(*(total[run] for run in TEACHERS)))
        if moderate and strong:
            claim = f"moderate: the moderate student (0.7) is no lower than that of 0.9 ({said})"
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
            f"moderate: the moderate student is above GDPO, here the ablations' lambda 0 ({said})",
            *paired(f"{kind}/sum", (moderate, PAPER), (ablated, "lambda_0")),
        )
    ]
