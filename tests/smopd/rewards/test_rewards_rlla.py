"""The RLLA rewards: every rule of format and accuracy as a case, hostile text, the real items' truths."""

import json

import pytest
from hypothesis import strategies as st

from smopd.evals import rlla as rlla_items
from smopd.rewards.rlla import (
    MAX_BLOCK_CHARS,
    accuracy_reward,
    extract_response,
    format_reward,
    length_reward,
)

CALL = '{"name": "find", "parameters": {"city": "Oslo", "days": 3}}'
TOOL_TRUTH = f"<think> t </think>\n<tool_call>\n{CALL}\n</tool_call>"
RESPONSE_TRUTH = "<think> t </think>\n<response> r </response>"
BOTH_TRUTH = TOOL_TRUTH + "\n<response> r </response>"
NEITHER_TRUTH = "<think> t </think>"


def format_of(response: str, truth: str) -> float:
    return format_reward(["q"], [response], ground_truth=[truth])[0]


def accuracy_of(response: str, truth: str, **kwargs) -> float:
    return accuracy_reward(["q"], [response], ground_truth=[truth], **kwargs)[0]


def block(*calls: object) -> str:
    lines = [call if isinstance(call, str) else json.dumps(call) for call in calls]
    return "<think> t </think>\n<tool_call>\n" + "\n".join(lines) + "\n</tool_call>"


def call(name: str, **parameters: object) -> dict:
    return {"name": name, "parameters": parameters}


@pytest.mark.parametrize("truth", [TOOL_TRUTH, RESPONSE_TRUTH, BOTH_TRUTH, NEITHER_TRUTH])
def test_a_truth_has_its_own_format(truth):
    assert format_of(truth, truth) == 1.0
    assert format_of(f"\n {truth} \n", truth) == 1.0, "the text is stripped before it is scored"


@pytest.mark.parametrize(
    "response",
    [
        "<think></think>\n<tool_call>\nno json\n</tool_call>",
        "<think> a </think> b <think> c </think>\n<tool_call>\n{}\n</tool_call>",
        "<think> a\nb </think>\n<tool_call>\n{}\n\n{}\n</tool_call>",
        "<think> a <response> b </response> </think>\n<tool_call>\n{}\n</tool_call>",
    ],
    ids=["json-is-not-read", "two-thinks", "dot-matches-newline", "response-tag-in-think"],
)
def test_tool_format_passes(response):
    assert format_of(response, TOOL_TRUTH) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "<tool_call>\n{}\n</tool_call>",
        "<think> a </think>\n\n<tool_call>\n{}\n</tool_call>",
        "<think> a </think><tool_call>\n{}\n</tool_call>",
        "<think> a </think> \n<tool_call>\n{}\n</tool_call>",
        "<think> a </think>\n<tool_call>{}</tool_call>",
        "<think> a </think>\n<tool_call> {}\n</tool_call>",
        "<think> a </think>\n<tool_call>\n</tool_call>",
        "Sure! <think> a </think>\n<tool_call>\n{}\n</tool_call>",
        "<think> a </think>\n<tool_call>\n{}\n</tool_call> Done.",
        "<think> a </think>\n<tool_call>\n{}\n</tool_call>\n<response> b </response>",
        "<think> a </think>\n<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>",
        "<think> <tool_call> </think>\n<tool_call>\n{}\n</tool_call>",
        "<think> a </think>\n<tool_call>\n{}",
        "<think> a\n<tool_call>\n{}\n</tool_call>",
        "<THINK> a </THINK>\n<tool_call>\n{}\n</tool_call>",
    ],
)
def test_tool_format_fails(response):
    assert format_of(response, TOOL_TRUTH) == 0.0


