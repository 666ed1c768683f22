"""Teachers at URLs: our own server (teacher_server.py, binary) or a `vllm serve` (JSON, temperature 1).

A union takes a second round: each teacher's servers, ours alone, are asked about the ids of the others.

Every server is asked at the start, and again when it comes back, what kind it is and whether it fits: its
tokenizer, and one answer as it will be wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
from torch import Tensor

from smopd.engine.local.teachers import empty_topk
from smopd.engine.local.union import Dropping, others_ids, with_others, without_padding
from smopd.engine.models.loading import UnusableModel
from smopd.engine.models.packing import flat_offsets
from smopd.engine.remote.client import Client
from smopd.engine.remote.servers import NOT_AN_ANSWER, Refused, RetryPolicy, Servers, ServerUnavailable
from smopd.engine.remote.wire import (
    BINARY,
    check_values,
    pack_given,
    pack_request,
    unpack_answer,
    unpack_values,
)
from smopd.engine.types import Rollout, TeacherTopK
from smopd.kernels.checks import check_kappa

REQUEST_TOKENS = 16_384  # ours: about as many of a batch's tokens go into one request
OTHER_KIND = "is of another kind than the teacher's first server, expected all ours or all vLLM's"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probe:
    """A text and the student's token ids of it, which a teacher must agree to."""

    text: str
    token_ids: tuple[int, ...]
    tokens: int = 0
    """How many ids are tokens of the student's: a teacher has as many rows at least."""


