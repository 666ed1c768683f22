"""The estimators that weight rewards by their batch or group, against loops in float64; over ranks."""

import math
import statistics

import pytest
import torch
import torch.distributed as dist

from smopd.advantages import ESTIMATORS, RMS_FLOOR
from smopd.config.settings import Advantage
from tests.ranks import forks

NAN = math.nan
REWARDS = [
    [[-3.0, 0.0, 2.0], [1.0, 1.0, 2.0], [3.0, 0.0, 2.0], [2.5, 0.0, 2.0]],
    [[0.5, 0.0, 2.0], [NAN, 0.0, 2.0], [-1.0, 0.0, 2.0], [-2.0, 0.0, 2.0]],
    [[1.5, NAN, 2.0], [2.5, NAN, 2.0], [NAN, NAN, NAN], [0.0, NAN, 2.0]],
]
"""Groups of responses of three rewards: dense, rare, constant; some unscored."""
WEIGHTS = [0.5, 2.0, 1.0]
LOW = [NAN, -1.0, NAN]
NEW = ("batch_balanced", "saw", "dvao")


def column(k):
    return [row[k] for group in REWARDS for row in group if not math.isnan(row[k])]


def group_advantage(k):
    """Eq. 1 with 0 for unscored responses and level groups."""
    found = []
    for group in REWARDS:
        known = [row[k] for row in group if not math.isnan(row[k])]
        sigma = statistics.stdev(known) if len(known) > 1 else 0.0
        mean = statistics.fmean(known) if known else 0.0
        values = [mean if math.isnan(row[k]) or sigma == 0 else row[k] for row in group]
        found += [(value - mean) / (sigma + 1e-6) for value in values]
    return found


def whitened(weights):
    """Eq. 3 over the responses that a reward scored; 0 for the others."""
    rows = zip(*map(group_advantage, range(3)), strict=True)
    sums = [sum(w * a for w, a in zip(weights, row, strict=True)) for row in rows]
    scored = [not all(map(math.isnan, row)) for group in REWARDS for row in group]
    known = [value for value, counts in zip(sums, scored, strict=True) if counts]
    mean, sigma = statistics.fmean(known), statistics.stdev(known)
    return [(value - mean) / (sigma + 1e-6) * counts for value, counts in zip(sums, scored, strict=True)]


def batch_balanced():
    rms = [math.sqrt(sum(a * a for a in group_advantage(k)) / max(1, len(column(k)))) for k in range(3)]
    return whitened([w / max(r, RMS_FLOOR) for w, r in zip(WEIGHTS, rms, strict=True)])


def saw():
    spread = []
    for k in range(3):
        low = min(column(k)) if math.isnan(LOW[k]) else LOW[k]
        above = [value - low for value in column(k)]
        spread.append(statistics.stdev(above) / (abs(statistics.fmean(above)) + 1e-8))
    return whitened([3 * w * cv / (sum(spread) + 1e-8) for w, cv in zip(WEIGHTS, spread, strict=True)])


def dvao():
    found = []
    for group in REWARDS:
        known = [[row[k] for row in group if not math.isnan(row[k])] for k in range(3)]
        sigma = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in known]
        mean = [statistics.fmean(values) if values else 0.0 for values in known]
        scale = sum(w * s for w, s in zip(WEIGHTS, sigma, strict=True)) + 1e-8
        for row in group:
            scored = [k for k in range(3) if not math.isnan(row[k])]
            found.append(sum(WEIGHTS[k] * (row[k] - mean[k]) for k in scored) / scale)
    return found


def estimate(name, groups, process_group=None):
    rows = [row for g in groups for row in REWARDS[g]]
    return ESTIMATORS[name](
        torch.tensor(rows, dtype=torch.float64).reshape(-1, 3),
        torch.tensor([g for g in groups for _ in REWARDS[g]], dtype=torch.int64),
        weights_K=torch.tensor(WEIGHTS, dtype=torch.float64),
        low_K=torch.tensor(LOW, dtype=torch.float64),
        lengths_R=torch.ones(len(rows), dtype=torch.int64),
        settings=Advantage(),
        process_group=process_group,
    )


@pytest.mark.parametrize("expected", [batch_balanced, saw, dvao])
def test_equals_its_definition(expected):
    adv_R, kept_R = estimate(expected.__name__, range(3))
    assert kept_R.all()
    torch.testing.assert_close(adv_R, torch.tensor(expected(), dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_a_reward_hardly_ever_earned_counts_at_most_twenty_times():
    dense_GR, rare_GR = torch.zeros(2, 400, 8, dtype=torch.float64)
    dense_GR[1:, ::2], rare_GR[0, 0] = 1, 1  # Eq. 1: sqrt(7 / 8) from 0, and sqrt(8) apart
    adv_R, _ = ESTIMATORS["batch_balanced"](
        torch.stack([dense_GR, rare_GR], -1).flatten(0, 1),
        torch.arange(400).repeat_interleave(8),
        weights_K=torch.ones(2, dtype=torch.float64),
        lengths_R=torch.ones(3200, dtype=torch.int64),
        settings=Advantage(),
        process_group=None,
    )
    rare, dense = float(adv_R[0] - adv_R[1]), float(adv_R[8] - adv_R[9])
    rms = math.sqrt(399 / 400 * 7 / 8)  # that of the rare reward is sqrt(7 / 3200), below 0.05
    assert rare / dense == pytest.approx(math.sqrt(8) / 0.05 / (2 * math.sqrt(7 / 8) / rms), rel=1e-4)


@pytest.mark.parametrize("value", [0.7, 123456789.1])
def test_equal_rewards_of_a_group_give_no_advantage(value):
    rewards_RK = torch.full((6, 3), value, dtype=torch.float64)
    adv_R, _ = ESTIMATORS["dvao"](rewards_RK, torch.zeros(6).long(), weights_K=torch.tensor(WEIGHTS).double())
    assert adv_R.eq(0).all()


def _rank(rank, store, folder):
    """Rank 0 has two groups, rank 1 one, rank 2 none."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    groups = [(0, 2), (1,), ()][rank]
    torch.save({name: estimate(name, groups, dist.group.WORLD)[0] for name in NEW}, folder / f"{rank}.pt")
    dist.destroy_process_group()


def test_ranks_agree_with_one_process(tmp_path):
    forks(_rank, (tmp_path / "store", tmp_path), nprocs=3)
    shares = [torch.load(tmp_path / f"{rank}.pt") for rank in range(3)]
    for name in NEW:
        expected = estimate(name, (0, 2, 1))[0]
        found = torch.cat([share[name] for share in shares])
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
