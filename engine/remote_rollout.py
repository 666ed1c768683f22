"""Sampling at `vllm serve` on other hosts, through vLLM's token and weight endpoints; needs no vLLM here.

A server is started with

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model PATH --enable-scale-out \\
        --logprobs-mode processed_logprobs --generation-config vllm \\
        --worker-extension-cls smopd.engine.vllm_transfer.Extension \\
        --weight-transfer-config '{"backend": "smopd"}'

New weights go to it through files in a folder that it can read, or a process group, under a label that no
other run has. Each answer names the label of what sampled it: a server that holds anything else, because it
was started again or another run has taken it, is taken out, and its prompts go to the others. It comes back
with the next weights.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.servers import BUSY, Away, Refused, Servers
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm_rollout import request_seed
from smopd.engine.vllm_weights import Checked, architecture_of, stored
from smopd.engine.weight_files import FILE_BYTES, part_files, parts
from smopd.engine.weight_group import WeightGroup

GENERATE = "/inference/v1/generate"
HOW_TO_START = "start it with VLLM_SERVER_DEV_MODE=1 and the options in smopd.engine.remote_rollout"


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
        longest: prompt and response tokens that a server must have room for.
        transfer: how weights travel: `files`, or a process group of `gloo` or `nccl`.
        transfer_folder: for files: every server can read it under the same path; None: this host's memory.
    Raises:
        NoServer: none answers.
        ValueError: a server has too few positions, or takes no weights.
    """

    def __init__(
        self,
        servers: Servers,
        end_ids: Sequence[int],
        longest: int,
        transfer: str = "files",
        transfer_folder: str | Path | None = None,
    ):
        self.servers = servers
        self.end_ids = sorted(end_ids)
        self.transfer = transfer
        self.transfer_folder = transfer_folder
        self.policy_version = 0
        self._run = distributed.broadcast_object(uuid.uuid4().hex[:12])
        self._probe(longest)

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """As `RolloutEngine`.

        Raises:
            NoServer: every server is out, by their silence or by what they hold.
        """
        version = self.policy_version
        each = [
            Request(tuple(prompt), group, sample)
            for prompt, group in zip(prompts, groups, strict=True)
            for sample in range(sampling.n)
        ]

        made: dict[Request, Rollout] = {}

        def ask(client: httpx.Client, item: Request) -> httpx.Response:
            answer = client.post(GENERATE, json=self._body(item, sampling))
            if answer.is_success:
                made[item] = self._rollout(item, answer.json()["choices"][0], version)
            return answer

        self.servers.map(ask, each)
        return [made[item] for item in each]

    def _body(self, item: Request, sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self._model,
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

    def _label(self, version: int) -> str:
        """What a server calls these weights of this run."""
        return f"{self._run}-{version}"

    def _rollout(self, item: Request, choice: dict[str, Any], version: int) -> Rollout:
        """The response in vLLM's `choice`.

        Raises:
            Away: other weights took part in it, or the server ended it before its time.
        """
        found = {span["version"] for span in choice["weight_versions"] or ()}
        if found != {self._label(version)}:
            raise Away(stale(found, self._label(version)))
        logps = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if choice["finish_reason"] not in ("stop", "length") or len(logps) != len(choice["token_ids"]):
            raise Away(
                f"ended a response of group {item.group} by {choice['finish_reason']!r} with "
                f"{len(choice['token_ids'])} tokens and {len(logps)} log-probabilities"
            )
        return Rollout(
            item.prompt,
            torch.tensor(choice["token_ids"], dtype=torch.int64),
            torch.tensor(logps, dtype=torch.float32),
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
                self._send(stream, version)
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
        self.load_weights(checked, 0)
        if checked.error is not None:
            raise checked.error

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.servers.readmit()
        for url in self.servers.alive:
            self._init_transfer(url)  # again: it may have been started anew since
        self._post("/pause?mode=wait")
        self._post("/update_weight_version", {"new_version": f"part of {self._label(version)}"})
        self._post("/collective_rpc", {"method": "forget_weight_update"})
        self._post("/start_weight_update")
        if self.transfer == "files":
            for path in part_files(weights, self.transfer_folder):
                self._post("/update_weights", {"update_info": {"path": str(path)}})
        else:
            self._send_in_groups(weights)
        self._post("/finish_weight_update", {"weight_version": self._label(version)})
        self._post("/reset_prefix_cache")
        self._post("/resume")
        for url, answer in self.servers.each(lambda client: client.get("/weight_info")).items():
            held = answer.json()["weight_version"]
            if held != self._label(version):
                self.servers.take_out(url, stale({held}, self._label(version)))
        if not self.servers.alive:
            raise self.servers.none_left()

    def _send_in_groups(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        groups: dict[str, WeightGroup] = {}
        seconds = self.servers.patience.deadline_seconds

        def meet(client: httpx.Client) -> httpx.Response:
            made = groups[self.servers.url_of(client)] = WeightGroup(client, self.transfer, seconds)
            return made.joined

        def send(client: httpx.Client, part: dict[str, Tensor]) -> httpx.Response:
            return groups[self.servers.url_of(client)].send(client, part)

        try:
            self.servers.each(meet)
            for part in parts(weights, FILE_BYTES):
                self.servers.each(partial(send, part=part))
        finally:
            for group in groups.values():
                group.close()

    def _post(self, path: str, body: dict | None = None) -> None:
        self.servers.each(lambda client: client.post(path, json=body or {}))

    def _probe(self, longest: int) -> None:
        models = self.servers.each(lambda client: client.get("/v1/models"))
        for url, answer in models.items():
            model = answer.json()["data"][0]
            self._model = model["id"]
            if (model.get("max_model_len") or longest) < longest:
                raise ValueError(
                    f"{url}: has room for {model['max_model_len']} tokens, expected {longest} "
                    "(data.max_prompt_tokens and rollout.max_new_tokens; vLLM's --max-model-len)"
                )
        distributed.on_first(self._init_transfers)

    def _init_transfers(self) -> None:
        for url in self.servers.alive:
            self._init_transfer(url)

    def _init_transfer(self, url: str) -> None:
        try:
            answer = httpx.post(f"{url}/init_weight_transfer_engine", json={"init_info": {}}, timeout=60.0)
            known = httpx.get(url + GENERATE, timeout=60.0).status_code != httpx.codes.NOT_FOUND
        except httpx.TransportError as error:
            self.servers.take_out(url, f"{type(error).__name__}: {error}")
            return
        if answer.status_code in BUSY:
            self.servers.take_out(url, f"status {answer.status_code}: {answer.text[:200]}")
            return
        if not answer.is_success:
            raise Refused(f"{url}: takes no weights (status {answer.status_code}); {HOW_TO_START}")
        if not known:
            raise Refused(f"{url}: has no {GENERATE} (--enable-scale-out); {HOW_TO_START}")


def stale(found: Iterable[str], expected: str) -> str:
    return f"holds the weights {' and '.join(sorted(found)) or 'of no name'}, expected {expected}"
