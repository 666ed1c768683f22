"""Sampling from `vllm serve` on other hosts through its token and weight endpoints, without a local vLLM.

Start a server with

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model PATH --enable-scale-out \\
        --logprobs-mode processed_logprobs --generation-config vllm \\
        --worker-extension-cls smopd.engine.vllm.transfer.Extension \\
        --weight-transfer-config '{"backend": "smopd"}'

Each version of the weights has a label that is unique to this run. Each response carries the label of the
weights that sampled it. A server that restarted, or that another run uses, has other weights. It is removed
until the next weights are sent, and its prompts go to the other servers.
"""

import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median_low
from typing import Any

import httpx
import torch
from torch import Tensor

from smopd.engine import distributed
from smopd.engine.errors import NoServer
from smopd.engine.remote.servers import Request, Servers, ServerUnavailable
from smopd.engine.remote.wire import PROBE_NATS, require_logprobs
from smopd.engine.settings import WeightTransport
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm.rollout import Sample, samples_of, sampling_parameters
from smopd.engine.weights.architecture import Checked, architecture_of, stored
from smopd.engine.weights.transport import send

GENERATE = "/inference/v1/generate"
HOW_TO_START = "start it with VLLM_SERVER_DEV_MODE=1 and the options in smopd.engine.remote.rollout"
GREEDY = {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "detokenize": False}
ONE = GREEDY | {"temperature": 1.0, "allowed_token_ids": [0]}
ONE_CANDIDATE = Request(GENERATE, json={"token_ids": [0], "sampling_params": ONE})
PROBE = Request(GENERATE, json={"token_ids": [0, 1, 2], "sampling_params": GREEDY})


