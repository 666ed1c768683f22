"""verl's distillation and advantages through smopd.integrations.verl.

Against verl's own functions where the two coincide, smopd.ops elsewhere. Needs verl 0.9.1, in an environment
of its own: make test-verl.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("verl") is None:
    pytest.skip(
        "verl is not installed: make test-verl runs these in its environment", allow_module_level=True
    )

import numpy as np
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.utils.config import omega_conf_to_dataclass

from smopd.integrations import verl as smopd_verl
from smopd.ops import (
    gd2po_advantages,
    gdpo_advantages,
    teacher_forward_kl,
    teacher_mixture,
    topk_forward_kl,
)

ROOT = Path(__file__).resolve().parents[2]
N, V, S = 24, 97, 6
LENGTHS = (9, 15)  # tokens of the two sequences
PROMPTS = (3, 5)
# verl's own tests of what is replaced, in its sources.
THEIR_TESTS = (
    "tests/workers/test_distillation_topk_symmetry_on_cpu.py",
    "tests/workers/test_chunked_topk_log_probs_on_cpu.py",
    "tests/trainer/ppo/test_core_algos_on_cpu.py",
)


def nested(rows: Tensor) -> Tensor:
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    return torch.nested.nested_tensor_from_jagged(rows, offsets=offsets)


def logits(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(1, N, V, generator=generator)).to(dtype).requires_grad_()


def top(seed: int) -> tuple[Tensor, Tensor]:
    """A teacher's top S: ids and log-probabilities (N, S)."""
    generator = torch.Generator().manual_seed(seed)
    values, ids = (2 * torch.randn(N, V, generator=generator)).log_softmax(-1).topk(S)
    return ids, values


def data_of(ids: Tensor, logps: Tensor, temperature: float = 1.0) -> TensorDict:
    """A micro-batch of two sequences, as verl's engine hands it to the loss."""
    responses = [length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    mask = torch.arange(max(responses)) < torch.tensor(responses)[:, None]
    prompt_mask = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]
    columns = {
        "prompts": torch.zeros(2, max(PROMPTS), dtype=torch.long),
        "responses": torch.zeros(2, max(responses), dtype=torch.long),
        "attention_mask": torch.cat([prompt_mask, mask], dim=1).long(),
        "response_mask": mask,
        "temperature": torch.full((2,), temperature),
        "teacher_ids": nested(ids),
        "teacher_logprobs": nested(logps),
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": 2,
    }
    return TensorDict(columns, batch_size=[])


def predicting_responses() -> Tensor:
    """(N,) mask of the rows whose next token is of a response."""
    places = [torch.arange(length) for length in LENGTHS]
    kept = [
        (place >= prompt - 1) & (place < length - 1)
        for place, prompt, length in zip(places, PROMPTS, LENGTHS, strict=True)
    ]
    return torch.cat(kept)


ACTOR = SimpleNamespace(
    strategy="fsdp", loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None
)


def distillation(loss_config: Any) -> SimpleNamespace:
    return SimpleNamespace(distillation_loss=loss_config)


def host_config(**settings: Any) -> Any:
    """verl's configuration of its own forward_kl_topk, supervised and without its maximum."""
    chosen = {
        "loss_mode": "forward_kl_topk",
        "topk": S,
        "use_policy_gradient": False,
        "use_task_rewards": False,
    }
    clamps = {"loss_max_clamp": None, "log_prob_min_clamp": None}
    return smopd_verl.worker_config.DistillationLossConfig(**{**chosen, **clamps, **settings})


def our_config(**settings: Any) -> Any:
    return smopd_verl.SmopdLossConfig(**{"topk": S, "use_task_rewards": False, **settings})


