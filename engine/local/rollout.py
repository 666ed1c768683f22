"""The local rollout engine, which samples with transformers from an unsharded copy of the policy.

Each draw uses a hash of (seed, group, sample, position) as its random number. Up to rounding, responses
therefore do not depend on how prompts are batched or distributed over ranks. `Decoder` samples the same
responses into static buffers. This lets a CUDA graph replay the step that samples a token.

Shapes: R rows, T new tokens, L prompt positions, C positions in the buffers, K key-value heads.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, StaticLayer

from smopd.engine.errors import UnusableModel
from smopd.engine.models import attention, paths
from smopd.engine.models.loading import cache_argument
from smopd.engine.types import Rollout, Sampling
from smopd.engine.weights.architecture import checked
from smopd.kernels.dispatch import serving

log = logging.getLogger(__name__)

COMPACT_SHARE = 0.8  # ours: finished rows are removed if at most this share of rows is unfinished
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # fields of transformers' configs
# SplitMix64's constants as int64
GOLDEN, MIX_1, MIX_2 = (x - 2**64 for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
Way = Literal["together", "alone", "uncached"]
"""together: one padded batch; alone: one prompt at a time, with a cache; uncached: alone, without a cache."""
CHECK_TOKENS = 4  # ours: tokens per response in the self-check
_WAYS: dict[tuple, Way] = {}
"""For each `paths.architecture`, the Way that has passed the self-check in this process."""
CHECK_EVERY = 16  # tokens (ours) between checks for finished rows; each check synchronizes with the device
BLOCK = 256  # positions (ours): a small block needs more graphs, a large block reads more unused keys
ALIGNED = 16  # positions (ours): torch's kernels would copy a mask whose rows are not 16-byte aligned


class Begun(NamedTuple):
    """The state after the prefill: tensors with one row per response, and a cache with one row per prompt."""

    cache: Cache
    logits_RV: Tensor
    seen_RL: Tensor
    """False at the padding before a prompt."""
    position_R1: Tensor
    """Position of the first response token."""
    uniform_RT: Tensor
    """The random number for each new token, a float64 in [0, 1)."""


class LocalRollout:
    """A transformers model as a `RolloutEngine`.

    Args:
        model: already on its device and in the dtype for sampling. The engine owns and modifies it.
        end_ids: tokens that end a response.
        max_batch_tokens: maximum cache positions of a batch. Prompts that do not fit form further batches.
        decoding: "loop", "in_place", or "auto", which means in place on CUDA if the model allows it.
    Raises:
        ValueError: `decoding` is "in_place", which the model does not support.
        UnusableModel: no `Way` of sampling agrees with the model's forward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        max_batch_tokens: int = 262_144,
        decoding: Literal["auto", "loop", "in_place"] = "auto",
    ):
        self.model = model.eval().requires_grad_(False)
        self.max_batch_tokens = max_batch_tokens
        self.policy_version = 0
        self.in_place = False
        self.boundary = attention.rope_boundary(model.config.get_text_config())
        self.way = self._choose_way()
        self.end_ids = torch.tensor(sorted(end_ids), device=model.device)
        self.in_place = decoding == "in_place" or (decoding == "auto" and model.device.type == "cuda")
        if self.in_place and (reason := why_not_in_place(model, self.way)) is not None:
            if decoding == "in_place":
                raise ValueError(f"decoding: 'in_place' cannot serve, {reason}; expected 'auto' or 'loop'")
            self.in_place = False
            log.warning("sampling without CUDA graphs: %s", reason)
        self.graphs = self.in_place and model.device.type == "cuda"

    def _choose_way(self) -> Way:
        """Return the fastest `Way` whose log-probabilities agree with those of transformers' forward."""
        reasons = [attention.why_not_packed(self.model)]
        ways: list[Way] = ["alone", "uncached"] if reasons[0] else ["together", "alone", "uncached"]
        key = paths.architecture(self.model)
        self.end_ids = torch.empty(0, dtype=torch.int64, device=self.model.device)
        prompts = list(dict.fromkeys(rollout.prompt_ids for rollout in paths.check_rollouts(self.model)))
        sampling = Sampling(n=2, max_new_tokens=CHECK_TOKENS)
        for self.way in ways:
            attention.set_attention(self.model, "plain")
            if self.way == "together":
                attention.set_token_attention(self.model)
            if self.way == _WAYS.get(key):
                return self.way
            try:
                rollouts = self.generate(prompts, range(len(prompts)), sampling)
                with torch.no_grad(), paths.native_attention(self.model):
                    expected_N = paths.single_logps(self.model, rollouts)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # any exception means that the architecture cannot do this
                reasons.append(f"{self.way}: {paths.brief(error)}")
                continue
            off = paths.difference(self.model, torch.cat([each.logps for each in rollouts]), expected_N.cpu())
            if off is None:
                if self.way != "together":
                    log.warning("sampling one prompt at a time, prompts %s: %s", self.way, reasons[-1])
                _WAYS[key] = self.way
                return self.way
            reasons.append(f"{self.way}: {off}")
        raise UnusableModel(f"model {self.model.name_or_path}: cannot be sampled here ({reasons[-1]})")

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
        """Yield lists of prompt indices, short prompts first. Prompts in one list are sampled together."""
        turn: list[int] = []
        for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
            positions = len(prompts[i]) + sampling.max_new_tokens
            single = self.way != "together" or self._crosses(len(prompts[i]), sampling)
            if turn and (single or (len(turn) + 1) * sampling.n * positions > self.max_batch_tokens):
                yield turn
                turn = []
            turn.append(i)
        if turn:
            yield turn

    def _crosses(self, prompt_length: int, sampling: Sampling) -> bool:
        """Return whether a response may grow beyond `boundary`, where the rotary embedding changes."""
        return self.boundary is not None and prompt_length + sampling.max_new_tokens > self.boundary

    def _sample(self, prompts: list[tuple[int, ...]], groups: list[int], sampling: Sampling) -> list[Rollout]:
        n = sampling.n
        if self.way == "together" and not self._crosses(len(prompts[0]), sampling):
            begun = self._begin(prompts, groups, sampling)
            if self.in_place:
                results = Decoder(self, begun, sampling).run()
            else:
                results = self._decode(begun, sampling)
        else:
            results = self._decode_alone(prompts[0], groups[0], sampling)
        tokens_RT, logps_RT = (result.cpu() for result in results)
        ends_RT = torch.isin(tokens_RT, self.end_ids.cpu())
        finished_R = ends_RT.any(1)
        lengths_R = torch.where(finished_R, ends_RT.int().argmax(1) + 1, tokens_RT.shape[1])
        made = []
        for r, (length, finished) in enumerate(zip(lengths_R.tolist(), finished_R.tolist(), strict=True)):
            own = tokens_RT[r, :length].clone(), logps_RT[r, :length].clone()
            made.append(Rollout(prompts[r // n], *own, groups[r // n], finished, self.policy_version))
        return made

    def _begin(self, prompts: list[tuple[int, ...]], groups: list[int], sampling: Sampling) -> Begun:
        """Prefill the cache with prompts that are padded on the left."""
        attention.reset_rope(self.model)
        device, n = self.model.device, sampling.n
        rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        longest, lengths = ids.shape[1], torch.tensor([len(row) for row in rows], device=device)
        real = torch.arange(longest, device=device) >= longest - lengths[:, None]
        position = (real.cumsum(-1) - 1).clamp(min=0)
        causal = torch.ones(longest, longest, dtype=torch.bool, device=device).tril()
        own = torch.eye(longest, dtype=torch.bool, device=device)
        mask = (causal & real[:, None, None, :]) | own
        most = longest + sampling.max_new_tokens
        cache = Cache(layer_class_to_replicate=partial(GrowingLayer, most))  # no windows: masks apply them
        masks = attention.layer_masks(self.model, mask, position, position)
        logits = self.forward(ids, masks, position, cache)
        keys_R = torch.tensor(groups, device=device).repeat_interleave(n)
        samples_R = torch.arange(n, device=device).repeat(len(prompts))
        uniform_RT = uniform(sampling.seed, keys_R, samples_R, sampling.max_new_tokens)
        logits_RV, seen_RL = logits.repeat_interleave(n, 0), real.repeat_interleave(n, 0)
        return Begun(cache, logits_RV, seen_RL, position[:, -1:].repeat_interleave(n, 0) + 1, uniform_RT)

    def _decode(self, begun: Begun, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Return (R, T) tokens and log-probabilities. Entries after a row's end token are undefined."""
        cache, logits, seen, position, uniform_RT = begun
        device, shape = logits.device, uniform_RT.shape
        cache.batch_repeat_interleave(sampling.n)
        rows = torch.arange(shape[0], device=device)
        going = torch.ones(shape[0], dtype=torch.bool, device=device)

        tokens_RT = torch.zeros(shape, dtype=torch.int64, device=device)
        logps_RT = torch.zeros(shape, dtype=torch.float32, device=device)
        for step in range(shape[1]):
            token, logp = draw(logits, sampling, uniform_RT[rows, step])
            tokens_RT[rows, step], logps_RT[rows, step] = token, logp
            going = going & ~torch.isin(token, self.end_ids)
            left = int(going.sum())
            if left == 0 or step + 1 == shape[1]:
                break
            if left <= COMPACT_SHARE * len(rows):
                kept = torch.nonzero(going)[:, 0]
                cache.batch_select_indices(kept)
                rows, token, going = rows[kept], token[kept], going[kept]
                seen, position = seen[kept], position[kept]
            seen = torch.cat([seen, seen.new_ones(len(rows), 1)], dim=1)
            keys = position - seen.shape[1] + 1 + torch.arange(seen.shape[1], device=device)
            mask = attention.layer_masks(self.model, seen[:, None, None, :], position, keys)
            logits = self.forward(token[:, None], mask, position, cache)
            position = position + 1
        return tokens_RT, logps_RT

    def _decode_alone(self, prompt: tuple[int, ...], group: int, sampling: Sampling) -> tuple[Tensor, Tensor]:
        """Sample one prompt's responses with the model's masks. Return as `_decode`, but T may be smaller."""
        n, n_new, device = sampling.n, sampling.max_new_tokens, self.model.device
        keys_R, samples_R = torch.full((n,), group, device=device), torch.arange(n, device=device)
        uniform_RT = uniform(sampling.seed, keys_R, samples_R, n_new)
        seen_RL = ids = torch.tensor(prompt, device=device).expand(n, -1)
        tokens, logps = [], []
        options: dict[str, Any] = {"use_cache": self.way != "uncached"}
        for step in range(n_new):
            crossing = self.boundary is not None and seen_RL.shape[1] == self.boundary + 1
            if self.way == "uncached" or step == 0 or crossing:  # a crossing changes the rotation of all keys
                ids = seen_RL
                attention.reset_rope(self.model)
                if self.way != "uncached":
                    options[cache_argument(self.model)] = DynamicCache(config=self.model.config)
            logits_RV = self.model(input_ids=ids, **options).logits[:, -1]
            token_R, logp_R = draw(logits_RV, sampling, uniform_RT[:, step])
            tokens.append(token_R)
            logps.append(logp_R)
            if bool(torch.isin(torch.stack(tokens, 1), self.end_ids).any(1).all()):
                break
            ids = token_R[:, None]
            seen_RL = torch.cat([seen_RL, ids], 1)
        return torch.stack(tokens, 1), torch.stack(logps, 1)

    def forward(self, ids: Tensor, mask: Any, position: Tensor, cache: Cache) -> Tensor:
        options: dict[str, Any] = {cache_argument(self.model): cache, "use_cache": True, "logits_to_keep": 1}
        return self.model(input_ids=ids, attention_mask=mask, position_ids=position, **options).logits[:, -1]


class GrowingLayer(DynamicLayer):
    """A layer's keys and values, (R, K, L, d). Spare positions let a new token be written in place.

    most: the maximum number of positions that will be needed.
    """

    is_initialized: bool

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.dtype, self.device = key_states.dtype, key_states.device
            self.is_initialized = True
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = _appended(self.keys, key_states, self.most)
        self.values = _appended(self.values, value_states, self.most)
        return self.keys, self.values


def _appended(x: Tensor, more: Tensor, most: int) -> Tensor:
    """Append `more` to x, (R, K, L, d), and return the result. If x has spare positions, write in place."""
    n_rows, n_heads, length, size = x.shape
    total = length + more.shape[2]
    if length == 0 or x.stride(1) < total * size:
        roomy = x.new_empty(n_rows, n_heads, min(total + BLOCK, most), size)
        roomy[:, :, :length] = x
        x = roomy
    whole = x.as_strided((n_rows, n_heads, total, size), x.stride())
    whole[:, :, length:] = more
    return whole


class Slots(StaticLayer):
    """A layer's keys and values, (R, K, C, d). A new token is written at `slot`, which all layers share."""

    def __init__(self, keys: Tensor, values: Tensor, slot: Tensor):
        super().__init__(max_cache_len=keys.shape[2])
        self.keys, self.values, self.slot = keys, values, slot
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.slot, key_states)
        self.values.index_copy_(2, self.slot, value_states)
        return self.keys, self.values


class Decoder:
    """Buffers and a CUDA graph for rows sampled together. A failed capture sets `engine.graphs` to False."""

    def __init__(self, engine: LocalRollout, begun: Begun, sampling: Sampling):
        self.engine, self.sampling = engine, sampling
        device, self.n_new = begun.logits_RV.device, sampling.max_new_tokens
        self.uniform_RT, self.position_R1 = begun.uniform_RT, begun.position_R1.clone()
        n_rows, self.filled = begun.seen_RL.shape
        self.most = self.filled + self.n_new
        self.slot = torch.full((1,), self.filled, device=device)
        self.at = torch.ones(1, dtype=torch.int64, device=device)
        self.tokens_RT = torch.zeros(n_rows, self.n_new, dtype=torch.int64, device=device)
        self.logps_RT = torch.zeros(n_rows, self.n_new, dtype=torch.float32, device=device)
        token_R, self.logps_RT[:, 0] = draw(begun.logits_RV, sampling, self.uniform_RT[:, 0])
        self.tokens_RT[:, 0], self.token_R1 = token_R, token_R[:, None].clone()
        mask_RL = torch.zeros_like(begun.seen_RL, dtype=engine.model.dtype)
        mask_RL.masked_fill_(~begun.seen_RL, float("-inf"))
        self.mask = self._room(mask_RL[:, None, None], 3, float("-inf"))
        room = partial(self._room, dim=2, fill=0.0, repeats=sampling.n)
        layers = [Slots(room(layer.keys), room(layer.values), self.slot) for layer in begun.cache.layers]
        self.cache = Cache(layers=layers)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False
        # torch's default capture stream belongs to the device that captured first.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self) -> tuple[Tensor, Tensor]:
        """Return (R, T) tokens and log-probabilities. Entries after a row's end token are undefined."""
        tokens_RT, logps_RT = self.tokens_RT.clone(), self.logps_RT.clone()
        rows = torch.arange(len(tokens_RT), device=tokens_RT.device)
        with nullcontext() if self.stream is None else torch.cuda.device(self.stream.device):
            for at in range(1, self.n_new):
                if at % CHECK_EVERY == 0:
                    ended = torch.isin(self.tokens_RT[:, :at], self.engine.end_ids).any(1)
                    kept = torch.nonzero(~ended)[:, 0]
                    if len(kept) == 0:
                        break
                    if 2 * len(kept) <= len(rows):
                        tokens_RT[rows], logps_RT[rows] = self.tokens_RT, self.logps_RT
                        rows = rows[kept]
                        self._keep(kept)
                if self.filled == self.mask.shape[3]:
                    self._grow()
                self._advance()
            tokens_RT[rows], logps_RT[rows] = self.tokens_RT, self.logps_RT
        return tokens_RT, logps_RT

    def _step(self) -> None:
        self.mask.index_fill_(3, self.slot, 0.0)
        logits_RV = self.engine.forward(self.token_R1, self.mask, self.position_R1, self.cache)
        uniform_R = self.uniform_RT.index_select(1, self.at)[:, 0]
        token_R, logp_R = draw(logits_RV, self.sampling, uniform_R)
        self.tokens_RT.index_copy_(1, self.at, token_R[:, None])
        self.logps_RT.index_copy_(1, self.at, logp_R[:, None])
        self.token_R1.copy_(token_R[:, None])
        for counter in (self.position_R1, self.slot, self.at):
            counter.add_(1)

    def _advance(self) -> None:
        """Sample a token in each row. With graphs, the second call for a shape captures a graph to replay."""
        if self.engine.graphs and self.warm and self.graph is None:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
        else:
            self._step()
        self.warm = True
        self.filled += 1

    def _capture(self) -> None:
        before = None if self.stream is None else torch.cuda.current_stream()
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                self._step()
            self.graph = graph
        except RuntimeError as error:  # capturing runs nothing, so the rows are unchanged
            if before is not None:
                torch.cuda.set_stream(before)  # torch does not restore the stream after a failed capture
            self.engine.graphs = False
            log.warning("sampling without CUDA graphs: capture failed: %s", error)

    def _keep(self, kept_R: Tensor) -> None:
        self.graph, self.warm = None, False
        for name in ("uniform_RT", "position_R1", "tokens_RT", "logps_RT", "token_R1", "mask"):
            setattr(self, name, getattr(self, name)[kept_R])
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys[kept_R], layer.values[kept_R]

    def _grow(self) -> None:
        self.graph, self.warm = None, False
        self.mask = self._room(self.mask, 3, float("-inf"))
        for layer in self.cache.layers:
            layer.keys = self._room(layer.keys, 2, 0.0)
            layer.values = self._room(layer.values, 2, 0.0)

    def _room(self, x: Tensor, dim: int, fill: float, repeats: int = 1) -> Tensor:
        """Return x with each row repeated, and with room for another BLOCK of positions in `dim`."""
        shape = list(x.shape)
        wanted = min(self.filled + BLOCK, self.most)
        shape[0], shape[dim] = repeats * shape[0], -(-wanted // ALIGNED) * ALIGNED
        roomy = x.new_full(shape, fill)
        roomy.unflatten(0, (-1, repeats)).narrow(dim + 1, 0, x.shape[dim]).copy_(x[:, None])
        return roomy


def why_not_in_place(model: PreTrainedModel, way: Way) -> str | None:
    """Return why `model` cannot be decoded in place, or None if it can."""
    if way != "together":
        return "its prompts are sampled one at a time"
    config = model.config.get_text_config()
    if any(getattr(config, name, None) for name in EXPERTS):
        return "its layers have experts, whose tokens are counted on the host"
    if attention.rope_boundary(config) is not None:
        return "its rotary embedding depends on the sequence's length"
    return attention.why_not_pieces(model)


def draw(logits_RV: Tensor, sampling: Sampling, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Draw (R,) tokens by inverting the cumulative distribution at uniform_R. Return them and their logps.

    At temperature 0, return each row's most likely token and its log-probability at temperature 1.
    """
    if sampling.temperature == 0:
        logps_RV = logits_RV.float().log_softmax(-1)
        token_R = logps_RV.argmax(-1)
        return token_R, logps_RV.gather(-1, token_R[:, None])[:, 0]
    token_R, logp_R = serving("draw", logits_RV)(logits_RV, sampling.temperature, uniform_R)
    return token_R.clamp(max=logits_RV.shape[-1] - 1), logp_R  # ids stay below V even in a row of NaN


def uniform(seed: int, keys_R: Tensor, samples_R: Tensor, positions: int) -> Tensor:
    """Hash (seed, key, sample, position) to (R, positions) float64 in [0, 1) with SplitMix64's finalizer."""
    state = _mix(torch.full_like(keys_R[:, None], seed))
    for part in (keys_R[:, None], samples_R[:, None], torch.arange(positions, device=keys_R.device)):
        state = _mix(state + (part + 1) * GOLDEN)
    return ((state >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift int64 to the right and fill with zeros."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