@pytest.mark.parametrize(
    "response, truth, expected",
    [
        ("<think></think>\n<response></response>", RESPONSE_TRUTH, 1.0),
        ("<think></think>\n<response> <tool_call> </response>", RESPONSE_TRUTH, 1.0),
        ("<think></think>\n\n<response></response>", RESPONSE_TRUTH, 0.0),
        ("<think></think>\n<response></response>.", RESPONSE_TRUTH, 0.0),
        ("<think></think>\n<response></response>\n<response></response>", RESPONSE_TRUTH, 0.0),
        (TOOL_TRUTH, RESPONSE_TRUTH, 0.0),
        (BOTH_TRUTH, RESPONSE_TRUTH, 0.0),
        (RESPONSE_TRUTH, TOOL_TRUTH, 0.0),
        (RESPONSE_TRUTH, BOTH_TRUTH, 0.0),
        (TOOL_TRUTH, BOTH_TRUTH, 0.0),
        ("<think></think>\n<response></response>\n<tool_call>\n{}\n</tool_call>", BOTH_TRUTH, 0.0),
        (BOTH_TRUTH.replace("\n<response>", "<response>"), BOTH_TRUTH, 0.0),
        ("<think> a </think> b </think>", NEITHER_TRUTH, 1.0),
        ("<think> a </think> b", NEITHER_TRUTH, 0.0),
    ],
)
def test_other_shapes(response, truth, expected):
    assert format_of(response, truth) == expected


@pytest.mark.parametrize("response", ["", RESPONSE_TRUTH, TOOL_TRUTH, "<tool_call>[["])
@pytest.mark.parametrize("truth", [RESPONSE_TRUTH, NEITHER_TRUTH, "plain text"])
def test_accuracy_is_0_where_no_call_is_wanted(response, truth):
    assert accuracy_of(response, truth) == 0.0


def reward(score: float, best: float) -> float:
    return 6.0 * score / best - 3.0


A, B = call("a", x=1, y="u"), call("b", z=[1, 2])  # S_max = 1 + 3 + 2 = 6


@pytest.mark.parametrize(
    "truth, predicted, expected",
    [
        ([A, B], [A, B], 3.0),
        ([A, B], [B, A], 3.0),
        ([A], [{**A, "id": 7, "arguments": {}}], 3.0),
        ([call("a")], [call("a")], 3.0),
        ([A, A], [A, A], 3.0),
        ([A, B], [A], reward(1 / 2 + 3, 6)),
        ([A], [A, B], reward(1 / 2 + 3, 4)),
        ([A], [A, A], reward(1 / 2 + 3, 4)),
        ([A, A], [A], reward(1 / 2 + 3, 7)),
        ([A], [call("c", x=1, y="u")], -3.0),
        ([A], [call("a")], reward(1 + 0, 4)),
        ([call("a")], [A], reward(1 + 0, 2)),
        ([A], [call("a", x=2, y="v")], reward(1 + 1, 4)),
        ([A], [call("a", x=1, w="u")], reward(1 + 1 / 3 + 1, 4)),
        ([A], [call("a", x=1, y="u", w=0)], reward(1 + 2 / 3 + 2, 4)),
        ([call("a", x=1)], [call("a", x=True)], 3.0),
        ([call("a", x=1)], [call("a", x=1.0)], 3.0),
        ([call("a", x=1)], [call("a", x="1")], reward(1 + 1, 3)),
        ([call("a", x={"p": [1, None]})], [call("a", x={"p": [1, None]})], 3.0),
        # The first true call takes the best prediction although the second needed it.
        ([call("a", x=1), call("a", x=1, y=2)], [call("a", x=1, y=2)], reward(1 / 2 + 1 / 2 + 1, 6)),
        # Of two equal predictions the first is taken; a score of 0 takes none.
        ([call("a", x=1), call("a", y=1)], [call("a", y=1), call("a", x=1)], 3.0),
        ([call("a", x=1), call("a", y=1)], [call("a", w=1), call("a", y=1)], reward(1 + 2, 5)),
    ],
)
def test_accuracy_by_hand(truth, predicted, expected):
    assert accuracy_of(block(*predicted), block(*truth)) == pytest.approx(expected, abs=1e-12)


def test_a_duplicate_key_counts_with_its_last_value():
    response = block('{"name": "a", "parameters": {"x": 2, "x": 1}}')
    assert accuracy_of(response, block(call("a", x=1))) == 3.0


def test_only_the_first_block_is_read():
    good, bad = block(A), block(call("c"))
    assert accuracy_of(good + bad, block(A)) == 3.0
    assert accuracy_of(bad + good, block(A)) == -3.0


def test_a_call_without_parameters_only_spoils_what_it_is_compared_with():
    assert accuracy_of(block({"name": "a"}), block(A)) == -3.0
    assert accuracy_of(block(A, {"name": "b"}), block(A)) == pytest.approx(reward(1 / 2 + 3, 4))


