"""The models behind teachers in vLLM: their engines and adapters, and what the engines are made with."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config import PoolerConfig
from vllm.config.lora import LoRAConfig
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from smopd.engine.local.teachers import require_vocabulary
from smopd.engine.models.loading import UnusableModel, stored_dtype
from smopd.engine.settings import VllmSettings
from smopd.engine.vllm.engines import LORA_RANKS
from smopd.engine.vllm.pooler import TASK, text_config, unsupported_head
from smopd.engine.weights.adapters import Adapter, read_adapter, same_place

LOGITS_BYTES = 512 << 20  # ours: about what vLLM's prompt_logprobs hold at a time, tokens times V in fp32
MIN_BATCH_TOKENS, MAX_SEQUENCES = 64, 256  # ours

_log = logging.getLogger("smopd")
_lora_ids = itertools.count(1)  # vLLM keeps adapters by number; none is used twice


@dataclass(frozen=True)
class Base:
    """A model in vLLM and the teachers that it serves: itself, adapters of it, or both.

    Attributes:
        role: names its engine; bases of one role take turns in it.
        members: each teacher's number, and its adapter or None.
        rank: the largest of its adapters', 0 without any.
        adapters: how many it has.
    """

    path: str
    role: str
    n_vocab: int
    members: list[tuple[int, LoRARequest | None]]
    rank: int
    adapters: int

    def settings(self, wanted: VllmSettings) -> VllmSettings:
        """`wanted` with room for the adapters."""
        if not self.adapters:
            return wanted
        rank, adapters = max(self.rank, wanted.max_lora_rank), max(self.adapters, wanted.max_loras)
        return wanted.model_copy(update={"max_lora_rank": rank, "max_loras": adapters})


def read_bases(
    paths: Sequence[str | Path], tokens: int, base: str | Path | None, engines: int | None, role: str
) -> list[Base]:
    """The models behind the teachers, each with those that it serves, itself before its adapters."""
    groups: dict[str, tuple[str, list[tuple[int, Adapter | None]]]] = {}
    for member, path in enumerate(paths):
        adapter = read_adapter(path, base)
        model = str(adapter.base if adapter else path)
        groups.setdefault(same_place(model), (model, []))[1].append((member, adapter))
    bases = []
    for i, (model, members) in enumerate(groups.values()):
        stored_dtype(model)  # raises in our words where there is no model
        n_vocab = text_config(model).vocab_size
        for member, _ in members:
            require_vocabulary(member, model, n_vocab, tokens)
        served = [(member, lora_request(adapter)) for member, adapter in members]
        served.sort(key=lambda pair: pair[1] is not None)
        ranks = [lora_rank(adapter) for _, adapter in members if adapter]
        slot = i % (engines or len(groups))
        rank = max(ranks, default=0)
        bases.append(Base(model, f"{role}/{slot}", n_vocab, served, rank, len(ranks)))
    return bases


def lora_request(adapter: Adapter | None) -> LoRARequest | None:
    if adapter is None:
        return None
    number = next(_lora_ids)
    return LoRARequest(f"{adapter.folder.name}-{number}", number, str(adapter.folder.resolve()))


def lora_rank(adapter: Adapter) -> int:
    """The least of vLLM's ranks that holds the adapter.

    Raises:
        UnusableModel: vLLM does not serve its kind of LoRA.
    """
    try:
        helper = PEFTHelper.from_dict(adapter.config)
        wanted = max([helper.r, *helper.rank_pattern.values()])
        rank = next((rank for rank in LORA_RANKS if rank >= wanted), LORA_RANKS[-1])
        helper.validate_legal(LoRAConfig(max_lora_rank=rank))
    except (TypeError, ValueError) as error:
        raise UnusableModel(f"adapter {adapter.folder}: vLLM does not serve it ({error})") from error
    return rank


def choose_route(route: str, bases: Sequence[Base]) -> str:
    """The route that serves, said once in the log.

    Raises:
        UnusableModel: `route` is the pooler, and it cannot apply a teacher's head.
    """
    reasons = [f"{base.path}: {reason}" for base in bases if (reason := unsupported_head(base.path))]
    if route == "pooler" and reasons:
        raise UnusableModel(f"teachers.route: pooler cannot serve {reasons[0]}; expected prompt_logprobs")
    if route != "auto":
        chosen, why = route, "as set"
    elif reasons:
        chosen, why = "prompt_logprobs", f"the pooler cannot serve {reasons[0]}"
    else:
        chosen, why = "pooler", "it can apply every teacher's head"
    _log.info("teachers in vLLM are served by the route %s (%s)", chosen, why)
    return chosen


def room_to_draw(length: int, bases: Sequence[Base]) -> int:
    """Positions for sequences of `length` where vLLM draws a token behind each: on the route prompt_logprobs.

    Raises:
        UnusableModel: a model has no such position.
    """
    for base in bases:
        limit = getattr(text_config(base.path), "max_position_embeddings", None)
        if limit is not None and length >= limit:
            raise UnusableModel(
                f"{base.path}: the route prompt_logprobs draws a token behind prompts and responses of "
                f"{length}, expected fewer than its {limit} positions (teachers.vllm.max_model_len)"
            )
    return length + 1


def engine_options(pooled: bool, bases: Sequence[Base], batch_tokens: int | None) -> dict[str, Any]:
    """What the engines are made with, beside the settings."""
    options: dict[str, Any] = {"enable_prefix_caching": False}
    if pooled:
        options |= {
            "runner": "pooling",
            "convert": "embed",
            "pooler_config": PoolerConfig(task=TASK),
            "worker_extension_cls": "smopd.engine.vllm.pooler.TeacherWorker",
            "skip_tokenizer_init": False,  # vLLM's pooling front end asks for one
        }
    else:
        options["max_logprobs"] = -1
        if batch_tokens is None:
            widest = max(base.n_vocab for base in bases)
            batch_tokens = max(MIN_BATCH_TOKENS, LOGITS_BYTES // (4 * widest))
            batch_tokens = min(batch_tokens, 8192)
    if batch_tokens is not None:
        options["max_num_batched_tokens"] = batch_tokens
        options["max_num_seqs"] = min(MAX_SEQUENCES, batch_tokens)
        options["enable_chunked_prefill"] = True
    return options
