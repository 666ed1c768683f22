"""The token view: the text of each token, the student's view of it, and the teachers'."""

import math
from pathlib import Path

import pytest
import torch

from smopd.engine.types import Rollout, TeacherTopK
from smopd.ops import TopK
from smopd.record.files import JsonlLog
from smopd.record.token_view import add_merged, add_teachers, texts, token_records


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


class Bytes:
    """Tokens are bytes, and the first token loses its space, as with sentencepiece."""

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace").removeprefix(" ")


def teachers(*p_M: float, entries: int = 1) -> TeacherTopK:
    """Return scores of one token, with equal top tokens of every model."""
    ids = torch.arange(entries).expand(1, len(p_M), entries)
    return TeacherTopK(ids, torch.full(ids.shape, 0.5).log(), torch.tensor([p_M]).log())


@pytest.mark.parametrize("text", ["plain words", " first space", "é and 日本語\n", "", "cut \udcff"])
def test_texts_of_tokens_join_to_the_response(text: str) -> None:
    ids = list(text.encode("utf-8", "surrogateescape"))
    found = texts(Bytes(), ids)
    assert len(found) == len(ids) and "".join(found) == Bytes().decode(ids)
    assert found[:3] == (["", "é", " "] if text.startswith("é") else found[:3])


def test_only_the_policys_tokens_have_models() -> None:
    mask = torch.tensor([False, True])
    rollout = Rollout((1,), torch.tensor([0, 1]), torch.zeros(2), 0, True, loss_mask=mask)
    student = TopK(torch.tensor([[4, 5]]), torch.tensor([[0.75, 0.0]]).log(), torch.tensor([0.2]).log())
    records = token_records(Letters(), rollout, student)
    assert records == [{"text": "a"}, {"text": "b", "p": 0.2, "student": [["e", 0.75]]}]
    add_teachers(records, Letters(), teachers(0.9, 0.3))
    assert "teachers" not in records[0]
    assert records[1]["log_ratios"] == [round(math.log(0.9 / 0.6), 3), round(math.log(0.3 / 0.6), 3)]
    assert records[1]["teachers"] == [[["a", 0.5]], [["a", 0.5]]]


def test_merged_models_are_added_once(tmp_path: Path) -> None:
    log = JsonlLog(tmp_path / "tokens.jsonl")
    for step in (1, 2):
        token = {"text": "b", "p": 0.5, "student": [["b", 0.5]]}
        ids = {"prompt_ids": [1], "response_ids": [9, step]}
        log.write({"step": step, "teachers": [], **ids, "tokens": [{"text": "the environment's"}, token]})
    asked = []

    def score(model, rollouts):
        asked.append((model, *(int(rollout.of_policy(rollout.response_ids)) for rollout in rollouts)))
        ids, half = torch.zeros(2, 1, 1, dtype=torch.int32), torch.full((2, 1, 1), 0.5).log()
        return TeacherTopK(ids, half, torch.tensor([[0.1], [0.5 if model == "one" else 0.1]]).log())

    for _ in range(2):
        add_merged(log.path, Letters(), ["one", "two"], score)
    assert asked == [("one", 1, 2), ("two", 1, 2)]
    ratios = [line["tokens"][1]["log_ratios"] for line in log.read()]
    assert ratios == [[0.0, 0.0], [0.511, -1.099]]
