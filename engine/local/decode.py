"""Decoding with static buffers, so that a CUDA graph can replay a token. Results equal rollout.py's loop.

Shapes: R rows, T new tokens, L prompt positions, C positions that the buffers hold, K key-value heads.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from smopd.engine.local.rollout import Begun, LocalRollout, draw
from smopd.engine.types import Sampling

log = logging.getLogger(__name__)

CHECK_EVERY = 16  # tokens (ours) between checks for finished rows, which synchronize with the device
BLOCK = 256  # positions (ours): smaller blocks need more graphs, larger ones read more unused keys
ALIGNED = 16  # positions (ours): torch's kernels copy masks whose rows are not 16-byte aligned


class Slots(StaticLayer):
    """A layer's keys and values, (R, K, C, d). Each token is written at `slot`, shared by all layers."""

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
    """Buffers and CUDA graph of rows sampled together. Sets `engine.graphs` to False if capture fails."""

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
        layers = [
            Slots(
                self._room(layer.keys, 2, 0.0, sampling.n),
                self._room(layer.values, 2, 0.0, sampling.n),
                self.slot,
            )
            for layer in begun.cache.layers
        ]
        self.cache = Cache(layers=layers)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.warm = False
        # torch's default capture stream belongs to the device that captured first.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self) -> tuple[Tensor, Tensor]:
        """Return (R, T) tokens and log-probabilities; entries after a row's end token are undefined."""
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
        """Compute a token: the first one of a shape warms up, the second is captured, the others replay."""
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
                torch.cuda.set_stream(before)  # torch does not restore it after a failed capture
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
        """Repeat each row and extend `dim` by another block of positions."""
        shape = list(x.shape)
        wanted = min(self.filled + BLOCK, self.most)
        shape[0], shape[dim] = repeats * shape[0], -(-wanted // ALIGNED) * ALIGNED
        roomy = x.new_full(shape, fill)
        roomy.unflatten(0, (-1, repeats)).narrow(dim + 1, 0, x.shape[dim]).copy_(x[:, None])
        return roomy