def loss_of(config: Any, data: TensorDict, student: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """verl's two calls: in the logits processor and after it."""
    compute = smopd_verl.losses.distillation_ppo_loss
    columns = compute(ACTOR, distillation(config), data=data, student_logits=student)
    output = {name: column[0] for name, column in columns.items()}
    return compute(ACTOR, distillation(config), model_output=output, data=data)


@pytest.mark.parametrize("floor", [None, -10.0, -4.0], ids=["no floor", "floor -10", "floor -4"])
def test_verls_own_top_k_loss_keeps_its_values_and_gradient(floor: float | None) -> None:
    ids, logps = top(1)
    results = []
    for function in (smopd_verl.ORIGINALS["compute_forward_kl_topk"], smopd_verl.compute_forward_kl_topk):
        student = logits()
        config = distillation(SimpleNamespace(log_prob_min_clamp=floor))
        columns = function(student, nested(logps), nested(ids), config, "thd")
        weights = torch.linspace(0.5, 2.0, N)
        (grad,) = torch.autograd.grad((columns["distillation_losses"] * weights).sum(), student)
        results.append({**columns, "grad": grad})
    theirs, ours = results
    assert theirs.keys() == ours.keys()
    for name in theirs:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_one_teacher_without_tail_is_verls_loss_without_its_clamp() -> None:
    """Through verl's distillation_ppo_loss. verl clamps a negative token at 0, and its gradient with it."""
    ids, logps = top(1)
    student = logits()
    with torch.no_grad():  # with more mass on the support than the teacher has there
        student[0, ::2] = student[0, ::2].scatter(1, ids[::2].long(), 12 + logps[::2])
    per_token = topk_forward_kl(student[0], ids[:, 0], ids, logps)[1]
    mask = predicting_responses()
    assert (per_token[mask] < 0).any() and (per_token[mask] > 0).any()
    ours, metrics = loss_of(our_config(tail=False), data_of(ids, logps), student)
    theirs, _ = loss_of(host_config(), data_of(ids, logps), student)
    torch.testing.assert_close(ours, per_token[mask].mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs, per_token[mask].clamp(min=0).mean(), rtol=1e-5, atol=1e-6)
    assert metrics["distillation/negative_share"] == pytest.approx(
        (per_token[mask] < 0).float().mean().item()
    )
    (our_grad,) = torch.autograd.grad(ours, student)
    (their_grad,) = torch.autograd.grad(theirs, student)
    positive, negative = mask & (per_token > 0), mask & (per_token < 0)
    torch.testing.assert_close(our_grad[0, positive], their_grad[0, positive], rtol=1e-5, atol=1e-6)
    assert not their_grad[0, negative].any() and our_grad[0, negative].abs().sum(-1).gt(0).all()
    assert not our_grad[0, ~mask].any()


def test_where_no_token_is_negative_the_two_losses_are_equal() -> None:
    student = logits()
    ids, logps = top(1)
    student = (student.detach() - 5 * torch.zeros(1, N, V).scatter(2, ids[None], 1.0)).requires_grad_()
    ours, metrics = loss_of(our_config(tail=False), data_of(ids, logps), student)
    theirs, _ = loss_of(host_config(), data_of(ids, logps), student)
    assert metrics["distillation/negative_share"] == 0.0
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(ours, student)[0], torch.autograd.grad(theirs, student)[0], rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_student_and_teachers_are_at_temperature_one(temperature: float) -> None:
    """verl's engine divides the student's logits by the rollout's temperature before the loss."""
    ids, logps = top(1)
    student = logits()
    columns = smopd_verl.compute_topk_loss(
        ACTOR, distillation(our_config()), data_of(ids, logps, temperature), student / temperature, "thd"
    )
    expected = topk_forward_kl(student[0], ids[:, 0], ids, logps, tail=True)[1]
    torch.testing.assert_close(columns["distillation_losses"][0], expected, rtol=1e-5, atol=1e-5)
    on_support = student[0].log_softmax(-1).gather(1, ids).exp().sum(-1)
    torch.testing.assert_close(columns["student_mass"][0], on_support, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(columns["teacher_mass"][0], logps.exp().sum(-1), rtol=1e-5, atol=1e-5)


class Client:
    """A teacher's server: its top log-probabilities at each position, the questions counted."""

    def __init__(self, seed: int) -> None:
        self.ids, self.logps = top(seed)
        self.asked = 0

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> SimpleNamespace:
        self.asked += 1
        assert sampling_params["prompt_logprobs"] == S
        n = len(prompt_ids)
        fields = {"prompt_ids": self.ids[:n].tolist(), "prompt_logprobs": self.logps[:n].tolist()}
        return SimpleNamespace(extra_fields=fields)


def manager_of(config: Any, clients: dict[str, Client]) -> Any:
    manager = object.__new__(smopd_verl.teacher_manager.AsyncTeacherLLMServerManager)
    manager.distillation_loss_config = config
    manager.teacher_key = "data_source"
    inference = SimpleNamespace(temperature=1.0, max_model_len=None)
    manager.teacher_model_configs = {key: SimpleNamespace(inference=inference) for key in clients}
    manager.teacher_client = clients
    return manager


def ask(manager: Any, routing_key: str | None = None) -> tuple[Tensor, Tensor]:
    return asyncio.run(manager.compute_teacher_logprobs_single([1] * N, routing_key=routing_key))


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_all_teachers_are_asked_and_mixed_and_the_loss_is_the_mixtures(merge: bool) -> None:
    clients = {"math": Client(1), "code": Client(2)}
    config = our_config(merge=merge, teacher_weights={"math": 0.3, "code": 0.7})
    ids, logps = ask(manager_of(config, clients), routing_key="math")
    assert [client.asked for client in clients.values()] == [1, 1]
    stacked_ids = torch.stack([clients["code"].ids, clients["math"].ids], dim=1)
    stacked_logps = torch.stack([clients["code"].logps, clients["math"].logps], dim=1)
    log_alpha = torch.tensor([0.7, 0.3]).log()
    expected = teacher_mixture(stacked_ids, stacked_logps, log_alpha, S, merge=merge)
    assert ids.shape == (N, S) and torch.equal(ids, expected.ids_NS)
    torch.testing.assert_close(logps, expected.logps_NS, rtol=1e-5, atol=1e-6)
    student = logits()
    loss, _ = loss_of(config, data_of(ids.long(), logps), student)
    teachers = (stacked_ids, stacked_logps, log_alpha, S)
    kl = teacher_forward_kl(student[0], ids[:, 0], *teachers, merge=merge, tail=True)[1]
    expected_loss = kl[predicting_responses()].mean()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, student)[0],
        torch.autograd.grad(expected_loss, student)[0],
        rtol=1e-5,
        atol=1e-6,
    )


