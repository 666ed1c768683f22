"""Sampling with vLLM: one request a response, with its own seed.

A seed is a hash of (seed, group, sample), so a response depends on nothing else but for rounding: not on the
batch, the rank or the engine that draws it.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.errors import NoServer
from smopd.engine.settings import VllmSettings
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm.engines import engine, exclusive, load, of_sharing_ranks, sleep, wake_up

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

LOWEST_TEMPERATURE = 0.01  # vLLM silently raises lower ones to this
ROLE = "rollout"

GroupedPrompt = tuple[tuple[int, ...], int]
"""A prompt and its group."""

_numbers = itertools.count(1)


class VllmRollout:
    """Serves `RolloutEngine`.

    With tensor parallelism the ranks that share a model sample their prompts together; each keeps its own.

    Args:
        path: where the first weights and the architecture come from; a folder or hub id.
        end_ids: tokens that end a response.
        settings: of the engine.
        options: for vllm.LLM, over what the settings say.
    Raises:
        ValueError, RuntimeError: as `engine.vllm.engine`.
    """

    def __init__(self, path: str | Path, end_ids: Sequence[int], settings: VllmSettings, **options: Any):
        self.llm: LLM = engine(ROLE, path, settings, logprobs_mode="processed_logprobs", **options)
        self.settings = settings
        self.end_ids = sorted(set(end_ids))
        self.policy_version = 0
        self._adapter: Any = None
        self._folder = tempfile.TemporaryDirectory(prefix="smopd-adapters-")
        sleep(self.llm)

    @property
    def takes_adapters(self) -> bool:
        return self.settings.max_lora_rank > 0

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """As `RolloutEngine`.

        Raises:
            ValueError: a prompt with `max_new_tokens` is too long for the engine, or the temperature too low.
            LostWeights: the last load failed.
        """
        own = [(tuple(prompt), group) for prompt, group in zip(prompts, groups, strict=True)]
        with exclusive(self.settings):
            wake_up(self.llm)
            try:
                requests, first = self._together(own)
                self._require(requests, sampling)
                rollouts = self._sample(requests, sampling) if requests else []
            finally:
                sleep(self.llm)
        return rollouts[first * sampling.n : (first + len(own)) * sampling.n]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As `RolloutEngine`; an adapter is dropped.

        Raises:
            ValueError: a weight is missing, unknown or of another shape.
            LostWeights: vLLM itself failed in an earlier load; this engine cannot be used again.
            NoServer: an engine in a process of its own has ended, on this rank or another.
        """
        stream = iter(weights)

        def take() -> None:
            try:
                with exclusive(self.settings):
                    load(self.llm, stream)
                    self._drop_adapter()
            except NoServer:
                for _ in stream:  # other ranks take part in gathering it
                    pass
                raise

        self._on_every_rank(take)
        self.policy_version = version

    def load_adapter(self, folder: str | Path, version: int) -> None:
        """Serves the base with the adapter in `folder` (peft's format) as `version` from now on.

        Raises:
            ValueError: the engine takes no adapters, or not this one.
            NoServer: as `load_weights`.
        """
        if not self.takes_adapters:
            raise ValueError("load_adapter: max_lora_rank is 0, expected the adapters' rank or more")
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        number = next(_numbers)
        kept = Path(self._folder.name) / str(number)
        shutil.copytree(folder, kept)  # vLLM may read it again
        request = LoRARequest(f"policy-{number}", number, str(kept))

        def take() -> None:
            with exclusive(self.settings):
                wake_up(self.llm)  # the adapters' tensors leave the GPU with the weights
                try:
                    self.llm.llm_engine.add_lora(request)
                    self._drop_adapter()
                except EngineDeadError:
                    raise
                except Exception as error:
                    shutil.rmtree(kept)
                    raise ValueError(f"load_adapter: {folder}: vLLM refuses it ({error})") from error
                finally:
                    sleep(self.llm)

        self._on_every_rank(take)
        self._adapter = request
        self.policy_version = version

    def _on_every_rank(self, take: Callable[[], None]) -> None:
        """An engine in its own process may end on one rank alone; a colocated one ends with its rank."""
        if self.settings.placement == "process":
            distributed.all_or_raise(take, (NoServer,))
        else:
            take()

    def _drop_adapter(self) -> None:
        if self._adapter is not None:
            self.llm.llm_engine.remove_lora(self._adapter.lora_int_id)
            shutil.rmtree(self._adapter.lora_path)
            self._adapter = None

    def _require(self, requests: list[GroupedPrompt], sampling: Sampling) -> None:
        longest = max((len(prompt) for prompt, _ in requests), default=0)
        limit = self.llm.model_config.max_model_len
        if requests and longest + sampling.max_new_tokens > limit:
            raise ValueError(
                f"generate: a prompt of {longest} tokens and max_new_tokens {sampling.max_new_tokens} exceed "
                f"the engine's {limit} positions (max_model_len)"
            )
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"generate: temperature {sampling.temperature}, expected 0 or at least {LOWEST_TEMPERATURE}"
            )

    def _together(self, own: list[GroupedPrompt]) -> tuple[list[GroupedPrompt], int]:
        """The requests of all ranks that share this engine's model, and where this rank's begin."""
        gathered, rank = of_sharing_ranks(self.settings, own)
        return list(itertools.chain(*gathered)), sum(map(len, gathered[:rank]))

    def _sample(self, requests: list[GroupedPrompt], sampling: Sampling) -> list[Rollout]:
        from vllm.inputs import TokensPrompt

        each = [(prompt, group, sample) for prompt, group in requests for sample in range(sampling.n)]
        with torch.random.fork_rng(devices=[]):  # on a CPU vLLM draws from the caller's generator too
            outputs = self.llm.generate(
                [TokensPrompt(prompt_token_ids=list(prompt)) for prompt, _, _ in each],
                [self._parameters(sampling, request_seed(sampling.seed, g, sample)) for _, g, sample in each],
                use_tqdm=False,
                lora_request=self._adapter,
            )
        return [
            self._rollout(prompt, group, output.outputs[0])
            for (prompt, group, _), output in zip(each, outputs, strict=True)
        ]

    def _parameters(self, sampling: Sampling, seed: int) -> SamplingParams:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_new_tokens,
            seed=seed,
            stop_token_ids=self.end_ids,
            ignore_eos=True,  # end_ids hold every end token
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
        )

    def _rollout(self, prompt: tuple[int, ...], group: int, output: Any) -> Rollout:
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(
                f"generate: vLLM ended a response of group {group} by {output.finish_reason!r}"
            )
        flat = output.logprobs
        return Rollout(
            prompt,
            torch.tensor(output.token_ids, dtype=torch.int64),
            torch.tensor(flat.logprobs)[torch.tensor(flat.start_indices)],
            group,
            finished=output.token_ids[-1] in self.end_ids,
            policy_version=self.policy_version,
        )


def request_seed(seed: int, group: int, sample: int) -> int:
    """63 bits that depend on all three."""
    digest = hashlib.blake2b(f"{seed} {group} {sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
