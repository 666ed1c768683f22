"""Sampling at `vllm serve` on other hosts, through vLLM's token and weight endpoints; needs no vLLM here.

A server is started with

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model PATH --enable-scale-out \\
        --logprobs-mode processed_logprobs --generation-config vllm \\
        --worker-extension-cls smopd.engine.vllm.transfer.Extension \\
        --weight-transfer-config '{"backend": "smopd"}'

Each answer names the label of the weights that sampled it: a server that holds any but this run's newest,
because it was started again or another run has taken it, is removed, and its prompts go to the others. It
comes back with the next weights (smopd.engine.remote.weights).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.remote.client import Request
from smopd.engine.remote.servers import Servers
from smopd.engine.remote.weights import GENERATE, RemoteWeights, require_label
from smopd.engine.remote.wire import check_logprobs
from smopd.engine.settings import WeightTransport
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm.rollout import LOWEST_TEMPERATURE, request_seed
from smopd.engine.weights.architecture import Checked, architecture_of, stored


@dataclass(frozen=True)
class Sample:
    prompt: tuple[int, ...]
    group: int
    number: int
    """Of the prompt's responses."""


class RemoteRollout:
    """Serves `RolloutEngine`; every rank asks all servers, the first one sends the weights.

    Nothing is sampled before weights are sent.

    Args:
        servers: of one model.
        end_ids: tokens that end a response.
        longest, transport, folder: as RemoteWeights.
        vocabulary: rows of the model's head; ids are below it.
    Raises:
        NoServer: none answers.
        ValueError: a server has too few positions, or takes no weights.
    """

    def __init__(
        self,
        servers: Servers,
        end_ids: Sequence[int],
        longest: int,
        vocabulary: int,
        transport: WeightTransport = "files",
        folder: str | Path | None = None,
    ):
        self.servers = servers
        self.end_ids, self.vocabulary = sorted(end_ids), vocabulary
        self.policy_version = 0
        run = distributed.broadcast_object(uuid.uuid4().hex[:12])
        self.weights = RemoteWeights(servers, run, longest, transport, folder)
        servers.each(Request("/health"), lambda answer: None)
        distributed.on_rank0(self.weights.require_servable)

    @property
    def bad_answers(self) -> int:
        return self.servers.bad_answers

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """As `RolloutEngine`.

        Raises:
            NoServer: every server is removed, by their silence or by what they hold.
            ValueError: a temperature that vLLM would raise.
        """
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"generate: temperature {sampling.temperature}, expected 0 or at least {LOWEST_TEMPERATURE}"
            )
        version = self.policy_version
        samples = [
            Sample(tuple(prompt), group, i)
            for prompt, group in zip(prompts, groups, strict=True)
            for i in range(sampling.n)
        ]

        def request(url: str, sample: Sample) -> Request:
            return Request(GENERATE, json=self._body(sample, sampling))

        def read(answer: httpx.Response, sample: Sample) -> Rollout:
            return self._rollout(sample, answer.json()["choices"][0], version, sampling.max_new_tokens)

        return self.servers.map(request, samples, read)

    def _body(self, sample: Sample, sampling: Sampling) -> dict[str, Any]:
        return {
            "token_ids": list(sample.prompt),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens,
                "seed": request_seed(sampling.seed, sample.group, sample.number),
                "stop_token_ids": self.end_ids,
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }

    def _rollout(self, sample: Sample, choice: dict[str, Any], version: int, longest: int) -> Rollout:
        """The response in vLLM's `choice`, of at most `longest` tokens; raises where it is none."""
        require_label(
            {span["version"] for span in choice["weight_versions"] or ()}, self.weights.label(version)
        )
        reason, ids = choice["finish_reason"], torch.tensor(choice["token_ids"])
        logps_T = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]]).float()
        if reason not in ("stop", "length") or logps_T.shape != ids.shape or len(ids) > longest:
            raise ValueError(
                f"a response of group {sample.group} ended by {reason!r} with {tuple(ids.shape)} tokens and "
                f"{len(logps_T)} log-probabilities, expected as many of both, at most {longest}"
            )
        if len(ids) and ids.dtype != torch.int64:
            raise TypeError(f"token_ids are of {ids.dtype}, expected integers")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            raise ValueError(
                f"token_ids from {int(ids.min())} to {int(ids.max())}, expected ids below {self.vocabulary}"
            )
        check_logprobs("logprobs", logps_T)
        if not bool(logps_T.isfinite().all()):
            raise ValueError("a sampled token has the log-probability -inf, expected a finite one")
        return Rollout(
            sample.prompt,
            ids.long(),
            logps_T,
            sample.group,
            finished=reason == "stop",
            policy_version=version,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sends full tensors by their transformers names; a collective call.

        Servers that were removed and are back take them too.

        Raises:
            NoServer: no server took them.
        """
        for removed in distributed.gather_objects(self.servers.removed):  # another rank may have found one
            self.servers.removed.update(removed)
        stream, trouble = iter(weights), None
        if distributed.rank() == 0:
            try:
                self.weights.send(stream, version)
            except Exception as error:  # the other ranks wait for the answer
                trouble = error
        for _ in stream:  # other ranks take part in gathering it
            pass
        self.servers.removed, trouble = distributed.broadcast_object((self.servers.removed, trouble))
        if trouble is not None:
            raise trouble
        self.policy_version = version

    def load_path(self, path: str) -> None:
        """Sends the model at `path`, a folder or hub id, as version 0; a collective call.

        Raises:
            NoServer: no server took it.
            ValueError: its files lack a weight, or hold one of another shape.
        """
        architecture = architecture_of(path)
        checked = Checked(architecture, stored(path, architecture))
        self.load_weights(checked if distributed.rank() == 0 else (), 0)
        error = distributed.broadcast_object(checked.error)
        if error is not None:
            raise error
