"""Teachers in vLLM: responses in, each teacher's top-kappa at every response token out, by one of two routes.

    pooler            the head runs inside vLLM (smopd.engine.vllm.pooler): tensors out, any temperature, no
                      (tokens, V) buffer, no Python object a token
    prompt_logprobs   vLLM's own log-probabilities of a prompt, for heads that the pooler cannot apply

With a union every teacher is asked a second time, about the ids of the others, but the last one, which is
asked about them with its own kappa.

LoRA teachers of one base share an engine; the base and each adapter are scored in calls of their own, as vLLM
on a CPU gives wrong values for batches that mix them. Nothing is read from the prefix cache, since positions
found there have no output: a prompt is computed again for each of its responses.

Shapes: N response tokens in flat order, T those of one response, M teachers, S = kappa, U given ids a token.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest

from smopd.engine.local.teachers import empty_topk
from smopd.engine.local.union import Dropping, others_ids, with_others, without_padding
from smopd.engine.models.packing import flat_offsets
from smopd.engine.settings import VllmSettings
from smopd.engine.types import Rollout, TeacherTopK
from smopd.engine.vllm.bases import Base, choose_route, engine_options, read_bases, room_to_draw
from smopd.engine.vllm.engines import engine, exclusive, of_sharing_ranks, sleep, warm_cache
from smopd.engine.vllm.pooler import Question, ask
from smopd.engine.weights.adapters import same_place
from smopd.kernels.checks import check_kappa

ROUTES = ("auto", "pooler", "prompt_logprobs")


class VllmTeachers(Dropping):
    """Serves `TeacherEngine` with vLLM.

    Args:
        paths: folders or hub ids of models, and folders of LoRA adapters in peft's format.
        settings: of the engines; max_model_len is of a prompt and its response. Rank and number of adapters
            are raised to what the adapters need.
        vocabulary: the student's. A teacher's may be larger, by padding.
        tokens: how many of its ids are tokens; a teacher's may be as small. None: all.
        route: "pooler", "prompt_logprobs", or "auto": the pooler where it can apply every teacher's head.
        base: of the adapters; None: each names its own.
        engines: how many engines the models share; None: one each. With fewer, models take turns, and the
            weights of each are loaded at most once a pass; union makes two passes.
        role: tells these engines from others in the process.
        batch_tokens: most tokens that an engine computes at a time. None: vLLM's choice; on the
            prompt_logprobs route what keeps (tokens, V) near 512 MiB.
        device: where results are wanted.
    Raises:
        ValueError: no path, an unknown route, or a number below 1.
        FileNotFoundError, UnusableModel: a path holds no model or adapter that can be served, or too few
            positions for the route.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        settings: VllmSettings,
        vocabulary: int,
        route: str = "auto",
        *,
        base: str | Path | None = None,
        engines: int | None = None,
        role: str = "teachers",
        batch_tokens: int | None = None,
        device: torch.device | str = "cpu",
        tokens: int | None = None,
    ):
        if not paths:
            raise ValueError("teachers: got none, expected at least one")
        if route not in ROUTES:
            raise ValueError(f"teachers.route: got {route!r}, expected one of {', '.join(ROUTES)}")
        for name, value in (("engines", engines), ("batch_tokens", batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"teachers.{name}: got {value}, expected at least 1")
        self.vocabulary, self.device, self.settings = vocabulary, device, settings
        self.n_teachers = len(paths)
        self.bases = read_bases(paths, tokens or vocabulary, base, engines, role)
        self.rows = min(one.n_vocab for one in self.bases)
        self.pooled = choose_route(route, self.bases) == "pooler"
        if not self.pooled and settings.max_model_len is not None:
            room = room_to_draw(settings.max_model_len, self.bases)
            self.settings = settings.model_copy(update={"max_model_len": room})
        self._options = engine_options(self.pooled, self.bases, batch_tokens)
        self._held: dict[str, str] = {}  # the path whose weights a role has
        for one in self.bases:
            warm_cache(one.path)
            if one.role not in self._held:
                sleep(self._engine(one))

    def overlaps(self, device: torch.device) -> bool:
        return self.settings.placement == "process"

    def base(self, path: str | Path) -> VllmTeachers | None:
        """The model at `path` without adapters, where some of its are here: takes turns in their engine."""
        for one in self.bases:
            if same_place(one.path) == same_place(path):
                alone = copy.copy(self)
                alone.bases, alone.n_teachers, alone.dropped = [replace(one, members=[(0, None)])], 1, 0
                return alone
        return None

    def score(
        self, rollouts: Sequence[Rollout], kappa: int, temperature: float, *, union: bool = False
    ) -> TeacherTopK:
        """As `TeacherEngine`.

        Raises:
            ValueError: a response with its prompt is too long for an engine; or on the prompt_logprobs route
                a temperature other than 1, or `union`.
        """
        self._require(kappa, temperature, union)
        inside, outside_N = self.inside(rollouts)
        together, mine = self._together(inside)
        result = empty_topk(flat_offsets(together)[-1], self.n_teachers, kappa, "cpu")

        union = union and kappa > 0 and self.n_teachers > 1
        asked: list[int] = []
        of_others: dict[int, Tensor] = {}  # by teacher, what it thinks of the others' ids

        def visit(llm: LLM, base: Base, member: int, lora: LoRARequest | None) -> None:
            if self.pooled:
                given_NU = None
                if union and len(asked) == self.n_teachers - 1:  # now the others' ids are known
                    given_NU, _ = others_ids(result.ids_NMS, result.logps_NMS, member)
                answers = self._ask(llm, together, lora, kappa, temperature, given_NU)
                ids_NS, logps_NS, token_logp_N1, rest_NU = answers.split(
                    [kappa, kappa, 1, answers.shape[1] - 2 * kappa - 1], dim=1
                )
                if given_NU is not None:
                    of_others[member] = rest_NU
            else:
                ids_NS, logps_NS, token_logp_N1 = prompt_logprobs(llm, together, kappa, lora)
            if base.n_vocab > self.shared:
                self.drop(int((ids_NS[mine] >= self.shared).sum()))
                ids_NS, logps_NS, _ = without_padding(ids_NS, logps_NS, self.shared)
            result.ids_NMS[:, member], result.logps_NMS[:, member] = ids_NS, logps_NS
            result.token_logps_NM[:, member] = token_logp_N1[:, 0]
            asked.append(member)

        self._each(together, visit)
        if union:
            result = self._union(together, result, temperature, of_others)
        result.token_logps_NM[mine][outside_N] = -torch.inf
        return TeacherTopK(*(value[mine].to(self.device) for value in vars(result).values()))

    def given(
        self, rollouts: Sequence[Rollout], ids_NMU: Tensor, token_logps_NM: Tensor, temperature: float
    ) -> Tensor:
        """As `LocalTeachers.given`.

        Raises:
            ValueError: as `score` with a union.
        """
        self._require(0, temperature, union=True)
        inside, _ = self.inside(rollouts)
        together, mine = self._together(inside)
        parts, _ = of_sharing_ranks(self.settings, (ids_NMU.cpu(), token_logps_NM.cpu()))
        ids_NMU, token_logps_NM = (torch.cat(each) for each in zip(*parts, strict=True))
        result = torch.empty(ids_NMU.shape)

        def visit(llm: LLM, base: Base, member: int, lora: LoRARequest | None) -> None:
            known = (ids_NMU[:, member], token_logps_NM[:, member])
            result[:, member] = self._ask(llm, together, lora, 0, temperature, *known)

        self._each(together, visit)
        return result[mine].to(self.device)

    def _together(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], slice]:
        """The rollouts of all ranks that share a model, less empty ones, and which tokens are this rank's."""
        own = [rollout for rollout in rollouts if len(rollout.response_ids)]
        gathered, rank = of_sharing_ranks(self.settings, own)
        ends = flat_offsets([rollout for part in gathered for rollout in part])
        first = sum(len(part) for part in gathered[:rank])
        return [rollout for part in gathered for rollout in part], slice(ends[first], ends[first + len(own)])

    def _ask(
        self,
        llm: LLM,
        rollouts: Sequence[Rollout],
        lora: LoRARequest | None,
        kappa: int,
        temperature: float,
        given_NU: Tensor | None = None,
        known_N: Tensor | None = None,
    ) -> Tensor:
        """The pooler's answers to one `Question` of this kind a response."""
        spans = [slice(*ends) for ends in itertools.pairwise(flat_offsets(rollouts))]
        questions = [
            Question(
                len(r.prompt_ids) - 1,
                r.response_ids,
                kappa,
                temperature,
                None if given_NU is None else given_NU[span],
                None if known_N is None else known_N[span],
            )
            for r, span in zip(rollouts, spans, strict=True)
        ]
        return ask(llm, rollouts, questions, lora)

    def _union(
        self,
        rollouts: Sequence[Rollout],
        own: TeacherTopK,
        temperature: float,
        of_others: dict[int, Tensor],
    ) -> TeacherTopK:
        """A second pass over the teachers that `of_others` does not hold, with the others' ids given."""
        n_tokens, n_teachers, kappa = own.ids_NMS.shape
        whole = empty_topk(n_tokens, n_teachers, n_teachers * kappa, "cpu")

        def visit(llm: LLM, base: Base, member: int, lora: LoRARequest | None) -> None:
            given_NU, _ = others_ids(own.ids_NMS, own.logps_NMS, member)
            known_N = own.token_logps_NM[:, member]
            of_others[member] = self._ask(llm, rollouts, lora, 0, temperature, given_NU, known_N)

        self._each(rollouts, visit, [m for m in range(n_teachers) if m not in of_others])
        for m in range(n_teachers) if rollouts else ():
            given_NU, kept_NU = others_ids(own.ids_NMS, own.logps_NMS, m)
            entries = (own.ids_NMS[:, m], own.logps_NMS[:, m])
            whole.ids_NMS[:, m], whole.logps_NMS[:, m] = with_others(
                *entries, given_NU, of_others[m], kept_NU
            )
        return replace(whole, token_logps_NM=own.token_logps_NM)

    def _each(
        self,
        rollouts: Sequence[Rollout],
        visit: Callable[[LLM, Base, int, LoRARequest | None], None],
        members: Sequence[int] | None = None,
    ) -> None:
        """Every teacher once, or those of `members`, where an engine holds the weights before the others."""
        longest = max((len(r.prompt_ids) + len(r.response_ids) for r in rollouts), default=0)
        for base in sorted(self.bases, key=lambda base: self._held.get(base.role) != base.path):
            chosen = [one for one in base.members if members is None or one[0] in members]
            if not chosen:
                continue
            with exclusive(self.settings):
                llm = self._engine(base)
                limit = llm.model_config.max_model_len - (not self.pooled)  # which draws a token more
                if longest > limit:
                    raise ValueError(
                        f"score: a prompt and its response are {longest} tokens, expected at most {limit} "
                        f"({base.path})"
                    )
                for member, lora in chosen if rollouts else ():
                    visit(llm, base, member, lora)
                sleep(llm)

    def _engine(self, base: Base) -> LLM:
        llm = engine(base.role, base.path, base.settings(self.settings), **self._options)
        if self.pooled:
            llm.collective_rpc("serve_teacher", args=(base.path,))
        self._held[base.role] = base.path
        return llm

    def _require(self, kappa: int, temperature: float, union: bool) -> None:
        check_kappa("score", kappa, self.shared)
        if not self.pooled and temperature != 1:
            raise ValueError(
                f"score: temperature is {temperature}, expected 1: the route prompt_logprobs serves no other"
            )
        if not self.pooled and union:
            raise ValueError("score: union is True, expected False on the route prompt_logprobs")


