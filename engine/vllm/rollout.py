"""Sampling with vLLM: one request per response.

Each request is seeded with a hash of (seed, group, sample). Up to rounding, a response therefore does not
depend on the batch, the rank or the engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.errors import CannotSend, NoServer
from smopd.engine.settings import Vllm
from smopd.engine.types import Rollout, Sampling, draw_key
from smopd.engine.vllm.engines import SAMPLES, engine, of_sharing_ranks

if TYPE_CHECKING:
    from vllm import LLM

LOWEST_TEMPERATURE = 0.01  # vLLM silently raises lower temperatures to this


class Sample(NamedTuple):
    """A response to draw: the `number`-th response to `prompt`."""

    prompt: tuple[int, ...]
    group: int
    number: int


class VllmRollout:
    """`RolloutEngine` with vLLM. Ranks that share a model sample their prompts together.

    Args:
        path: folder or hub id of the first weights.
        end_ids: tokens that end a response.
    """

    def __init__(self, path: str | Path, end_ids: Sequence[int], settings: Vllm):
        self.engine = engine(SAMPLES, path, settings, logprobs_mode="processed_logprobs")
        self.engine.sleep()
        self.end_ids = sorted(set(end_ids))
        self.policy_version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """Sample as in `RolloutEngine`. Raise LostWeights if the last load failed."""
        own = samples_of(prompts, groups, sampling)
        if not own and self.engine.settings.tensor_parallel_size == 1:
            return []  # without waking the engine
        with self.engine.awake() as llm:
            gathered, rank = of_sharing_ranks(self.engine.settings, own)
            rollouts = self._sample(llm, list(itertools.chain(*gathered)), sampling)
        first = sum(map(len, gathered[:rank]))
        return rollouts[first : first + len(own)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load as in `RolloutEngine`. Raise as `Engine.load`, but NoServer and CannotSend on all ranks."""
        stream = iter(weights)

        def take() -> None:
            try:
                self.engine.load(stream)
            except (NoServer, CannotSend):
                for _ in stream:  # empties it: gathering a tensor is a collective call
                    pass
                raise

        if self.engine.settings.placement == "process":
            distributed.all_or_raise(take, (NoServer, CannotSend))
        else:
            take()
        self.policy_version = version

    def _sample(self, llm: LLM, samples: Sequence[Sample], sampling: Sampling) -> list[Rollout]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if not samples:
            return []
        longest, limit = max(len(sample.prompt) for sample in samples), llm.model_config.max_model_len
        if longest + sampling.max_new_tokens > limit:
            got = f"a prompt of {longest} tokens and max_new_tokens {sampling.max_new_tokens}"
            raise ValueError(f"generate: {got} exceed the engine's {limit} positions (max_model_len)")
        prompts = [TokensPrompt(prompt_token_ids=list(sample.prompt)) for sample in samples]
        each = [sampling_parameters(sampling, sample, self.end_ids) for sample in samples]
        with torch.random.fork_rng(devices=[]):  # on a CPU vLLM advances the caller's generator
            params = [SamplingParams(**one, flat_logprobs=True) for one in each]
            outputs = llm.generate(prompts, params, use_tqdm=False)
        pairs = zip(samples, outputs, strict=True)
        return [self._rollout(sample, output.outputs[0]) for sample, output in pairs]

    def _rollout(self, sample: Sample, output: Any) -> Rollout:
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a response of group {sample.group} by {output.finish_reason!r}")
        flat = output.logprobs
        return Rollout(
            sample.prompt,
            torch.tensor(output.token_ids, dtype=torch.int64),
            torch.tensor(flat.logprobs)[torch.tensor(flat.start_indices)],
            sample.group,
            finished=output.token_ids[-1] in self.end_ids,
            policy_version=self.policy_version,
        )


def sampling_parameters(sampling: Sampling, sample: Sample, end_ids: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of vLLM's SamplingParams."""
    return {
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "max_tokens": sampling.max_new_tokens,
        "seed": draw_key(sampling.seed, sample.group, sample.number),
        "stop_token_ids": list(end_ids),
        "ignore_eos": True,  # end_ids contain every end token
        "logprobs": 0,
        "detokenize": False,
    }


def samples_of(prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling) -> list[Sample]:
    """List the responses to draw. Raise ValueError for a temperature that vLLM would change."""
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"temperature {sampling.temperature}, expected 0 or at least {LOWEST_TEMPERATURE}")
    return [
        Sample(tuple(prompt), group, number)
        for prompt, group in zip(prompts, groups, strict=True)
        for number in range(sampling.n)
    ]
