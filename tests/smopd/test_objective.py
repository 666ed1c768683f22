"""The objective: schedule of lambda, denominators, old log-probabilities, importance weights, reverse KL."""

import math
from types import SimpleNamespace

import pytest
import torch

from smopd.config.settings import Loss, Opd
from smopd.engine.errors import UserCodeError
from smopd.engine.types import TeacherTopK
from smopd.gates import failure
from smopd.objective import Objective, Signals, Target, opd_coef, teachers_rewards, token_weights
from smopd.step.batch import Batch, positions
from tests.engine.tiny import ragged_rollouts
from tests.smopd.run.invariance_worker import SETTINGS, settings_of

ONE = {"loop": {"updates_per_step": 1}}
REVERSE = {"opd": {"divergence": "reverse_kl_sampled"}}
SHIFT = torch.tensor([-0.5, 0.2, 3.0])


def objective(coef, **changes) -> Objective:
    return Objective(settings_of(**changes), coef, torch.device("cpu"))


def batch_of(rollouts, updates=1, group_size=3):
    groups = len(rollouts) // group_size
    prompts = [SimpleNamespace(token_ids=rollouts[g * group_size].prompt_ids) for g in range(groups)]
    return Batch.of(prompts, positions(groups, updates, 0, 1), rollouts, group_size)


def shifted(batch):
    return batch.rollout_logp_N + SHIFT[torch.arange(len(batch.rollout_logp_N)) % 3]


def ref_of(batch):
    return torch.linspace(-1, 1, len(batch.token_ids_N))


def target_of(batch) -> Target:
    n = len(batch.token_ids_N)
    token_logps_NM = torch.log(torch.rand(n, 2, generator=torch.Generator().manual_seed(1)))
    topk = TeacherTopK(torch.zeros(n, 2, 4, dtype=torch.int32), torch.full((n, 2, 4), -2.0), token_logps_NM)
    return Target(topk, torch.tensor([0.25, 0.75]).log(), torch.zeros(2), torch.ones(2))


def tokens_of(changes, old=None, target=None, ref=None, updates=1, coef=1.0):
    """Return a batch and the loss inputs of each update; `old`, `target`, `ref` build signals."""
    batch = batch_of(ragged_rollouts(0), updates=updates)
    adv_R = torch.arange(len(batch.rollouts), dtype=torch.float64)
    signals = Signals(*(make(batch) if make else None for make in (old, target, ref)))
    made = [objective(coef, **changes).loss_tokens(batch, part, adv_R, signals) for part in batch.parts]
    return batch, made


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
    weight_N = token_weights(Loss(aggregation=aggregation), torch.tensor([3, 0, 1, 2]))
    assert weight_N.tolist() == pytest.approx([*[expected[0]] * 3, expected[1], *[expected[2]] * 2])
    empty = token_weights(Loss(aggregation=aggregation), torch.zeros(0, dtype=torch.int64))
    assert empty.shape == (0,), "a rank without responses divides by no zero"


def test_the_first_update_needs_no_second_forward():
    assert not objective(1.0, **ONE).needs_old_logps
    assert objective(1.0).needs_old_logps
    assert objective(1.0, **ONE, loss={"importance_cap": 2.0}).needs_old_logps
    assert objective(1.0, **ONE, **REVERSE).needs_old_logps
    assert not objective(0.0, **ONE, **REVERSE).needs_old_logps
    assert not objective(1.0, loss={"old_logps": "rollout"}).needs_old_logps
    assert objective(0.0, **ONE, kl_ref={"coef": 0.1}).needs_old_logps


@pytest.mark.parametrize("updates", [1, 2])
def test_every_token_carries_its_responses_advantage_in_one_of_the_updates(updates):
    changes = {"loop": {"updates_per_step": updates}}
    batch, made = tokens_of(changes, old=shifted, target=target_of, updates=updates)
    assert torch.cat([tokens.adv_N for tokens in made]).tolist() == batch.response_N.float().tolist()
    assert torch.cat([tokens.token_ids_N for tokens in made]).equal(batch.token_ids_N)
    assert batch.token_ids_N.equal(torch.cat([rollout.response_ids for rollout in batch.rollouts]))
    for tokens in made:
        assert tokens.pg_weight_N.equal(tokens.kl_weight_N) and tokens.reverse_adv_N is None
        assert float(tokens.pg_weight_N.sum()) == pytest.approx(1.0)
        assert tokens.teacher_ids_NMS.shape[1:] == (2, 4)
    if updates > 1:
        assert torch.cat([tokens.old_logp_N for tokens in made]).equal(shifted(batch))
    else:
        assert made[0].old_logp_N is None, "the ratio is 1"


@pytest.mark.parametrize("terms", ["teachers", "reference", "both"])
def test_truncated_importance_weighs_every_term_of_the_sampled_tokens(terms):
    """The forward KL and the entropy, which use whole distributions, are not weighted."""
    changes = ONE | (REVERSE if terms != "reference" else {})
    ref = None
    if terms != "teachers":
        changes, ref = changes | {"kl_ref": {"coef": 0.1}}, ref_of
    _, (plain,) = tokens_of(changes, shifted, target_of, ref)
    _, (capped,) = tokens_of(changes | {"loss": {"importance_cap": 1.5}}, shifted, target_of, ref)
    expected = torch.tensor([math.exp(-0.5), math.exp(0.2), 1.5])
    expected = expected[torch.arange(len(plain.reverse_weight_N)) % 3]
    torch.testing.assert_close(capped.reverse_weight_N, plain.reverse_weight_N * expected)
    torch.testing.assert_close(capped.pg_weight_N, plain.pg_weight_N * expected)
    for name in ("reverse_adv_N", "kl_weight_N", "ent_weight_N"):
        assert getattr(capped, name).equal(getattr(plain, name)), name


