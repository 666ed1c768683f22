"""teacher_mixture against all pairs of candidates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.harness import objective
from smopd.ops import teacher_mixture
from tests.kernels import float64


def check_against_oracle(ids, logps, log_alpha, kappa: int, merge: bool) -> None:
    out = teacher_mixture(ids, logps, log_alpha, kappa, merge=merge)
    rows = float64.as_rows(*objective.mixture(ids, logps, log_alpha, kappa, merge))
    assert out.ids_NS.shape == out.logps_NS.shape == (ids.shape[0], kappa)
    assert out.ids_NS.dtype == torch.int32
    for got_ids, got_logps, mass, row in zip(out.ids_NS, out.logps_NS, out.mass_N, rows, strict=True):
        n_live = len(row)
        assert got_logps.tolist() == pytest.approx(
            [logp for _, logp in row] + [-math.inf] * (kappa - n_live), abs=1e-12
        )
        assert got_ids[n_live:].tolist() == [0] * (kappa - n_live)
        assert float(mass) == pytest.approx(sum(math.exp(logp) for _, logp in row), abs=1e-12)
        # Ids agree as sets of (id, value): two merged values may differ by rounding where they tie.
        got = sorted(
            (token, round(logp, 9)) for token, logp in zip(got_ids.tolist(), got_logps.tolist(), strict=True)
        )
        want = sorted([(token, round(logp, 9)) for token, logp in row] + [(0, -math.inf)] * (kappa - n_live))
        got_values = [value for _, value in got]
        if len(set(got_values)) == len(got_values):
            assert [token for token, _ in got] == [token for token, _ in want]


@st.composite
def teachers(draw):
    n_rows, n_teachers, n_support = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(0, 6))
    count = n_rows * n_teachers * n_support
    ids = draw(st.lists(st.integers(0, 7), min_size=count, max_size=count))
    value = st.one_of(st.just(-math.inf), st.floats(-200, 0), st.sampled_from([-1.0, -2.0]))
    logps = draw(st.lists(value, min_size=count, max_size=count))
    shape = (n_rows, n_teachers, n_support)
    alpha = draw(
        st.lists(st.one_of(st.just(-math.inf), st.floats(-3, 0)), min_size=n_teachers, max_size=n_teachers)
    )
    return (
        torch.tensor(ids, dtype=torch.int64).reshape(shape),
        torch.tensor(logps, dtype=torch.float64).reshape(shape),
        torch.tensor(alpha, dtype=torch.float64),
    )


@settings(max_examples=200, deadline=None)
@given(teachers(), st.integers(0, 30), st.booleans())
def test_any_mixture_equals_the_dict(case, kappa: int, merge: bool) -> None:
    check_against_oracle(*case, kappa, merge)


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


def test_merged_ties_go_to_the_lower_id_and_pooled_ties_to_the_lower_teacher() -> None:
    ids = torch.tensor([[[9, 3], [5, 1]]])
    logps = torch.full((1, 2, 2), -1.5)
    assert teacher_mixture(ids, logps, torch.zeros(2), 3, merge=True).ids_NS.tolist() == [[1, 3, 5]]
    assert teacher_mixture(ids, logps, torch.zeros(2), 3).ids_NS.tolist() == [[9, 3, 5]]


@pytest.mark.parametrize("shape", [(2,), (1, 2), (4, 1), (4, 2), (1,), ()], ids=str)
def test_log_alpha_broadcasts(shape: tuple[int, ...]) -> None:
    ids, logps = float64.random_teachers(4, 2, 30, 5, seed=1)
    log_alpha = torch.rand(shape, dtype=torch.float64).log()
    check_against_oracle(ids, logps, log_alpha, 6, True)


def test_empty_slots_may_hold_any_id() -> None:
    ids = torch.tensor([[[-1, 4]]])
    logps = torch.tensor([[[-torch.inf, -0.5]]])
    for merge in (False, True):
        out = teacher_mixture(ids, logps, torch.zeros(1), 3, merge=merge)
        assert out.ids_NS.tolist() == [[4, 0, 0]]
        assert out.logps_NS.tolist() == [[-0.5, -torch.inf, -torch.inf]]


def test_low_precision_inputs_give_fp32() -> None:
    ids, logps = float64.random_teachers(2, 2, 30, 5, seed=1)
    assert teacher_mixture(ids, logps.bfloat16(), torch.zeros(2), 4).logps_NS.dtype == torch.float32


def test_no_rows() -> None:
    out = teacher_mixture(torch.zeros(0, 2, 3, dtype=torch.int32), torch.zeros(0, 2, 3), torch.zeros(2), 4)
    assert out.ids_NS.shape == (0, 4) and out.mass_N.shape == (0,)
