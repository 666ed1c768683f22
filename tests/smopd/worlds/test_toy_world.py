"""The quickstart's world: determinism, splits, scores of its truths, stated rates of its demonstrations."""

import json
import math

import pytest

from smopd.rewards.rlla import accuracy_reward, format_reward
from smopd.worlds import toy_tools, toy_world

MANY = 20_000


def request_of(row):
    return row["prompt"].split("\n")[1]


def standard_errors(measured, rate, n):
    return abs(measured - rate) / math.sqrt(rate * (1 - rate) / n)


@pytest.fixture(scope="module")
def sloppy():
    return toy_world.demonstrations(MANY, seed=5, format_rate=0.02)


def test_prompts_depend_on_seed_and_split_alone():
    again = toy_world.prompts(50, seed=3)
    assert toy_world.prompts(50, seed=3) == again
    assert toy_world.prompts(20, seed=3) == again[:20]
    assert toy_world.prompts(50, seed=4) != again


def test_held_out_requests_are_in_no_training_prompt():
    held_out = {request_of(row) for row in toy_world.prompts(2000, seed=0, split="heldout")}
    train = {request_of(row) for row in toy_world.prompts(5000, seed=0)}
    imitated = {request_of(row) for row in toy_world.demonstrations(5000, seed=0)}
    assert len(held_out) > 200
    assert held_out.isdisjoint(train | imitated)


def test_ground_truths_score_full_marks():
    rows = toy_world.prompts(500, seed=1) + toy_world.prompts(500, seed=1, split="heldout")
    prompts = [row["prompt"] for row in rows]
    truths = [row["ground_truth"] for row in rows]
    assert accuracy_reward(prompts, truths, ground_truth=truths) == [3.0] * 1000
    assert format_reward(prompts, truths, ground_truth=truths) == [1.0] * 1000


def test_prompts_offer_the_true_tool_among_two_to_four():
    offered_counts, asked = set(), {}
    for row in toy_world.prompts(3000, seed=2):
        signatures = [part.rstrip(")").split("(") for part in row["prompt"].split("\n")[0].split("; ")]
        offered = {name: parameters.split(", ") for name, parameters in signatures}
        call = json.loads(row["ground_truth"].split("\n")[2])
        assert offered[call["name"]] == list(call["parameters"])
        offered_counts.add(len(offered))
        words = [word for word in request_of(row).rstrip("?").split() if not word.isdigit()]
        asked.setdefault(call["name"], set()).add(words[0])
        for value in call["parameters"].values():
            assert str(value) in request_of(row).replace("?", "").split()
    assert offered_counts == {2, 3, 4}
    assert set(asked) == set(toy_tools.TOOLS)
    assert len(toy_tools.TOOLS) >= 12
    assert all(len(tool.requests) >= 3 for tool in toy_tools.TOOLS.values())


def test_exact_format_has_the_stated_rate(sloppy):
    texts = [row["completion"] for row in sloppy]
    passes = sum(format_reward(texts, texts, ground_truth=[row["ground_truth"] for row in sloppy]))
    assert standard_errors(passes / MANY, 0.02, MANY) < 4


@pytest.mark.parametrize("rate", [0.0, 0.0003, 0.1, 0.512])
def test_format_rates_multiply_to_the_base_rate(rate):
    rates = toy_world.format_rates(rate)
    assert rates.exact == pytest.approx(rate)
    assert rates.no_prefix == rates.call_on_own_line == rates.no_trailer == 0.8


def test_systematic_errors_leave_room_above_the_greedy_call():
    """Greedy decoding makes each misnaming and quoting that most demonstrations make, and no other error."""
    completions, truths = [], []
    for row in toy_world.prompts(2000, seed=9, split="heldout"):
        call = json.loads(row["ground_truth"].split("\n")[2])
        greedy = {}
        for name, value in call["parameters"].items():
            parameter = toy_tools.PARAMETERS[name]
            shown = parameter.alias if parameter.alias_rate > 0.5 else name
            greedy[shown] = str(value) if parameter.quoted_rate > 0.5 else value
        call["parameters"] = greedy
        completions.append(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
        truths.append(row["ground_truth"])
    scores = accuracy_reward(completions, completions, ground_truth=truths)
    assert 0.65 < sum(scores) / len(scores) < 0.9


def test_without_noise_every_call_is_right():
    rows = toy_world.demonstrations(500, seed=1, noise=0.0)
    texts = [row["completion"] for row in rows]
    assert set(accuracy_reward(texts, texts, ground_truth=[row["ground_truth"] for row in rows])) == {3.0}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: toy_world.prompts(0, 1), "n is 0, expected at least 1"),
        (lambda: toy_world.prompts(1, 1, split="test"), "split is 'test', expected one of train, heldout"),
        (lambda: toy_world.demonstrations(1, 1, format_rate=0.6), "format_rate is 0.6, expected 0 to 0.512"),
        (lambda: toy_world.demonstrations(1, 1, noise=2.0), "noise is 2.0, expected 0 to 1"),
    ],
)
def test_arguments_out_of_range_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
