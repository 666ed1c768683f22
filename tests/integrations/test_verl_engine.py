"""verl's FSDP engine with SMOPD's loss: its own forward_step on a batch of its v1 trainer, on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

if find_spec("verl") is None:
    pytest.skip(
        "verl is not installed: make test-verl runs these in its environment", allow_module_level=True
    )

import torch.distributed as dist
from tensordict import TensorDict
from torch.testing._internal.distributed.fake_pg import FakeStore
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

from smopd.integrations import verl_host, verl_loss
from smopd.ops import topk_forward_kl
from tests.integrations.tiny_verl import (
    ACTOR,
    LENGTHS,
    PROMPTS,
    N,
    V,
    data_of,
    distillation,
    host_config,
    logits,
    nested,
    our_config,
    predicting_responses,
    top,
    with_settings,
)


class Student(nn.Module):
    """A language model of which verl's engine takes the logits, packed or padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits_of = nn.Embedding(V, V)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits_of(input_ids))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl names an accelerator's index, or fails."""
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")


def engine(student: nn.Module) -> Any:
    """verl's engine without its process groups, as verl's own test of its outputs has it."""
    made = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    made.module, made.use_ulysses_sp, made.pad_to_length = student, False, False
    made.engine_config = SimpleNamespace(entropy_checkpointing=False)
    made._autocast_dtype, made.ulysses_device_mesh = torch.float32, None
    return made


def v1_batch(temperature: float | Tensor, *, remove_padding: bool, task_rewards: bool) -> TensorDict:
    """What verl's v1 trainer sends its actor for two responses of two prompts."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(V, (N,), generator=generator).split(LENGTHS)
    responses = [row[prompt:] for row, prompt in zip(rows, PROMPTS, strict=True)]
    ids, logps = top(1)

    def column(rows: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    columns = {
        "input_ids": nested(torch.cat(rows)),
        "position_ids": nested(torch.cat([torch.arange(length) for length in LENGTHS])),
        "prompts": column([row[:prompt] for row, prompt in zip(rows, PROMPTS, strict=True)]),
        "responses": column(responses),
        "response_mask": column([torch.ones_like(row) for row in responses]),
        "old_log_probs": column([-4 * torch.rand(len(row), generator=generator) for row in responses]),
        "advantages": column([torch.randn(len(row), generator=generator) for row in responses]),
        "teacher_ids": nested(ids.int()),
        "teacher_logprobs": nested(logps),
    }
    settings = {
        "use_remove_padding": remove_padding,
        "pad_mode": DatasetPadMode.NO_PADDING,
        "use_fused_kernels": False,
        "calculate_entropy": False,
        "distillation_use_topk": True,
        "distillation_only": not task_rewards,
        "batch_num_tokens": sum(len(row) for row in responses),
    }
    return with_settings(TensorDict(columns, batch_size=[2]), temperature, **settings)


@pytest.mark.parametrize("stored", [float, lambda t: torch.full((2,), t)], ids=["a number", "a tensor"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("remove_padding", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("task_rewards", [True, False], ids=["with task rewards", "alone"])
def test_the_loss_of_verls_engine(
    stored: Any, temperature: float, remove_padding: bool, task_rewards: bool
) -> None:
    """verl's ppo_loss, if asked for, plus distillation_loss_coef times the mean KL at temperature 1."""
    actor = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2)
    config = our_config(use_task_rewards=task_rewards, distillation_loss_coef=0.3)
    loss_function = partial(
        verl_host.losses.distillation_ppo_loss, config=actor, distillation_config=distillation(config)
    )
    data = v1_batch(stored(temperature), remove_padding=remove_padding, task_rewards=task_rewards)
    student = Student()
    loss, said = engine(student).forward_step(data, loss_function, forward_only=False)
    (grad,) = torch.autograd.grad(loss, student.parameters())

    rows_NV = student.logits_of(data["input_ids"].values())
    ids, logps = top(1)
    kl_N = topk_forward_kl(rows_NV, ids[:, 0], ids, logps, tail=True)[1]
    expected = kl_N[predicting_responses()].mean()
    if task_rewards:
        following = data["input_ids"].values().roll(-1)
        logp_N = (rows_NV / temperature).log_softmax(-1).gather(1, following[:, None])[:, 0]
        task_loss, _ = ppo_loss(actor, {"log_probs": nested(logp_N)}, data)
        expected = task_loss + 0.3 * expected
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        grad, torch.autograd.grad(expected, student.parameters())[0], rtol=1e-5, atol=1e-6
    )
    assert ("log_probs" in said["model_output"]) == task_rewards
    on_support = rows_NV.detach().log_softmax(-1).gather(1, ids).exp().sum(-1)[predicting_responses()]
    assert said["metrics"]["distillation/student_mass"] == pytest.approx(on_support.mean().item(), rel=1e-5)


@contextmanager
def sequence_parallel(rank: int, size: int) -> Iterator[None]:
    """verl's Ulysses group as a rank of it sees it, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    verl_host.ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    try:
        yield
    finally:
        verl_host.ulysses.set_ulysses_sequence_parallel_group(None)
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 5], ids=["24 tokens on 2 ranks", "24 tokens and one of padding on 5"])
@pytest.mark.parametrize("loss_mode", [verl_loss.LOSS_MODE, "forward_kl_topk"])
def test_each_rank_of_a_sequence_gets_its_own_rows(loss_mode: str, size: int) -> None:
    ids, logps = top(1)
    config = distillation(our_config() if loss_mode == verl_loss.LOSS_MODE else host_config())
    compute = verl_host.losses.compute_topk_loss
    whole = logits()
    expected = compute(ACTOR, config, data_of(ids, logps), whole, "thd")
    (grad,) = torch.autograd.grad(expected["distillation_losses"].sum(), whole)
    padded = torch.cat([logits(), torch.zeros(1, -N % size, V)], dim=1).detach().requires_grad_()
    parts = []
    for rank, student in enumerate(padded.chunk(size, dim=1)):
        with sequence_parallel(rank, size):
            parts.append(compute(ACTOR, config, data_of(ids, logps), student, "thd"))
    for name, column in expected.items():
        together = torch.cat([part[name] for part in parts], dim=1)[:, :N]
        torch.testing.assert_close(together, column, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    losses = torch.cat([part["distillation_losses"] for part in parts], dim=1)[:, :N]
    (ours,) = torch.autograd.grad(losses.sum(), padded)
    torch.testing.assert_close(ours[:, :N], grad, rtol=1e-6, atol=1e-6)
    assert not ours[:, N:].any()  # verl's padding: every teacher log-probability 0