def test_rollout_log_probabilities_as_the_ratios_denominator_and_opd_without_the_anchor():
    batch, (tokens,) = tokens_of(ONE | {"loss": {"old_logps": "rollout", "anchor_coef": 0.0}})
    assert tokens.old_logp_N.equal(batch.rollout_logp_N)
    assert tokens.pg_weight_N.abs().max() == 0
    assert float(tokens.kl_weight_N.sum()) == pytest.approx(1.0)


def test_reverse_kl_uses_the_exact_mixture_on_the_sampled_token():
    batch, (tokens,) = tokens_of(ONE | REVERSE, old=shifted, target=target_of)
    p_NM = target_of(batch).topk.token_logps_NM.exp()
    expected = (0.25 * p_NM[:, 0] + 0.75 * p_NM[:, 1]).log() - shifted(batch)
    torch.testing.assert_close(tokens.reverse_adv_N, expected, rtol=1e-4, atol=1e-5)
    assert tokens.kl_weight_N.abs().max() == 0, "the forward KL is only watched"
    assert float(tokens.reverse_weight_N.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl_sampled"])
def test_where_lambda_is_0_nothing_weighs_what_the_teachers_say(divergence):
    changes = ONE | {"opd": {"divergence": divergence}, "kl_ref": {"coef": 0.1}}
    _, (tokens,) = tokens_of(changes, shifted, target_of, ref_of, coef=0.0)
    assert tokens.teacher_ids_NMS is not None
    assert tokens.kl_weight_N.abs().max() == 0
    assert objective(0.0, **changes).loss_settings.opd_coef == 1, "for the reference policy's term"


def test_loss_settings_follow_the_recipe():
    found = objective(0.4, opd={"target": "pooled", "tail": False, "temperature": 1.3}).loss_settings
    assert (found.opd_coef, found.merge, found.tail) == (0.4, False, False)
    assert (found.temperature, found.kl_temperature, found.dual_clip) == (0.7, 1.3, 3.0)


def test_reward_failure_uses_the_range_or_the_batch():
    rewards_RK = torch.tensor([[-3.0, 5.0], [0.0, 7.0], [3.0, torch.nan]], dtype=torch.float64)
    dense, sparse = SETTINGS["rewards"]
    fixed = settings_of(rewards=[{**dense, "range": [-3, 3]}, {**sparse, "range": "batch"}])
    expected = torch.tensor([[1.0, 1.0], [0.5, 0.0], [0.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(failure(*teachers_rewards(fixed, rewards_RK)), expected)


@pytest.mark.parametrize("coef", [0.0, 0.5])
def test_kl_to_the_reference_is_a_term_of_its_own_at_its_own_weight(coef):
    chosen = ONE | {"kl_ref": {"coef": 0.02}}
    batch, (tokens,) = tokens_of(chosen, shifted, target_of if coef else None, ref_of, coef=coef)
    torch.testing.assert_close(tokens.reverse_adv_N, -ref_of(batch))
    scale = objective(coef, **chosen).loss_settings.opd_coef
    torch.testing.assert_close(scale * tokens.reverse_weight_N, 0.02 * tokens.kl_weight_N)


def test_kl_to_the_reference_joins_the_sampled_reverse_kl():
    both = ONE | REVERSE | {"kl_ref": {"coef": 0.1}}
    batch, (tokens,) = tokens_of(both, shifted, target_of, ref_of, coef=0.5)
    _, (alone,) = tokens_of(ONE | REVERSE, shifted, target_of, coef=0.5)
    torch.testing.assert_close(tokens.reverse_adv_N, alone.reverse_adv_N - 0.1 / 0.5 * ref_of(batch))


def whole(rewards_RK, group_R, *, lengths_R, **other):
    """Of the estimator's arguments, change what it may; keep every other response."""
    adv_R = rewards_RK[:, 0].clone()
    rewards_RK.zero_()
    lengths_R.zero_()
    return adv_R, group_R % 2 == 0


@pytest.mark.parametrize(
    ("estimator", "said"),
    [
        ("whole", None),
        ("scalar", r"scalar returned 0.0, expected float64 \(15,\) and bool \(15,\)"),
        ("short", r"short returned float64 \(14,\) and bool \(15,\), expected"),
        ("undefined", "undefined returned NaN or infinity"),
    ],
)
def test_what_an_estimator_returns_is_checked_and_what_it_changes_is_its_own(estimator, said):
    batch = batch_of(ragged_rollouts(0))
    rewards_RK = torch.arange(30, dtype=torch.float64).reshape(15, 2)
    before = (rewards_RK.clone(), batch.lengths_R.clone())
    made = objective(1.0, advantage={"estimator": f"{__name__}:{estimator}"})
    if said is not None:
        with pytest.raises(UserCodeError, match=said):
            made.advantages(batch, rewards_RK, [0.5, 0.5])
        return
    adv_R, _ = made.advantages(batch, rewards_RK, [0.5, 0.5])
    assert torch.equal(adv_R, torch.where(batch.group_R % 2 == 0, before[0][:, 0], 0.0))
    assert torch.equal(rewards_RK, before[0]) and torch.equal(batch.lengths_R, before[1])


def scalar(rewards_RK, group_R, **other):
    return 0.0


def short(rewards_RK, group_R, **other):
    return rewards_RK[1:, 0], group_R >= 0


def undefined(rewards_RK, group_R, **other):
    return rewards_RK[:, 0] / 0, group_R >= 0