@pytest.mark.parametrize(
    "response",
    [
        "",
        CALL,
        f"<tool_call>\n{CALL}",
        f"{CALL}\n</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\nNone\n</tool_call>",
        "<tool_call>\n__import__('os').getcwd()\n</tool_call>",
        f"<tool_call>\n[{CALL}]\n</tool_call>",
        f"<tool_call>\n{CALL}\n\n{CALL}\n</tool_call>",
        f"<tool_call>\n{CALL} {CALL}\n</tool_call>",
        f"<tool_call>\n{CALL}\nand\n</tool_call>",
        CALL.replace('"', "'").join(["<tool_call>\n", "\n</tool_call>"]),
        block('"find"'),
        block("3"),
        block("[]"),
        block("{}"),
        block('{"name": ["find"], "parameters": {}}'),
        block('{"name": {"find": 1}, "parameters": {}}'),
        block('{"name": "find", "parameters": ["Oslo"]}'),
        block('{"name": "find", "parameters": null}'),
    ],
)
def test_what_cannot_be_read_scores_lowest(response):
    assert accuracy_of(response, TOOL_TRUTH) == -3.0
    assert accuracy_of(response, TOOL_TRUTH, score_range=(-1.0, 1.0)) == -1.0


@pytest.mark.parametrize(
    "body",
    [
        "[" * 60_000,
        '{"a":' * 12_000,
        "[" * 500 + "]" * 500,
        '{"name": "find", "parameters": ' + "[" * 400 + "]" * 400 + "}",
        '"' * 60_000,
        '\\"' * 30_000,
        '"' + "\\" * 60_000,
        '{"name": "find", "parameters": {"city": ' + "9" * 60_000 + "}}",
        '{"name": "find", "parameters": {"city": "' + "x" * MAX_BLOCK_CHARS + '"}}',
        "{}\n" * 20_000,
    ],
)
def test_hostile_json_is_refused(body):
    assert accuracy_of(f"<tool_call>\n{body}\n</tool_call>", TOOL_TRUTH) == -3.0


@pytest.mark.parametrize(
    "truth",
    [
        "<tool_call>\nnot json\n</tool_call>",
        f"<tool_call>\n{CALL}",
        "<tool_call>\n</tool_call>",
        block({"name": "find"}),
        block({"name": "find", "parameters": [1]}),
        block({"parameters": {}}),
        block("[" * 1000),
    ],
)
def test_a_malformed_truth_raises(truth):
    with pytest.raises(ValueError, match="malformed ground_truth"):
        accuracy_of(TOOL_TRUTH, truth)


@pytest.mark.parametrize("function", [format_reward, accuracy_reward])
def test_wrong_columns_raise(function):
    with pytest.raises(ValueError, match=r"ground_truth has 1 entries, expected 2"):
        function(["q", "q"], ["a", "b"], ground_truth=[TOOL_TRUTH])
    with pytest.raises(ValueError, match=r"ground_truth\[1\] is NoneType, expected str"):
        function(["q", "q"], ["a", "b"], ground_truth=[TOOL_TRUTH, None])
    assert function([], [], ground_truth=[], other=[]) == []


@pytest.mark.parametrize(
    ("truth", "predicted", "fine", "refined", "intermediate", "coarse"),
    [
        ([call("a", x=1, y=2)], [call("a", y=2, x=1)], 3.0, 3.0, 3.0, 3.0),
        ([call("a", x=1, y=2)], [call("a", x=1, y=3)], reward(3, 4), reward(3, 4), reward(1, 2), -3.0),
        # Another order of calls: equal names in another order are worth nothing to refined.
        ([call("a", x=1), call("b")], [call("b"), call("a", x=1)], 3.0, reward(3, 4), 3.0, -3.0),
        # And so are parameter names in another order.
        (
            [call("a", x=1, y=2)],
            [call("a", y=2, x=1), call("b")],
            reward(1 / 2 + 3, 4),
            reward(2, 4),
            reward(1 / 2 + 1, 2),
            -3.0,
        ),
        # A call without parameters, and one with a further key: no equal calls.
        ([call("a", x=1)], [{"name": "a"}], -3.0, -3.0, reward(1, 2), -3.0),
        ([call("a", x=1)], [{**call("a", x=1), "id": 1}], 3.0, 3.0, reward(1, 2), -3.0),
        # A prediction serves one true call alone.
        ([call("a")] * 2, [call("a")], reward(1 / 2 + 1, 3), reward(1, 3), reward(1 / 2 + 1, 3), -3.0),
    ],
)
def test_granularities_by_hand(truth, predicted, fine, refined, intermediate, coarse):
    expected = {"fine": fine, "refined": refined, "intermediate": intermediate, "coarse": coarse}
    for granularity, score in expected.items():
        got = accuracy_of(block(*predicted), block(*truth), granularity=granularity)
        assert got == pytest.approx(score, abs=1e-12), granularity
        assert accuracy_of("no call", block(*truth), granularity=granularity) == -3.0
        assert accuracy_of("no call", RESPONSE_TRUTH, granularity=granularity) == 0.0


