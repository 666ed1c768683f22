"""Token by token: whose entries the target holds, and what is written of each token."""

from __future__ import annotations

import pytest
import torch

from smopd.config.settings import Opd
from smopd.engine.types import TeacherTopK
from smopd.objective import Target
from smopd.ops import TopK
from smopd.record.token_view import SHOWN, target_shares, token_records


def some(
    n: int = 40, teachers: int = 3, kappa: int = 6, vocabulary: int = 11
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids_NMS and logps_NMS with many ids in common and some empty slots."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, teachers, vocabulary, generator=generator) * 2
    logps, ids = logits.log_softmax(-1).topk(kappa)
    logps[torch.rand(logps.shape, generator=generator) < 0.1] = -torch.inf
    return ids.int(), logps


def test_pooled_keeps_the_largest_and_merged_joins_equal_ids():
    ids = torch.tensor([[[1, 2], [2, 3]]])
    logps = torch.tensor([[[0.5, 0.3], [0.4, 0.1]]]).log()
    half = torch.tensor([0.5, 0.5]).log()
    assert target_shares(logps, ids, half, 2, False).tolist()[0] == pytest.approx([5 / 9, 4 / 9])
    # merged: id 2 has 0.35, id 1 has 0.25
    assert target_shares(logps, ids, half, 2, True).tolist()[0] == pytest.approx([0.8 / 1.2, 0.4 / 1.2])


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_records_are_of_the_response_asked_for():
    ids_NMS, logps_NMS = some()
    log_alpha = torch.randn(40, 3).log_softmax(-1)
    target = Target(
        TeacherTopK(ids_NMS, logps_NMS, torch.zeros(40, 3)), log_alpha, torch.zeros(3), torch.ones(3)
    )
    student = TopK(torch.arange(200).view(40, 5).int() % 26, torch.linspace(-9, -1, 200).view(40, 5).flip(-1))
    opd = Opd(kappa=6, target="merged")
    records = token_records(Letters(), torch.tensor([3, 4, 5]), target, opd, student, slice(10, 13))
    assert [record["text"] for record in records] == ["d", "e", "f"]
    shares = target_shares(logps_NMS, ids_NMS, log_alpha, 6, True)[10:13]
    assert [record["shares"] for record in records] == [[round(x, 3) for x in row] for row in shares.tolist()]
    for t, record in enumerate(records):
        assert len(record["teachers"]) == 3
        said = logps_NMS[10 + t, 1, :SHOWN]
        assert [value for _, value in record["teachers"][1]] == pytest.approx(
            [p for p in said.exp().tolist() if p > 0], abs=1e-4
        )
        assert [text for text, _ in record["student"]] == [
            chr(97 + i) for i in student.ids_NS[10 + t].tolist()
        ]
