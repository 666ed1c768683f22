"""The study's page: every chapter of synthetic runs, with verdicts that follow from them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from smopd.cli import read_settings
from smopd.study import theory, verdicts
from smopd.study.__main__ import main
from smopd.study.chapters import CHAPTERS
from smopd.study.experiments import EXPERIMENTS
from smopd.study.finished import Study
from smopd.study.measures import Spread, commit, curve, final, take_off
from smopd.study.sparsity import budgets

SUMS = {
    "base": 0.1,
    "grpo": 1.0,
    "gdpo": 1.1,
    "gd2po": 1.2,
    "no_anchor": 2.0,
    "reverse_kl": 2.2,
    "sequential": 3.5,
}
TEACHER_SUM, STUDENT_SUM = 2.5, 3.0
FORMATS = {"base": 0.002, "grpo": 0.01, "gdpo": 0.02, "gd2po": 0.01, "accuracy_teacher": 0.0}


def finished_run(
    folder: Path, run: str, formats: list[float], evaluation: dict[str, float], **more: float
) -> None:
    (folder / run).mkdir(parents=True)
    lines = [
        {
            "step": step + 1,
            "reward/format/mean": value,
            "reward/accuracy/mean": 1.0,
            "reward/format/zero_variance_groups": 1 - theory.mixed_groups(value, 8),
            **more,
        }
        for step, value in enumerate(formats)
    ]
    (folder / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / run / "evaluation.json").write_text(json.dumps(evaluation))
    (folder / "study_seconds.txt").write_text("90.0\n")


def synthetic(output: Path, experiment: str, seed: int) -> None:
    """Runs of every variant: the student above its teachers, and they above GDPO, by far more than a seed."""
    for variant in EXPERIMENTS[experiment].variants:
        folder = output / experiment / variant / f"seed_{seed}"
        settings = read_settings(str(EXPERIMENTS[experiment].path))
        for run in ("base", *settings.runs):
            teacher = run.endswith("teacher")
            total = SUMS.get(run, TEACHER_SUM if teacher else STUDENT_SUM) + 0.01 * seed
            exact = FORMATS.get(run, 0.96) + 0.001 * seed
            scores = {"accuracy": total - exact, "format": exact, "sum": total, "coverage": exact}
            scores["brevity"] = total - exact
            evaluation = {f"{kind}/{name}": v for kind in ("greedy", "sampled") for name, v in scores.items()}
            kappa = 0.90 if run == "kappa_4" else 0.999
            more = {"kl/negative": 0.9, "teacher_mass": kappa}
            more |= {f"teacher_{m}/top_kappa_mass": kappa + 1e-5 * seed for m in (0, 1)}
            more |= {
                "reward/coverage/zero_variance_groups": 0.125,
                "reward/brevity/zero_variance_groups": 0.0,
            }
            finished_run(folder, run, [0.001, exact / 2, exact], evaluation, **more)


@pytest.fixture
def every(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two seeds of every experiment but for the conflict, which has one."""
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    monkeypatch.setattr("smopd.study.students.gradient_factor", lambda base, seed: 0.1 + 0.001 * seed)
    for experiment in EXPERIMENTS:
        for seed in range(1 if experiment == "conflict" else 2):
            synthetic(tmp_path, experiment, seed)
    return tmp_path


def page_of(output: Path, pages: Path, *more: str) -> str:
    assert main(["--page-only", "--output", str(output), "--pages", str(pages), *more]) == 0
    return (pages / "study.md").read_text()


