"""Two sequences with a student's logits and a teacher's top tokens, as verl's engine hands them to a loss."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from smopd.integrations import verl as smopd_verl
from smopd.integrations import verl_host

N, V, S = 24, 97, 6
LENGTHS = (9, 15)  # tokens of the two sequences
PROMPTS = (3, 5)


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


def data_of(ids: Tensor, logps: Tensor, temperature: float | Tensor = 1.0) -> TensorDict:
    """A micro-batch of verl's legacy trainer. verl stores what is no tensor as NonTensorData."""
    responses = [length - prompt for length, prompt in zip(LENGTHS, PROMPTS, strict=True)]
    mask = torch.arange(max(responses)) < torch.tensor(responses)[:, None]
    prompt_mask = torch.arange(max(PROMPTS)) >= max(PROMPTS) - torch.tensor(PROMPTS)[:, None]
    columns = {
        "prompts": torch.zeros(2, max(PROMPTS), dtype=torch.long),
        "responses": torch.zeros(2, max(responses), dtype=torch.long),
        "attention_mask": torch.cat([prompt_mask, mask], dim=1).long(),
        "response_mask": mask,
        "teacher_ids": nested(ids),
        "teacher_logprobs": nested(logps),
    }
    data = TensorDict(columns, batch_size=[])
    return with_settings(data, temperature, batch_num_tokens=int(mask.sum()))


def with_settings(data: TensorDict, temperature: float | Tensor, **settings: Any) -> TensorDict:
    """The batch with what verl's trainer and engine tell its loss, stored as they store it."""
    if isinstance(temperature, Tensor):
        data["temperature"] = temperature
    else:
        tu.assign_non_tensor_data(data, "temperature", temperature)
    tu.assign_non_tensor(data, dp_size=1, global_batch_size=2, **settings)
    return data


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
    return verl_host.worker_config.DistillationLossConfig(**{**chosen, **clamps, **settings})


def our_config(**settings: Any) -> Any:
    return smopd_verl.SmopdLossConfig(**{"topk": S, "use_task_rewards": False, **settings})


def loss_of(config: Any, data: TensorDict, student: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """verl's two calls: in the logits processor and after it."""
    compute = verl_host.losses.distillation_ppo_loss
    columns = compute(ACTOR, distillation(config), data=data, student_logits=student)
    output = {name: column[0] for name, column in columns.items()}
    return compute(ACTOR, distillation(config), model_output=output, data=data)
