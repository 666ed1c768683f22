"""Sampling at `vllm serve` on other hosts, through the OpenAI-compatible API and vLLM's weight endpoints.

A server is started with

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model PATH \\
        --logprobs-mode processed_logprobs --generation-config vllm \\
        --worker-extension-cls smopd.engine.vllm_transfer.Extension \\
        --weight-transfer-config '{"backend": "smopd_files"}'

New weights go to it through files in a folder that it can read, and it is asked which version it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import torch
from safetensors.torch import save_file
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.servers import Refused, Servers
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm_rollout import request_seed
from smopd.engine.vllm_weights import Checked, architecture_of, stored

DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 and the options in smopd.engine.remote_rollout"


class RemoteRollout:
    """Serves `RolloutEngine`; every rank asks all servers, the first one sends the weights.

    Args:
        servers: of one model.
        end_ids: tokens that end a response.
        longest: prompt and response tokens that a server must have room for.
        transfer_folder: that every server can read under the same path; None: shared memory of this host.
    Raises:
        NoServer: none answers.
        ValueError: a server has too few positions, or takes no weights.
    """

    def __init__(
        self,
        servers: Servers,
        end_ids: Sequence[int],
        longest: int,
        transfer_folder: str | Path | None = None,
    ):
        self.servers = servers
        self.end_ids = sorted(end_ids)
        self.transfer_folder = transfer_folder
        self.policy_version = 0
        self._probe(longest)

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        each = [
            (tuple(prompt), group, sample)
            for prompt, group in zip(prompts, groups, strict=True)
            for sample in range(sampling.n)
        ]

        def ask(client: httpx.Client, item: tuple[tuple[int, ...], int, int]) -> httpx.Response:
            prompt, group, sample = item
            return client.post(
                "/v1/completions",
                json={
                    "model": self._model,
                    "prompt": list(prompt),
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "max_tokens": sampling.max_new_tokens,
                    "seed": request_seed(sampling.seed, group, sample),
                    "stop_token_ids": self.end_ids,
                    "ignore_eos": True,
                    "logprobs": 0,
                    "return_token_ids": True,
                    "skip_special_tokens": False,
                },
            )

        answers = self.servers.map(ask, each)
        return [self._rollout(item, answer) for item, answer in zip(each, answers, strict=True)]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sends full tensors by their transformers names; a collective call.

        Servers that were out and are back take them too.

        Raises:
            NoServer: no server took them.
        """
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
        from smopd.engine.vllm_transfer import FILE_BYTES, SHARED_MEMORY, on_cpu, parts

        for url in self.servers.readmit():
            self._init_transfer(url)
        place = self.transfer_folder or (SHARED_MEMORY if SHARED_MEMORY.is_dir() else None)
        with TemporaryDirectory(prefix="smopd-weights-", dir=place) as folder:
            Path(folder).chmod(0o755)
            path = Path(folder) / "part.safetensors"
            self._post("/pause?mode=wait")
            self._post("/collective_rpc", {"method": "forget_weight_update"})
            self._post("/start_weight_update")
            for part in parts(weights, FILE_BYTES):
                save_file({name: on_cpu(value) for name, value in part.items()}, path)
                self._post("/update_weights", {"update_info": {"path": str(path)}})
                path.unlink()
            self._post("/finish_weight_update", {"weight_version": str(version)})
            self._post("/reset_prefix_cache")
            self._post("/resume")
        for url, answer in self.servers.each(lambda client: client.get("/weight_info")).items():
            held = answer.json()["weight_version"]
            if held != str(version):
                self.servers.take_out(url, f"holds policy {held} after {version} was sent")

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
        except httpx.TransportError as error:
            self.servers.take_out(url, f"{type(error).__name__}: {error}")
            return
        if not answer.is_success:
            raise Refused(f"{url}: takes no weights (status {answer.status_code}); {DEV_MODE}")

    def _rollout(self, item: tuple[tuple[int, ...], int, int], answer: httpx.Response) -> Rollout:
        prompt, group, _ = item
        choice = answer.json()["choices"][0]
        logps = choice["logprobs"]["token_logprobs"]
        if choice["finish_reason"] not in ("stop", "length") or len(logps) != len(choice["token_ids"]):
            raise RuntimeError(
                f"generate: a server ended a response of group {group} by {choice['finish_reason']!r} "
                f"with {len(choice['token_ids'])} tokens and {len(logps)} log-probabilities"
            )
        return Rollout(
            prompt,
            torch.tensor(choice["token_ids"], dtype=torch.int64),
            torch.tensor(logps, dtype=torch.float32),
            group,
            finished=choice["finish_reason"] == "stop",
            policy_version=self.policy_version,
        )
