"""A pooler inside vLLM that turns hidden states into top-kappa log-probabilities.

vLLM runs a teacher as a pooling model, whose output would be a hidden state a token. `TeacherWorker`, an
extension of vLLM's worker, puts the teacher's head there: at response positions only, chunk by chunk of a
prefill, through `linear_topk_logprobs`, so that neither hidden states nor (tokens, V) are kept. In pooling
mode vLLM loads no head: it is read from the checkpoint, or is the input embedding where the two are tied.

Shapes: T tokens of one response, N of all responses in a step, S = kappa, U given ids a token, D hidden,
V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from vllm import LLM, PoolingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.pool.metadata import PoolingMetadata

import smopd.engine.vllm.transfer  # noqa: F401  registers how weights reach an engine in its own process
from smopd.engine.local.union import given_logprobs
from smopd.engine.models.loading import UnusableModel, logit_scale
from smopd.engine.models.packing import flat_offsets
from smopd.engine.types import Rollout
from smopd.engine.weights.architecture import file_at, identity, weight_places
from smopd.kernels.ops.linear_topk import linear_topk_logprobs

TASK = "token_embed"
WORKER = "smopd.engine.vllm.pooler.TeacherWorker"
HEAD, TIED_HEAD = "lm_head", "embed_tokens"


class TeacherPooler(Pooler):
    """Answers requests of `ask` with (T, 2 S + 1) fp32: ids, log-probabilities, the token's own.

    The log-probabilities of given ids, (T, U), stand behind these, or alone where the token's own is known.
    Ids are exact in fp32: a vocabulary is far below 2^24.

    Args:
        source: tells this head from others.
        weight_VD: the head, or None: the first n_vocab rows of `embedding`, as they are at each call.
        scale: of the logits.
    """

    def __init__(
        self,
        source: object,
        embedding: VocabParallelEmbedding,
        n_vocab: int,
        weight_VD: Tensor | None = None,
        bias_V: Tensor | None = None,
        scale: float = 1.0,
    ):
        super().__init__()
        self.source, self.embedding, self.n_vocab = source, embedding, n_vocab
        self.weight_VD, self.bias_V, self.scale = weight_VD, bias_V, scale

    def get_supported_tasks(self) -> Set[str]:
        return {TASK}

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor | None]:
        cursor = pooling_metadata.get_pooling_cursor()
        counts, ends = cursor.num_scheduled_tokens_cpu.tolist(), cursor.seq_lens_cpu.tolist()
        begins = [end - count for end, count in zip(ends, counts, strict=True)]
        asked = [params.extra_kwargs for params in pooling_metadata.pooling_params]
        parts = [rows_between(*each) for each in zip(asked, begins, ends, strict=True)]
        lengths = [len(part["token_ids_N"]) for part in parts]
        hidden = [rows[len(rows) - n :] for rows, n in zip(hidden_states.split(counts), lengths, strict=True)]
        joined = {
            name: torch.cat([part[name] for part in parts]).to(hidden_states.device, non_blocking=True)
            for name in parts[0]
        }
        kappa, temperature = asked[0]["kappa"], asked[0]["temperature"]  # all are of one `ask`
        answers = self.answer(torch.cat(hidden), kappa, temperature, **joined).split(lengths)
        results: list[Tensor | None] = []
        states, finished = pooling_metadata.pooling_states, cursor.get_finished_mask()
        for state, begin, answer, done in zip(states, begins, answers, finished, strict=True):
            if begin == 0:
                state.clean()  # of what was computed before a preemption
            chunks = state.hidden_states_cache  # what vLLM keeps of a request between its chunks
            chunks.append(answer)
            results.append(torch.cat(chunks) if done else None)
            if done:
                state.clean()
        return results

    def answer(
        self,
        hidden_ND: Tensor,
        kappa: int,
        temperature: float,
        token_ids_N: Tensor,
        given_NU: Tensor | None = None,
        known_N: Tensor | None = None,
    ) -> Tensor:
        """Its arguments are those of `ask`."""
        weight_VD = self.embedding.weight[: self.n_vocab] if self.weight_VD is None else self.weight_VD
        options: dict[str, Any] = {"bias_V": self.bias_V, "temperature": temperature / self.scale}
        answer: list[Tensor] = []
        if known_N is None:
            top = linear_topk_logprobs(hidden_ND, weight_VD, kappa, token_ids_N=token_ids_N, **options)
            assert top.token_logp_N is not None  # ids were given
            known_N = top.token_logp_N
            answer = [top.ids_NS.float(), top.logps_NS, known_N[:, None]]
        if given_NU is not None:
            answer.append(given_logprobs(hidden_ND, weight_VD, given_NU, token_ids_N, known_N, **options))
        return torch.cat(answer, 1)


def rows_between(asked: Mapping[str, Any], begin: int, end: int) -> dict[str, Tensor]:
    """The rows of one request of `ask` that the positions begin..end-1 answer."""
    part = slice(max(0, begin - asked["first"]), max(0, end - asked["first"]))
    return {name: value[part] for name, value in load(asked["rows"]).items()}


class TeacherWorker:
    """What vLLM's worker can do in addition, by name through `collective_rpc`."""

    model_runner: Any

    def serve_teacher(self, path: str) -> None:
        """Puts the head of the model at `path` behind the decoder, which holds that model's weights."""
        model = self.model_runner.get_model()
        poolers, source = model.pooler.poolers_by_task, (path, identity(path))
        if getattr(poolers[TASK], "source", None) == source:
            return
        embedding = next(
            module
            for module in model.modules()
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        )
        config, like = text_config(path), embedding.weight
        weight_VD = bias_V = None
        if not config.tie_word_embeddings:
            weight_VD, bias_V = read(path, f"{HEAD}.weight", like), read(path, f"{HEAD}.bias", like)
        elif embedding.tp_size > 1:  # this rank has a part of it
            weight_VD = read(path, f"{TIED_HEAD}.weight", like)
        scale = logit_scale(config)
        poolers[TASK] = TeacherPooler(source, embedding, config.vocab_size, weight_VD, bias_V, scale)


