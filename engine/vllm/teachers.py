"""Teachers in vLLM. They compute top-kappa log-probabilities at each response token (pooler.py).

LoRA teachers of one base share an engine. The base and each adapter are scored separately, because vLLM on
a CPU computes wrong values for mixed batches. Prefix caching is off, as cached positions have no output.

Shapes: N response tokens in flat order, M teachers, S = kappa.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from vllm.config import PoolerConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from smopd.engine.local.teachers import Dropping, empty_topk, require_vocabulary
from smopd.engine.models.loading import UnusableModel, stored_dtype
from smopd.engine.models.packing import flat_offsets
from smopd.engine.settings import Vllm
from smopd.engine.types import Rollout, TeacherTopK
from smopd.engine.vllm.engines import Engine, engine, exclusive, of_sharing_ranks, warm_cache
from smopd.engine.vllm.pooler import TASK, WORKER, ask, require_head, text_config
from smopd.engine.weights.adapters import Adapter, read_adapter, same_place
from smopd.kernels.checks import check_kappa

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM
_lora_ids = itertools.count(1)  # vLLM identifies adapters by number


@dataclass(frozen=True)
class Base:
    """A model in vLLM. It is a teacher itself, the base of teachers that are its adapters, or both.

    role: its engine's role. Bases of one role take turns. members: each teacher's index, and adapter or None.
    """

    path: str
    role: str
    n_vocab: int
    members: list[tuple[int, LoRARequest | None]]
    settings: Vllm


class VllmTeachers(Dropping):
    """`TeacherEngine` with vLLM.

    Args:
        paths: folders or hub ids of models, and folders of LoRA adapters in peft's format.
        settings: max_model_len must cover a prompt with its response.
        vocabulary: the student's vocabulary size. A teacher's size may differ because of padding.
        tokens: size of the student's tokenizer, the minimum for a teacher's vocabulary. None: `vocabulary`.
        engines: number of engines, or None for one per model. With fewer, models use the same engine in turn,
            and each model is loaded at most once per call.
        role: distinguishes these engines from others in the process.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        settings: Vllm,
        vocabulary: int,
        *,
        engines: int | None = None,
        role: str = "teachers",
        tokens: int | None = None,
    ):
        self.vocabulary, self.settings, self.n_teachers = vocabulary, settings, len(paths)
        self.bases = read_bases(paths, tokens or vocabulary, engines, role, settings)
        self.rows = min(one.n_vocab for one in self.bases)
        self._held: dict[str, str] = {}  # role -> path of the weights in its engine
        for one in self.bases:
            warm_cache(one.path)
            if one.role not in self._held:
                self._engine(one).sleep()

    def overlaps(self, device: torch.device) -> bool:
        return self.settings.placement == "process"

    def base(self, path: str | Path) -> VllmTeachers | None:
        """Return an engine for only the model at `path` if it is a teacher or a teacher's base, else None."""
        for one in self.bases:
            if same_place(one.path) == same_place(path):
                alone = copy.copy(self)
                alone.bases, alone.n_teachers, alone.dropped = [replace(one, members=[(0, None)])], 1, 0
                return alone
        return None

    def score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TeacherTopK:
        check_kappa("score", kappa, self.shared)
        inside, outside_N = self.inside(rollouts)
        together, mine = self._together(inside)
        if not together:
            return empty_topk(0, self.n_teachers, kappa, "cpu")
        result = empty_topk(flat_offsets(together)[-1], self.n_teachers, kappa, "cpu")
        longest = max(len(r.prompt_ids) + len(r.response_ids) for r in together)
        for base in sorted(self.bases, key=lambda base: self._held.get(base.role) != base.path):
            with exclusive(self.settings), self._engine(base).awake() as llm:
                llm.collective_rpc("serve_teacher", args=(base.path,))
                limit = llm.model_config.max_model_len
                if longest > limit:
                    text = f"a prompt and its response are {longest} tokens, expected at most {limit}"
                    raise ValueError(f"score: {text} ({base.path})")
                for m, lora in base.members:
                    answers = ask(llm, together, lora, kappa, temperature)
                    result.ids_NMS[:, m], result.logps_NMS[:, m] = answers[:, :-1].tensor_split(2, 1)
                    result.token_logps_NM[:, m] = answers[:, -1]
        own = TeacherTopK(*(value[mine] for value in vars(result).values()))
        own.token_logps_NM[outside_N] = -torch.inf
        return self.without_padding(own)

    def _together(self, rollouts: Sequence[Rollout]) -> tuple[list[Rollout], slice]:
        """Return the non-empty rollouts of ranks that share a model, and this rank's slice of the tokens."""
        own = [rollout for rollout in rollouts if rollout.n_tokens]
        gathered, rank = of_sharing_ranks(self.settings, own)
        before = [rollout for part in gathered[:rank] for rollout in part]
        begin = flat_offsets(before)[-1]
        return [r for part in gathered for r in part], slice(begin, begin + flat_offsets(own)[-1])

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
            skip_tokenizer_init=False,  # vLLM's pooling front end needs a tokenizer
        )


def read_bases(
    paths: Sequence[str | Path], tokens: int, engines: int | None, role: str, settings: Vllm
) -> list[Base]:
    """Group the teachers by base model. A model that is a teacher itself precedes its adapters."""
    groups: dict[str, tuple[str, list[tuple[int, Adapter | None]]]] = {}
    for member, path in enumerate(paths):
        adapter = read_adapter(path)
        model = str(adapter.base if adapter else path)
        groups.setdefault(same_place(model), (model, []))[1].append((member, adapter))
    bases = []
    for i, (model, members) in enumerate(groups.values()):
        stored_dtype(model)  # raises if there is no model
        require_head(model)
        n_vocab, own = text_config(model).vocab_size, settings
        for member, _ in members:
            require_vocabulary(member, model, n_vocab, tokens)
        served: list[tuple[int, LoRARequest | None]] = [(m, None) for m, adapter in members if not adapter]
        served += [(m, lora_request(adapter)) for m, adapter in members if adapter]
        if ranks := [lora_rank(adapter) for _, adapter in members if adapter]:
            lora = {"enable_lora": True, "max_lora_rank": max(ranks), "max_loras": len(ranks)}
            own = settings.model_copy(update={"engine_kwargs": settings.engine_kwargs | lora})
        bases.append(Base(model, f"{role}/{i % (engines or len(groups))}", n_vocab, served, own))
    return bases


def lora_request(adapter: Adapter) -> LoRARequest:
    number = next(_lora_ids)
    return LoRARequest(f"{adapter.folder.name}-{number}", number, str(adapter.folder.resolve()))


def lora_rank(adapter: Adapter) -> int:
    """Return the smallest of LORA_RANKS that fits. Raise UnusableModel if vLLM cannot serve the adapter."""
    try:
        helper = PEFTHelper.from_dict(adapter.config)
        needed = max([helper.r, *helper.rank_pattern.values()])
        rank = next((rank for rank in LORA_RANKS if rank >= needed), LORA_RANKS[-1])
        helper.validate_legal(LoRAConfig(max_lora_rank=rank))
    except (TypeError, ValueError) as error:
        raise UnusableModel(f"adapter {adapter.folder}: vLLM does not serve it ({error})") from error
    return rank