def test_every_chapter_says_what_its_runs_show(every: Path, tmp_path: Path) -> None:
    page = page_of(every, tmp_path / "docs")
    sections = {text.partition("\n")[0]: text for text in re.split(r"^## ", page, flags=re.M)[1:]}
    assert len(sections) == len(CHAPTERS)
    pictures = re.findall(r"!\[.*\]\(study/(.*)\.svg\)", page)
    assert sorted(pictures) == sorted(CHAPTERS)
    for picture in pictures:
        text = (tmp_path / "docs/study" / f"{picture}.svg").read_text()
        assert text.startswith("<?xml")

    found = re.findall(r"^\| (.+?) \| (\S+ ± \S+|\S+|.* neither in \d+) \| (\w+) \|$", page, flags=re.M)
    judged = [row for row in found if row[2] in verdicts.ANSWERS]
    n, agrees, contradicts, undecided = map(
        int,
        re.search(
            r"Of (\d+) comparisons below (\d+) agree,\s(\d+)\scontradict and (\d+) are undecided", page
        ).groups(),
    )
    assert n == len(judged) == agrees + contradicts + undecided
    assert {verdict for claim, _, verdict in judged if "SMOPD's sum is above GDPO's" in claim} == {"agrees"}
    nine = (
        "| §3.1: 9x the weight is 9x the gradient (the factor is 1, to 10%) | 0.101 ± 0.001 | contradicts |"
    )
    assert nine in page
    conflict = sections["Two rewards in conflict"]
    assert "±" not in conflict and "\n*1 seed; 1 job of together 2 minutes" in conflict
    assert "coverage 0.125, brevity 0.000." in conflict
    assert conflict.count("| undecided |") == 6
    assert "\n*2 seeds; 2 jobs of together 3 minutes" in sections["Ablations of the student"]
    assert (
        "“lambda 1 to 0, merged, tail”: opd.decay_steps 40, opd.schedule linear, opd.support merged" in page
    )
    assert "“kappa 64”: opd.kappa 64;" in page
    assert "Of the students “lambda 1, pooled, kappa 16” has the highest sampled sum, 3.005 ± 0.007;" in page


def test_budgets_count_what_a_run_stands_on() -> None:
    budget = budgets(read_settings(str(EXPERIMENTS["density"].path)))
    assert budget["gdpo"] == (100, 0) and budget["gdpo_long"] == (300, 0)
    assert budget["smopd"] == (100, 160) or budget["smopd"] == (100, 200)
    assert budget["sequential"] == (100, 100)


@pytest.fixture
def density(tmp_path: Path) -> Path:
    """Two seeds at one rate: the format teacher takes off in both, balanced GDPO in one and later."""
    for seed, gdpo in enumerate([[0.0, 0.1, 0.6], [0.0, 0.1, 0.2]]):
        folder = tmp_path / "density" / "rate_0.0018" / f"seed_{seed}"
        finished_run(folder, "base", [], {"sampled/format": 0.002})
        finished_run(folder, "gdpo", gdpo, {"sampled/format": gdpo[-1]})
        finished_run(folder, "format_teacher", [0.0, 0.5, 0.9], {"sampled/format": 0.9 + 0.05 * seed})
    (tmp_path / "density" / "rate_0.0018" / "seed_2").mkdir()  # begun, not finished
    return tmp_path


def test_measures_over_seeds(density: Path) -> None:
    folders = [density / "density" / "rate_0.0018" / f"seed_{seed}" for seed in (0, 1)]
    assert final(folders, "format_teacher", "sampled/format") == Spread(
        pytest.approx(0.925), pytest.approx(0.035355, rel=1e-3), 2
    )
    assert final(folders, "gdpo", "greedy/format") is None
    assert [take_off(folder, "gdpo", "reward/format/mean") for folder in folders] == [3, None]
    drawn = curve(folders, "gdpo", "reward/format/mean", window=2)
    assert [step for step, _ in drawn] == [1, 2, 3]
    assert drawn[2][1].mean == pytest.approx((0.35 + 0.15) / 2)


