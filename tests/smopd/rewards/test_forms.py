"""Rewards in published forms: every argument by name, and what is missing is named before the first call."""

import asyncio
import inspect

import pytest

from smopd.rewards.forms import BadSignature, RewardFunction

CHAT = [{"role": "user", "content": "2+2?"}]
PROMPTS, COMPLETIONS = [CHAT, "2+3?"], ["four", "5"]
COLUMNS = {"answer": ["4", "5"], "source": ["a", "b"]}


def ours(prompts, completions, *, answer, **columns):
    return [[*row, sorted(columns)] for row in zip(prompts, completions, answer, strict=True)]


def swapped(completions, prompts, **kwargs):
    return [completions, prompts, sorted(kwargs)]


def answered(completions, answer, bonus=0):
    return [completions, answer, bonus]


def demo(prompts, completions, answer, **kwargs):
    return [completion[0]["content"] == right for completion, right in zip(completions, answer, strict=True)]


def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):
    return {"score": scale * (solution_str == ground_truth), "acc": 1, "source": data_source}


async def compute_async(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return float(solution_str == ground_truth)


def stepwise(completions, training_step):
    return [0.0] * len(completions)


def positional(prompts, completions, /):
    return [0.0] * len(completions)


def get_overlong(limit, *, cache=1):
    return lambda completion_ids, **kwargs: [float(len(ids) > limit - cache) for ids in completion_ids]


class Suffix:
    def __init__(self, end="4", **options):
        self.end = end

    def __call__(self, completions, **kwargs):
        return [completion.endswith(self.end) for completion in completions]


def compute_with_ids(solution_str, ground_truth, completion_ids, prompts, answer):
    return len(completion_ids) + (solution_str == answer) + isinstance(prompts, list)


def of_one(completion, answer, prompt):
    return float(completion[-1]["content"] == answer) + (prompt is not None)


def compute_parts(solution_str, ground_truth, step=0):
    return float(solution_str == ground_truth), 1.0, step


def compute_calls(solution_str, ground_truth, extra_info):
    extra_info["calls"] = extra_info.get("calls", 0) + 1
    return extra_info["calls"]


def truthful(prompts, completions, ground_truth):
    return ground_truth


def spread(completions, *rest, **kwargs):
    return [len(rest)] * len(completions)


async def get_async(limit=3):
    return spread


def get_number(value=1):
    return value


def load(function, kwargs=None, completions=None):
    module = "builtins" if function is max else __name__
    return RewardFunction.load(f"{module}:{function.__name__}", kwargs or {}, completions)


def call(function, kwargs=None, completions=None, columns=COLUMNS):
    loaded = load(function, kwargs, completions)
    loaded.require_columns(columns)
    return loaded(PROMPTS, COMPLETIONS, columns)


def test_arguments_go_by_name_and_completions_to_a_chat_as_trl_passes_them():
    in_messages = [[{"role": "assistant", "content": "four"}], "5"]
    assert call(ours) == [[CHAT, "four", "4", ["source"]], ["2+3?", "5", "5", ["source"]]]
    assert call(swapped) == [in_messages, PROMPTS, ["answer", "source"]]
    assert call(answered, {"bonus": 2}) == [in_messages, ["4", "5"], 2]
    assert call(answered, completions="text")[0] == COMPLETIONS
    assert call(answered, {"answer": "x"})[1] == "x", "kwargs override columns"
    with pytest.raises(TypeError, match="set `completions: messages`"):
        call(demo)
    loaded = load(demo, completions="messages")
    assert loaded([CHAT] * 2, COMPLETIONS, {"answer": ["4", "5"]}) == [False, True]


def test_a_factory_is_called_once_with_the_kwargs_and_returns_the_reward():
    ids = {"completion_ids": [[1, 2, 3], [1]], "cache": [9, 9]}
    assert call(get_overlong, {"limit": 3}, columns=ids) == [1, 0]
    assert call(get_overlong, {"limit": 3, "cache": 0}, columns=ids) == [0, 0]
    assert call(Suffix, {"end": "5"}, "text") == [False, True]


def test_verl_scores_one_response_at_a_time():
    truths = {"data_source": ["a", "b"], "reward_model": [{"ground_truth": "4"}, {"ground_truth": "5"}]}
    assert call(compute_score, columns=truths) == [0, 1]
    assert call(compute_score, {"scale": 3}, columns={**truths, "ground_truth": ["four", "x"]}) == [3, 0]
    result = call(compute_async, columns=truths)
    assert inspect.isawaitable(result) and asyncio.run(result) == [0.0, 1.0]
    ids = {"completion_ids": [[1, 2], [1]], "ground_truth": ["", ""], "answer": ["", "5"]}
    assert call(compute_with_ids, columns=ids) == [3, 2], "any column, and what TRL passes"
    assert call(of_one, columns={"answer": ["four", "4"]}) == [2, 1], "as verifiers' functions of a rubric"
    assert call(compute_parts, columns=truths) == [0, 1], "the sum, then its parts"
    assert call(compute_calls, columns=truths) == [1, 1], "each response has an extra_info of its own"
    assert call(spread) == [0, 0]
    assert call(truthful, columns=truths) == ["4", "5"], "whatever the form"


@pytest.mark.parametrize(
    ("function", "kwargs", "message"),
    [
        (answered, {}, "takes 'answer', which is not a column of the data; there are question"),
        (compute_score, {}, "takes 'data_source', which is not a column"),
        (answered, {"answer": 1, "bonsu": 2}, "cannot be called: .* unexpected keyword argument 'bonsu'"),
        (stepwise, {}, "takes 'training_step' without a default"),
        (positional, {}, "positional.only"),
        (get_overlong, {}, "takes none of completions, .*, and is not a factory .* argument: 'limit'"),
        (get_overlong, {"limit": 3, "cash": 1}, "unexpected keyword argument 'cash'"),
        (get_async, {}, r"get_async\(limit=3\) .* and is not a reward: it is a factory, which must not be"),
        (max, {}, "builtins:max has no signature, expected a function written in Python"),
        (get_number, {}, "get_number.*, and is not a factory of a function that does: it returned int"),
        (get_number, {"value": get_number}, r"nor does the function that it returned: \(value=1\)"),
    ],
)
def test_an_argument_that_is_no_column_is_named(function, kwargs, message):
    with pytest.raises(BadSignature, match=message):
        load(function, kwargs).require_columns(["question"])