class RemoteRollout:
    """`RolloutEngine` and `WeightReceiver` for servers of one model. Rank 0 sends the weights.

    Args:
        end_ids: tokens that end a response.
        longest: maximum number of tokens of a prompt and its response together.
        vocabulary: number of rows of the model's head.
        folder: for transport "files", a folder that all servers can read. None means this host's /dev/shm.
    Raises:
        NoServer: no server answers.
        ValueError: a server lacks the weight or token endpoints, or has too few positions.
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
        self.servers, self.longest, self.vocabulary = servers, longest, vocabulary
        self.end_ids = sorted(end_ids)
        self.transport, self.folder = transport, folder
        self.policy_version = self._sent = 0
        self.run = distributed.broadcast_object(uuid.uuid4().hex[:12])
        servers.each(Request("/health"), lambda answer: None)
        distributed.on_rank0(self._require_servable)

    @property
    def bad_answers(self) -> int:
        return self.servers.bad_answers

    def label(self, version: int) -> str:
        return f"{self.run}-{version}"

    def generate(
        self, prompts: Sequence[Sequence[int]], groups: Sequence[int], sampling: Sampling
    ) -> list[Rollout]:
        """Sample as in `RolloutEngine`. Raise NoServer if none is left, ValueError as `samples_of` does."""
        version = self.policy_version

        def request(url: str, sample: Sample) -> Request:
            parameters = sampling_parameters(sampling, sample, self.end_ids)
            return Request(GENERATE, json={"token_ids": list(sample.prompt), "sampling_params": parameters})

        def read(url: str, sample: Sample, answer: httpx.Response) -> Rollout:
            return self._rollout(sample, answer.json()["choices"][0], version, sampling.max_new_tokens)

        return self.servers.map(request, samples_of(prompts, groups, sampling), read)

    def _rollout(self, sample: Sample, choice: dict[str, Any], version: int, longest: int) -> Rollout:
        """Validate vLLM's `choice` and convert it to a rollout of at most `longest` new tokens."""
        self._require_held({span["version"] for span in choice["weight_versions"] or ()}, version)
        reason, ids = choice["finish_reason"], torch.tensor(choice["token_ids"])
        logps_T = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]]).float()
        if reason not in ("stop", "length") or logps_T.shape != ids.shape or len(ids) > longest:
            got = f"ended by {reason!r} with {tuple(ids.shape)} tokens and {len(logps_T)} log-probabilities"
            raise ValueError(f"group {sample.group}: a response {got}, expected equal counts up to {longest}")
        if (len(ids) and ids.dtype != torch.int64) or bool(((ids < 0) | (ids >= self.vocabulary)).any()):
            raise ValueError(f"token_ids are not all integers from 0 to {self.vocabulary - 1}")
        require_logprobs("logprobs", logps_T)
        if not bool(logps_T.isfinite().all()):
            raise ValueError("a sampled token has the log-probability -inf, expected a finite one")
        return Rollout(
            sample.prompt, ids.long(), logps_T, sample.group, reason == "stop", policy_version=version
        )

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send full tensors under their transformers names, also to restored servers (a collective call)."""
        for removed in distributed.gather_objects(self.servers.removed):
            self.servers.removed.update(removed)
        stream, trouble = iter(weights), None
        try:
            try:
                if distributed.rank() == 0:
                    self._send(stream, version)
            finally:
                for _ in stream:  # gathering a tensor is a collective call
                    pass
        except Exception as error:  # do not raise yet: the ranks wait for each other below
            trouble = error
        self.servers.removed, first = distributed.broadcast_object((self.servers.removed, trouble))
        if (trouble := first or trouble) is not None:
            raise trouble
        self.policy_version = version

    def load_path(self, path: str) -> None:
        """Send the model at `path`, a folder or hub id, as version 0. This is a collective call."""
        architecture = architecture_of(path)
        checked = Checked(architecture, stored(path, architecture))
        self.load_weights(checked if distributed.rank() == 0 else (), 0)
        error = distributed.broadcast_object(checked.error)
        if error is not None:
            raise error

    def _send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self._sent = version
        self.servers.restore()
        self._check()  # a server may have restarted with other options
        send(self, weights, self.transport, self.folder)
        self._post("/reset_prefix_cache")
        self._post("/resume")
        held = Request("/weight_info")
        self.servers.each(held, lambda answer: self._require_held({answer.json()["weight_version"]}, version))
        self.servers.each(ONE_CANDIDATE, _require_normalised)
        probed = self.servers.each(PROBE, _first_logp)
        expected = median_low(probed.values())
        apart = {url: logp for url, logp in probed.items() if abs(logp - expected) > PROBE_NATS}
        if 2 * len(apart) >= len(probed):
            raise NoServer(f"rollout.urls: servers hold different models, with probe log-probs {probed}")
        for url, logp in apart.items():
            reason = f"holds another model: log-probability {logp:.4g} of a probe, not {expected:.4g}"
            self.servers.remove(url, reason)

    def start_weight_update(self) -> None:
        self._post("/pause?mode=wait")
        self._post("/update_weight_version", {"new_version": f"part of {self.label(self._sent)}"})
        self._post("/collective_rpc", {"method": "forget_weight_update"})
        self._post("/start_weight_update")

    def update_weights(self, request: dict[str, Any]) -> None:
        self._post("/update_weights", request)

    def finish_weight_update(self) -> None:
        self._post("/finish_weight_update", {"weight_version": self.label(self._sent)})

    def _post(self, path: str, body: dict[str, Any] | None = None) -> None:
        self.servers.each(Request(path, json=body or {}), lambda answer: None)

    def _require_held(self, found: set[Any], version: int) -> None:
        """Raise ServerUnavailable unless `found`, a server's labels, is exactly the label of `version`."""
        if found != {self.label(version)}:
            held = " and ".join(sorted(map(str, found))) or "of no name"
            raise ServerUnavailable(f"holds the weights {held}, expected {self.label(version)}")

    def _require_servable(self) -> None:
        """Raise ValueError if a server answers but fails `_check`."""
        answering = self.servers.alive
        with suppress(NoServer):
            self._check()
        wrong = [f"{url}: {self.servers.removed[url]}" for url in answering if url in self.servers.removed]
        if wrong:
            raise ValueError(f"{'; '.join(wrong)}; {HOW_TO_START}")

    def _check(self) -> None:
        """Remove servers that lack the weight or token endpoints, or have too few positions."""

        def room(answer: httpx.Response) -> None:
            most = answer.json()["data"][0].get("max_model_len") if answer.is_success else None
            if most is not None and most < self.longest:
                sizes = "data.max_prompt_tokens and rollout.max_new_tokens; vLLM's --max-model-len"
                raise ServerUnavailable(f"has room for {most} tokens, expected {self.longest} ({sizes})")

        self._post("/init_weight_transfer_engine", {"init_info": {}})
        takes_tokens = Request(GENERATE, accept=(httpx.codes.METHOD_NOT_ALLOWED,))  # 405: the endpoint exists
        self.servers.each(takes_tokens, lambda answer: None)
        self.servers.each(Request("/v1/models", accept=(httpx.codes.NOT_FOUND,)), room)


def _first_logp(answer: httpx.Response) -> float:
    return float(answer.json()["choices"][0]["logprobs"]["content"][0]["logprob"])


def _require_normalised(answer: httpx.Response) -> None:
    """Raise ServerUnavailable if the only allowed token has a log-probability other than 0."""
    logp = _first_logp(answer)
    if abs(logp) > 1e-6:
        text = f"returns log-probability {logp} for the only allowed token, expected 0"
        raise ServerUnavailable(f"{text} (--logprobs-mode processed_logprobs); {HOW_TO_START}")
