"""Chapters on the merge: the mass of the teachers' top-kappa, ablations of the student, priority profiles."""

from __future__ import annotations

from pathlib import Path

from smopd.folder import flat
from smopd.report.tables import Row, markdown
from smopd.runs import BASE
from smopd.study import figures, gradients
from smopd.study.experiments import SHARES
from smopd.study.figures import Axes
from smopd.study.finished import WINDOW, Chapter, Finished, Study, row
from smopd.study.measures import Spread, curve, final, mean_of, spread
from smopd.study.verdicts import Verdict, above, alike, best, differences, judge, no_lower

KAPPAS = {4: "kappa_4", 8: "kappa_8", 16: "smopd_paper", 32: "kappa_32", 64: "kappa_64"}
PAPER = "smopd_paper"
TEACHERS = {"format_teacher": "Format teacher", "accuracy_teacher": "Accuracy teacher"}
PAPER_MASS = 0.994  # Fig. 3's text
NARROW = 0.06  # App. E's "narrow band" of RLLA Mean
PROFILE_PROMPTS = 512  # a base rate of 0.2% is a handful of successes in 4,096 responses
PROFILE_ROLLOUTS = 8


def mass(study: Study, pages: Path) -> Chapter | None:
    """Fig. 3's form: the teachers' top-kappa mass over training, for several kappa."""
    done = study.finished("ablations")
    if not done.folders:
        return None
    teachers = done.settings.teachers.models
    panels = []
    verdicts: list[Verdict] = []
    for m, teacher in enumerate(teachers):
        metric = f"teacher_{m}/top_kappa_mass"
        drawn = {f"kappa {kappa}": curve(done.folders, run, metric, WINDOW) for kappa, run in KAPPAS.items()}
        panels.append((Axes(f"{teacher.reward} teacher", "step", "mass of its top kappa"), drawn))
        held = {
            kappa: [mean_of(folder / KAPPAS[kappa], metric) for folder in done.folders] for kappa in (16, 64)
        }
        verdicts += judge(
            f"Fig. 3: the {teacher.reward} teacher's top 16 hold 0.994", held[16], low=PAPER_MASS
        )
        verdicts += alike(
            f"§4.3: kappa 64 adds little mass to the {teacher.reward} teacher's",
            held[64],
            held[16],
            1 - PAPER_MASS,
        )
    figures.lines(pages / "mass.svg", panels)
    kept = {
        kappa: spread([mean_of(folder / run, "teacher_mass") for folder in done.folders])
        for kappa, run in KAPPAS.items()
    }
    text = (
        "Each teacher's own top-kappa mass on the student's tokens. The kept target's mass, mean over "
        "training: "
        + ", ".join(f"kappa {kappa}: {value}" for kappa, value in kept.items() if value is not None)
        + ". The targets are pooled, so a token that both teachers name takes two of the kappa places."
    )
    return Chapter("Teacher mass over training", text, verdicts, "mass.svg", [done])


def ablations(study: Study, pages: Path) -> Chapter | None:
    """Students beside the paper's, and what the paper's ablations say."""
    done = study.finished("ablations")
    if not done.folders:
        return None
    columns = ["greedy/accuracy", "greedy/format", "greedy/sum"]
    columns += ["sampled/accuracy", "sampled/format", "sampled/sum"]
    labels = done.labels
    totals = {
        run: value
        for run in done.of_stage("merge")
        if (value := final(done.folders, run, "sampled/sum")) is not None
    }
    bars = {labels[run]: value for run, value in totals.items()}
    figures.bars(pages / "ablations.svg", [(Axes("sampled sum", "accuracy + format", ""), bars)])
    negative = {
        labels[run]: spread([mean_of(folder / run, "kl/negative") for folder in done.folders])
        for run in (PAPER, "merged", "merged_tail")
    }
    loop = done.settings.loop
    text = (
        f"{loop.prompts_per_step} prompts x {done.settings.rollout.group_size} rollouts, {loop.steps} steps. "
        f"All students have the same two teachers; “{labels[PAPER]}” is the paper's, and the others differ "
        f"from it in: {_changes(done)}.\n\n{done.table(columns)}\n{_ranking(done, totals)} Share of tokens "
        "with a negative KL: "
        + ", ".join(f"“{label}” {value}" for label, value in negative.items() if value is not None)
        + "."
    )
    return Chapter("Ablations of the student", text, _ablation_verdicts(done), "ablations.svg", [done])


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


def _ranking(done: Finished, totals: dict[str, Spread]) -> str:
    """The best student, and whether the seeds tell it from the second."""
    ranked = sorted(totals, key=lambda run: totals[run].mean, reverse=True)
    if not ranked:
        return ""
    first = ranked[0]
    said = f"Of the students “{done.labels[first]}” has the highest sampled sum, {totals[first]}"
    if len(ranked) == 1:
        return f"{said}."
    apart = differences(*(done.values(run, "sampled/sum") for run in ranked[:2]))
    return f"{said}; it is {spread(apart):+} from the next, “{done.labels[ranked[1]]}”."


