"""examples/tools: the service, the rewards of a right conversation and of wrong ones, and the recipe."""

import pytest

from examples.tools import world
from smopd.config.cli import read_settings
from smopd.worlds import toy_world
from tests.ranks import ROOT


@pytest.mark.parametrize(
    ("change", "task", "form"),
    [
        (lambda call, report: [call, report], 1.0, 1.0),
        (lambda call, report: [call, f"Done.{report[10:-11]}"], 1.0, 0.0),
        (lambda call, report: [call, "<response>0</response>"], 0.5, 1.0),
        (lambda call, report: [call.partition("\n")[2], report], 1.0, 0.0),
        (lambda call, report: [report], 0.0, 0.0),
    ],
)
def test_rewards(change, task, form):
    for row in toy_world.prompts(4, seed=0):
        truth = row["ground_truth"]
        result = world.result_of(truth)
        assert 1 <= int(result or 0) <= world.RESULTS
        spoken = []
        for text in change(truth, f"<response>{result}</response>"):
            spoken.append({"role": "assistant", "content": text})
            spoken += world.Service().answer(None, spoken[-1]) or []
        assert world.task([spoken], ground_truth=[truth]) == [pytest.approx(task)]
        assert world.form([spoken], ground_truth=[truth]) == [form]


def test_the_recipe_reads_and_its_demonstrations_have_two_turns():
    settings = read_settings(str(ROOT / "examples/tools/recipe.yaml"), {})
    assert settings.rollout.environment == "examples.tools.world:Service"
    rows = world.demonstrations(8, seed=0, format_rate=0.02)
    assert [isinstance(row["prompt"], list) for row in rows] == [False, True] * 8
