"""The safety suite: its prompts, what becomes of two scorers' values, the paper's rows, and its options."""

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from smopd.evals import safety
from smopd.evals.safety import PreferenceOptions, Safety, SafetyEvaluation
from smopd.evals.suite import Item
from smopd.rewards.preference_model import preference_reward
from tests.smopd.recipes import evaluated, write_lines
from tests.smopd.rewards.tiny_preference import byte_tokenizer, save

GROUPS = ("hh", "hh", "pku", "alpaca")
RESPONSES = ("a", "bb", "ccc", "dddd")


def items(groups=GROUPS):
    asked = [({"role": "user", "content": f"question {i}"},) for i in range(len(groups))]
    return [Item(f"{group}/{i}", group, asked[i]) for i, group in enumerate(groups)]


def lengths(prompts, responses):
    return [float(len(response)) for response in responses]


def tens(prompts, responses):
    return [10.0 * len(response) for response in responses]


def write_data(folder: Path, **rows):
    folder.mkdir(exist_ok=True)
    for group, file in safety.FILES.items():
        prompts = rows.get(group, [{"prompt": [{"role": "user", "content": f"about {group}"}]}])
        with gzip.open(folder / file, "wt") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in prompts)
    return folder


def test_the_real_prompts(data_set):
    found = safety.load_safety_items(data_set("safe"))
    assert Counter(item.group for item in found) == {"hh": 8520, "pku": 8211, "alpaca": 512}  # the paper's
    assert len({item.key for item in found}) == len(found)
    assert {item.messages[-1]["role"] for item in found} == {"user"}


def test_means_of_means():
    suite = Safety(items(), lengths, tens)
    scores = suite.score(RESPONSES)
    assert scores[1] == {"useful": 2.0, "harmless": 20.0}
    summary = suite.summary(GROUPS, scores)
    assert [summary[f"hh_{name}"] for name in ("useful", "harmless", "avg")] == [1.5, 15.0, 8.25]
    assert [summary[f"{group}_avg"] for group in ("pku", "alpaca")] == [16.5, 22.0]
    assert summary["overall"] == pytest.approx((8.25 + 16.5 + 22.0) / 3)
    assert (summary["useful"], summary["harmless"]) == (8.5 / 3, 85 / 3)
    assert summary["unscorable"] == 0 and suite.truths() is None
    assert {column.key for column in suite.columns} <= summary.keys()
    partial = suite.summary(GROUPS[:2], scores[:2])
    assert (partial["hh_avg"], partial["pku_avg"], partial["overall"]) == (8.25, None, None)


def test_absent_scores_are_left_out_and_counted():
    def gaps(prompts, responses):
        return [None, 2.0, float("nan"), 4.0]

    suite = Safety(items(), gaps, tens)
    scores = suite.score(RESPONSES)
    assert [score["useful"] for score in scores] == [None, 2.0, None, 4.0]
    summary = suite.summary(GROUPS, scores)
    assert (summary["hh_useful"], summary["hh_harmless"], summary["unscorable"]) == (2.0, 15.0, 2)
    assert summary["pku_useful"] is summary["pku_avg"] is summary["overall"] is None
    options = SafetyEvaluation(helpful=PreferenceOptions("a/b"), harmless=PreferenceOptions("a/c"))
    assert options.notes(suite, summary) == ["2 scores are missing and left out of the means"]


def test_a_bad_row_is_named(tmp_path):
    good, answered = ({"prompt": [{"role": role, "content": "p"}]} for role in ("user", "assistant"))
    for row, said in (({"prompt": "p"}, "prompt is a text, exp"), (answered, "a chat that ends with")):
        data = write_data(tmp_path / "safe", pku=[good, row])
        with pytest.raises(ValueError, match=rf"pku_saferlhf_test.jsonl.gz: row 1:? .*{said}"):
            safety.load_safety_items(data)


def test_two_preference_models_score_responses(tmp_path):
    for seed, name in enumerate(("rm", "cm")):
        save(tmp_path / name, byte_tokenizer(), seed)
    data, responses = write_data(tmp_path / "safe"), ["Yes.", "No, never.", "Perhaps"]
    given = write_lines(tmp_path / "given.jsonl", [{"response": text} for text in responses])
    arguments = ["--helpful.model", tmp_path / "rm", "--harmless.model", tmp_path / "cm"]
    arguments += ["--harmless.sign", "-1", "--max-tokens", "256", "--data", data, "--responses", given]
    result, scores = evaluated("safety", tmp_path, *arguments)
    chats = [item.messages for item in safety.load_safety_items(data)]
    for name, model, sign in (("useful", "rm", 1), ("harmless", "cm", -1)):
        own = preference_reward(chats, responses, model=str(tmp_path / model), max_tokens=256)
        assert [score[name] for score in scores] == [sign * value for value in own]
        assert result[name] == pytest.approx(sign * sum(own) / 3)
    assert result["overall"] == pytest.approx((result["useful"] + result["harmless"]) / 2)
    assert result["preference_models"]["harmless"]["sign"] == -1