def test_one_teacher_answers_as_verls_manager_has_it() -> None:
    manager = manager_of(our_config(), {"default": Client(1)})
    ids, logps = ask(manager)
    their_ids, their_logps = asyncio.run(
        smopd_verl.ORIGINALS["compute_teacher_logprobs_single"](manager, [1] * N)
    )
    assert torch.equal(ids, their_ids) and ids.dtype == their_ids.dtype
    torch.testing.assert_close(logps, their_logps, rtol=1e-5, atol=1e-6)


def test_verls_own_loss_modes_still_route() -> None:
    clients = {"math": Client(1), "code": Client(2)}
    ids, logps = ask(manager_of(host_config(), clients), routing_key="code")
    assert [client.asked for client in clients.values()] == [0, 1]
    assert torch.equal(ids.long(), clients["code"].ids)
    torch.testing.assert_close(logps, clients["code"].logps)


@pytest.mark.parametrize(
    "weights, message",
    [({"math": 1.0}, r"names \['math'\], expected the configured teachers \['code', 'math'\]"),
     ({"math": 0.5, "code": 0.6}, "sum to 1")],
    ids=["a teacher without weight", "no distribution"],
)  # fmt: skip
def test_wrong_weights_are_refused(weights: dict[str, float], message: str) -> None:
    manager = manager_of(our_config(teacher_weights=weights), {"math": Client(1), "code": Client(2)})
    with pytest.raises(ValueError, match=message):
        ask(manager)


@pytest.mark.parametrize("loss_mode", [smopd_verl.LOSS_MODE, "forward_kl_topk"])
def test_a_teacher_of_another_vocabulary_is_refused(loss_mode: str) -> None:
    ids, logps = top(1)
    ids = ids.clone()
    ids[3, 2] = V
    config = our_config() if loss_mode == smopd_verl.LOSS_MODE else host_config()
    with pytest.raises(ValueError, match=rf"names tokens 0 to {V}, expected ids in \[0, {V}\)"):
        loss_of(config, data_of(ids, logps), logits())


