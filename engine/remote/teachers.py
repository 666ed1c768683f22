"""Teachers behind URLs, each served by `teacher_server.py`.

Requests carry a digest of the weights that the teacher's first server had. A server with other weights
refuses the request. Servers are checked at the start and whenever they are restored.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path

import httpx
import torch

from smopd.engine.local.teachers import Dropping, empty_topk, require_vocabulary
from smopd.engine.models.loading import UnusableModel
from smopd.engine.models.packing import flat_offsets
from smopd.engine.remote.servers import Request, Servers, ServerUnavailable
from smopd.engine.remote.wire import answer_bytes, pack_request, unpack_answer
from smopd.engine.types import Rollout, TeacherTopK
from smopd.kernels.checks import check_kappa

REQUEST_TOKENS = 16_384  # ours: approximate tokens per request


@dataclass(frozen=True)
class Probe:
    """A text and its token ids in the student's tokenizer, which servers must reproduce and be able to score.

    tokens: size of the student's tokenizer. A teacher's head needs at least this many rows.
    """

    text: str
    token_ids: tuple[int, ...]
    tokens: int = 0


class RemoteTeachers(Dropping):
    """`TeacherEngine` for teachers behind URLs.

    Args:
        urls: for each teacher, the URLs of its servers.
        vocabulary: the student's vocabulary size.
        kappa, temperature: the values that later calls of `score` will pass.
    Raises:
        NoServer: no server of a teacher answers.
        UnusableModel: a server does not fit (tokenizer, vocabulary, kappa or temperature).
    """

    def __init__(
        self, urls: Sequence[Sequence[str]], vocabulary: int, probe: Probe, kappa: int, temperature: float
    ):
        self.vocabulary, self.rows, self.probe = vocabulary, vocabulary, probe
        self.kappa, self.temperature = kappa, temperature
        self.teachers = [Servers(each) for each in urls]
        self.digests: dict[int, str] = {}  # of each teacher's weights, as its first server reports
        for m, servers in enumerate(self.teachers):
            self._admit(m, servers.urls, starting=True)
            if not servers.alive:
                raise servers.none_left()

    @property
    def bad_answers(self) -> int:
        return sum(servers.bad_answers for servers in self.teachers)

    def overlaps(self, device: torch.device) -> bool:
        return True

    def base(self, path: str | Path) -> None:
        return None

    def score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TeacherTopK:
        check_kappa("score", kappa, self.shared)
        rollouts, n_teachers = [r for r in rollouts if r.n_tokens], len(self.teachers)
        if not rollouts:
            return empty_topk(0, n_teachers, kappa, "cpu")
        parts = portions(rollouts)
        result = empty_topk(flat_offsets(rollouts)[-1], n_teachers, kappa, "cpu")

        def ask(m: int) -> int:
            servers = self.teachers[m]
            self._admit(m, servers.restore())  # a restored server may have another model
            answers = servers.map(
                lambda url, part: self._score_request(m, part, kappa, temperature),
                parts,
                lambda url, part, answer: unpack_answer(answer.content, flat_offsets(part)[-1], kappa),
            )
            ids, logps, token_logps, dropped = zip(*answers, strict=True)
            result.ids_NMS[:, m], result.logps_NMS[:, m] = torch.cat(ids), torch.cat(logps)
            result.token_logps_NM[:, m] = torch.cat(token_logps)
            return sum(dropped)

        with ThreadPoolExecutor(n_teachers, thread_name_prefix="teachers") as pool:
            self.drop(sum(pool.map(ask, range(n_teachers))))
        return self.without_padding(result)

    def _score_request(self, m: int, part: list[Rollout], kappa: int, temperature: float) -> Request:
        params = {"kappa": kappa, "temperature": temperature, "weights": self.digests[m]}
        size = answer_bytes(flat_offsets(part)[-1], kappa)
        return Request("/score", content=pack_request(part), params=params, most_bytes=size)

    def _admit(self, m: int, urls: Sequence[str], *, starting: bool = False) -> None:
        """Remove servers that `_require_fit` rejects. If `starting`, raise its UnusableModel instead."""
        for url in urls:
            try:
                self._require_fit(m, url)
            except (ServerUnavailable, UnusableModel) as error:
                if starting and isinstance(error, UnusableModel):
                    raise
                self.teachers[m].remove(url, str(error))

    def _require_fit(self, m: int, url: str) -> None:
        """Raise ServerUnavailable or UnusableModel unless the server can answer later calls of `score`."""
        servers, name = self.teachers[m], f"teachers.models.{m}: {url}"
        described = servers.ask(url, Request("/describe", accept=(httpx.codes.NOT_FOUND,)), _description)
        if described is None:
            raise UnusableModel(f"{name} is not a teacher server; start it with smopd.engine.teacher_server")
        vocabulary, rows, weights = described
        text = Request("/tokenize", json={"prompt": self.probe.text, "add_special_tokens": False})
        if servers.ask(url, text, lambda answer: tuple(answer.json()["tokens"])) != self.probe.token_ids:
            raise UnusableModel(f"{name} has another tokenizer than the student, expected one of its family")
        require_vocabulary(m, url, rows, self.probe.tokens)
        self.rows = min(self.rows, rows)
        if vocabulary != self.vocabulary:
            expected = f"expected the student's {self.vocabulary} (--vocabulary)"
            raise UnusableModel(f"{name} was started for a vocabulary of {vocabulary}, {expected}")
        known = self.digests.setdefault(m, weights)
        if weights != known:
            raise ServerUnavailable(f"holds weights {weights}, the teacher's first server holds {known}")
        ids = self.probe.token_ids
        trial = Rollout(ids[:1], torch.tensor(ids[-1:]), torch.zeros(1), 0, True)
        try:
            request = self._score_request(m, [trial], self.kappa, self.temperature)
            servers.ask(url, request, lambda answer: None)
        except ServerUnavailable as error:
            if error.cause != "refused":
                raise
            raise UnusableModel(f"{name} refuses kappa {self.kappa}: {error}") from error


def _description(answer: httpx.Response) -> tuple[int, int, str] | None:
    """Return (vocabulary, rows, digest) of a `teacher_server`, or None for any other server."""
    if not answer.is_success:
        return None
    described = answer.json()
    return int(described["vocabulary"]), int(described["rows"]), str(described["weights"])


def portions(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    """Split the rollouts into consecutive parts of about REQUEST_TOKENS tokens."""
    sizes = (len(rollout.prompt_ids) + len(rollout.response_ids) for rollout in rollouts)
    starts = accumulate(sizes, initial=0)
    parts = groupby(zip(starts, rollouts, strict=False), key=lambda each: each[0] // REQUEST_TOKENS)
    return [[rollout for _, rollout in part] for _, part in parts]
