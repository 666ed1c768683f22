"""A pooler inside vLLM that turns hidden states into top-kappa log-probabilities.

vLLM runs a teacher as a pooling model, which returns hidden states. `TeacherWorker`, an extension of vLLM's
worker, installs `TeacherPooler`. The pooler applies the teacher's head to response positions, one prefill
chunk at a time, and keeps neither hidden states nor (tokens, V) logits. In pooling mode vLLM loads no head.
The head is therefore read from the checkpoint or, if tied, is the input embedding.

Shapes: T tokens of one response, N of all responses in a step, S = kappa, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from vllm import LLM, PoolingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.pooler.abstract import Pooler
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.v1.pool.metadata import PoolingMetadata

import smopd.engine.vllm.transfer  # noqa: F401  registers the weight transfer to engines in their own process
from smopd.engine.models.loading import UnusableModel, custom_code, logit_scale
from smopd.engine.types import Rollout
from smopd.engine.weights.architecture import identity, tensor, weight_files
from smopd.kernels.ops.topk import linear_topk_logprobs

TASK = "token_embed"
WORKER = "smopd.engine.vllm.pooler.TeacherWorker"
HEAD, TIED_HEAD = "lm_head", "embed_tokens"


class TeacherPooler(Pooler):
    """Pooler that answers `ask` with (T, 2 S + 1) fp32: top ids, their logps, and the response token's logp.

    fp32 represents ids below 2^24 exactly.

    Args:
        source: identifies the head.
        weight_VD: the head. None means the first n_vocab rows of `embedding`, read at each call.
        scale: multiplies the logits.
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
        requests = [params.extra_kwargs for params in pooling_metadata.pooling_params]
        hidden, token_ids = [], []
        for request, chunk, begin, end in zip(
            requests, hidden_states.split(counts), begins, ends, strict=True
        ):
            rows = load(request["rows"])
            place_N = rows["predictor_N"] - begin
            inside_N = (place_N >= 0) & (place_N < end - begin)
            hidden.append(chunk[place_N[inside_N].to(chunk.device)])
            token_ids.append(rows["token_ids_N"][inside_N])
        token_ids_N = torch.cat(token_ids).to(hidden_states.device, non_blocking=True)
        kappa, temperature = requests[0]["kappa"], requests[0]["temperature"]  # equal for all requests
        joined = self.answer(torch.cat(hidden), kappa, temperature, token_ids_N)
        answers = joined.split([len(each) for each in token_ids])
        results: list[Tensor | None] = []
        states, finished = pooling_metadata.pooling_states, cursor.get_finished_mask()
        for state, begin, answer, done in zip(states, begins, answers, finished, strict=True):
            if begin == 0:
                state.clean()  # drops results from before a preemption
            chunks = state.hidden_states_cache  # kept by vLLM between the chunks of a request
            chunks.append(answer)
            results.append(torch.cat(chunks) if done else None)
            if done:
                state.clean()
        return results

    def answer(self, hidden_ND: Tensor, kappa: int, temperature: float, token_ids_N: Tensor) -> Tensor:
        weight_VD = self.embedding.weight[: self.n_vocab] if self.weight_VD is None else self.weight_VD
        options: dict[str, Any] = {"bias_V": self.bias_V, "temperature": temperature / self.scale}
        top = linear_topk_logprobs(hidden_ND, weight_VD, kappa, token_ids_N=token_ids_N, **options)
        assert top.token_logp_N is not None  # ids were given
        return torch.cat([top.ids_NS.float(), top.logps_NS, top.token_logp_N[:, None]], 1)


class TeacherWorker:
    """Extension of vLLM's worker, called through `collective_rpc`."""

    model_runner: Any

    def serve_teacher(self, path: str) -> None:
        """Serve the head of the model at `path`. The decoder must already have that model's weights."""
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
        elif embedding.tp_size > 1:  # the embedding is sharded
            weight_VD = read(path, f"{TIED_HEAD}.weight", like)
        scale = logit_scale(config)
        poolers[TASK] = TeacherPooler(source, embedding, config.vocab_size, weight_VD, bias_V, scale)


def ask(
    llm: LLM, rollouts: Sequence[Rollout], lora: LoRARequest | None, kappa: int, temperature: float
) -> Tensor:
    """Return `TeacherPooler`'s answers for the responses' tokens, in flat order."""
    params = []
    for r in rollouts:
        predictor_T = torch.arange(len(r.response_ids)) + len(r.prompt_ids) - 1
        rows = {"token_ids_N": r.of_policy(r.response_ids).int(), "predictor_N": r.of_policy(predictor_T)}
        numbers = {"kappa": kappa, "temperature": temperature}
        # `rows` is sent as bytes, which reach an engine in another process unchanged.
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
    """Raise UnusableModel if the pooler cannot apply the head of the model at `path`."""
    config = text_config(path)
    try:
        logit_scale(config)
    except ValueError as error:
        raise UnusableModel(f"model {path}: {error}") from error
    if not config.tie_word_embeddings and _find(path, f"{HEAD}.weight") is None:
        raise UnusableModel(f"model {path}: has no {HEAD}.weight in safetensors, which its head is read from")


def text_config(path: str) -> PretrainedConfig:
    """Return the config of the language model at `path`, which may be part of a larger model."""
    return AutoConfig.from_pretrained(path, **custom_code()).get_text_config()


def read(path: str, name: str, like: Tensor) -> Tensor | None:
    """Return the weight whose name ends in `name`, in `like`'s dtype and on its device, or None."""
    found = _find(path, name)
    return None if found is None else tensor(*found).to(like)


def _find(path: str, name: str) -> tuple[str, str] | None:
    """Return the file and full name of the weight whose name ends in `name`, or None."""
    found = ((file, full) for full, file in weight_files(path).items() if f".{full}".endswith(f".{name}"))
    return next(found, None)