def test_what_would_clamp_or_shard_is_refused() -> None:
    ids, logps = top(1)
    with pytest.raises(ValueError, match=r"distillation_loss.loss_max_clamp is 10.0, expected None"):
        our_config(loss_max_clamp=10.0)
    with pytest.raises(ValueError, match=r"distillation_loss.use_policy_gradient is True, expected False"):
        our_config(use_policy_gradient=True)
    plain = host_config(loss_mode=smopd_verl.LOSS_MODE, log_prob_min_clamp=-10.0)
    with pytest.raises(ValueError, match=r"distillation_loss.log_prob_min_clamp is -10.0, expected None"):
        loss_of(plain, data_of(ids, logps), logits())
    megatron = SimpleNamespace(strategy="megatron")
    with pytest.raises(NotImplementedError, match="strategy megatron shards"):
        smopd_verl.compute_topk_loss(
            megatron, distillation(our_config()), data_of(ids, logps), logits(), "thd"
        )
    with pytest.raises(ValueError, match="use_fused_kernels=false"):
        smopd_verl.unclamped_forward_kl(ACTOR, distillation(our_config()), {}, data_of(ids, logps))


def test_verls_configuration_takes_the_mixtures_settings() -> None:
    config = omega_conf_to_dataclass(
        OmegaConf.create(
            {
                "_target_": "smopd.integrations.verl.SmopdLossConfig",
                "loss_mode": "smopd_forward_kl",
                "topk": 16,
                "teacher_weights": {"openai/gsm8k": 0.25, "code": 0.75},
                "tail": False,
            }
        )
    )
    assert isinstance(config, smopd_verl.SmopdLossConfig) and config.loss_settings.use_topk
    assert dict(config.teacher_weights) == {"openai/gsm8k": 0.25, "code": 0.75} and not config.tail


KEYS = ["accuracy", "format"]
LONG = (4, 2, 3, 1, 4, 4, 2, 3)  # response lengths
GROUPS = ["a", "a", "a", "a", "b", "b", "b", "b"]


def rollouts(rewards: dict[str, list[float | None]]) -> DataProto:
    mask = (torch.arange(4) < torch.tensor(LONG)[:, None]).float()
    prompts = torch.zeros(8, 2, dtype=torch.long)
    tensors = {
        "token_level_rewards": torch.zeros(8, 4),
        "response_mask": mask,
        "prompts": prompts,
        "attention_mask": torch.cat([torch.ones(8, 2), mask], dim=1).long(),
    }
    columns = {name: np.asarray(column, dtype=object) for name, column in rewards.items()}
    return DataProto.from_dict(tensors, non_tensors={"uid": np.asarray(GROUPS, dtype=object), **columns})


def advantages_of(estimator: str, data: DataProto, **settings: Any) -> Tensor:
    config = OmegaConf.create({"gdpo_reward_keys": KEYS, **settings})
    done = smopd_verl.ray_trainer.compute_advantage(data, adv_estimator=estimator, config=config)
    assert torch.equal(done.batch["advantages"], done.batch["returns"])
    return done.batch["advantages"]


