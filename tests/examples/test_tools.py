"""examples/tools: the service, the rewards of a right conversation and of wrong ones, and the recipe."""

import pytest

from examples.tools import world
from smopd.config.cli import read_settings
from smopd.worlds import toy_world
from tests.ranks import ROOT


def test_rewards():
    for row in toy_world.prompts(4, seed=0):
        call, result = row["ground_truth"], world.result_of(row["ground_truth"])
        assert 1 <= int(result or 0) <= world.RESULTS
        report = f"<response>{result}</response>"
        for texts, task, form in (
            ([call, report], 1.0, 1.0),
            ([call, f"Done.{result}"], 1.0, 0.0),
            ([call, "<response>0</response>"], 0.5, 1.0),
            ([call.partition("\n")[2], report], 1.0, 0.0),
            ([report], 0.0, 0.0),
        ):
            spoken = []
            for text in texts:
                spoken.append({"role": "assistant", "content": text})
                spoken += world.Service().answer(None, spoken[-1]) or []
            assert world.task([spoken], ground_truth=[call]) == [pytest.approx(task)]
            assert world.form([spoken], ground_truth=[call]) == [form]


def test_the_recipe_reads_and_its_demonstrations_have_two_turns():
    settings = read_settings(str(ROOT / "examples/tools/recipe.yaml"), {})
    assert settings.rollout.environment == "examples.tools.world:Service"
    rows = world.demonstrations(8, seed=0, format_rate=0.02)
    assert [isinstance(row["prompt"], list) for row in rows] == [False, True] * 8
