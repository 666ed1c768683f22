"""New weights to `vllm serve` on other hosts: through files in a folder that it can read, or a process group.

They come under a label that no other run has, which each answer of the server names (remote_rollout).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from smopd.engine.remote.client import Client, authorization
from smopd.engine.remote.servers import BUSY, Refused, Servers, ServerUnavailable
from smopd.engine.remote.weight_group import WeightGroup
from smopd.engine.weights.files import part_files, parts

GENERATE = "/inference/v1/generate"
HOW_TO_START = "start it with VLLM_SERVER_DEV_MODE=1 and the options in smopd.engine.remote.rollout"
MINUTE = 60.0


class RemoteWeights:
    """Sends from one process to all servers.

    Args:
        run: of its own for each run.
        longest: prompt and response tokens that a server must have room for.
        transfer: `files`, or a process group of `gloo` or `nccl`.
        folder: for files: every server can read it under the same path; None: this host's memory.
    Raises:
        ValueError: nccl where there is no CUDA.
    """

    def __init__(
        self,
        servers: Servers,
        run: str,
        longest: int,
        transfer: str = "files",
        folder: str | Path | None = None,
    ):
        if transfer == "nccl" and not torch.cuda.is_available():
            raise ValueError(
                "remote.transfer: got nccl, which needs CUDA on this host; expected files or gloo"
            )
        self.servers, self.run, self.longest = servers, run, longest
        self.transfer, self.folder = transfer, folder

    def label(self, version: int) -> str:
        """What a server calls these weights of this run."""
        return f"{self.run}-{version}"

    def require_servable(self) -> None:
        """Asks each server that is not out whether it takes weights and tokens, and whether they fit.

        Raises:
            Refused: one does not.
        """
        for url in self.servers.alive:
            self._begin(url)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Full tensors by their transformers names; servers that were out and are back take them too.

        Raises:
            NoServer: no server took them.
        """
        self.servers.readmit()
        for url in self.servers.alive:
            try:
                self._begin(url)  # again: it may have been started anew since
            except Refused as error:
                self.servers.take_out(url, str(error))
        self._post("/pause?mode=wait")
        self._post("/update_weight_version", {"new_version": f"part of {self.label(version)}"})
        self._post("/collective_rpc", {"method": "forget_weight_update"})
        self._post("/start_weight_update")
        if self.transfer == "files":
            for path in part_files(weights, self.folder):
                self._post("/update_weights", {"update_info": {"path": str(path)}})
        else:
            self._send_in_groups(weights)
        self._post("/finish_weight_update", {"weight_version": self.label(version)})
        self._post("/shutdown_weight_transfer_engine")  # a group's memory is the server's while it samples
        self._post("/reset_prefix_cache")
        self._post("/resume")
        self._require_taken(version)
        self.servers.each(_one_candidate, read=_require_normalised)

    def _require_taken(self, version: int) -> None:
        held_by = self.servers.each(
            lambda client: client.get("/weight_info"),
            read=lambda answer: str(answer.json()["weight_version"]),
        )
        for url, held in held_by.items():
            if held != self.label(version):
                self.servers.take_out(url, stale({held}, self.label(version)))
        if not self.servers.alive:
            raise self.servers.none_left()

    def _send_in_groups(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        groups: dict[str, WeightGroup] = {}
        nccl = self.transfer == "nccl"
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        seconds = self.servers.patience.deadline_seconds

        def meet(client: Client) -> httpx.Response:
            group, joined = WeightGroup.meet(client, device, min(MINUTE, seconds), seconds)
            groups[client.url] = group
            return joined

        def send(client: Client, part: Mapping[str, Tensor]) -> httpx.Response:
            return groups[client.url].send(client, part)

        self.servers.each(meet)
        for part in parts(weights):
            ready = {name: value.detach().to(device).contiguous() for name, value in part.items()}
            self.servers.each(partial(send, part=ready))

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.servers.each(lambda client: client.post(path, json=body or {}))

    def _begin(self, url: str) -> None:
        """Has the server forget an earlier group.

        Raises:
            Refused: it takes no weights or no tokens, or has too little room.
        """
        try:
            with httpx.Client(base_url=url, timeout=MINUTE, headers=authorization()) as client:
                answer = client.post("/init_weight_transfer_engine", json={"init_info": {}})
                models = client.get("/v1/models")
                known = client.get(GENERATE).status_code != httpx.codes.NOT_FOUND
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
        room = models.json()["data"][0].get("max_model_len") if models.is_success else None
        if room is not None and room < self.longest:
            raise Refused(
                f"{url}: has room for {room} tokens, expected {self.longest} "
                "(data.max_prompt_tokens and rollout.max_new_tokens; vLLM's --max-model-len)"
            )


def _one_candidate(client: Client) -> httpx.Response:
    sampling = {
        "temperature": 1.0,
        "allowed_token_ids": [0],
        "max_tokens": 1,
        "logprobs": 0,
        "detokenize": False,
    }
    return client.post(GENERATE, json={"token_ids": [0], "sampling_params": sampling})


def _require_normalised(answer: httpx.Response) -> None:
    """Its log-probabilities are those of what it samples from: of one candidate alone, 0.

    Raises:
        ServerUnavailable: they are not.
    """
    logp = answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"]
    if abs(logp) > 1e-6:
        raise ServerUnavailable(
            f"gives the only candidate the log-probability {logp}, expected 0 "
            f"(--logprobs-mode processed_logprobs); {HOW_TO_START}"
        )


def stale(found: Iterable[str], expected: str) -> str:
    return f"holds the weights {' and '.join(sorted(found)) or 'of no name'}, expected {expected}"
