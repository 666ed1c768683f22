"""The token view: shares of the teachers, and the record of a token."""

from __future__ import annotations

import pytest
import torch

from smopd.config.settings import Opd
from smopd.engine.types import TeacherTopK
from smopd.objective import Target
from smopd.ops import Mixture, TopK
from smopd.record.token_view import target_shares, token_records


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_pooled_keeps_the_largest_and_merged_joins_equal_ids() -> None:
    ids = torch.tensor([[[1, 2], [2, 3]]])
    logps = torch.tensor([[[0.5, 0.3], [0.4, 0.1]]]).log()
    half = torch.tensor([0.5, 0.5]).log()
    assert target_shares(logps, ids, half, 2, False).tolist()[0] == pytest.approx([5 / 9, 4 / 9])
    # merged: id 2 has 0.35, id 1 has 0.25
    assert target_shares(logps, ids, half, 2, True).tolist()[0] == pytest.approx([0.8 / 1.2, 0.4 / 1.2])


def test_a_record_is_of_the_token_asked_for() -> None:
    ids_NMS = torch.tensor([[[9, 9], [9, 9]], [[1, 2], [2, 3]]])
    logps_NMS = torch.tensor([[[0.9, 0.1], [0.9, 0.1]], [[0.5, 0.3], [0.4, 0.0]]]).log()
    topk = TeacherTopK(ids_NMS, logps_NMS, torch.zeros(2, 2))
    log_alpha_NM = torch.tensor([[0.9, 0.1], [0.5, 0.5]]).log()
    target = Target(topk, log_alpha_NM, torch.zeros(2), torch.ones(2))
    student = TopK(torch.tensor([[9, 9], [4, 5]]), torch.tensor([[0.9, 0.1], [0.75, 0.25]]).log())
    opd = Opd(kappa=2, target="merged")
    (record,) = token_records(Letters(), torch.tensor([1]), target, opd, student, slice(1, 2))
    assert record == {
        "text": "b",
        "shares": [0.667, 0.333],
        "teachers": [[["b", 0.5], ["c", 0.3]], [["c", 0.4]]],  # without the empty slot
        "student": [["e", 0.75], ["f", 0.25]],
    }


def test_of_a_product_a_record_has_each_change() -> None:
    ids, logps = torch.tensor([[[1, 2], [2, 1], [2, 3]]]), torch.full((1, 3, 2), 0.5).log()
    topk = TeacherTopK(ids, logps, torch.tensor([[-0.5, -3.0, -1.0]]))
    product = Mixture(ids[:, 0].int(), logps[:, 0], torch.ones(1))
    target = Target(topk, torch.full((2,), 0.5).log(), torch.zeros(2), torch.ones(2), product)
    student = TopK(torch.tensor([[4, 5]]), torch.tensor([[-0.1, -3.0]]))
    (record,) = token_records(Letters(), torch.tensor([1]), target, Opd(kappa=2), student, slice(0, 1))
    assert record["changes"] == [0.5, -2.0] and "shares" not in record
    assert record["reference"] == [["c", 0.5], ["d", 0.5]] and len(record["teachers"]) == 2
