"""Teachers at URLs: our own server (teacher_server.py, binary) or a `vllm serve` (JSON, temperature 1).

A union takes a second round: each teacher's servers, ours alone, are asked about the ids of the others.

Every server is asked at the start, and again when it is restored, what kind it is and whether it fits: its
tokenizer, and one answer as it will be wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from smopd.engine.local.teachers import empty_topk
from smopd.engine.local.union import Dropping, others_ids, with_others, without_padding
from smopd.engine.models.loading import UnusableModel
from smopd.engine.models.packing import flat_offsets
from smopd.engine.remote.client import Request, ServerUnavailable
from smopd.engine.remote.servers import RetryPolicy, Servers
from smopd.engine.remote.wire import check_values, pack_given, pack_request, unpack_answer, unpack_values
from smopd.engine.types import Rollout, TeacherTopK
from smopd.kernels.checks import check_kappa

T = TypeVar("T")
Answer = tuple[Tensor, Tensor, Tensor, int]
"""ids (N, S), log-probabilities (N, S) and the tokens' own (N,); how many ids the server dropped."""
Given = tuple[Sequence[Rollout], Tensor, Tensor]
"""Rollouts, ids (N, U) and the tokens' own log-probabilities (N,)."""
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
        retry: RetryPolicy | None = None,
    ):
        self.vocabulary, self.rows, self.dtype = vocabulary, vocabulary, dtype
        self.probe, self.kappa, self.temperature, self.union = probe, kappa, temperature, union
        self.teachers = [Servers(each, retry) for each in urls]
        self._models: dict[str, str] = {}  # of vLLM's servers, by URL
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
            self._restore(m)
            method = self._binary if self.ours[m] else self._json
            ids_NS, logps_NS, token_logps_N, away = method(self.teachers[m], rollouts, kappa, temperature)
            ids_NS, logps_NS, here = without_padding(ids_NS, logps_NS, self.shared)
            result.ids_NMS[:, m], result.logps_NMS[:, m] = ids_NS, logps_NS
            result.token_logps_NM[:, m] = token_logps_N
            return away + here

        if rollouts:
            self.drop(sum(self._of_each(ask)))
        return self._union(rollouts, result, temperature) if union and kappa > 0 else result

    def _union(self, rollouts: Sequence[Rollout], own: TeacherTopK, temperature: float) -> TeacherTopK:
        """The second round."""
        n_tokens, n_teachers, kappa = own.ids_NMS.shape
        whole = empty_topk(n_tokens, n_teachers, n_teachers * kappa, "cpu")

        def ask(m: int) -> None:
            others_NU, kept_NU = others_ids(own.ids_NMS, own.logps_NMS, m)
            given = (rollouts, others_NU, own.token_logps_NM[:, m])
            logps_NU = self._given(self.teachers[m], *given, temperature)
            entries = (own.ids_NMS[:, m], own.logps_NMS[:, m])
            whole.ids_NMS[:, m], whole.logps_NMS[:, m] = with_others(*entries, others_NU, logps_NU, kept_NU)

        if rollouts:
            self._of_each(ask)
        return TeacherTopK(whole.ids_NMS, whole.logps_NMS, own.token_logps_NM)

    def _of_each(self, ask: Callable[[int], T]) -> list[T]:
        """`ask` of every teacher, all at once."""
        with ThreadPoolExecutor(len(self.teachers), thread_name_prefix="teachers") as pool:
            return list(pool.map(ask, range(len(self.teachers))))

    def _given(
        self,
        servers: Servers,
        rollouts: Sequence[Rollout],
        ids_NU: Tensor,
        token_logps_N: Tensor,
        temperature: float,
    ) -> Tensor:
        items: list[Given] = []
        begin = 0
        for part in portions(rollouts):
            rows = slice(begin, begin := begin + flat_offsets(part)[-1])
            items.append((part, ids_NU[rows], token_logps_N[rows]))
        return torch.cat(
            servers.map(
                lambda url, item: self._ask_given(item, temperature),
                items,
                lambda answer, item: unpack_values(answer.content, *item[1].shape),
            )
        )

    def _binary(
        self, servers: Servers, rollouts: Sequence[Rollout], kappa: int, temperature: float
    ) -> Answer:
        answers = servers.map(
            lambda url, item: self._score(item, kappa, temperature),
            portions(rollouts),
            lambda answer, item: unpack_answer(answer.content, flat_offsets(item)[-1], kappa),
        )
        ids, logps, own, dropped = zip(*answers, strict=True)
        return torch.cat(ids), torch.cat(logps), torch.cat(own), sum(dropped)

    def _json(self, servers: Servers, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> Answer:
        _require_temperature(servers.urls[0], temperature)
        answers = servers.map(
            lambda url, item: self._prompt_logprobs(
                url, [*item.prompt_ids, *item.response_ids.tolist()], kappa
            ),
            rollouts,
            lambda answer, item: _parse(answer.json()["choices"][0]["prompt_logprobs"], item, kappa),
        )
        ids, logps, own = zip(*answers, strict=True)
        return torch.cat(ids), torch.cat(logps), torch.cat(own), 0

    def _score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> Request:
        params = {"kappa": kappa, "temperature": temperature, "dtype": self.dtype}
        return Request("/score", content=pack_request(rollouts), params=params)

    def _ask_given(self, given: Given, temperature: float) -> Request:
        params = {"temperature": temperature, "dtype": self.dtype}
        return Request("/given", content=pack_given(*given), params=params)

    def _prompt_logprobs(self, url: str, ids: list[int], kappa: int) -> Request:
        body: dict[str, Any] = {"model": self._models[url], "prompt": ids, "prompt_logprobs": kappa}
        return Request("/v1/completions", json=body | {"max_tokens": 1, "temperature": 0.0})

    def _probe(self, m: int) -> bool:
        """Whether the teacher's servers are ours. Each is asked; unavailable ones are removed."""
        servers, kinds = self.teachers[m], {}
        for url in servers.alive:
            try:
                kinds[url] = self._fits(m, url)
            except ServerUnavailable as error:
                servers.remove(url, str(error))
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

    def _restore(self, m: int) -> None:
        """Restores servers that answer again and fit: another model may be there by now."""
        servers = self.teachers[m]
        for url in servers.restore():
            try:
                reason = "" if self._fits(m, url) == self.ours[m] else OTHER_KIND
            except (ServerUnavailable, UnusableModel) as error:
                reason = str(error)
            if reason:
                servers.remove(url, reason)

    def _fits(self, m: int, url: str) -> bool:
        """Whether the server at `url` is ours.

        Raises:
            ServerUnavailable: it does not answer.
            UnusableModel: it cannot serve what will be asked.
        """
        servers, name = self.teachers[m], f"teachers.models.{m}: {url}"
        described = servers.ask(url, Request("/describe", accept=(httpx.codes.NOT_FOUND,)), _description)
        asked = {"prompt": self.probe.text, "add_special_tokens": False}
        tokens = servers.ask(
            url, Request("/tokenize", json=asked), lambda answer: tuple(answer.json()["tokens"])
        )
        if tokens != self.probe.token_ids:
            raise UnusableModel(
                f"{name} has another tokenizer than the student; expected a teacher of one family"
            )
        if described is None:
            self._require_vllm(servers, url, name)
        else:
            self._require_ours(servers, url, name, *described)
        return described is not None

    def _require_ours(self, servers: Servers, url: str, name: str, vocabulary: int, rows: int) -> None:
        if rows < self.probe.tokens:
            raise UnusableModel(f"{name} has {rows} rows, the student has {self.probe.tokens} tokens")
        self.rows = min(self.rows, rows)
        if vocabulary != self.vocabulary:
            raise UnusableModel(
                f"{name} was started for a vocabulary of {vocabulary}, expected the student's "
                f"{self.vocabulary} (--vocabulary)"
            )
        ids = self.probe.token_ids
        one = Rollout(ids[:1], torch.tensor(ids[-1:]), torch.zeros(1), 0, True)
        given = ([one], torch.tensor([ids[:1]], dtype=torch.int32), torch.zeros(1))
        try:
            score = self._score([one], self.kappa, self.temperature)
            servers.ask(url, score, lambda answer: unpack_answer(answer.content, 1, self.kappa))
            if self.union:
                servers.ask(url, self._ask_given(given, self.temperature), lambda answer: None)
        except ServerUnavailable as error:
            _raise_refused(error, f"{name} cannot answer what will be asked")

    def _require_vllm(self, servers: Servers, url: str, name: str) -> None:
        if self.union:
            raise UnusableModel(
                f"{name} is a vLLM server, which cannot be asked about the other teachers' ids; serve it "
                "with smopd.engine.teacher_server, or leave teachers.union and merge.method product"
            )
        _require_temperature(url, self.temperature)
        self._models[url] = servers.ask(
            url, Request("/v1/models"), lambda answer: str(answer.json()["data"][0]["id"])
        )
        ids = list(self.probe.token_ids[:2])
        try:
            servers.ask(url, self._prompt_logprobs(url, ids, self.kappa), lambda answer: None)
        except ServerUnavailable as error:
            _raise_refused(
                error,
                f"{name} gives no {self.kappa} log-probabilities a position; start it with --max-logprobs "
                f"{self.kappa}, or lower opd.kappa",
            )


def _raise_refused(error: ServerUnavailable, message: str) -> None:
    """UnusableModel where the server refused the request, else the error itself."""
    raise UnusableModel(f"{message} ({error})") if error.cause == "refused" else error


def _description(answer: httpx.Response) -> tuple[int, int] | None:
    """Vocabulary and rows of a server of ours; None: it is another's."""
    if not answer.is_success:
        return None
    described = answer.json()
    return int(described["vocabulary"]), int(described["rows"])


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
            if entry["rank"] < 1:
                raise ValueError(f"a token has rank {entry['rank']}, expected 1 or more")
            if entry["rank"] <= kappa:
                ids_TS[t, entry["rank"] - 1] = int(token_id)
                logps_TS[t, entry["rank"] - 1] = entry["logprob"]
    check_values(ids_TS, logps_TS, own_T)
    return ids_TS, logps_TS, own_T