def _ablation_verdicts(done: Finished) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for kind in ("greedy", "sampled"):
        total = {run: done.values(run, f"{kind}/sum") for run in done.labels}
        teachers = best(total["accuracy_teacher"], total["format_teacher"])
        student = total[PAPER]
        verdicts += [
            *above(f"Table 3: the student is above OPD alone ({kind} sum)", student, total["no_anchor"]),
            *above(f"Table 3: OPD alone is above both teachers ({kind} sum)", total["no_anchor"], teachers),
            *above(f"Table 3: the student is above both teachers ({kind} sum)", student, teachers),
            *above(f"Table 3: … above the anchor alone ({kind} sum)", student, total["lambda_0"]),
            *above(f"Table 4: … above the sampled reverse KL ({kind} sum)", student, total["reverse_kl"]),
            *alike(f"Table 4: kappa 64 is no other than 16 ({kind} sum)", total["kappa_64"], student, NARROW),
        ]
        for gate in ("sequence", "token"):
            claim = f"Table 8: the {gate} gate is within {NARROW} of uniform ({kind} sum)"
            verdicts += alike(claim, total[f"{gate}_gate"], student, NARROW)
    return verdicts


def profiles(study: Study, pages: Path) -> Chapter | None:
    """Teachers of several priority profiles: what their gradients are made of, and what is learned."""
    every = study.variants("profiles")
    if not every:
        return None
    runs = {**TEACHERS, PAPER: "Student"}
    factors = [gradient_factor(folder, seed) for seed, folder in enumerate(_bases(every))]
    rows: list[Row] = []
    ended: dict[str, list[tuple[float, Spread]]] = {label: [] for label in runs.values()}
    for share in SHARES:
        if (done := every.get(f"share_{share:g}")) is None:
            continue
        nominal = share / (1 - share)
        found = {
            "nominal ratio": Spread(nominal, 0.0, 1),
            "measured ratio": spread([None if factor is None else nominal * factor for factor in factors]),
            **{label: final(done.folders, run, "sampled/format") for run, label in runs.items()},
            "Student, sum": final(done.folders, PAPER, "sampled/sum"),
        }
        for label in runs.values():
            if (value := found[label]) is not None:
                ended[label].append((share, value))
        rows.append(row(f"({1 - share:.2g}, {share:g})", f"{share}", found))
    what = "sampled format at the end"
    axes = Axes(what, "share of a teacher's own reward", "sampled format", bottom=0, top=1)
    figures.lines(pages / "profiles.svg", [(axes, ended)])
    columns = ["nominal ratio", "measured ratio", *runs.values(), "Student, sum"]
    text = (
        "How much of the policy gradient each reward has on the base model "
        f"({PROFILE_PROMPTS} prompts x {PROFILE_ROLLOUTS}): the norm of the format reward's part over that "
        "of the accuracy reward's, under the format teacher's profile. Both parts are linear in their "
        f"weights, so it is the ratio of the weights times one factor, {spread(factors)}; and the {what}:\n\n"
        + markdown(rows, columns)
    )
    verdicts = [
        *judge(
            "§3.1: 9x the weight is 9x the gradient (the factor is 1, to 10%)", factors, low=0.9, high=1.1
        ),
        *_profile_verdicts(every),
    ]
    return Chapter("Priority profiles", text, verdicts, "profiles.svg", list(every.values()))


def gradient_factor(base: Path, seed: int) -> float | None:
    """The format reward's gradient over the accuracy reward's with equal weights; None where that is 0."""
    sampled = gradients.sample(base, PROFILE_PROMPTS, PROFILE_ROLLOUTS, seed)
    dense, sparse = gradients.contributions(base, sampled, (0.5, 0.5))
    return sparse / dense if dense else None


def _bases(every: dict[str, Finished]) -> list[Path]:
    """The seeds' base models; the variants of one seed share theirs."""
    most = max(every.values(), key=lambda done: len(done.folders))
    return [folder / BASE / "export" for folder in most.folders]


def _profile_verdicts(every: dict[str, Finished]) -> list[Verdict]:
    verdicts: list[Verdict] = []
    for name, done in every.items():
        share = name.removeprefix("share_")
        total = {run: done.values(run, "sampled/sum") for run in (PAPER, *TEACHERS)}
        claim = f"Table 7: the student is above its teachers, whatever the profile: {share} (sampled sum)"
        verdicts += above(claim, total[PAPER], best(*(total[run] for run in TEACHERS)))
    if {"share_0.6", "share_0.9"} <= every.keys():
        formats = [
            every[name].values("format_teacher", "sampled/format") for name in ("share_0.9", "share_0.6")
        ]
        claim = "§3.1: more weight, more format: the teacher of 0.9 over that of 0.6 (sampled)"
        verdicts += above(claim, *_paired(*formats))
    if {"share_0.7", "share_0.9"} <= every.keys():
        totals = [every[name].values(PAPER, "sampled/sum") for name in ("share_0.7", "share_0.9")]
        claim = "Table 7: the moderate student (0.7) is no lower than the aggressive one (0.9) (sampled sum)"
        verdicts += no_lower(claim, *_paired(*totals))
    return verdicts


def _paired(these: list[float | None], those: list[float | None]) -> tuple[list[float | None], ...]:
    """The seeds that both have, which are the first ones."""
    n = min(len(these), len(those))
    return these[:n], those[:n]