def test_the_page_says_what_was_found(density: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    page = page_of(density, tmp_path / "docs")
    assert "sooner in 2, later in 0, at the same step in 0, neither in 0 | undecided |" in page
    assert "0.925 ± 0.035" in page
    assert "GDPO, three times the steps 300" in page
    assert "## Ablations" not in page  # none has been run
    pictures = re.findall(r"!\[.*\]\((.*\.svg)\)", page)
    assert pictures == ["study/figure_1.svg", "study/density.svg", "study/signal.svg"]
    first = (tmp_path / "docs/study/figure_1.svg").read_bytes()
    page = page_of(density, tmp_path / "docs", "--seeds", "1")
    assert (tmp_path / "docs/study/figure_1.svg").read_bytes() == first
    assert "\n*1 seed; 1 job of" in page and "0.950 |" in page and "0.000 ±" not in page


def test_a_larger_size_has_runs_of_its_own(density: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    assert "## How sparse" not in page_of(density, tmp_path / "docs", "--size", "gpu")


def test_runs_of_other_settings_are_left_out(density: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    seed = density / "density/rate_0.0018/seed_1"
    (seed / "config.yaml").write_text("loop: {steps: 17}\n")
    pages = tmp_path / "docs"
    assert main(["--page-only", "--output", str(density), "--pages", str(pages)]) == 1
    assert "loop.steps: was 17, now 100" in capsys.readouterr().err
    assert "\n*1 seed; 1 job of" in (pages / "study.md").read_text()


def test_the_commit_of_a_run(tmp_path: Path) -> None:
    assert commit(tmp_path) == "unrecorded"
    git = {"commit": "0123456789abcdef", "modified": True}
    (tmp_path / "environment.json").write_text(json.dumps({"git": git}))
    assert commit(tmp_path) == "0123456789, modified"


@pytest.mark.parametrize(
    ("judged", "answer"),
    [
        (lambda: verdicts.above("", [1.0, 1.1, 1.2], [0.5, 0.5, 0.6]), "agrees"),
        (lambda: verdicts.above("", [0.5, 0.5, 0.6], [1.0, 1.1, 1.2]), "contradicts"),
        (lambda: verdicts.above("", [1.0, 1.1, 0.4], [0.5, 0.5, 0.6]), "undecided"),
        (lambda: verdicts.above("", [1.0], [0.5]), "undecided"),
        (lambda: verdicts.above("", [3.0, 3.0], [3.0, 3.0]), "undecided"),
        (lambda: verdicts.no_lower("", [3.0, 3.0], [3.0, 3.0]), "agrees"),
        (lambda: verdicts.alike("", [1.00, 1.01], [1.01, 1.00], 0.06), "agrees"),
        (lambda: verdicts.alike("", [1.00, 1.01], [2.01, 2.00], 0.06), "contradicts"),
        (lambda: verdicts.alike("", [1.0, 1.2], [1.0, 1.0], 0.06), "undecided"),
        (lambda: verdicts.judge("", [0.02, 0.03], high=0.09), "agrees"),
        (lambda: verdicts.judge("", [0.02, None, 0.3], high=0.09), "undecided"),
        (lambda: verdicts.counted("", 12, 1, ""), "agrees"),
        (lambda: verdicts.counted("", 2, 0, ""), "undecided"),
        (lambda: verdicts.counted("", 1, 12, ""), "contradicts"),
    ],
)
def test_verdicts(judged: Callable[[], list[verdicts.Verdict]], answer: str) -> None:
    assert [verdict.answer for verdict in judged()] == [answer]


def test_a_claim_without_a_value_has_no_verdict() -> None:
    assert verdicts.above("", [None, None], [1.0, 2.0]) == []
    assert verdicts.best([1.0, None], [2.0, 3.0]) == [2.0, None]
    assert verdicts.table([]) == ""


def test_the_gradients_ratio_is_measured_on_a_model(tmp_path: Path, monkeypatch) -> None:
    """Linear in the weights: the profile's ratio is the factor times the weights' ratio."""
    import torch

    from smopd.small_models import world_model
    from smopd.study import gradients, students

    model, tokenizer = world_model(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    prompts = gradients.sample(tmp_path, 2, 4, 0)
    random = torch.Generator().manual_seed(0)
    rewards_RK = torch.rand(len(prompts.rollouts), 2, dtype=torch.float64, generator=random)
    sampled = gradients.Sampled(prompts.rollouts, rewards_RK, prompts.group_R)
    monkeypatch.setattr(gradients, "sample", lambda *args: sampled)
    factor = students.gradient_factor(tmp_path, 0)
    dense, sparse = gradients.contributions(tmp_path, sampled, (0.1, 0.9))
    assert sparse / dense == pytest.approx(9 * factor, rel=1e-4)


def test_no_run_no_chapter(tmp_path: Path) -> None:
    assert [name for name, write in CHAPTERS.items() if write(Study({}), tmp_path)] == ["figure_1"]
