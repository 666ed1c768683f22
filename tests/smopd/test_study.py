"""The study: its recipes resolve, its arithmetic is the paper's, its page says what runs hold."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from smopd.cli import parse
from smopd.study import theory
from smopd.study.conflict import brevity_reward, coverage_reward
from smopd.study.experiments import EXPERIMENTS, SIZES
from smopd.study.jobs import Job, jobs, run
from smopd.study.measures import Spread, curve, final, seeds_of, take_off
from smopd.toy_world import prompts

VARIANTS = [(name, variant) for name, one in EXPERIMENTS.items() for variant in one.variants]


@pytest.mark.parametrize(("experiment", "variant"), VARIANTS, ids=["-".join(each) for each in VARIANTS])
@pytest.mark.parametrize("size", SIZES)
def test_every_run_of_the_study_is_one_that_the_command_takes(
    experiment: str, variant: str, size: str, tmp_path: Path
) -> None:
    command = Job(experiment, variant, 3, tmp_path, size).command()
    assert command[1:3] == ["-m", "smopd.train"]
    settings = parse(command[3:]).settings
    assert settings.seed == 3 and settings.processes == 1
    assert Path(settings.output) == tmp_path / experiment / variant / "seed_3"


def test_variants_change_what_their_names_say(tmp_path: Path) -> None:
    def settings(experiment: str, variant: str):
        return parse(Job(experiment, variant, 0, tmp_path, "cpu").command()[3:]).settings

    kwargs = settings("density", "rate_0.005").warm_start.source.kwargs
    assert kwargs["format_rate"] == 0.005 and kwargs["n"] == 32000
    runs = settings("profiles", "share_0.95").runs
    assert runs["format_teacher"].reward_weights == [0.05, 0.95]
    assert runs["accuracy_teacher"].reward_weights == [0.95, 0.05]
    ablations = settings("ablations", "base")
    assert ablations.resolved("kappa_64").opd.kappa == 64
    assert ablations.resolved("merged_tail").opd.tail and ablations.resolved("kappa_64").opd.tail is False
    assert ablations.resolved("smopd").opd.schedule == "linear"
    assert ablations.resolved("no_anchor").loss.anchor_coef == 0


def test_jobs_go_seed_by_seed(tmp_path: Path) -> None:
    ordered = jobs(["curves", "density"], (0, 1), tmp_path, "cpu")
    assert [job.seed for job in ordered] == [0] * 6 + [1] * 6


def test_jobs_that_begin_alike_share_their_warm_start(tmp_path: Path, monkeypatch) -> None:
    first, second = (Job(name, "base", 0, tmp_path, "cpu") for name in ("curves", "conflict"))
    assert first.base == second.base
    assert Job("profiles", "share_0.6", 0, tmp_path, "cpu").base == first.base
    others = [("curves", "base", 1), ("density", "rate_0.05", 0), ("snips", "base", 0)]
    assert first.base not in [Job(*other, tmp_path, "cpu").base for other in others]

    warmed = []

    def train(job: Job, command: list[str]) -> int:
        if command[-2:] == ["--stage", "warm-start"]:
            warmed.append(job)
            (job.folder / "base" / "export").mkdir(parents=True)
            (job.folder / "base" / "evaluation.json").write_text("{}")
        return 0

    monkeypatch.setattr("smopd.study.jobs._train", train)
    assert run([first, second], at_once=2) == [] and first.finished and second.finished
    assert len(warmed) == 1
    (other,) = {first, second} - set(warmed)
    assert [path.name for path in (other.folder / "base").iterdir()] == ["export"]


def test_figure_1a_is_the_papers() -> None:
    before, after = theory.figure_1a((0.1, 0.9))
    assert before.tolist() == pytest.approx([0.0526, -0.0950, -0.0175, 0.0599], abs=6e-5)
    assert after.tolist() == pytest.approx([0.1950, -0.3524, -0.0650, 0.2224], abs=6e-5)


def test_the_expected_signal_and_its_amplification() -> None:
    assert theory.mixed_groups(0.5, 1) == 0
    assert theory.mixed_groups(0.003, 8) == pytest.approx(0.0237, abs=1e-4)
    assert theory.amplification(1 / 64) == pytest.approx(6.03, abs=0.01)
    assert theory.amplification(1.0) == pytest.approx(0.9 / math.sqrt(0.82) * math.sqrt(2), rel=1e-6)


def test_the_conflicting_rewards() -> None:
    row = prompts(1, seed=5)[0]
    call = json.loads(row["ground_truth"].split("<tool_call>\n")[1].split("\n</tool_call>")[0])
    values = [str(value) for value in call["parameters"].values()]
    answers = ["", " ".join(values), values[0]]
    covered = coverage_reward([""] * 3, answers, [row["ground_truth"]] * 3)
    assert covered[:2] == [0.0, 1.0] and covered[2] == pytest.approx(1 / len(values))
    assert brevity_reward([""] * 3, ["", "x" * 80, "x" * 500], longest=160) == [1.0, 0.5, 0.0]


def finished_run(folder: Path, run: str, formats: list[float], evaluation: dict[str, float]) -> None:
    (folder / run).mkdir(parents=True)
    lines = [
        {
            "step": step + 1,
            "reward/format/mean": value,
            "reward/accuracy/mean": 1.0,
            "reward/format/zero_variance_groups": 1 - theory.mixed_groups(value, 8),
        }
        for step, value in enumerate(formats)
    ]
    (folder / run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / run / "evaluation.json").write_text(json.dumps(evaluation))
    (folder / "study_seconds.txt").write_text("30.0\n")


@pytest.fixture
def density(tmp_path: Path) -> Path:
    """Two seeds at one rate: the format teacher takes off in both, balanced GDPO in one and later."""
    for seed, gdpo in enumerate([[0.0, 0.1, 0.6], [0.0, 0.1, 0.2]]):
        folder = tmp_path / "density" / "rate_0.0018" / f"seed_{seed}"
        finished_run(folder, "base", [], {"sampled/format": 0.002})
        finished_run(folder, "gdpo", gdpo, {"sampled/format": gdpo[-1]})
        finished_run(folder, "format_teacher", [0.0, 0.5, 0.9], {"sampled/format": 0.9 + 0.05 * seed})
    (tmp_path / "density" / "rate_0.0018" / "seed_7").mkdir()  # begun, not finished
    return tmp_path


def test_measures_over_seeds(density: Path) -> None:
    folders = seeds_of(density / "density" / "rate_0.0018")
    assert [folder.name for folder in folders] == ["seed_0", "seed_1"]
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
    from smopd.study.__main__ import main

    pages = tmp_path / "docs"
    assert main(["--page-only", "--output", str(density), "--pages", str(pages)]) == 0
    page = (pages / "study.md").read_text()
    assert "Of 2 paired runs the format teacher took off sooner than balanced GDPO in 2" in page
    assert "0.925 ± 0.035" in page
    assert "## Ablations" not in page  # none has been run
    pictures = re.findall(r"!\[.*\]\((.*\.svg)\)", page)
    assert pictures == ["study/density.svg", "study/signal.svg"]
    assert all((pages / picture).read_text().startswith("<?xml") for picture in pictures)
    first = (pages / "study" / "density.svg").read_bytes()
    main(["--page-only", "--output", str(density), "--pages", str(pages)])
    assert (pages / "study" / "density.svg").read_bytes() == first


def test_an_unknown_experiment_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from smopd.study.__main__ import main

    assert main(["--only", "curve", "--output", str(tmp_path)]) == 2
    assert "--only curve: expected one of curves, density" in capsys.readouterr().err


def test_snips_are_calls_that_score_full_marks(shared_data: Path) -> None:
    from smopd.rewards.rlla import accuracy_reward, format_reward
    from smopd.study import snips

    folder = str(shared_data / "snips")
    rows = snips.prompts(folder, 100, 0, "validate")
    truths = [row["ground_truth"] for row in rows]
    asked = [row["prompt"] for row in rows]
    assert accuracy_reward(asked, truths, ground_truth=truths) == [3.0] * 100
    assert format_reward(asked, truths, ground_truth=truths) == [1.0] * 100
    demonstrated = snips.demonstrations(folder, 2000, 0, 0.05)
    exact = format_reward(
        [row["prompt"] for row in demonstrated],
        [row["completion"] for row in demonstrated],
        ground_truth=[row["ground_truth"] for row in demonstrated],
    )
    assert 0.03 < sum(exact) / 2000 < 0.07
    with pytest.raises(ValueError, match="split is 'test', expected one of train, validate"):
        snips.prompts(folder, 1, 0, "test")


def test_the_snips_model_reads_and_writes_its_words(shared_data: Path) -> None:
    from smopd.study import snips

    folder = str(shared_data / "snips")
    _, tokenizer = snips.model(0, folder=folder)
    for row in snips.demonstrations(folder, 50, 1, 0.5):
        ids = tokenizer(row["completion"], add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == row["completion"]
        words = tokenizer.convert_ids_to_tokens(tokenizer(row["prompt"], add_special_tokens=False).input_ids)
        assert [word.strip() for word in words] == row["prompt"].split()
