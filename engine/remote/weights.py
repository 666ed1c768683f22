"""New weights to `vllm serve` on other hosts: in files that they can read, or in the requests themselves.

They come under a label that no other run has, and each answer names the label of the weights that sampled it
(smopd.engine.remote.rollout).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
from torch import Tensor

from smopd.engine.errors import NoServer
from smopd.engine.remote.client import Request, ServerUnavailable
from smopd.engine.remote.servers import Servers
from smopd.engine.settings import WeightTransport
from smopd.engine.weights.transport import send

GENERATE = "/inference/v1/generate"
HOW_TO_START = "start it with VLLM_SERVER_DEV_MODE=1 and the options in smopd.engine.remote.rollout"


class RemoteWeights:
    """Sends from one process to all servers; serves `WeightReceiver`.

    Args:
        run: a name of its own for each run.
        longest: prompt and response tokens that a server must have room for.
        folder: for files: every server can read it under the same path; None: this host's memory.
    Raises:
        ValueError: the transport is ipc, which reaches no server.
    """

    def __init__(
        self,
        servers: Servers,
        run: str,
        longest: int,
        transport: WeightTransport = "files",
        folder: str | Path | None = None,
    ):
        if transport == "ipc":
            raise ValueError("rollout.transfer: got ipc, expected files or inline")
        self.servers, self.run, self.longest = servers, run, longest
        self.transport, self.folder = transport, folder
        self._version = 0

    def label(self, version: int) -> str:
        """What a server calls these weights of this run."""
        return f"{self.run}-{version}"

    def require_servable(self) -> None:
        """Asks each server that is not removed whether it takes weights and tokens, and whether they fit.

        Raises:
            ValueError: one does not.
        """
        asked = self.servers.alive
        with suppress(NoServer):
            self._check()
        wrong = [f"{url}: {self.servers.removed[url]}" for url in asked if url in self.servers.removed]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; {HOW_TO_START}")

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Full tensors by their transformers names; servers that were removed and are back take them too.

        Raises:
            NoServer: no server took them.
        """
        self._version = version
        self.servers.restore()
        self._check()  # a server may have been started anew since
        send(self, weights, self.transport, self.folder)
        self._post("/reset_prefix_cache")
        self._post("/resume")
        self._require_taken()
        self.servers.each(_ONE_CANDIDATE, _require_normalised)

    def start_weight_update(self) -> None:
        self._post("/pause?mode=wait")
        self._post("/update_weight_version", {"new_version": f"part of {self.label(self._version)}"})
        self._post("/collective_rpc", {"method": "forget_weight_update"})
        self._post("/start_weight_update")

    def update_weights(self, request: dict[str, Any]) -> None:
        self._post("/update_weights", request)

    def finish_weight_update(self) -> None:
        self._post("/finish_weight_update", {"weight_version": self.label(self._version)})

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.servers.each(Request(path, json=body or {}), lambda answer: None)

    def _require_taken(self) -> None:
        def same(answer: httpx.Response) -> None:
            require_label({str(answer.json()["weight_version"])}, self.label(self._version))

        self.servers.each(Request("/weight_info"), same)

    def _check(self) -> None:
        """Removes servers that take no weights or no tokens, or have too little room."""

        def room(answer: httpx.Response) -> None:
            most = answer.json()["data"][0].get("max_model_len") if answer.is_success else None
            if most is not None and most < self.longest:
                raise ServerUnavailable(
                    f"has room for {most} tokens, expected {self.longest} "
                    "(data.max_prompt_tokens and rollout.max_new_tokens; vLLM's --max-model-len)"
                )

        self._post("/init_weight_transfer_engine", {"init_info": {}})
        takes_tokens = Request(GENERATE, accept=(httpx.codes.METHOD_NOT_ALLOWED,))  # 404 where there is none
        self.servers.each(takes_tokens, lambda answer: None)
        self.servers.each(Request("/v1/models", accept=(httpx.codes.NOT_FOUND,)), room)


_ONE_CANDIDATE = Request(
    GENERATE,
    json={
        "token_ids": [0],
        "sampling_params": {
            "temperature": 1.0,
            "allowed_token_ids": [0],
            "max_tokens": 1,
            "logprobs": 0,
            "detokenize": False,
        },
    },
)


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


def require_label(found: set[str], expected: str) -> None:
    """Raises ServerUnavailable: other weights than `expected` are held."""
    if found != {expected}:
        held = " and ".join(sorted(map(str, found))) or "of no name"
        raise ServerUnavailable(f"holds the weights {held}, expected {expected}")
