"""Teachers in vLLM: responses in, each teacher's top-kappa at every response token out (pooler.py).

LoRA teachers of one base share an engine; the base and each adapter are scored in calls of their own, as vLLM
on a CPU gives wrong values for batches that mix them. Nothing is read from the prefix cache, since positions
found there have no output: a prompt is computed again for each of its responses.

Shapes: N response tokens in flat order, M teachers, S = kappa, U given ids a token.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from vllm.config import PoolerConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from smopd.engine.local.teachers import empty_topk, require_vocabulary
from smopd.engine.local.union import Dropping, others_ids, united, without_padding
from smopd.engine.models.loading import UnusableModel, stored_dtype
from smopd.engine.models.packing import flat_offsets
from smopd.engine.settings import VllmSettings
from smopd.engine.types import Rollout, TeacherTopK
from smopd.engine.vllm.engines import Engine, engine, exclusive, of_sharing_ranks, warm_cache
from smopd.engine.vllm.pooler import TASK, WORKER, ask, require_head, text_config
from smopd.engine.weights.adapters import Adapter, read_adapter, same_place
from smopd.kernels.checks import check_kappa

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM
_lora_ids = itertools.count(1)  # vLLM keeps adapters by number; none is used twice

Ask = Callable[..., Tensor]
"""(kappa, temperature, given_NU, known_N) -> `pooler.ask` of one teacher about the rollouts at hand."""


@dataclass(frozen=True)
class Base:
    """A model in vLLM and the teachers that it serves: itself, adapters of it, or both.

    Attributes:
        role: names its engine; bases of one role take turns in it.
        members: each teacher's number, and its adapter or None.
        settings: of its engine, with room for the adapters.
    """

    path: str
    role: str
    n_vocab: int
    members: list[tuple[int, LoRARequest | None]]
    settings: VllmSettings


class VllmTeachers(Dropping):
    """Serves `TeacherEngine` with vLLM, unions too.

    Args:
        paths: at least one; folders or hub ids of models, and folders of LoRA adapters in peft's format.
        settings: of the engines; max_model_len is of a prompt and its response. Rank and number of adapters
            are set to what the adapters need.
        vocabulary: the student's. A teacher's may be larger, by padding.
        tokens: how many of its ids are tokens; a teacher's may be as small. None: all.
        engines: how many engines the models share; None: one each. With fewer, models take turns, and the
            weights of each are loaded at most once a pass; union makes two passes.
        role: tells these engines from others in the process.
    Raises:
        FileNotFoundError, UnusableModel: a path holds no model or adapter that can be served.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        settings: VllmSettings,
        vocabulary: int,
        *,
        engines: int | None = None,
        role: str = "teachers",
        tokens: int | None = None,
    ):
        self.vocabulary, self.settings, self.n_teachers = vocabulary, settings, len(paths)
        self.bases = read_bases(paths, tokens or vocabulary, engines, role, settings)
        self.rows = min(one.n_vocab for one in self.bases)
        self._held: dict[str, str] = {}  # the path whose weights a role has
        for one in self.bases:
            warm_cache(one.path)
            if one.role not in self._held:
                self._engine(one).sleep()

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
        """As `TeacherEngine`; with a union each but the last teacher is asked again, about the others' ids.

        Raises:
            ValueError: a response with its prompt is too long for an engine.
        """
        check_kappa("score", kappa, self.shared)
        inside, outside_N = self.inside(rollouts)
        together, mine = self._together(inside)
        union = union and kappa > 0 and self.n_teachers > 1
        if not together:
            return empty_topk(0, self.n_teachers, kappa * (self.n_teachers if union else 1), "cpu")
        result = empty_topk(flat_offsets(together)[-1], self.n_teachers, kappa, "cpu")
        asked: list[int] = []
        of_others: dict[int, Tensor] = {}  # by teacher, what it thinks of the others' ids

        def visit(ask: Ask, m: int) -> None:
            given_NU = None
            if union and len(asked) == self.n_teachers - 1:  # now the others' ids are known
                given_NU, _ = others_ids(result.ids_NMS, result.logps_NMS, m)
            answers = ask(kappa, temperature, given_NU)
            if given_NU is not None:
                of_others[m] = answers[:, 2 * kappa + 1 :]
            ids_NS, logps_NS = answers[:, :kappa], answers[:, kappa : 2 * kappa]
            self.drop(int((ids_NS[mine] >= self.shared).sum()))
            ids_NS, logps_NS, _ = without_padding(ids_NS, logps_NS, self.shared)
            result.ids_NMS[:, m], result.logps_NMS[:, m] = ids_NS, logps_NS
            result.token_logps_NM[:, m] = answers[:, 2 * kappa]
            asked.append(m)

        def visit_again(ask: Ask, m: int) -> None:
            given_NU, _ = others_ids(result.ids_NMS, result.logps_NMS, m)
            of_others[m] = ask(0, temperature, given_NU, result.token_logps_NM[:, m])

        self._each(together, visit)
        if union:
            self._each(together, visit_again, asked[:-1])
            result = united(result, of_others)
        result.token_logps_NM[mine][outside_N] = -torch.inf
        return TeacherTopK(*(value[mine] for value in vars(result).values()))

    def given(
        self, rollouts: Sequence[Rollout], ids_NMU: Tensor, token_logps_NM: Tensor, temperature: float
    ) -> Tensor:
        """As `LocalTeachers.given`. Raises as `score`."""
        inside, _ = self.inside(rollouts)
        together, mine = self._together(inside)
        parts, _ = of_sharing_ranks(self.settings, (ids_NMU, token_logps_NM))
        ids_NMU, token_logps_NM = (torch.cat(each) for each in zip(*parts, strict=True))
        result = torch.empty(ids_NMU.shape)

        def visit(ask: Ask, m: int) -> None:
            result[:, m] = ask(0, temperature, ids_NMU[:, m], token_logps_NM[:, m])

        if together:
            self._each(together, visit)
        return result[mine]

    def _together(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], slice]:
        """The rollouts of all ranks that share a model, less empty ones, and which tokens are this rank's."""
        own = [rollout for rollout in rollouts if len(rollout.response_ids)]
        gathered, rank = of_sharing_ranks(self.settings, own)
        before = [rollout for part in gathered[:rank] for rollout in part]
        begin = flat_offsets(before)[-1]
        return [r for part in gathered for r in part], slice(begin, begin + flat_offsets(own)[-1])

    def _each(
        self,
        rollouts: Sequence[Rollout],
        visit: Callable[[Ask, int], None],
        members: Sequence[int] | None = None,
    ) -> None:
        """Every teacher once, or those of `members`, where an engine holds the weights before the others."""
        longest = max(len(r.prompt_ids) + len(r.response_ids) for r in rollouts)
        for base in sorted(self.bases, key=lambda base: self._held.get(base.role) != base.path):
            chosen = [one for one in base.members if members is None or one[0] in members]
            if not chosen:
                continue
            with exclusive(self.settings), self._engine(base).awake() as llm:
                llm.collective_rpc("serve_teacher", args=(base.path,))
                limit = llm.model_config.max_model_len
                if longest > limit:
                    raise ValueError(
                        f"score: a prompt and its response are {longest} tokens, expected at most {limit} "
                        f"({base.path})"
                    )
                for member, lora in chosen:
                    visit(partial(ask, llm, rollouts, lora), member)

    def _engine(self, base: Base) -> Engine:
        self._held[base.role] = base.path
        return engine(
            base.role,
            base.path,
            base.settings,
            enable_prefix_caching=False,
            runner="pooling",
            convert="embed",
            pooler_config=PoolerConfig(task=TASK),
            worker_extension_cls=WORKER,
            skip_tokenizer_init=False,  # vLLM's pooling front end asks for one
        )


