"""Teachers at URLs: our own server (teacher_server.py, binary) or a `vllm serve` (JSON, temperature 1).

What kind of server it is, its tokenizer and its limits are asked at the start.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import torch
from torch import Tensor

from smopd.engine.models import UnusableModel
from smopd.engine.packing import flat_offsets
from smopd.engine.servers import Patience, Refused, Servers
from smopd.engine.support import without_padding
from smopd.engine.teacher_wire import BINARY, pack_request, unpack_answer
from smopd.engine.teachers import empty_topk
from smopd.engine.types import Rollout, TeacherTopK
from smopd.kernels.checks import check_kappa

REQUEST_TOKENS = 16_384  # ours: about as many of a batch's tokens go into one request

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """A text and the student's token ids of it, which a teacher must agree to."""

    text: str
    token_ids: tuple[int, ...]


class RemoteTeachers:
    """Serves `TeacherEngine`.

    Args:
        urls: for each teacher its servers, which hold the same model.
        vocabulary: the student's.
        probe: of the student's tokenizer.
        kappa, temperature: what will be asked for.
        dtype: of log-probabilities on the way, "float16" or "float32".
    Raises:
        NoServer: a teacher has no server that answers.
        UnusableModel: another tokenizer, too few log-probabilities, or a temperature that it cannot serve;
            says what to change.
    """

    def __init__(
        self,
        urls: Sequence[Sequence[str]],
        vocabulary: int,
        probe: Probe,
        kappa: int,
        temperature: float,
        *,
        dtype: str = "float32",
        patience: Patience | None = None,
    ):
        self.vocabulary, self.dtype, self.dropped = vocabulary, dtype, 0
        self.teachers = [Servers(each, patience) for each in urls]
        self._models: dict[str, str] = {}
        self.ours = [self._probe(m, probe, kappa, temperature) for m in range(len(self.teachers))]

    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        if union:
            raise ValueError("score: union is True, expected False for teachers at URLs")
        check_kappa("score", kappa, self.vocabulary)
        rollouts = [rollout for rollout in rollouts if len(rollout.response_ids)]
        result = empty_topk(flat_offsets(rollouts)[-1], len(self.teachers), kappa, "cpu")

        def ask(m: int) -> None:
            self.teachers[m].readmit()
            method = self._binary if self.ours[m] else self._json
            ids_NS, logps_NS, token_logps_N = method(self.teachers[m], rollouts, kappa, temperature)
            ids_NS, logps_NS, dropped = without_padding(ids_NS, logps_NS, self.vocabulary)
            self.dropped += dropped
            result.ids_NMS[:, m], result.logps_NMS[:, m] = ids_NS, logps_NS
            result.token_logps_NM[:, m] = token_logps_N

        if rollouts:
            with ThreadPoolExecutor(len(self.teachers), thread_name_prefix="teachers") as pool:
                list(pool.map(ask, range(len(self.teachers))))
        return result

    def _binary(
        self, servers: Servers, rollouts: Sequence[Rollout], kappa: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        def ask(client: httpx.Client, item: Sequence[Rollout]) -> httpx.Response:
            return client.post(
                "/score",
                params={"kappa": kappa, "temperature": temperature, "dtype": self.dtype},
                content=pack_request(item),
                headers={"content-type": BINARY},
            )

        answers = [unpack_answer(answer.content) for answer in servers.map(ask, portions(rollouts))]
        ids, logps, own = zip(*answers, strict=True)
        return torch.cat(ids), torch.cat(logps), torch.cat(own)

    def _json(
        self, servers: Servers, rollouts: Sequence[Rollout], kappa: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        _require_temperature(servers, temperature)
        model = self._models[servers.urls[0]]

        def ask(client: httpx.Client, item: Rollout) -> httpx.Response:
            ids = [*item.prompt_ids, *item.response_ids.tolist()]
            return _prompt_logprobs(client, model, ids, kappa)

        parsed = [
            _parse(answer.json()["choices"][0]["prompt_logprobs"], rollout, kappa)
            for rollout, answer in zip(rollouts, servers.map(ask, rollouts), strict=True)
        ]
        ids, logps, own = zip(*parsed, strict=True)
        return torch.cat(ids), torch.cat(logps), torch.cat(own)

    def _probe(self, m: int, probe: Probe, kappa: int, temperature: float) -> bool:
        """Whether the teacher's servers are ours."""
        servers, name = self.teachers[m], f"teachers.models.{m}"
        try:
            ours = httpx.get(f"{servers.urls[0]}/describe", timeout=10.0).is_success
        except httpx.TransportError:
            ours = False
        asked = {"prompt": probe.text, "add_special_tokens": False}
        for url, answer in servers.each(lambda client: client.post("/tokenize", json=asked)).items():
            if tuple(answer.json()["tokens"]) != probe.token_ids:
                raise UnusableModel(
                    f"{name}: {url} has another tokenizer than the student; expected a teacher of one family"
                )
        if ours:
            return True
        _require_temperature(servers, temperature)
        for url, answer in servers.each(lambda client: client.get("/v1/models")).items():
            self._models[url] = answer.json()["data"][0]["id"]
        model = self._models[servers.alive[0]]
        self._models[servers.urls[0]] = model
        try:
            servers.each(lambda client: _prompt_logprobs(client, model, list(probe.token_ids[:2]), kappa))
        except Refused as error:
            raise UnusableModel(
                f"{name}: gives no {kappa} log-probabilities a position; start it with --max-logprobs "
                f"{kappa}, or lower opd.kappa ({error})"
            ) from error
        log.info("%s is a vLLM server: its answers are JSON, slower than smopd.engine.teacher_server", name)
        return False


def portions(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Consecutive rollouts of about REQUEST_TOKENS together."""
    parts: list[list[Rollout]] = []
    size = REQUEST_TOKENS
    for rollout in rollouts:
        if size >= REQUEST_TOKENS:
            parts.append([])
            size = 0
        parts[-1].append(rollout)
        size += len(rollout.prompt_ids) + len(rollout.response_ids)
    return parts


def _require_temperature(servers: Servers, temperature: float) -> None:
    if temperature != 1:
        raise UnusableModel(
            f"{servers.urls[0]}: a vLLM server gives log-probabilities at temperature 1, asked for "
            f"{temperature}; serve the teacher with smopd.engine.teacher_server"
        )


def _prompt_logprobs(client: httpx.Client, model: str, ids: list[int], kappa: int) -> httpx.Response:
    body = {"model": model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": kappa}
    return client.post("/v1/completions", json=body)


def _parse(rows: list, rollout: Rollout, kappa: int) -> tuple[Tensor, Tensor, Tensor]:
    """A response's entries by rank, and its tokens' own; a row holds its token too, ranked or not."""
    n_tokens = len(rollout.response_ids)
    ids_TS = torch.zeros(n_tokens, kappa, dtype=torch.int32)
    logps_TS = torch.full((n_tokens, kappa), -torch.inf)
    own_T = torch.empty(n_tokens)
    answered = rows[len(rollout.prompt_ids) :][:n_tokens]
    for t, (token, row) in enumerate(zip(rollout.response_ids.tolist(), answered, strict=True)):
        own_T[t] = row[str(token)]["logprob"]
        for token_id, entry in row.items():
            if entry["rank"] <= kappa:
                ids_TS[t, entry["rank"] - 1] = int(token_id)
                logps_TS[t, entry["rank"] - 1] = entry["logprob"]
    return ids_TS, logps_TS, own_T