REWARDS: dict[str, list[float | None]] = {
    "accuracy": [3.0, -3.0, 1.5, 0.0, 2.0, 2.5, -1.0, 3.0],
    "format": [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0],
}


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]], ids=["equal", "weighted"])
def test_gdpo_over_tokens_is_verls_gdpo(weights: list[float] | None) -> None:
    ours = advantages_of("smopd_gdpo_tokens", rollouts(REWARDS), gdpo_reward_weights=weights)
    theirs = advantages_of("gdpo", rollouts(REWARDS), gdpo_reward_weights=weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_gdpo_and_gd2po_are_smopds() -> None:
    rewards_RK = torch.tensor([REWARDS[key] for key in KEYS]).T.contiguous()
    group_R, weights_K = torch.tensor([0] * 4 + [1] * 4), torch.tensor([0.7, 0.3])
    mask = (torch.arange(4) < torch.tensor(LONG)[:, None]).float()
    lengths = {"weights_K": weights_K, "lengths_R": torch.tensor(LONG)}
    weights = {"gdpo_reward_weights": [0.7, 0.3]}
    expected = {
        "smopd_gdpo": gdpo_advantages(rewards_RK, group_R, weights_K=weights_K),
        "smopd_gd2po": gd2po_advantages(rewards_RK, group_R, **lengths)[0],
    }
    for name, adv_R in expected.items():
        ours = advantages_of(name, rollouts(REWARDS), **weights)
        torch.testing.assert_close(ours, adv_R[:, None] * mask, rtol=1e-5, atol=1e-6)
    kept = gd2po_advantages(rewards_RK, group_R, **lengths, snr_threshold=0.2)[0]
    ours = advantages_of("smopd_gd2po", rollouts(REWARDS), **weights, gd2po_snr_threshold=0.2)
    torch.testing.assert_close(ours, kept[:, None] * mask, rtol=1e-5, atol=1e-6)
    assert not torch.equal(kept, expected["smopd_gd2po"])


def test_an_unscorable_reward_is_left_out() -> None:
    rewards = {**REWARDS, "format": [None, *REWARDS["format"][1:]]}
    ours = advantages_of("smopd_gdpo", rollouts(rewards))
    assert ours.isfinite().all() and ours[0].abs().sum() > 0


def test_equal_rewards_give_exactly_nothing() -> None:
    """verl's mean of equal float32 numbers is off by an ulp, which its epsilon makes an advantage of."""
    rewards = {"accuracy": [0.1] * 4 + [0.7] * 4, "format": [0.3] * 8}
    assert not advantages_of("smopd_gdpo", rollouts(rewards)).any()


def test_reward_keys_are_required() -> None:
    with pytest.raises(
        ValueError, match=r"smopd_gdpo: algorithm.gdpo_reward_keys is \['accuracy', 'style'\]"
    ):
        advantages_of("smopd_gdpo", rollouts(REWARDS), gdpo_reward_keys=["accuracy", "style"])
    with pytest.raises(ValueError, match=r"smopd_gd2po: algorithm.gdpo_reward_keys is \[\]"):
        advantages_of("smopd_gd2po", rollouts(REWARDS), gdpo_reward_keys=[])


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_verl_loads_it_as_an_external_module_and_it_says_what_it_replaced() -> None:
    external = {"VERL_USE_EXTERNAL_MODULES": "smopd.integrations.verl", "VERL_USE_EXTERNAL_PLUGINS": "none"}
    done = python("import verl.trainer.ppo.v1.utils as u; print(u.compute_advantage.__module__)", **external)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("smopd ")]
    assert len(said) == 1
    for name in (smopd_verl.LOSS_MODE, *smopd_verl.ESTIMATORS, *smopd_verl.ORIGINALS):
        assert name in said[0]
    assert done.stdout.splitlines()[-1] == "smopd.integrations.verl"


def test_verl_loads_it_as_a_plugin(tmp_path: Path) -> None:
    info = tmp_path / "declared-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: declared\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\nsmopd = smopd.integrations.verl\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = python("import verl", PYTHONPATH=path, VERL_USE_EXTERNAL_MODULES="")
    assert done.returncode == 0, done.stderr
    assert "registered loss_mode smopd_forward_kl" in done.stdout


def test_another_version_is_refused_by_name() -> None:
    code = (
        "import importlib.metadata as m\n"
        "real = m.version\n"
        "m.version = lambda name: '0.10.0' if name == 'verl' else real(name)\n"
        "import smopd.integrations.verl\n"
    )
    done = python(code, VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode != 0
    assert "verl>=0.9.1,<0.9.2; verl 0.10.0 is installed" in done.stderr.splitlines()[-1]


def test_a_changed_function_is_refused_by_name() -> None:
    def compute_advantage(data: Any, estimator: Any) -> None: ...

    owner = SimpleNamespace(compute_advantage=compute_advantage)
    with pytest.raises(
        ImportError, match=r"compute_advantage has no parameter adv_estimator, config; it has data"
    ):
        smopd_verl.replace(owner, smopd_verl.compute_advantage, "data", "adv_estimator", "config")
    assert owner.compute_advantage is compute_advantage


def test_the_example_learns() -> None:
    command = [sys.executable, str(ROOT / "examples" / "verl_distillation.py"), "--steps", "15"]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    first, last = (float(line.split("loss ")[1].split(",")[0]) for line in steps)
    assert last < 0.5 * first, done.stdout


def test_verls_own_tests_still_pass() -> None:
    checkout = os.environ.get("VERL_SOURCE")
    if not checkout:
        pytest.skip("VERL_SOURCE names no checkout of verl 0.9.1")
    theirs = [name for name in THEIR_TESTS if Path(checkout, name).exists()]
    assert theirs, f"{checkout} has none of {THEIR_TESTS}"
    environment = {
        **os.environ,
        "VERL_USE_EXTERNAL_MODULES": "smopd.integrations.verl",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *theirs]
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
