"""The embedded rollout engine: transformers with a key-value cache, on an unsharded copy of the policy.

The random number of a draw is a hash of (seed, group, sample, position): but for rounding, responses do not
depend on how prompts are batched or spread over ranks. The loop here defines what decode.py computes on CUDA.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from smopd.engine.models.attention import choose_for_sampling, own_way
from smopd.engine.models.loading import cache_argument
from smopd.engine.types import Rollout, Sampling
from smopd.engine.weights.architecture import checked
from smopd.kernels.ops.draw import draw as draw_token

log = logging.getLogger(__name__)

COMPACT_SHARE = 0.8  # ours: finished rows leave the batch once no more than this share is still going
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # of transformers' configurations
MOVING_ROPE = ("dynamic", "longrope")  # of transformers: these ask how long the sequence is


class Begun(NamedTuple):
    """Prompts that have been read: a row a response, but for the cache, which has one a prompt."""

    cache: DynamicCache
    logits_RV: Tensor
    seen_RL: Tensor
    """False where a row's prompt is padded."""
    position_R1: Tensor
    """Of the first response token."""
    uniform_RT: Tensor
    """float64 in [0, 1), one for each new token."""


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
        if self.in_place and (reason := why_not_in_place(model)) is not None:
            if decoding == "in_place":
                raise ValueError(f"decoding: 'in_place' cannot serve, {reason}; expected 'auto' or 'loop'")
            self.in_place = False
            log.warning("sampling without CUDA graphs: %s", reason)
        self.graphs = self.in_place and model.device.type == "cuda"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = self.model.state_dict()
        for name, value in checked(weights, {name: value.shape for name, value in own.items()}):
            own[name].copy_(value)
        self.policy_version = version

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        results: list[list[Rollout]] = [[] for _ in prompts]
        for turn in self._turns(prompts, sampling):
            made = self._sample([tuple(prompts[i]) for i in turn], [groups[i] for i in turn], sampling)
            for place, i in enumerate(turn):
                results[i] = made[place * sampling.n : (place + 1) * sampling.n]
        return list(chain.from_iterable(results))

    def _turns(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Iterator[list[int]]:
        """Indices of the prompts that are sampled together, short ones first."""
        turn: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            positions = len(prompts[i]) + sampling.max_new_tokens
            if turn and (len(turn) + 1) * sampling.n * positions > self.max_batch_tokens:
                yield turn
                turn = []
            turn.append(i)
        if turn:
            yield turn

    def _sample(self, prompts: list[tuple[int, ...]], groups: list[int], sampling: Sampling) -> list[Rollout]:
        device, n = self.model.device, sampling.n
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
            logits.repeat_interleave(n, 0),
            real.repeat_interleave(n, 0),
            position[:, -1:].repeat_interleave(n, 0) + 1,
            uniform(
                sampling.seed,
                torch.tensor(groups, device=device).repeat_interleave(n),
                torch.arange(n, device=device).repeat(len(prompts)),
                sampling.max_new_tokens,
            ),
        )
        if self.in_place:
            from smopd.engine.local.decode import decode_in_place

            tokens_RT, logps_RT, lengths_R, finished_R = decode_in_place(self, begun, sampling)
        else:
            tokens_RT, logps_RT, lengths_R, finished_R = self._decode(begun, sampling)

        tokens_RT, logps_RT = tokens_RT.cpu(), logps_RT.cpu()
        return [
            Rollout(
                prompts[r // n],
                tokens_RT[r, :length].clone(),
                logps_RT[r, :length].clone(),
                groups[r // n],
                finished,
                self.policy_version,
            )
            for r, (length, finished) in enumerate(zip(lengths_R.tolist(), finished_R.tolist(), strict=True))
        ]

    def _decode(self, begun: Begun, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(R, T) tokens and log-probabilities, (R,) lengths and whether a token ended them."""
        cache, logits, seen, position, uniform_RT = begun
        device, shape = logits.device, uniform_RT.shape
        cache.batch_repeat_interleave(sampling.n)
        rows = torch.arange(shape[0], device=device)
        going = torch.ones(shape[0], dtype=torch.bool, device=device)

        tokens_RT = torch.zeros(shape, dtype=torch.int64, device=device)
        logps_RT = torch.zeros(shape, dtype=torch.float32, device=device)
        lengths_R = torch.full(shape[:1], shape[1], device=device)
        finished_R = torch.zeros(shape[0], dtype=torch.bool, device=device)
        for step in range(shape[1]):
            token, logp = draw(logits, sampling, uniform_RT[rows, step])
            tokens_RT[rows[going], step] = token[going]
            logps_RT[rows[going], step] = logp[going]
            ended = going & torch.isin(token, self.end_ids)
            lengths_R[rows[ended]] = step + 1
            finished_R[rows[ended]] = True
            going = going & ~ended
            left = int(going.sum())
            if left == 0 or step + 1 == shape[1]:
                break
            if left <= COMPACT_SHARE * len(rows):
                kept = torch.nonzero(going)[:, 0]
                cache.batch_select_indices(kept)
                rows, token, going = rows[kept], token[kept], going[kept]
                seen, position = seen[kept], position[kept]
            seen = torch.cat([seen, seen.new_ones(len(rows), 1)], dim=1)
            logits = self.forward(token[:, None], seen[:, None, None, :], position, cache)
            position = position + 1
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


def why_not_in_place(model: PreTrainedModel) -> str | None:
    """Why `model` cannot be decoded in place; None where it can."""
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in EXPERTS):
        return "its layers have experts, whose tokens the host counts"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in MOVING_ROPE:
        return f"the model's rotary embedding is {rope['rope_type']!r}"
    return own_way(model)


def draw(logits_RV: Tensor, sampling: Sampling, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,) tokens, where the cumulative distribution passes uniform_R, and their log-probabilities under it.

    At temperature 0 the most likely token, with its log-probability at temperature 1.
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


def uniform(seed: int, keys_R: Tensor, samples_R: Tensor, positions: int) -> Tensor:
    """(R, positions) float64 in [0, 1), a hash of seed, key, sample and position (SplitMix64's finaliser)."""
    state = _mix(torch.full_like(keys_R[:, None], seed))
    for part in (keys_R[:, None], samples_R[:, None], torch.arange(positions, device=keys_R.device)):
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
