"""The study's page: every chapter of synthetic runs, with verdicts that follow from them."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bench.study import students, theory, verdicts
from bench.study.__main__ import main
from bench.study.chapters import CHAPTERS
from bench.study.experiments import EXPERIMENTS
from bench.study.finished import KINDS, Study, budgets
from bench.study.jobs import Job
from bench.study.measures import Spread, commit, curve, final, take_off
from bench.study.page import NUMBER, WORDS, Chapter
from smopd.config.cli import read_settings
from smopd.config.recipe import builtin, write_yaml

ROOT = Path(__file__).parents[2]
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


def sections_of(page: str) -> dict[str, str]:
    """Title -> text of the chapters and of the comparisons."""
    return {text.partition("\n")[0]: text for text in re.split(r"^## ", page, flags=re.M)[1:]}


def rows_of(text: str) -> list[list[str]]:
    """The cells of a text's tables, without their headers."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return [row for i, row in enumerate(lines) if "---" not in {row[0], lines[min(i + 1, len(lines) - 1)][0]}]


def compared(page: str) -> list[list[str]]:
    """Chapter, place in the paper, claim, what was found and verdict of every comparison."""
    return [
        [chapter, place, f"{claim} ({said})", *cell.rsplit(", ", 1)]
        for chapter, place, claim, *cells in rows_of(sections_of(page)["Every comparison"])
        for said, cell in zip(KINDS.values(), cells, strict=True)
        if cell != "-"
    ]


def counts_of(page: str) -> tuple[int, list[int]]:
    """The number of comparisons and of each verdict, as the first table's last row says."""
    last = rows_of(page.partition("\n## ")[0])[-1]
    return int(last[0].removeprefix("All ").removesuffix(" comparisons")), list(map(int, last[-3:]))


def assert_the_verdicts_are_counted(page: str) -> None:
    """The first table has every comparison once, in its claim's row."""
    judged = compared(page)
    n, counts = counts_of(page)
    assert n == len(judged) == sum(counts)
    assert counts == [sum(row[-1] == answer for row in judged) for answer in verdicts.ANSWERS]
    claims = rows_of(page.partition("\n## ")[0])[:-1]
    assert counts == [sum(int(row[column]) for row in claims) for column in (-3, -2, -1)]
    assert {row[1] for row in claims} == {row[1] for row in judged}
    linked = set(re.findall(r"\]\(#(.+?)\)", page))
    assert linked == {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in {row[0] for row in judged}
    }


@pytest.mark.slow
def test_every_chapter_says_what_its_runs_show(every: Path, tmp_path: Path) -> None:
    page = page_of(every, tmp_path / "docs")
    sections = sections_of(page)
    assert len(sections) == len(CHAPTERS) + 1
    pictures = re.findall(r"!\[.*\]\(study/(.*)\.png\)", page)
    assert sorted(pictures) == sorted(CHAPTERS)
    for picture in pictures:
        drawn = (tmp_path / "docs/study" / f"{picture}.png").read_bytes()
        assert drawn.startswith(b"\x89PNG") and len(drawn) < MOST_BYTES

    assert_the_verdicts_are_counted(page)
    of_table_1 = [row for row in compared(page) if row[1] == "Table 1"]
    assert {row[-1] for row in of_table_1 if "SMOPD's sum is above GDPO's" in row[2]} == {"agrees"}
    assert "(the factor is 1, to 10%, our bound) | - | 0.101 ± 0.001, contradicts |" in page
    conflict = sections["Two rewards in conflict"]
    assert "±" not in conflict and "\n*1 seed; 1 job of together 2 thread-minutes" in conflict
    assert "coverage 0.125, brevity 0.000." in conflict
    of_conflict = [row for row in compared(page) if row[0] == "Two rewards in conflict"]
    assert [row[-1] for row in of_conflict] == ["undecided"] * 8
    assert not any("±" in row[3] for row in of_conflict)
    assert "\n*2 seeds; 2 jobs of together 3 thread-minutes" in sections["Ablations"]
    assert "| opd.decay_steps 40, opd.schedule linear, opd.support merged, opd.tail True |" in page
    assert re.search(r"^\| kappa 64 \| \S+ \+ \S+ \| opd.kappa 64 \|", page, flags=re.M)
    parts = [re.search(r"^!\[.*\n\n(.+)\n\n\| .+ \|\n", text, flags=re.M) for text in sections.values()]
    assert len([found for found in parts if found]) == len(CHAPTERS)
    unwritten = [title for title, text in sections.items() if WORDS["no_finding"] in text]
    assert {*sections} - {*unwritten} == {"Figure 1: who decides the gradient", "Every comparison"}
    assert not re.search(r"\b(None|nan)\b", page)