class RemoteTeachers(Dropping):
    """Serves `TeacherEngine`.

    Args:
        urls: for each teacher its servers, which hold the same model.
        vocabulary: the student's.
        probe: of the student's tokenizer.
        kappa, temperature, union: what will be asked for.
        dtype: of log-probabilities on the way, "float16" or "float32".
    Raises:
        NoServer: a teacher has no server that answers.
        UnusableModel: a server has another tokenizer, gives too few log-probabilities, cannot serve the
            temperature or the union, or is of another kind than its teacher's first; says what to change.
    """

    def __init__(
        self,
        urls: Sequence[Sequence[str]],
        vocabulary: int,
        probe: Probe,
        kappa: int,
        temperature: float,
        *,
        union: bool = False,
        dtype: str = "float32",
        patience: RetryPolicy | None = None,
    ):
        self.vocabulary, self.rows, self.dtype = vocabulary, vocabulary, dtype
        self.probe, self.kappa, self.temperature, self.union = probe, kappa, temperature, union
        self.teachers = [Servers(each, patience) for each in urls]
        self._models: dict[str, str] = {}
        self.ours = [self._probe(m) for m in range(len(self.teachers))]

    @property
    def bad_answers(self) -> int:
        return sum(servers.bad_answers for servers in self.teachers)

    def overlaps(self, device: torch.device) -> bool:
        return True

    def base(self, path: str | Path) -> None:
        return None

    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        if union and not self.union:
            raise ValueError("score: union is True, expected False of teachers that were not made for it")
        check_kappa("score", kappa, self.shared)
        rollouts = [rollout for rollout in rollouts if len(rollout.response_ids)]
        result = empty_topk(flat_offsets(rollouts)[-1], len(self.teachers), kappa, "cpu")

        def ask(m: int) -> int:
            self._readmit(m)
            method = self._binary if self.ours[m] else self._json
            ids_NS, logps_NS, token_logps_N, away = method(self.teachers[m], rollouts, kappa, temperature)
            ids_NS, logps_NS, here = without_padding(ids_NS, logps_NS, self.shared)
            result.ids_NMS[:, m], result.logps_NMS[:, m] = ids_NS, logps_NS
            result.token_logps_NM[:, m] = token_logps_N
            return away + here

        if rollouts:
            with ThreadPoolExecutor(len(self.teachers), thread_name_prefix="teachers") as pool:
                self.drop(sum(pool.map(ask, range(len(self.teachers)))))
        return self._union(rollouts, result, temperature) if union and kappa > 0 else result

    def _union(self, rollouts: Sequence[Rollout], own: TeacherTopK, temperature: float) -> TeacherTopK:
        """The second round."""
        n_tokens, n_teachers, kappa = own.ids_NMS.shape
        whole = empty_topk(n_tokens, n_teachers, n_teachers * kappa, "cpu")

        def ask(m: int) -> None:
            others_NU, kept_NU = others_ids(own.ids_NMS, own.logps_NMS, m)
            logps_NU = self._given(
                self.teachers[m], rollouts, others_NU, own.token_logps_NM[:, m], temperature
            )
            entries = (own.ids_NMS[:, m], own.logps_NMS[:, m])
            whole.ids_NMS[:, m], whole.logps_NMS[:, m] = with_others(*entries, others_NU, logps_NU, kept_NU)

        if rollouts:
            with ThreadPoolExecutor(n_teachers, thread_name_prefix="teachers") as pool:
                list(pool.map(ask, range(n_teachers)))
        return TeacherTopK(whole.ids_NMS, whole.logps_NMS, own.token_logps_NM)

    def _given(
        self,
        servers: Servers,
        rollouts: Sequence[Rollout],
        ids_NU: Tensor,
        token_logps_N: Tensor,
        temperature: float,
    ) -> Tensor:
        parts, items, begin = portions(rollouts), [], 0
        for part in parts:
            rows = slice(begin, begin := begin + flat_offsets(part)[-1])
            items.append((part, ids_NU[rows], token_logps_N[rows]))

        def ask(client: Client, item: _Given) -> httpx.Response:
            return _ask_given(client, *item, temperature, self.dtype)

        def read(answer: httpx.Response, item: _Given) -> Tensor:
            return unpack_values(answer.content, *item[1].shape)

        return torch.cat(servers.map(ask, items, read))

    def _binary(
        self, servers: Servers, rollouts: Sequence[Rollout], kappa: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        def ask(client: Client, item: Sequence[Rollout]) -> httpx.Response:
            return _score(client, item, kappa, temperature, self.dtype)

        def read(answer: httpx.Response, item: Sequence[Rollout]) -> tuple[Tensor, Tensor, Tensor, int]:
            return unpack_answer(answer.content, flat_offsets(item)[-1], kappa)

        ids, logps, own, dropped = zip(*servers.map(ask, portions(rollouts), read), strict=True)
        return torch.cat(ids), torch.cat(logps), torch.cat(own), sum(dropped)

    def _json(
        self, servers: Servers, rollouts: Sequence[Rollout], kappa: int, temperature: float
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        _require_temperature(servers.urls[0], temperature)

        def ask(client: Client, item: Rollout) -> httpx.Response:
            ids = [*item.prompt_ids, *item.response_ids.tolist()]
            return _prompt_logprobs(client, self._models[client.url], ids, kappa)

        def read(answer: httpx.Response, item: Rollout) -> tuple[Tensor, Tensor, Tensor]:
            return _parse(answer.json()["choices"][0]["prompt_logprobs"], item, kappa)

        ids, logps, own = zip(*servers.map(ask, rollouts, read), strict=True)
        return torch.cat(ids), torch.cat(logps), torch.cat(own), 0

    def _probe(self, m: int) -> bool:
        """Whether the teacher's servers are ours. Each is asked; those that stay away are taken out."""
        servers, kinds = self.teachers[m], {}
        for url in servers.alive:
            try:
                kinds[url] = self._fits(m, url)
            except ServerUnavailable as error:
                servers.take_out(url, str(error))
        if not kinds:
            raise servers.none_left()
        ours = next(iter(kinds.values()))
        for url, kind in kinds.items():
            if kind != ours:
                raise UnusableModel(f"teachers.models.{m}: {url} {OTHER_KIND}")
        if not ours:
            log.info(
                "teachers.models.%d is a vLLM server: its answers are JSON, slower than "
                "smopd.engine.teacher_server",
                m,
            )
        return ours

    def _readmit(self, m: int) -> None:
        """Servers that were out and fit again: another model may be there by now."""
        servers = self.teachers[m]
        for url in servers.readmit():
            try:
                why = "" if self._fits(m, url) == self.ours[m] else OTHER_KIND
            except (ServerUnavailable, *NOT_AN_ANSWER) as error:  # another program may answer there
                why = f"{type(error).__name__}: {error}"
            if why:
                servers.take_out(url, why)

    def _fits(self, m: int, url: str) -> bool:
        """Whether the server at `url` is ours.

        Raises:
            ServerUnavailable: it does not answer.
            UnusableModel: it cannot serve what will be asked.
        """
        servers, ids, name = self.teachers[m], self.probe.token_ids, f"teachers.models.{m}: {url}"
        described = servers.patiently(
            url,
            lambda client: client.get("/describe"),
            (httpx.codes.NOT_FOUND,),
            lambda answer: (
                [int(answer.json()[name]) for name in ("vocabulary", "rows")] if answer.is_success else None
            ),
        )
        asked = {"prompt": self.probe.text, "add_special_tokens": False}
        tokens = servers.patiently(
            url,
            lambda client: client.post("/tokenize", json=asked),
            read=lambda answer: tuple(answer.json()["tokens"]),
        )
        if tokens != ids:
            raise UnusableModel(
                f"{name} has another tokenizer than the student; expected a teacher of one family"
            )
        if described is not None:
            vocabulary, rows = described
            if rows < self.probe.tokens:
                raise UnusableModel(f"{name} has {rows} rows, the student has {self.probe.tokens} tokens")
            self.rows = min(self.rows, rows)
            if vocabulary != self.vocabulary:
                raise UnusableModel(
                    f"{name} was started for a vocabulary of {vocabulary}, expected the student's "
                    f"{self.vocabulary} (--vocabulary)"
                )
            one = Rollout(ids[:1], torch.tensor(ids[-1:]), torch.zeros(1), 0, True)
            given = ([one], torch.tensor([ids[:1]], dtype=torch.int32), torch.zeros(1))
            try:
                servers.patiently(
                    url,
                    lambda client: _score(client, [one], self.kappa, self.temperature, self.dtype),
                    read=lambda answer: unpack_answer(answer.content, 1, self.kappa),
                )
                if self.union:
                    servers.patiently(
                        url, lambda client: _ask_given(client, *given, self.temperature, self.dtype)
                    )
            except Refused as error:
                raise UnusableModel(f"{name} cannot answer what will be asked ({error})") from error
            return True
        if self.union:
            raise UnusableModel(
                f"{name} is a vLLM server, which cannot be asked about the other teachers' ids; serve it "
                "with smopd.engine.teacher_server, or leave teachers.union and merge.method product"
            )
        _require_temperature(url, self.temperature)
        model = self._models[url] = servers.patiently(
            url,
            lambda client: client.get("/v1/models"),
            read=lambda answer: str(answer.json()["data"][0]["id"]),
        )
        try:
            servers.patiently(url, lambda client: _prompt_logprobs(client, model, list(ids[:2]), self.kappa))
        except Refused as error:
            raise UnusableModel(
                f"{name} gives no {self.kappa} log-probabilities a position; start it with --max-logprobs "
                f"{self.kappa}, or lower opd.kappa ({error})"
            ) from error
        return False


_Given = tuple[Sequence[Rollout], Tensor, Tensor]  # with ids (N, U) and the tokens' own values (N,)


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


def _require_temperature(url: str, temperature: float) -> None:
    if temperature != 1:
        raise UnusableModel(
            f"{url}: a vLLM server gives log-probabilities at temperature 1, asked for "
            f"{temperature}; serve the teacher with smopd.engine.teacher_server"
        )


def _score(
    client: Client, rollouts: Sequence[Rollout], kappa: int, temperature: float, dtype: str
) -> httpx.Response:
    return client.post(
        "/score",
        params={"kappa": kappa, "temperature": temperature, "dtype": dtype},
        content=pack_request(rollouts),
        headers={"content-type": BINARY},
    )


def _ask_given(
    client: Client,
    rollouts: Sequence[Rollout],
    ids_NU: Tensor,
    token_logps_N: Tensor,
    temperature: float,
    dtype: str,
) -> httpx.Response:
    return client.post(
        "/given",
        params={"temperature": temperature, "dtype": dtype},
        content=pack_given(rollouts, ids_NU, token_logps_N),
        headers={"content-type": BINARY},
    )


def _prompt_logprobs(client: Client, model: str, ids: list[int], kappa: int) -> httpx.Response:
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
    check_values(ids_TS, logps_TS, own_T)
    return ids_TS, logps_TS, own_T
