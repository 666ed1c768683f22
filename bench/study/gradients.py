"""How much of the policy gradient each reward has under a priority profile, measured on the base model.

Shapes: R responses, K rewards, N response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from smopd.engine.local.rollout import LocalRollout
from smopd.engine.models.loading import end_token_ids, load_model, load_tokenizer
from smopd.engine.models.packing import pack
from smopd.engine.settings import Packing
from smopd.engine.student.strategy import Policy
from smopd.engine.types import Rollout, Sampling
from smopd.ops import LossStats, LossTokens, gdpo_advantages, linear_smopd_loss
from smopd.rewards.rlla import accuracy_reward, format_reward
from smopd.worlds import toy_world


@dataclass(frozen=True)
class Sampled:
    """Responses of the base model with their rewards."""

    rollouts: list[Rollout]
    rewards_RK: Tensor
    group_R: Tensor


def sample(base: Path, n_prompts: int, group_size: int, seed: int) -> Sampled:
    """Responses to the toy world's training prompts, scored by accuracy and format."""
    model, tokenizer = load_model(base, torch.float32), load_tokenizer(base)
    rows = toy_world.prompts(n_prompts, seed)
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    engine = LocalRollout(model, end_token_ids(model, tokenizer))
    sampling = Sampling(n=group_size, max_new_tokens=32, seed=seed)
    rollouts = engine.generate(prompts, list(range(n_prompts)), sampling)
    texts = [tokenizer.decode(r.response_ids, skip_special_tokens=True) for r in rollouts]
    truths = [rows[r.group]["ground_truth"] for r in rollouts]
    asked = [rows[r.group]["prompt"] for r in rollouts]
    columns = [
        torch.tensor(reward(asked, texts, ground_truth=truths), dtype=torch.float64)
        for reward in (accuracy_reward, format_reward)
    ]
    return Sampled(rollouts, torch.stack(columns, 1), torch.tensor([r.group for r in rollouts]))


def contributions(base: Path, sampled: Sampled, weights: Sequence[float]) -> list[float]:
    """The norm of each reward's own part of the policy gradient (Eq. 1 to 3, 8; on policy), (K,)."""
    parts_RK = torch.stack(
        [
            weight * gdpo_advantages(sampled.rewards_RK[:, k : k + 1], sampled.group_R, whiten=None)
            for k, weight in enumerate(weights)
        ],
        1,
    )
    parts_RK = parts_RK / parts_RK.sum(1).std()
    lengths_R = torch.tensor([len(rollout.response_ids) for rollout in sampled.rollouts])
    policy = Policy(load_model(base, torch.float32).requires_grad_(True))
    return [
        _gradient_norm(policy, sampled.rollouts, adv_R.repeat_interleave(lengths_R).float())
        for adv_R in parts_RK.unbind(1)
    ]


def _gradient_norm(policy: Policy, rollouts: list[Rollout], adv_N: Tensor) -> float:
    policy.zero_grad()
    for batch in pack(rollouts, Packing()):
        weight_N = torch.full((len(batch.flat_N),), 1 / len(adv_N))
        tokens = LossTokens(token_ids_N=batch.token_ids_N, adv_N=adv_N[batch.flat_N], pg_weight_N=weight_N)
        loss, _ = policy(batch, partial(_loss, tokens=tokens))
        loss.backward()
    squares = [p.grad.double().square().sum() for p in policy.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def _loss(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, *, tokens: LossTokens
) -> tuple[Tensor, LossStats]:
    return linear_smopd_loss(hidden_ND, weight_VD, tokens, bias_V=bias_V)
