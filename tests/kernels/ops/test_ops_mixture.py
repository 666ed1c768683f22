"""teacher_mixture as the paper has it: Equation 5, and what pooling does with teachers that agree."""

from __future__ import annotations

import math

import pytest
import torch

from smopd.ops import teacher_mixture
from tests.kernels import float64


def test_merged_mixture_with_the_full_support_is_equation_5() -> None:
    torch.manual_seed(0)
    p = torch.randn(3, 2, 11, dtype=torch.float64).softmax(-1)
    ids = torch.arange(11).expand(3, 2, 11)
    alpha = torch.tensor([0.3, 0.7], dtype=torch.float64)
    out = teacher_mixture(ids, p.log(), alpha.log(), 11, merge=True)
    exact = (alpha[None, :, None] * p).sum(1)
    torch.testing.assert_close(exact.gather(1, out.ids_NS.long()), out.logps_NS.exp(), rtol=1e-14, atol=0)
    torch.testing.assert_close(out.mass_N, torch.ones(3, dtype=torch.float64))


def test_agreeing_teachers_fill_the_pool_with_repeats_unless_merged() -> None:
    ids, logps = float64.random_topk(5, 40, 16, seed=3)
    ids, logps = ids[:, None].expand(5, 2, 16), logps[:, None].expand(5, 2, 16)
    log_alpha = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    pooled = teacher_mixture(ids, logps, log_alpha, 16)
    merged = teacher_mixture(ids, logps, log_alpha, 16, merge=True)
    assert all(len(set(row.tolist())) == 8 for row in pooled.ids_NS)
    assert torch.equal(merged.ids_NS.long(), ids[:, 0])
    torch.testing.assert_close(merged.logps_NS, logps[:, 0])


def test_merging_keeps_tiny_probabilities() -> None:
    ids = torch.tensor([[[1, 2], [1, 2]]])
    logps = torch.tensor([[[-0.1, -300.0], [-0.2, -300.0]]])
    out = teacher_mixture(ids, logps, torch.zeros(2), 2, merge=True)
    assert out.logps_NS[0, 1].item() == pytest.approx(-300.0 + math.log(2.0), rel=1e-6)
