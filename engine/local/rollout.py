"""The embedded rollout engine: transformers with a key-value cache, on an unsharded copy of the policy.

Each prompt is read once for all its samples, and finished responses leave the batch. The random number of a
draw is a hash of (seed, group, sample, position), so responses do not depend on how prompts are batched or
spread over ranks, but for rounding in the forward pass itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from smopd.engine.models.attention import choose_for_sampling
from smopd.engine.types import Rollout, Sampling

COMPACT_SHARE = 0.8  # ours: finished rows leave the batch once no more than this share is still going


class LocalRollout:
    """Serves `RolloutEngine` with a transformers model.

    Args:
        model: on its device and in the dtype to sample with; owned by the engine from now on.
        end_ids: tokens that end a response.
        max_batch_tokens: most cache positions held at once; more prompts are sampled in turns.
    """

    def __init__(self, model: PreTrainedModel, end_ids: Sequence[int], max_batch_tokens: int = 262_144):
        self.model = model.eval().requires_grad_(False)
        choose_for_sampling(self.model)
        self.end_ids = torch.tensor(sorted(end_ids), device=model.device)
        self.max_batch_tokens = max_batch_tokens
        self.policy_version = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = self.model.state_dict()
        missing = set(own)
        for name, value in weights:
            if name not in own or own[name].shape != value.shape:
                found = tuple(own[name].shape) if name in own else "no such weight"
                raise ValueError(
                    f"load_weights: {name} has shape {tuple(value.shape)}, the engine has {found}"
                )
            own[name].copy_(value)
            missing.discard(name)
        if missing:
            raise ValueError(f"load_weights: the stream lacks {len(missing)} weights, first {min(missing)!r}")
        self.policy_version = version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        results: list[list[Rollout]] = [[] for _ in prompts]
        while by_length:
            turn = self._fitting(by_length, prompts, sampling)
            by_length = by_length[len(turn) :]
            batch = [tuple(prompts[i]) for i in turn]
            for i, rollouts in zip(
                turn, self._sample(batch, [groups[i] for i in turn], sampling), strict=True
            ):
                results[i] = rollouts
        return [rollout for rollouts in results for rollout in rollouts]

    def _fitting(self, order: list[int], prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[int]:
        n = 1
        while n < len(order):
            positions = len(prompts[order[n]]) + sampling.max_new_tokens
            if (n + 1) * sampling.n * positions > self.max_batch_tokens:
                break
            n += 1
        return order[:n]

    def _sample(
        self, prompts: list[tuple[int, ...]], groups: list[int], sampling: Sampling
    ) -> list[list[Rollout]]:
        device = self.model.device
        n_rows = len(prompts) * sampling.n
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        real = torch.zeros(len(prompts), longest, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            ids[i, longest - len(prompt) :] = torch.tensor(prompt)
            real[i, longest - len(prompt) :] = True
        ids, real = ids.to(device), real.to(device)
        position = (real.cumsum(-1) - 1).clamp(min=0)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        own = torch.eye(longest, dtype=torch.bool, device=device)
        mask = (causal & real[:, None, None, :]) | own
        cache = DynamicCache(config=self.model.config)
        logits = self._forward(ids, mask, position, cache)

        cache.batch_repeat_interleave(sampling.n)
        logits = logits.repeat_interleave(sampling.n, 0)
        seen = real.repeat_interleave(sampling.n, 0)
        next_position = position[:, -1:].repeat_interleave(sampling.n, 0) + 1
        keys = torch.tensor(groups, device=device).repeat_interleave(sampling.n)
        samples = torch.arange(sampling.n, device=device).repeat(len(prompts))
        rows = torch.arange(n_rows, device=device)

        tokens_RT = torch.zeros(n_rows, sampling.max_new_tokens, dtype=torch.int64, device=device)
        logps_RT = torch.zeros(n_rows, sampling.max_new_tokens, dtype=torch.float32, device=device)
        lengths_R = torch.full((n_rows,), sampling.max_new_tokens, device=device)
        finished_R = torch.zeros(n_rows, dtype=torch.bool, device=device)
        going = torch.ones(n_rows, dtype=torch.bool, device=device)
        for step in range(sampling.max_new_tokens):
            token, logp = draw(logits, sampling, uniform(sampling.seed, keys, samples, step))
            tokens_RT[rows[going], step] = token[going]
            logps_RT[rows[going], step] = logp[going]
            ended = going & torch.isin(token, self.end_ids)
            lengths_R[rows[ended]] = step + 1
            finished_R[rows[ended]] = True
            going = going & ~ended
            left = int(going.sum())
            if left == 0 or step + 1 == sampling.max_new_tokens:
                break
            if left <= COMPACT_SHARE * len(rows):
                kept = torch.nonzero(going)[:, 0]
                cache.batch_select_indices(kept)
                rows, keys, samples, token = rows[kept], keys[kept], samples[kept], token[kept]
                seen, next_position, going = seen[kept], next_position[kept], going[kept]
            seen = torch.cat([seen, seen.new_ones(len(rows), 1)], dim=1)
            logits = self._forward(token[:, None], seen[:, None, None, :], next_position, cache)
            next_position = next_position + 1

        tokens_RT, logps_RT = tokens_RT.cpu(), logps_RT.cpu()
        lengths, finished = lengths_R.tolist(), finished_R.tolist()
        return [
            [
                Rollout(
                    prompt,
                    tokens_RT[r, : lengths[r]].clone(),
                    logps_RT[r, : lengths[r]].clone(),
                    group,
                    finished[r],
                    self.policy_version,
                )
                for r in range(i * sampling.n, (i + 1) * sampling.n)
            ]
            for i, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
        ]

    def _forward(self, ids: Tensor, mask: Tensor, position: Tensor, cache: DynamicCache) -> Tensor:
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]


def draw(logits_RV: Tensor, sampling: Sampling, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """One token a row and its log-probability under the distribution that it was drawn from.

    Args:
        logits_RV: (R, V).
        sampling: temperature 0 takes the most likely token, with its log-probability at temperature 1.
        uniform_R: (R,) float64 in [0, 1); the token is where the cumulative distribution passes it.
    """
    if sampling.temperature == 0:
        logps_RV = logits_RV.float().log_softmax(-1)
        token_R = logps_RV.argmax(-1)
    else:
        logps_RV = (logits_RV.float() / sampling.temperature).log_softmax(-1)
        if sampling.top_p < 1:
            logps_RV = nucleus(logps_RV, sampling.top_p)
        cumulative_RV = logps_RV.double().exp().cumsum(-1)
        total_R = cumulative_RV[:, -1]
        aim_R = torch.minimum(uniform_R * total_R, total_R.nextafter(torch.zeros_like(total_R)))
        token_R = torch.searchsorted(cumulative_RV, aim_R[:, None], right=True)[:, 0]
    return token_R, logps_RV.gather(-1, token_R[:, None])[:, 0]


def nucleus(logps_RV: Tensor, top_p: float) -> Tensor:
    """Log-probabilities over the fewest tokens whose mass reaches `top_p`, renormalised; -inf elsewhere."""
    sorted_RV, order_RV = logps_RV.sort(dim=-1, descending=True, stable=True)
    mass_before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
    kept_RV = sorted_RV.masked_fill(mass_before_RV >= top_p, float("-inf")).log_softmax(-1)
    return torch.empty_like(kept_RV).scatter_(-1, order_RV, kept_RV)


def uniform(seed: int, keys_R: Tensor, samples_R: Tensor, position: int) -> Tensor:
    """(R,) float64 in [0, 1) from a hash of its arguments (SplitMix64's finaliser over a chain of them)."""
    state = _mix(torch.full_like(keys_R, seed))
    for part in (keys_R, samples_R, torch.full_like(keys_R, position)):
        state = _mix(state + (part + 1) * _signed(0x9E3779B97F4A7C15))
    return ((state >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