def prompt_logprobs(
    llm: LLM, rollouts: Sequence[Rollout], kappa: int, lora: LoRARequest | None
) -> tuple[Tensor, Tensor, Tensor]:
    """ids (N, S), log-probabilities (N, S), and the tokens' own (N, 1)."""
    params = SamplingParams(
        max_tokens=1, prompt_logprobs=kappa, flat_logprobs=True, detokenize=False, temperature=0.0
    )
    answers = llm.generate(
        [TokensPrompt(prompt_token_ids=[*r.prompt_ids, *r.response_ids.tolist()]) for r in rollouts],
        params,
        lora_request=lora,
        use_tqdm=False,
    )
    ids, logps = [], []
    for rollout, answer in zip(rollouts, answers, strict=True):
        flat = answer.prompt_logprobs
        shape = (len(rollout.response_ids), kappa + 1)  # a position's own token, then the kappa largest
        begin = flat.start_indices[len(rollout.prompt_ids)]
        assert len(flat.token_ids) - begin == shape[0] * shape[1]
        ids.append(np.asarray(flat.token_ids[begin:], np.int32).reshape(shape)[:, 1:])
        logps.append(np.asarray(flat.logprobs[begin:], np.float32).reshape(shape))
    logps_NS = torch.from_numpy(np.concatenate(logps))
    return torch.from_numpy(np.concatenate(ids)), logps_NS[:, 1:], logps_NS[:, :1]