@pytest.mark.slow
def test_the_page_judges_what_the_paper_claims(every: Path, tmp_path: Path) -> None:
    page = page_of(every, tmp_path / "docs")
    sections, judged = sections_of(page), compared(page)

    def claims(title: str, said: str) -> list[str]:
        return [row[2] for row in judged if row[0] == title and said in row[2]]

    assert {row[0] for row in judged if "§1" in row[1] and "both teachers" in row[2]} == {
        "Two rewards in conflict",
        "Two rewards in conflict, moderate profiles",
    }
    above = claims("Priority profiles", "is above both its teachers")
    assert len(above) == 2 and all("(0.7)" in claim for claim in above)
    assert claims("Priority profiles", "above GDPO, here the ablations' lambda 0 (greedy)")
    profiles = sections["Priority profiles"]
    assert "Format teacher, greedy format" in profiles and "Student, sampled sum" in profiles
    sparse = "How sparse the reward may be"
    assert claims(sparse, "stays below 9%") == ["GDPO's format stays below 9%, at 0.18% (greedy)"]
    assert len(claims(sparse, "(greedy)")) == 6
    assert len([claim for claim in claims(sparse, "(sampled, ours)") if "SMOPD's format" in claim]) == 5
    assert "| greedy, 0.05% |" in sections[sparse] and "| sampled, 5.00% |" in sections[sparse]
    conflict = sections["Two rewards in conflict"]
    assert "profiles are 0.9 and 0.1; the paper's conflicting setting has 0.7 and 0.3." in conflict
    assert "\n| SMOPD as in the paper | 100 + 160 |" in sections["All methods"]
    assert "\n| GDPO, three times the steps | 300 |" in sections[sparse]


def test_a_finding_is_of_the_runs_that_are_shown() -> None:
    chapter = Chapter("signal", ["p", "difference"], [["below 0.1", "-0.002 ± 0.002"], [0.02, "0.003"]])
    assert chapter.finding == WORDS["chapters"]["signal"]["finding"].strip()
    other = replace(chapter, rows=[["below 0.1", "-0.012 ± 0.002"], [0.02, "0.003"]])
    assert other.finding == WORDS["no_finding"]


def test_the_page_of_the_docs_is_this_one() -> None:
    """Its findings are page.yaml's with the numbers of its tables, its counts are those of the README."""
    page = (ROOT / "docs" / "study.md").read_text()
    assert_the_verdicts_are_counted(page)
    sections = sections_of(page)
    assert [*sections][:-1] == [WORDS["chapters"][name]["title"] for name in CHAPTERS]
    assert {row[0] for row in rows_of(page.partition("\n## ")[0])[:-1]} == {
        words["claim"] for words in WORDS["claims"].values()
    }
    for name in CHAPTERS:
        title, finding = (WORDS["chapters"][name][key].strip() for key in ("title", "finding"))
        assert f"![{title}](study/{name}.png)\n\n{finding}\n\n| " in sections[title]
        judged = [row for row in compared(page) if row[0] == title]
        shown = " ".join(" ".join(row) for row in [*rows_of(sections[title]), *judged])
        header = sections[title].split("\n| ")[1]
        assert set(NUMBER.findall(finding)) <= set(NUMBER.findall(f"{header} {shown}")), name
    n, (agree, contradict, undecided) = counts_of(page)
    said = (
        f"{n} of the paper's comparisons: {agree} agree, {contradict} contradict, {undecided} are undecided"
    )
    assert said in (ROOT / "README.md").read_text()


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
    assert "\n| where p is below 0.1 | +0.000 ± 0.000 |\n| elsewhere | +0.0" in page
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
        "2 jobs of together 8 thread-minutes (4 minutes where 2 cores are kept busy), the longest 4.*" in page
    )


def test_budgets_count_what_a_run_stands_on() -> None:
    budget = budgets(read_settings(str(EXPERIMENTS["density"].path)))
    assert budget["gdpo"] == (100, 0, 100) and budget["gdpo_long"] == (300, 0, 300)
    assert budget["smopd"] == budget["smopd_paper"] == (100, 200, 200)
    assert budget["sequential"] == (100, 100, 200)
    budget = budgets(read_settings(str(EXPERIMENTS["merging"].path)))
    assert budget["guarded"] == (50, 160, 130) and budget["sequential"] == (50, 80, 130)
    assert budget["gdpo"].own == budget["guarded"].total == budget["sequential_long"].total == 210


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
        assert budget["gdpo_long"][:2] == (sum(steps), 0) and len(steps) == 3
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
    assert "sooner in 2, later in 0, at the same step in 0, neither in 0, undecided |" in page
    assert "0.925 ± 0.035" in page
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
