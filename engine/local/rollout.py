"""The embedded rollout engine: transformers with a key-value cache, on an unsharded copy of the policy.

Each prompt is read once for all its samples, and finished responses leave the batch. The random number of a
draw is a hash of (seed, group, sample, position), so responses do not depend on how prompts are batched or
spread over ranks, but for rounding in the forward pass itself.

The loop here defines what is sampled. On CUDA a model of plain causal attention is decoded in place instead
(`smopd.engine.local.decode`), with the same draws.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from smopd.engine.models.attention import choose_for_sampling
from smopd.engine.models.renamed import cache_argument
from smopd.engine.types import Rollout, Sampling
from smopd.kernels.ops.draw import draw as draw_token

log = logging.getLogger(__name__)

COMPACT_SHARE = 0.8  # ours: finished rows leave the batch once no more than this share is still going


class Begun(NamedTuple):
    """Prompts that have been read: a row a response, but for the cache, which has one a prompt."""

    cache: DynamicCache
    logits: Tensor
    seen: Tensor
    next_position: Tensor
    keys: Tensor
    samples: Tensor


class LocalRollout:
    """Serves `RolloutEngine` with a transformers model.

    Args:
        model: on its device and in the dtype to sample with; owned by the engine from now on.
        end_ids: tokens that end a response.
        max_batch_tokens: most cache positions held at once; more prompts are sampled in turns.
        decoding: "loop", "in_place", or "auto": in place on CUDA where the model can be.
    Raises:
        ValueError: "in_place" cannot serve the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        max_batch_tokens: int = 262_144,
        decoding: Literal["auto", "loop", "in_place"] = "auto",
    ):
        self.model = model.eval().requires_grad_(False)
        choose_for_sampling(self.model)
        self.end_ids = torch.tensor(sorted(end_ids), device=model.device)
        self.max_batch_tokens = max_batch_tokens
        self.policy_version = 0
        self.in_place = decoding == "in_place" or (decoding == "auto" and model.device.type == "cuda")
        if self.in_place:
            from smopd.engine.local.decode import why_not

            if (reason := why_not(model)) is not None:
                if decoding == "in_place":
                    raise ValueError(
                        f"decoding: 'in_place' cannot serve, {reason}; expected 'auto' or 'loop'"
                    )
                self.in_place = False
                log.warning("sampling without CUDA graphs: %s", reason)
        self.graphs = self.in_place and model.device.type == "cuda"

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
        logits = self.forward(ids, mask, position, cache)

        begun = Begun(
            cache,
            logits.repeat_interleave(sampling.n, 0),
            real.repeat_interleave(sampling.n, 0),
            position[:, -1:].repeat_interleave(sampling.n, 0) + 1,
            torch.tensor(groups, device=device).repeat_interleave(sampling.n),
            torch.arange(sampling.n, device=device).repeat(len(prompts)),
        )
        if self.in_place:
            from smopd.engine.local.decode import decode_in_place

            tokens_RT, logps_RT, lengths_R, finished_R = decode_in_place(self, begun, sampling)
        else:
            tokens_RT, logps_RT, lengths_R, finished_R = self._decode(begun, sampling)

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

    def _decode(self, begun: Begun, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(R, T) tokens and log-probabilities, (R,) lengths and whether a token ended them."""
        cache, logits, seen, next_position, keys, samples = begun
        n_rows, device = len(keys), keys.device
        cache.batch_repeat_interleave(sampling.n)
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
            logits = self.forward(token[:, None], seen[:, None, None, :], next_position, cache)
            next_position = next_position + 1
        return tokens_RT, logps_RT, lengths_R, finished_R

    def forward(self, ids: Tensor, mask: Tensor, position: Tensor, cache: Cache) -> Tensor:
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=position,
            **{cache_argument(self.model): cache},
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
        return token_R, logps_RV.gather(-1, token_R[:, None])[:, 0]
    if sampling.top_p < 1:
        logps_RV = (logits_RV.float() / sampling.temperature).log_softmax(-1)
        return draw_token(nucleus(logps_RV, sampling.top_p), 1.0, uniform_R)
    return draw_token(logits_RV, sampling.temperature, uniform_R)


def nucleus(logps_RV: Tensor, top_p: float) -> Tensor:
    """Log-probabilities over the fewest tokens whose mass reaches `top_p`, renormalised; -inf elsewhere."""
    sorted_RV, order_RV = logps_RV.sort(dim=-1, descending=True, stable=True)
    mass_before_RV = sorted_RV.exp().cumsum(-1) - sorted_RV.exp()
    kept_RV = sorted_RV.masked_fill(mass_before_RV >= top_p, float("-inf")).log_softmax(-1)
    return torch.empty_like(kept_RV).scatter_(-1, order_RV, kept_RV)


def uniform(seed: int, keys_R: Tensor, samples_R: Tensor, position: int | Tensor) -> Tensor:
    """(R,) float64 in [0, 1) from a hash of its arguments (SplitMix64's finaliser over a chain of them).

    Keys and samples of (R, 1) and positions of (T,) give (R, T).
    """
    state = _mix(torch.full_like(keys_R, seed))
    positions = position if isinstance(position, Tensor) else torch.full_like(keys_R, position)
    for part in (keys_R, samples_R, positions):
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
