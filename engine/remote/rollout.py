"""Sampling at `vllm serve` on other hosts, through vLLM's token and weight endpoints; needs no vLLM here.

A server is started with

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model PATH --enable-scale-out \\
        --logprobs-mode processed_logprobs --generation-config vllm \\
        --worker-extension-cls smopd.engine.vllm.transfer.Extension \\
        --weight-transfer-config '{"backend": "smopd"}'

Each answer names the label of the weights that sampled it: a server that holds any but this run's newest,
because it was started again or another run has taken it, is taken out, and its prompts go to the others. It
comes back with the next weights (remote_weights).
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
from smopd.engine.remote.client import Client
from smopd.engine.remote.servers import Servers, ServerUnavailable
from smopd.engine.remote.weights import GENERATE, RemoteWeights, stale
from smopd.engine.remote.wire import check_logprobs
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm.rollout import LOWEST_TEMPERATURE, request_seed
from smopd.engine.weights.architecture import Checked, architecture_of, stored


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    group: int
    sample: int


class RemoteRollout:
    """Serves `RolloutEngine`; every rank asks all servers, the first one sends the weights.

    Nothing is sampled before weights are sent.

    Args:
        servers: of one model.
        end_ids: tokens that end a response.
        longest, transfer, transfer_folder: as RemoteWeights.
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
        transfer: str = "files",
        transfer_folder: str | Path | None = None,
    ):
        self.servers = servers
        self.end_ids, self.vocabulary = sorted(end_ids), vocabulary
        self.policy_version = 0
        run = distributed.broadcast_object(uuid.uuid4().hex[:12])
        self.weights = RemoteWeights(servers, run, longest, transfer, transfer_folder)
        servers.each(lambda client: client.get("/health"))
        distributed.on_rank0(self.weights.require_servable)

    @property
    def bad_answers(self) -> int:
        return self.servers.bad_answers

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """As `RolloutEngine`.

        Raises:
            NoServer: every server is out, by their silence or by what they hold.
            ValueError: a temperature that vLLM would raise.
        """
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            raise ValueError(
                f"generate: temperature {sampling.temperature}, expected 0 or at least {LOWEST_TEMPERATURE}"
            )
        version = self.policy_version
        each = [
            Request(tuple(prompt), group, sample)
            for prompt, group in zip(prompts, groups, strict=True)
            for sample in range(sampling.n)
        ]

        def ask(client: Client, item: Request) -> httpx.Response:
            return client.post(GENERATE, json=self._body(item, sampling))

        def read(answer: httpx.Response, item: Request) -> Rollout:
            return self._rollout(item, answer.json()["choices"][0], version, sampling.max_new_tokens)

        return self.servers.map(ask, each, read)

    def _body(self, item: Request, sampling: Sampling) -> dict[str, Any]:
        return {
            "token_ids": list(item.prompt),
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "max_tokens": sampling.max_new_tokens,
                "seed": request_seed(sampling.seed, item.group, item.sample),
                "stop_token_ids": self.end_ids,
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }

    def _rollout(self, item: Request, choice: dict[str, Any], version: int, longest: int) -> Rollout:
        """The response in vLLM's `choice`, of at most `longest` tokens.

        Raises:
            ServerUnavailable: other weights took part in it, or the server ended it before its time.
            ValueError, LookupError, TypeError: it is no response to what was asked.
        """
        found = {span["version"] for span in choice["weight_versions"] or ()}
        expected = self.weights.label(version)
        if found != {expected}:
            raise ServerUnavailable(stale(found, expected))
        logps = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if choice["finish_reason"] not in ("stop", "length") or len(logps) != len(choice["token_ids"]):
            raise ServerUnavailable(
                f"ended a response of group {item.group} by {choice['finish_reason']!r} with "
                f"{len(choice['token_ids'])} tokens and {len(logps)} log-probabilities"
            )
        ids = torch.tensor(choice["token_ids"])
        if len(ids) > longest:
            raise ValueError(f"a response of {len(ids)} tokens, expected at most {longest}")
        if len(ids) and ids.dtype != torch.int64:
            raise TypeError(f"token_ids are of {ids.dtype}, expected integers")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocabulary:
            raise ValueError(
                f"token_ids from {int(ids.min())} to {int(ids.max())}, expected ids below {self.vocabulary}"
            )
        logps_T = torch.tensor(logps, dtype=torch.float32)
        check_logprobs("logprobs", logps_T)
        if not bool(logps_T.isfinite().all()):
            raise ValueError("a sampled token has the log-probability -inf, expected a finite one")
        return Rollout(
            item.prompt,
            ids.long(),
            logps_T,
            item.group,
            finished=choice["finish_reason"] == "stop",
            policy_version=version,
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sends full tensors by their transformers names; a collective call.

        Servers that were out and are back take them too.

        Raises:
            NoServer: no server took them.
        """
        for out in distributed.gather_objects(self.servers.out):  # another rank may have found one first
            self.servers.out.update(out)
        stream, trouble = iter(weights), None
        if distributed.rank() == 0:
            try:
                self.weights.send(stream, version)
            except Exception as error:  # the other ranks wait to be told
                trouble = error
        for _ in stream:  # other ranks take part in gathering it
            pass
        self.servers.out, trouble = distributed.broadcast_object((self.servers.out, trouble))
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
