"""One update: fp32 masters, finite check, warm-up, and log-probabilities that equal a plain forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.distributed.tensor import DTensor

from smopd.engine import distributed
from smopd.engine.models.attention import fault
from smopd.engine.models.packing import flat_offsets
from smopd.engine.settings import Lora, TrainSettings
from smopd.engine.student.optimizers import cosine, last_share, linear
from smopd.engine.student.student import NonFiniteGradient, Student, join_stats, select_tokens
from smopd.ops import LossSettings, LossTokens
from tests.engine.tiny import ragged_rollouts, tiny_model


@pytest.fixture(scope="module", autouse=True)
def device():
    with distributed.process_group() as device:
        yield device


def student(device, *, tied=False, schedule=None, **options) -> Student:
    settings = TrainSettings(**{"learning_rate": 1e-2, "compute_dtype": "float32", **options})
    return Student(tiny_model(tied=tied), settings, device, schedule=schedule)


def loss_tokens(rollouts, adv: float = 1.0) -> LossTokens:
    token_ids_N = torch.cat([rollout.response_ids for rollout in rollouts])
    n = len(token_ids_N)
    return LossTokens(
        token_ids_N=token_ids_N, adv_N=torch.full((n,), adv), pg_weight_N=torch.full((n,), 1 / n)
    )


def parameters(student: Student) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in student.weights()}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logps_equal_a_plain_forward(device, temperature):
    rollouts = ragged_rollouts(0)
    found_N = student(device, micro_batch_tokens=50).logps(rollouts, temperature)
    plain = tiny_model().eval()
    expected = []
    for rollout in rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
        logits = plain(ids).logits[0, len(rollout.prompt_ids) - 1 : -1] / temperature
        expected.append(logits.log_softmax(-1).gather(-1, rollout.response_ids[:, None])[:, 0])
    torch.testing.assert_close(found_N, torch.cat(expected), rtol=1e-4, atol=1e-5)


def test_gradient_is_that_of_the_negative_log_likelihood(device):
    rollouts = ragged_rollouts(1)
    trained = student(device, max_grad_norm=1e9)
    gradients = {}

    def keep(optimizer, args, kwargs):
        for name, value in trained.model.named_parameters():
            gradients[name] = value.grad.full_tensor() if isinstance(value.grad, DTensor) else value.grad

    trained.optimizer.register_step_pre_hook(keep)
    update = trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0))
    plain = tiny_model().train()
    logps = []
    for rollout in rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
        logits = plain(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        logps.append(logits.log_softmax(-1).gather(-1, rollout.response_ids[:, None])[:, 0])
    (-torch.cat(logps).mean()).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)
    norm = torch.stack([parameter.grad.norm() for parameter in plain.parameters()]).norm()
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-4)
    torch.testing.assert_close(update.stats.logp_N, torch.cat(logps).detach(), rtol=1e-4, atol=1e-5)


def test_a_small_step_moves_fp32_masters_under_bf16(device):
    trained = student(device, learning_rate=1e-6, compute_dtype="bfloat16")
    before = parameters(trained)
    rollouts = ragged_rollouts(2)
    trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0))
    after = parameters(trained)
    assert all(value.dtype == torch.float32 for value in after.values())
    moved = torch.cat([(after[name] != before[name]).flatten() for name in before])
    assert moved.float().mean() > 0.5
    steps = torch.cat([(after[name] - before[name]).abs().flatten() for name in before])
    assert steps.max() < 1.1e-6


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(device, monkeypatch):
    monkeypatch.setattr("smopd.engine.student.student.MAX_SKIPPED_UPDATES", 1)
    trained = student(device)
    rollouts = ragged_rollouts(3)
    before = parameters(trained)
    bad = loss_tokens(rollouts, adv=float("nan"))
    update = trained.update(rollouts, bad, LossSettings(opd_coef=0.0))
    assert update.skipped
    assert all(value.equal(before[name]) for name, value in parameters(trained).items())
    good = trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0))
    assert not good.skipped
    assert not all(value.equal(before[name]) for name, value in parameters(trained).items())
    message = r"update 3: gradient norm nan; 2 updates were skipped, at most 1"
    with pytest.raises(NonFiniteGradient, match=message):
        trained.update(rollouts, bad, LossSettings(opd_coef=0.0))


def test_clipping_reports_the_norm_before_it(device):
    rollouts = ragged_rollouts(4)
    norms = []
    for limit in (1e9, 1e-3):
        trained = student(device, max_grad_norm=limit)
        norms.append(trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0)).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    assert norms[1] > 1e-3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_steps": 4}, [0.0025, 0.005, 0.0075, 0.01, 0.01]),
        ({"schedule": partial(last_share, updates=4, share=0.5)}, [0.01, 0.01, 0.01, 0.005, 0.0]),
    ],
)
def test_the_rate_warms_up_and_decays_to_zero(device, options, expected):
    trained = student(device, **options)
    rollouts = ragged_rollouts(5)
    rates = []
    for _ in range(5):
        trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0))
        rates.append(trained.optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx(expected)


def test_schedules() -> None:
    assert [linear(update, 4) for update in (0, 1, 4, 5)] == [1.0, 0.75, 0.0, 0.0]
    assert [cosine(update, 4) for update in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])


def test_weights_are_masters_also_between_a_forward_and_an_update(device):
    trained = student(device, compute_dtype="bfloat16")
    trained.logps(ragged_rollouts(0), 1.0)
    expected = tiny_model().state_dict()
    for name, value in trained.weights():
        assert value.dtype == torch.float32 and value.equal(expected[name]), name


@pytest.mark.parametrize(
    "packing",
    [
        {"micro_batch_tokens": 1000, "share_prompts": False},
        {"micro_batch_tokens": 50, "share_prompts": False},
        {"micro_batch_tokens": 1000},
        {"micro_batch_tokens": 50},
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_checkpointing": True}, {"lora": Lora(rank=2, alpha=4.0)}],
    ids=["plain", "checkpointed", "lora"],
)
def test_a_sequence_at_a_time_attends_as_the_mask_does(device, packing, options):
    rollouts = ragged_rollouts(7)
    results = []
    for attention in ("sdpa", "flash"):
        trained = student(device, attention=attention, max_grad_norm=1e9, **packing, **options)
        update = trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0))
        results.append((update.stats.logp_N, update.grad_norm, trained.logps(rollouts, 1.0)))
    (logp_N, norm, after_N), (expected_N, expected_norm, expected_after_N) = results
    torch.testing.assert_close(logp_N, expected_N, rtol=1e-5, atol=1e-5)
    assert norm == pytest.approx(expected_norm, rel=1e-5)
    torch.testing.assert_close(after_N, expected_after_N, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "eager"}, "attention\n.*'auto', 'sdpa' or 'flash'"),
        ({"strategy": "ddp"}, "strategy\n.*'fsdp2' or 'deepspeed'"),
        ({"shard_size": 2}, "shard_size: got 2, expected a divisor of the 1 ranks"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(device, options, message):
    with pytest.raises(ValueError, match=message):
        student(device, **options)


@pytest.mark.gpu
def test_the_variable_length_kernels_agree_with_sdpa_on_this_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    assert fault(tiny_model(), device, torch.bfloat16) is None


@pytest.mark.slow
def test_compiled_layers_change_nothing(device):
    results = []
    for compiled in (False, True):
        trained = student(device, compile=compiled, micro_batch_tokens=60)
        for seed in (0, 1):
            rollouts = ragged_rollouts(seed)
            trained.update(rollouts, loss_tokens(rollouts), LossSettings(opd_coef=0.0))
        results.append((trained.logps(ragged_rollouts(2), 1.0), list(parameters(trained))))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-3, atol=1e-4)
    assert results[0][1] == results[1][1], "names stay those of the model"


@pytest.mark.parametrize("lora", [None, Lora(rank=2, alpha=4.0)], ids=["full", "lora"])
def test_a_tied_head_is_gathered_once(device, lora, monkeypatch):
    trained = student(device, tied=True, lora=lora)
    gathered, full = [], trained.strategy.full
    monkeypatch.setattr(trained.strategy, "full", lambda value: gathered.append(id(value)) or full(value))
    weights = list(trained.weights())
    names = [name for name, _ in weights]
    assert len(names) == len(set(names))
    adapters = 2 * sum("lora_A" in name for name, _ in trained.model.named_parameters())
    assert len(gathered) == len(set(gathered)) == len(names) - 1 + adapters
    first = names.index("model.embed_tokens.weight")
    assert names[first + 1] == "lm_head.weight"
    assert weights[first][1] is weights[first + 1][1]


def test_take_and_join_are_inverse():
    rollouts = ragged_rollouts(6)
    tokens = loss_tokens(rollouts)
    n = flat_offsets(rollouts)[-1]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    part = select_tokens(tokens, order)
    assert part.token_ids_N.equal(tokens.token_ids_N[order])

    from smopd.ops import LossStats

    def stats(index):
        zero = torch.tensor(1.0)
        per_token = index.float()
        return LossStats(*[per_token] * 5, per_token.to(torch.int8), zero, zero, zero, zero)

    joined = join_stats([stats(order[:5]), stats(order[5:])], [order[:5], order[5:]])
    assert joined.logp_N.equal(torch.arange(n).float())
    assert joined.pg_loss == 2.0