def ask(
    llm: LLM,
    rollouts: Sequence[Rollout],
    lora: LoRARequest | None,
    kappa: int,
    temperature: float,
    given_NU: Tensor | None = None,
    known_N: Tensor | None = None,
) -> Tensor:
    """What the teacher says of the responses' tokens, in flat order, as `TeacherPooler` answers.

    A response's last token is never read, and the position before its first one predicts that.

    Args:
        given_NU: int32 ids to score beside the kappa largest, or instead where `known_N` is given.
        known_N: the tokens' own log-probabilities.
    """
    params = []
    for r, (begin, end) in zip(rollouts, itertools.pairwise(flat_offsets(rollouts)), strict=True):
        rows = {"token_ids_N": r.response_ids.int()}
        if given_NU is not None:
            rows["given_NU"] = given_NU[begin:end].contiguous()
        if known_N is not None:
            rows["known_N"] = known_N[begin:end].contiguous()
        numbers = {"first": len(r.prompt_ids) - 1, "kappa": kappa, "temperature": temperature}
        # Bytes reach an engine in another process as they are.
        params.append(PoolingParams(task=TASK, extra_kwargs=numbers | {"rows": save(rows)}))
    answers = llm.encode(
        [TokensPrompt(prompt_token_ids=[*r.prompt_ids, *r.response_ids[:-1].tolist()]) for r in rollouts],
        params,
        pooling_task=TASK,
        lora_request=lora,
        use_tqdm=False,
    )
    return torch.cat([answer.outputs.data for answer in answers])


def require_head(path: str) -> None:
    """Raises UnusableModel: the pooler cannot apply the head of the model at `path`."""
    config = text_config(path)
    try:
        logit_scale(config)
    except ValueError as error:
        raise UnusableModel(f"model {path}: {error}") from error
    if not config.tie_word_embeddings and _find(path, f"{HEAD}.weight") is None:
        raise UnusableModel(f"model {path}: has no {HEAD}.weight in safetensors, which its head is read from")


def text_config(path: str) -> PretrainedConfig:
    """The config of the language model at `path`, which may be part of a larger one."""
    return AutoConfig.from_pretrained(path).get_text_config()


def read(path: str, name: str, like: Tensor) -> Tensor | None:
    """The checkpoint's weight whose name ends in `name`, where there is one; dtype and device of `like`."""
    place = _find(path, name)
    if place is None:
        return None
    with safe_open(place[0], "pt") as file:
        return file.get_tensor(place[1]).to(like)


def _find(path: str, name: str) -> tuple[str, str] | None:
    """The file and the full name of the weight whose name ends in `name`."""
    for full, shard in weight_places(path).items():
        if full == name or full.endswith(f".{name}"):
            file = file_at(path, shard)
            return None if file is None else (file, full)
    return None
