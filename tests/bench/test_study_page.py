"""The study's page: every chapter of synthetic runs, with verdicts that follow from them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from bench.study import students, theory, verdicts
from bench.study.__main__ import main
from bench.study.chapters import CHAPTERS
from bench.study.experiments import EXPERIMENTS
from bench.study.finished import Study, budgets
from bench.study.jobs import Job
from bench.study.measures import Spread, commit, curve, final, take_off
from smopd.config.cli import read_settings
from smopd.config.recipe import builtin, write_yaml

SUMS = {
    "base": 0.1,
    "grpo": 1.0,
    "gdpo": 1.1,
    "gd2po": 1.2,
    "no_anchor": 2.0,
    "reverse_kl": 2.2,
    "sequential": 3.5,
}
MOST_BYTES = 200_000  # of a figure, which is kept with the page
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
    monkeypatch.setattr("bench.study.students.gradient_factor", lambda base, seed: 0.1 + 0.001 * seed)
    for experiment in EXPERIMENTS:
        for seed in range(1 if experiment == "conflict" else 2):
            synthetic(tmp_path, experiment, seed)
    return tmp_path


def page_of(output: Path, pages: Path, *more: str) -> str:
    assert main(["--page-only", "--output", str(output), "--pages", str(pages), *more]) == 0
    return (pages / "study.md").read_text()


@pytest.mark.slow
def test_every_chapter_says_what_its_runs_show(every: Path, tmp_path: Path) -> None:
    page = page_of(every, tmp_path / "docs")
    sections = {text.partition("\n")[0]: text for text in re.split(r"^## ", page, flags=re.M)[1:]}
    assert len(sections) == len(CHAPTERS)
    pictures = re.findall(r"!\[.*\]\(study/(.*)\.png\)", page)
    assert sorted(pictures) == sorted(CHAPTERS)
    for picture in pictures:
        drawn = (tmp_path / "docs/study" / f"{picture}.png").read_bytes()
        assert drawn.startswith(b"\x89PNG") and len(drawn) < MOST_BYTES

    found = re.findall(
        r"^\| (.+?) \| (\S+ ± \S+|\S+|.* neither in \d+|no difference: .+?) \| (\w+) \|$", page, flags=re.M
    )
    judged = [row for row in found if row[2] in verdicts.ANSWERS]
    n, agrees, contradicts, undecided = map(
        int,
        re.search(
            r"Of\s(\d+)\scomparisons\sbelow\s(\d+)\sagree,\s(\d+)\scontradict\sand\s(\d+)\sare\sundecided",
            page,
        ).groups(),
    )
    assert n == len(judged) == agrees + contradicts + undecided
    assert {verdict for claim, _, verdict in judged if "SMOPD's sum is above GDPO's" in claim} == {"agrees"}
    assert "(the factor is 1, to 10%, our bound) | 0.101 ± 0.001 | contradicts |" in page
    conflict = sections["Two rewards in conflict"]
    assert "±" not in conflict and "\n*1 seed; 1 job of together 2 thread-minutes" in conflict
    assert "coverage 0.125, brevity 0.000." in conflict
    assert conflict.count("| undecided |") == 8
    assert "\n*2 seeds; 2 jobs of together 3 thread-minutes" in sections["Ablations of the student"]
    assert (
        "“lambda 1 to 0, merged, tail”: opd.decay_steps 40, opd.schedule linear, opd.support merged" in page
    )
    assert "“kappa 64”: opd.kappa 64;" in page
    captions = re.findall(r"^!\[.*\n\n\*(.+)\*$", page, flags=re.M)
    assert len(captions) == len(CHAPTERS)
    assert all("±" in caption for caption in captions if "brevity" not in caption)
    assert not re.search(r"\b(None|nan)\b", page)


@pytest.mark.slow
def test_the_page_judges_what_the_paper_claims(every: Path, tmp_path: Path) -> None:
    page = page_of(every, tmp_path / "docs")
    sections = {text.partition("\n")[0]: text for text in re.split(r"^## ", page, flags=re.M)[1:]}
    surpassed = [title for title, text in sections.items() if "surpasses both teachers" in text]
    assert surpassed == ["Two rewards in conflict"]
    profiles = sections["Priority profiles"]
    assert profiles.count("is above both its teachers") == 2 and "(0.7)" in profiles
    assert "above GDPO, here the ablations' lambda 0 (greedy) |" in profiles
    assert "Format teacher, greedy format" in profiles and "Student, sampled sum" in profiles
    density = sections["How sparse may the sparse reward be"]
    assert density.count("stays below 9%") == 1 and "below 9%, at 0.18% (greedy)" in density
    assert density.count("(greedy) |") == 6 and density.count("(sampled, ours) |") == 5
    assert "\nGreedy:\n" in density and "\nSampled:\n" in density
    conflict = sections["Two rewards in conflict"]
    assert "profiles are 0.9 and 0.1; the paper's conflicting setting has 0.7 and 0.3." in conflict
    assert "“SMOPD as in the paper” 100 after 160 of the runs that it needs" in page


@pytest.mark.slow
def test_without_gdpo_the_profiles_say_so(every: Path, tmp_path: Path) -> None:
    shutil.rmtree(every / "ablations")
    page = page_of(every, tmp_path / "docs")
    assert "here the ablations' lambda 0" not in page
    assert "merging beats GDPO at 0.7 is not compared" in page


def test_a_base_without_a_mixed_group_is_told(every: Path, tmp_path: Path, monkeypatch) -> None:
    for experiment in set(EXPERIMENTS) - {"profiles"}:
        shutil.rmtree(every / experiment)
    monkeypatch.setattr(students, "gradient_factor", lambda base, seed: 0.2 * seed)
    page = page_of(every, tmp_path / "docs")
    assert "once a seed: 0.100 ± 0.141, which is 0 in 1 seed: no group there was mixed. The paper" in page


def test_the_base_models_are_told_by_their_folders(every: Path) -> None:
    folders = {("profiles", "share_0.7"): [every / "profiles/share_0.7/seed_4"]}
    folders["profiles", "share_0.9"] = [every / f"profiles/share_0.9/seed_{seed}" for seed in (1, 4)]
    assert sorted(students._bases(Study(folders).variants("profiles"))) == [1, 4]


def test_the_signals_direction_is_the_runs_own(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    alike = 1 - theory.mixed_groups_given(2, 128, 8)
    for seed in (0, 1):
        folder = tmp_path / "density" / "rate_0.0018" / f"seed_{seed}"
        finished_run(folder, "gdpo", [0.5, 0.25], {}, **{"reward/format/zero_variance_groups": 0.0})
        finished_run(folder, "grpo", [2 / 128], {}, **{"reward/format/zero_variance_groups": alike})
    page = page_of(tmp_path, tmp_path / "docs")
    assert "less the expected one: +0.000 ± 0.000 where p is below 0.1, +0.0" in page
    assert "was below" not in page


def test_settings_are_those_of_the_run(density: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    for seed in (0, 1):
        folder = density / f"density/rate_0.0018/seed_{seed}"
        job = Job("density", "rate_0.0018", seed, density, "gpu")
        assert job.folder != folder
        (folder / "config.yaml").write_text(write_yaml(job.settings))
    done = Study({("density", "rate_0.0018"): [folder]}).finished("density", "rate_0.0018")
    assert done.settings.loop.prompts_per_step == 512
    assert done.settings.warm_start.source.kwargs["format_rate"] == 0.0018


def test_a_chapter_says_what_it_took(density: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    for seed in (0, 1):
        folder = density / f"density/rate_0.0018/seed_{seed}"
        (folder / "environment.json").write_text(json.dumps({"cpus": 2, "git": None}))
        (folder / "study_seconds.txt").write_text("240.0\n")
    page = page_of(density, tmp_path / "docs")
    assert (
        "2 jobs of together 8 thread-minutes (4 minutes where 2 cores are kept busy), the longest 4;" in page
    )


def test_budgets_count_what_a_run_stands_on() -> None:
    budget = budgets(read_settings(str(EXPERIMENTS["density"].path)))
    assert budget["gdpo"] == (100, 0) and budget["gdpo_long"] == (300, 0)
    assert budget["smopd"] == budget["smopd_paper"] == (100, 200)
    assert budget["sequential"] == (100, 100)


def test_the_control_of_the_same_compute_has_it() -> None:
    """As many steps as the paper's student and its specialists together, each of as many rollouts."""
    quickstart = builtin()["quickstart"]
    found = []
    for path in (quickstart, *(experiment.path for experiment in EXPERIMENTS.values())):
        settings = read_settings(str(path))
        if "gdpo_long" not in settings.runs:
            continue
        found.append(path.stem)
        budget = budgets(settings)
        student = settings.resolved("smopd_paper")
        specialists = [teacher.model for teacher in student.teachers.models]
        steps = [budget[run][0] for run in (*specialists, "smopd_paper")]
        assert budget["gdpo_long"] == (sum(steps), 0) and len(steps) == 3
        rollouts = {
            (each.loop.prompts_per_step, each.rollout.group_size)
            for each in map(settings.resolved, (*specialists, "smopd_paper", "gdpo_long"))
        }
        assert len(rollouts) == 1
    assert found == ["density"]


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


@pytest.mark.slow
def test_the_page_says_what_was_found(density: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib (the study extra)")
    page = page_of(density, tmp_path / "docs")
    assert "sooner in 2, later in 0, at the same step in 0, neither in 0 | undecided |" in page
    assert "0.925 ± 0.035" in page
    assert "“GDPO, three times the steps” 300" in page
    assert "## Ablations" not in page  # none has been run
    pictures = re.findall(r"!\[.*\]\((.*\.png)\)", page)
    assert pictures == ["study/figure_1.png", "study/density.png", "study/signal.png"]
    first = (tmp_path / "docs/study/figure_1.png").read_bytes()
    page = page_of(density, tmp_path / "docs", "--seeds", "1")
    assert (tmp_path / "docs/study/figure_1.png").read_bytes() == first
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


def test_the_gradients_ratio_is_measured_on_a_model(tmp_path: Path, monkeypatch) -> None:
    """Linear in the weights: the profile's ratio is the factor times the weights' ratio."""
    import torch

    from bench.study import gradients
    from smopd.worlds.models import world_model

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