def read_bases(
    paths: Sequence[str | Path], tokens: int, engines: int | None, role: str, settings: VllmSettings
) -> list[Base]:
    """The models behind the teachers, each with those that it serves, itself before its adapters."""
    groups: dict[str, tuple[str, list[tuple[int, Adapter | None]]]] = {}
    for member, path in enumerate(paths):
        adapter = read_adapter(path)
        model = str(adapter.base if adapter else path)
        groups.setdefault(same_place(model), (model, []))[1].append((member, adapter))
    bases = []
    for i, (model, members) in enumerate(groups.values()):
        stored_dtype(model)  # raises in our words where there is no model
        require_head(model)
        n_vocab, own = text_config(model).vocab_size, settings
        for member, _ in members:
            require_vocabulary(member, model, n_vocab, tokens)
        served: list[tuple[int, LoRARequest | None]] = [(m, None) for m, adapter in members if not adapter]
        served += [(m, lora_request(adapter)) for m, adapter in members if adapter]
        if ranks := [lora_rank(adapter) for _, adapter in members if adapter]:
            own = settings.model_copy(update={"max_lora_rank": max(ranks), "max_loras": len(ranks)})
        bases.append(Base(model, f"{role}/{i % (engines or len(groups))}", n_vocab, served, own))
    return bases


def lora_request(adapter: Adapter) -> LoRARequest:
    number = next(_lora_ids)
    return LoRARequest(f"{adapter.folder.name}-{number}", number, str(adapter.folder.resolve()))


def lora_rank(adapter: Adapter) -> int:
    """The least of vLLM's ranks that holds the adapter; UnusableModel: vLLM does not serve its kind."""
    try:
        helper = PEFTHelper.from_dict(adapter.config)
        wanted = max([helper.r, *helper.rank_pattern.values()])
        rank = next((rank for rank in LORA_RANKS if rank >= wanted), LORA_RANKS[-1])
        helper.validate_legal(LoRAConfig(max_lora_rank=rank))
    except (TypeError, ValueError) as error:
        raise UnusableModel(f"adapter {adapter.folder}: vLLM does not serve it ({error})") from error
    return rank
