"""The objective: schedule of lambda, denominators, old log-probabilities, importance weights, reverse KL."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from smopd.config.settings import Loss, Opd, Settings, merged
from smopd.engine.types import TeacherTopK
from smopd.gates import failure
from smopd.objective import (
    Objective,
    Signals,
    Target,
    opd_coef,
    teachers_rewards,
    token_weights,
)
from smopd.step.batch import Batch, positions
from tests.engine.tiny import ragged_rollouts
from tests.smopd.run.invariance_worker import SETTINGS

CPU = torch.device("cpu")


def settings(**changes) -> Settings:
    return Settings.model_validate(merged(SETTINGS, changes))


def batch_of(rollouts, updates=1, group_size=3):
    groups = len(rollouts) // group_size
    prompts = [SimpleNamespace(token_ids=rollouts[g * group_size].prompt_ids) for g in range(groups)]
    return Batch.of(prompts, positions(groups, updates, 0, 1), rollouts, group_size)


def objective(coef, **changes) -> Objective:
    return Objective(settings(**changes), coef, CPU)


def test_schedules_of_lambda():
    assert [opd_coef(Opd(coef=0.7), step, 10) for step in (0, 9)] == [0.7, 0.7]
    linear = Opd(coef=1.0, final_coef=0.2, schedule="linear", decay_steps=4)
    assert [opd_coef(linear, step, 10) for step in range(6)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = Opd(coef=1.0, schedule="cosine")
    expected = [0.5 + 0.5 * math.cos(math.pi * step / 10) for step in range(11)]
    assert [opd_coef(cosine, step, 10) for step in range(11)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", [1 / 6, 1 / 6, 1 / 6]),
        ("seq-mean-token-mean", [1 / 9, 1 / 3, 1 / 6]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_denominators(aggregation, expected):
    lengths_R = torch.tensor([3, 1, 2])
    weight_N = token_weights(Loss(aggregation=aggregation), lengths_R)
    assert weight_N.tolist() == pytest.approx(
        [w for w, n in zip(expected, [3, 1, 2], strict=True) for _ in range(n)]
    )


def test_no_response_has_no_weight_and_no_division_by_zero():
    assert token_weights(Loss(), torch.zeros(0, dtype=torch.int64)).shape == (0,)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_share_every_mini_batch_without_overlap(world_size):
    shares = [positions(11, 3, rank, world_size) for rank in range(world_size)]
    for update, expected in enumerate(positions(11, 3, 0, 1)):
        assert sorted(p for share in shares for p in share[update]) == expected
    assert sorted(p for share in shares for part in share for p in part) == list(range(11))


def test_the_first_update_needs_no_second_forward():
    one = {"loop": {"updates_per_step": 1}}
    assert not objective(1.0, **one).needs_old_logps
    assert objective(1.0).needs_old_logps
    assert objective(1.0, **one, loss={"importance_cap": 2.0}).needs_old_logps
    reverse = {"opd": {"divergence": "reverse_kl_sampled"}}
    assert objective(1.0, **one, **reverse).needs_old_logps
    assert not objective(0.0, **one, **reverse).needs_old_logps
    assert not objective(1.0, loss={"old_logps": "rollout"}).needs_old_logps


def tokens_of(changes, old_logp_N=None, target=None, updates=1, ref=None, coef=1.0):
    batch = batch_of(ragged_rollouts(0), updates=updates)
    adv_R = torch.arange(len(batch.rollouts), dtype=torch.float64)
    old = old_logp_N(batch) if old_logp_N else None
    signals = Signals(old, target(batch) if target else None, ref(batch) if ref else None)
    made = [objective(coef, **changes).loss_tokens(batch, part, adv_R, signals) for part in batch.parts]
    return batch, made


def test_every_token_carries_its_responses_advantage():
    batch, (tokens,) = tokens_of({"loop": {"updates_per_step": 1}})
    assert tokens.adv_N.tolist() == batch.response_N.float().tolist()
    assert tokens.token_ids_N.equal(torch.cat([rollout.response_ids for rollout in batch.rollouts]))
    assert tokens.old_logp_N is None
    assert float(tokens.pg_weight_N.sum()) == pytest.approx(1.0)


def test_updates_cut_the_batch_without_loss():
    batch, made = tokens_of({}, old_logp_N=lambda batch: batch.rollout_logp_N + 0.1, updates=2)
    assert torch.cat([tokens.token_ids_N for tokens in made]).equal(batch.token_ids_N)
    torch.testing.assert_close(torch.cat([tokens.old_logp_N for tokens in made]), batch.rollout_logp_N + 0.1)
    assert [float(tokens.kl_weight_N.sum()) for tokens in made] == pytest.approx([1.0, 1.0])


def test_importance_weights_are_truncated():
    changes = {"loop": {"updates_per_step": 1}, "loss": {"importance_cap": 1.5}}
    shift = torch.tensor([-0.5, 0.2, 3.0])

    def old(batch):
        return batch.rollout_logp_N + shift[torch.arange(len(batch.rollout_logp_N)) % 3]

    _, (tokens,) = tokens_of(changes, old_logp_N=old)
    weights = tokens.pg_weight_N / tokens.kl_weight_N
    expected = torch.tensor([math.exp(-0.5), math.exp(0.2), 1.5])[torch.arange(len(weights)) % 3]
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    assert tokens.old_logp_N is None, "with one update the ratio itself is 1"


@pytest.mark.parametrize("terms", ["teachers", "reference", "both"])
def test_importance_weighs_every_term_of_the_sampled_tokens(terms):
    """And only those: the forward KL and the entropy are of whole distributions."""
    shift = torch.tensor([-0.5, 0.2, 3.0])

    def old(batch):
        return batch.rollout_logp_N + shift[torch.arange(len(batch.rollout_logp_N)) % 3]

    changes = {"loop": {"updates_per_step": 1}, "loss": {"importance_cap": 1.5}}
    reference = terms != "teachers"
    if terms != "reference":
        changes["opd"] = {"divergence": "reverse_kl_sampled"}
    if reference:
        changes["kl_ref"] = {"coef": 0.1}
    made = {}
    for cap in (1.5, None):
        given = changes if cap else {**changes, "loss": {}}
        _, (made[cap],) = tokens_of(given, old, target_of, ref=ref_of if reference else None)
    expected = torch.tensor([math.exp(-0.5), math.exp(0.2), 1.5])
    expected = expected[torch.arange(len(made[None].reverse_weight_N)) % 3]
    torch.testing.assert_close(made[1.5].reverse_weight_N, made[None].reverse_weight_N * expected)
    torch.testing.assert_close(made[1.5].pg_weight_N, made[None].pg_weight_N * expected)
    assert made[1.5].reverse_adv_N.equal(made[None].reverse_adv_N)
    assert made[1.5].kl_weight_N.equal(made[None].kl_weight_N)
    assert made[1.5].ent_weight_N.equal(made[None].ent_weight_N)


def test_rollout_log_probabilities_as_the_ratios_denominator():
    changes = {"loop": {"updates_per_step": 1}, "loss": {"old_logps": "rollout"}}
    batch, (tokens,) = tokens_of(changes)
    assert tokens.old_logp_N.equal(batch.rollout_logp_N)


def test_opd_alone_leaves_the_anchor_out():
    _, (tokens,) = tokens_of({"loop": {"updates_per_step": 1}, "loss": {"anchor_coef": 0.0}})
    assert tokens.pg_weight_N.abs().max() == 0
    assert float(tokens.kl_weight_N.sum()) == pytest.approx(1.0)


def target_of(batch) -> Target:
    n = len(batch.token_ids_N)
    token_logps_NM = torch.log(torch.rand(n, 2, generator=torch.Generator().manual_seed(1)))
    topk = TeacherTopK(torch.zeros(n, 2, 4, dtype=torch.int32), torch.full((n, 2, 4), -2.0), token_logps_NM)
    return Target(topk, torch.tensor([0.25, 0.75]).log(), torch.zeros(2), torch.ones(2))


def test_reverse_kl_uses_the_exact_mixture_on_the_sampled_token():
    changes = {"loop": {"updates_per_step": 1}, "opd": {"divergence": "reverse_kl_sampled"}}
    batch, (tokens,) = tokens_of(changes, old_logp_N=lambda batch: batch.rollout_logp_N, target=target_of)
    p_NM = target_of(batch).topk.token_logps_NM.exp()
    expected = (0.25 * p_NM[:, 0] + 0.75 * p_NM[:, 1]).log() - batch.rollout_logp_N
    torch.testing.assert_close(tokens.reverse_adv_N, expected, rtol=1e-4, atol=1e-5)
    assert tokens.kl_weight_N.abs().max() == 0, "the forward KL is only watched"
    assert float(tokens.reverse_weight_N.sum()) == pytest.approx(1.0)


def test_forward_kl_hands_the_teachers_over():
    _, (tokens,) = tokens_of({"loop": {"updates_per_step": 1}}, target=target_of)
    assert tokens.teacher_ids_NMS.shape[1:] == (2, 4)
    assert tokens.reverse_adv_N is None
    assert float(tokens.kl_weight_N.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl_sampled"])
def test_where_lambda_is_0_nothing_weighs_what_the_teachers_say(divergence):
    changes = {"loop": {"updates_per_step": 1}, "opd": {"divergence": divergence}, "kl_ref": {"coef": 0.1}}
    _, (tokens,) = tokens_of(changes, rollout_logps, target_of, ref=ref_of, coef=0.0)
    assert tokens.teacher_ids_NMS is not None
    assert tokens.kl_weight_N.abs().max() == 0
    assert objective(0.0, **changes).loss_settings.opd_coef == 1, "for the reference policy's term"


def test_loss_settings_follow_the_recipe():
    found = objective(0.4, opd={"target": "pooled", "tail": False, "temperature": 1.3}).loss_settings
    assert (found.opd_coef, found.merge, found.tail) == (0.4, False, False)
    assert (found.temperature, found.kl_temperature, found.dual_clip) == (0.7, 1.3, 3.0)


def test_reward_failure_uses_the_range_or_the_batch():
    rewards_RK = torch.tensor([[-3.0, 5.0], [0.0, 7.0], [3.0, torch.nan]], dtype=torch.float64)
    fixed = settings(rewards=[{**SETTINGS["rewards"][0]}, {**SETTINGS["rewards"][1], "range": "batch"}])
    expected = torch.tensor([[1.0, 1.0], [0.5, 0.0], [0.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(failure(*teachers_rewards(fixed, rewards_RK)), expected)


def ref_of(batch):
    return torch.linspace(-1, 1, len(batch.token_ids_N))


def rollout_logps(batch):
    return batch.rollout_logp_N


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_kl_to_the_reference_is_a_term_of_its_own_at_its_own_weight(coef):
    chosen = {"loop": {"updates_per_step": 1}, "kl_ref": {"coef": 0.02}}
    target = target_of if coef else None
    batch, (tokens,) = tokens_of(chosen, rollout_logps, target, ref=ref_of, coef=coef)
    torch.testing.assert_close(tokens.reverse_adv_N, -ref_of(batch))
    scale = objective(coef, **chosen).loss_settings.opd_coef
    torch.testing.assert_close(scale * tokens.reverse_weight_N, 0.02 * tokens.kl_weight_N)


def test_kl_to_the_reference_joins_the_sampled_reverse_kl():
    chosen = {
        "loop": {"updates_per_step": 1},
        "opd": {"divergence": "reverse_kl_sampled"},
        "kl_ref": {"coef": 0.1},
    }
    batch, (tokens,) = tokens_of(chosen, rollout_logps, target_of, ref=ref_of, coef=0.5)
    _, (alone,) = tokens_of({**chosen, "kl_ref": {}}, rollout_logps, target_of, coef=0.5)
    torch.testing.assert_close(tokens.reverse_adv_N, alone.reverse_adv_N - 0.1 / 0.5 * ref_of(batch))


def test_the_reference_needs_old_log_probabilities():
    one = {"loop": {"updates_per_step": 1}}
    assert objective(0.0, **one, kl_ref={"coef": 0.1}).needs_old_logps
