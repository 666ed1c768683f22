"""The RLLA rewards: every rule of format and accuracy as a case, and hostile text."""

import json

import pytest

from smopd.rewards.rlla import MAX_BLOCK_CHARS, accuracy_reward, extract_response, format_reward

CALL = '{"name": "find", "parameters": {"city": "Oslo", "days": 3}}'
TOOL_TRUTH = f"<think> t </think>\n<tool_call>\n{CALL}\n</tool_call>"
RESPONSE_TRUTH = "<think> t </think>\n<response> r </response>"
BOTH_TRUTH = TOOL_TRUTH + "\n<response> r </response>"
NEITHER_TRUTH = "<think> t </think>"


def accuracy_of(response: str, truth: str, **kwargs) -> float:
    return accuracy_reward(["q"], [response], ground_truth=[truth], other=[1], **kwargs)[0]


def block(*calls: object) -> str:
    lines = [call if isinstance(call, str) else json.dumps(call) for call in calls]
    return "<think> t </think>\n<tool_call>\n" + "\n".join(lines) + "\n</tool_call>"


def call(name: str, **parameters: object) -> dict:
    return {"name": name, "parameters": parameters}


CALLS, THINK = "<tool_call>\n{}\n</tool_call>", "<think> a </think>\n"
FORMS = {  # truth -> what passes, and what fails
    TOOL_TRUTH: (
        [
            *("<think></think>\n<tool_call>\nno json\n</tool_call>", f"<think> a </think> b {THINK}{CALLS}"),
            "<think> a\nb </think>\n<tool_call>\n{}\n\n{}\n</tool_call>",
            f"<think> a <response> b </response> </think>\n{CALLS}",
        ],
        [
            *("", CALLS, f"{THINK}\n{CALLS}", f"{THINK}<tool_call>{{}}</tool_call>", RESPONSE_TRUTH),
            *(f"{THINK}<tool_call>\n</tool_call>", f"Sure! {THINK}{CALLS}", f"{THINK}{CALLS} Done."),
            *(f"{THINK}{CALLS}\n{CALLS}", f"<think> <tool_call> </think>\n{CALLS}", BOTH_TRUTH),
            *(f"{THINK}<tool_call>\n{{}}", f"<THINK> a </THINK>\n{CALLS}"),
        ],
    ),
    RESPONSE_TRUTH: (
        [f"{THINK}<response></response>", f"{THINK}<response> <tool_call> </response>"],
        [
            *(f"{THINK}<response></response>.", f"{THINK}<response></response>\n<response></response>"),
            *(TOOL_TRUTH, BOTH_TRUTH),
        ],
    ),
    BOTH_TRUTH: (
        [],
        [
            *(RESPONSE_TRUTH, TOOL_TRUTH, f"{THINK}<response></response>\n{CALLS}"),
            BOTH_TRUTH.replace("\n<response>", "<response>"),
        ],
    ),
    NEITHER_TRUTH: (["<think> a </think> b </think>"], ["<think> a </think> b"]),
}


@pytest.mark.parametrize(("truth", "forms"), FORMS.items(), ids=["tool", "response", "both", "neither"])
def test_the_format_is_that_of_the_truth(truth, forms):
    passes, fails = [*forms[0], truth, f"\n {truth} \n"], forms[1]
    responses = [*passes, *fails]
    found = format_reward(responses, responses, ground_truth=[truth] * len(responses), other=responses)
    assert found == [1.0] * len(passes) + [0.0] * len(fails)


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
        ([A, B], [A], reward(1 / 2 + 3, 6)),
        ([A], [A, A], reward(1 / 2 + 3, 4)),
        ([A, A], [A], reward(1 / 2 + 3, 7)),
        ([A], [call("c", x=1, y="u")], -3.0),
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
        # A call without parameters spoils only what it is compared with.
        ([A], [{"name": "a"}], -3.0),
        ([A], [A, {"name": "b"}], reward(1 / 2 + 3, 4)),
        # Of a duplicate key the last value counts.
        ([call("a", x=1)], ['{"name": "a", "parameters": {"x": 2, "x": 1}}'], 3.0),
    ],
)
def test_accuracy_by_hand(truth, predicted, expected):
    assert accuracy_of(block(*predicted), block(*truth)) == pytest.approx(expected, abs=1e-12)


def test_only_the_first_block_is_read():
    good, bad = block(A), block(call("c"))
    assert accuracy_of(good + bad, block(A)) == 3.0
    assert accuracy_of(bad + good, block(A)) == -3.0


def test_accuracy_is_0_where_no_call_is_wanted():
    assert [accuracy_of(said, RESPONSE_TRUTH) for said in ("", TOOL_TRUTH, "<tool_call>[[")] == [0.0] * 3


UNREADABLE = [
    *("", CALL, f"<tool_call>\n{CALL}", f"{CALL}\n</tool_call>", f"<tool_call>\n[{CALL}]\n</tool_call>"),
    *(f"<tool_call>\n{CALL}\n{line}\n{CALL}\n</tool_call>" for line in ("", "and")),
    *map(block, ("{}", '{"name": ["find"], "parameters": {}}')),
    *(block(f'{{"name": "find", "parameters": {value}}}') for value in ('["Oslo"]', "null")),
]
HOSTILE = [  # tests/fuzz.py has more
    "[" * 60_000,
    '{"name": "find", "parameters": {"city": ' + "9" * 60_000 + "}}",
    '{"name": "find", "parameters": {"city": "' + "x" * MAX_BLOCK_CHARS + '"}}',
]


@pytest.mark.parametrize("response", [*UNREADABLE, *map(block, HOSTILE)])
def test_what_cannot_be_read_scores_lowest(response):
    assert accuracy_of(response, TOOL_TRUTH) == -3.0
    assert accuracy_of(response, TOOL_TRUTH, score_range=(-1.0, 1.0)) == -1.0


def test_mistakes_in_the_data_are_named():
    for truths, options, message in (
        ([], {}, "ground_truth has 0 entries, expected 1"),
        ([None], {}, r"ground_truth\[0\] is NoneType, expected str"),
        ([TOOL_TRUTH], {"score_range": (1, 1)}, r"score_range is \(1, 1\), expected \(lo, hi\) with lo < hi"),
        ([f"<tool_call>\n{CALL}"], {}, "malformed ground_truth"),
        ([block({"name": "find", "parameters": [1]})], {}, "malformed ground_truth"),
    ):
        with pytest.raises(ValueError, match=message):
            accuracy_reward(["q"], ["a"], ground_truth=truths, **options)


def test_extract_response():
    header = "<|start_header_id|>{}<|end_header_id|>\n\n{}<|eot_id|>".format
    for text in (
        "hello",
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>\n<|endoftext|>",
        "<|im_start|>assistant\nfirst<|im_end|>\n<|im_start|>assistant\n hello <|im_end|>",
        header("user", "q") + header("assistant", "hello"),
    ):
        assert extract_response(text) == "hello"