@pytest.mark.parametrize(
    ("scale", "step", "accuracy", "format_values"),
    [
        ("fixed", 7, (-3, 3), (0, 1)),
        ("two_stage", 0, (-1, 1), (0, 1)),
        ("two_stage", 29, (-1, 1), (0, 1)),
        ("two_stage", 30, (-3, 3), (0, 0.5)),
        ("dynamic", 0, (-2, 2), (-2, 2)),
        ("dynamic", 75, (-2.5, 2.5), (-1, 1.5)),
        ("dynamic", 150, (-3, 3), (-1, 1)),
        ("dynamic", 400, (-3, 3), (-1, 1)),
        ("two_stage", None, (-3, 3), (0, 1)),
        ("dynamic", None, (-3, 3), (0, 1)),
    ],
)
def test_scales_by_step(scale, step, accuracy, format_values):
    steps = None if step is None else [step, step]
    responses = ["no call", TOOL_TRUTH]
    for function, expected in ((accuracy_reward, accuracy), (format_reward, format_values)):
        got = function(
            ["q"] * 2,
            responses,
            ground_truth=[TOOL_TRUTH] * 2,
            scale=scale,
            training_step=steps,
            other=[1, 2],
        )
        assert got == pytest.approx(list(expected), abs=1e-12)


@pytest.mark.parametrize("function", [accuracy_reward, format_reward])
def test_wrong_variants_raise(function):
    with pytest.raises(ValueError, match="scale is 'linear', expected one of fixed, two_stage, dynamic"):
        function(["q"], ["a"], ground_truth=[TOOL_TRUTH], scale="linear")
    with pytest.raises(ValueError, match="training_step has 2 entries, expected 1"):
        function(["q"], ["a"], ground_truth=[TOOL_TRUTH], training_step=[1, 1])
    with pytest.raises(ValueError, match="granularity is 'exact', expected one of fine, refined"):
        accuracy_of("a", TOOL_TRUTH, granularity="exact")


@pytest.mark.parametrize(
    ("think", "step", "growing", "expected"),
    [
        (512, None, False, 1.0),
        (256, None, False, 0.5),
        (10, None, False, 0.02),
        (0, None, False, 0.0),
        (2000, 3, False, 1.0),
        (192, 0, True, 0.5),
        (320, 105, True, 0.5),
        (448, 210, True, 0.5),
        (256, None, True, 0.5),
    ],
)
def test_length_reward(think, step, growing, expected):
    text = "<think> " + "word " * think + "</think>\n<response> many more words </response>"
    steps = None if step is None else [step]
    assert length_reward(["q"], [text], growing=growing, training_step=steps, ground_truth=["t"]) == [
        expected
    ]


@pytest.mark.parametrize(
    "text",
    [
        "hello",
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|endoftext|>",
        "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>assistant\n hello <|im_end|>",
        "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nhello<|eot_id|>",
    ],
)
def test_extract_response(text):
    assert extract_response(text) == "hello"


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from(["1", "x", 1.0]),
    st.lists(st.integers(0, 1)),
)
calls = st.lists(
    st.builds(
        lambda name, parameters: {"name": name, "parameters": parameters},
        st.sampled_from("abc"),
        st.dictionaries(st.sampled_from("xyz"), values, max_size=3),
    ),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("name", ["rlla_4k_test.parquet", "rlla_4k_test.jsonl.gz"])
def test_the_real_truths_score_as_stated(data_set, name):
    items = rlla_items.load_rlla_items(data_set(f"rlla/{name}"))
    truths = [item.truth for item in items]
    assert len(truths) == 80
    assert sum("<tool_call>" in truth for truth in truths) == 71
    suite = rlla_items.Rlla(items)
    assert suite.summary([], suite.score(truths)) == {"accuracy": 2.6625, "format_pass": 1.0, "mean": 3.6625}
