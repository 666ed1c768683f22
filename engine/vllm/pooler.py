"""A pooler inside vLLM that turns hidden states into top-kappa log-probabilities.

vLLM runs a teacher as a pooling model, whose output would be a hidden state a token. `TeacherWorker`, an
extension of vLLM's worker, puts the teacher's head there: at response positions only, chunk by chunk of a
prefill, through `linear_topk_logprobs`, so that neither hidden states nor (tokens, V) are kept. In pooling
mode vLLM loads no head: it is read from the checkpoint, or is the input embedding where the two are tied.

Shapes: T tokens of one response, N of all responses in a step, S = kappa, U given ids a token, D hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
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
from smopd.engine.models.loading import logit_scale
from smopd.engine.types import Rollout
from smopd.engine.weights.architecture import file_at, weight_places
from smopd.kernels.ops.linear_topk import linear_topk_logprobs

TASK = "token_embed"
HEAD, TIED_HEAD = "lm_head", "embed_tokens"
EXACT_IDS = 1 << 24  # ids below are exact in fp32
HeadIdentity = tuple[object, ...]  # which head it is, to be compared
Kind = tuple[int, float, int | None, bool]  # of a question


@dataclass(frozen=True)
class Question:
    """What is asked of one response.

    first: the position whose hidden state predicts the response's first token.
    given_TU: ids to score beside the kappa largest, or instead where the tokens' own values are known.
    """

    first: int
    token_ids_T: Tensor
    kappa: int
    temperature: float
    given_TU: Tensor | None = None
    token_logps_T: Tensor | None = None

    def packed(self) -> dict[str, Any]:
        """Numbers and bytes, which reach an engine in another process as they are."""
        numbers = {"first": self.first, "kappa": self.kappa, "temperature": self.temperature}
        tensors = {
            name: value.numpy().astype(dtype).tobytes()
            for name, dtype in _DTYPES.items()
            if (value := getattr(self, name)) is not None
        }
        return numbers | tensors

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> Question:
        numbers = {name: value for name, value in packed.items() if name not in _DTYPES}
        tensors: dict[str, Any] = {
            name: torch.from_numpy(np.frombuffer(packed[name], dtype).copy())
            for name, dtype in _DTYPES.items()
            if name in packed
        }
        if "given_TU" in tensors:
            tensors["given_TU"] = tensors["given_TU"].view(len(tensors["token_ids_T"]), -1)
        return Question(**numbers, **tensors)

    def between(self, begin: int, end: int) -> Question:
        """The part that the positions begin..end-1 answer."""
        rows = slice(max(0, begin - self.first), max(0, end - self.first))
        parts: dict[str, Any] = {
            name: None if (v := getattr(self, name)) is None else v[rows] for name in _DTYPES
        }
        return replace(self, **parts)

    @property
    def kind(self) -> Kind:
        """Questions of one kind can be answered together."""
        n_given = None if self.given_TU is None else self.given_TU.shape[1]
        return self.kappa, self.temperature, n_given, self.token_logps_T is not None


_DTYPES = {"token_ids_T": np.int32, "given_TU": np.int32, "token_logps_T": np.float32}


class TeacherPooler(Pooler):
    """Answers each request's `Question` with (T, 2 S + 1) fp32: ids, log-probabilities, the token's own.

    The log-probabilities of given ids, (T, U), stand behind these, or alone where the token's own is known.

    Args:
        source: tells this head from others.
        weight_VD: the head, or None: the first n_vocab rows of `embedding`, as they are at each call.
    """

    def __init__(
        self,
        source: HeadIdentity,
        embedding: VocabParallelEmbedding,
        n_vocab: int,
        weight_VD: Tensor | None,
        bias_V: Tensor | None,
    ):
        super().__init__()
        self.source, self.embedding, self.n_vocab = source, embedding, n_vocab
        self.weight_VD, self.bias_V = weight_VD, bias_V

    def get_supported_tasks(self) -> Set[str]:
        return {TASK}

    @torch.no_grad()
    def forward(self, hidden_states: Tensor, pooling_metadata: PoolingMetadata) -> list[Tensor | None]:
        cursor = pooling_metadata.get_pooling_cursor()
        counts, ends = cursor.num_scheduled_tokens_cpu.tolist(), cursor.seq_lens_cpu.tolist()
        begins = [end - count for end, count in zip(ends, counts, strict=True)]
        whole = [Question.unpacked(params.extra_kwargs) for params in pooling_metadata.pooling_params]
        parts = [asked.between(*span) for asked, *span in zip(whole, begins, ends, strict=True)]
        hidden = [
            rows[len(rows) - len(part.token_ids_T) :]
            for rows, part in zip(hidden_states.split(counts), parts, strict=True)
        ]
        answers = self._answers(hidden, parts)
        results: list[Tensor | None] = []
        for i, (state, done) in enumerate(
            zip(pooling_metadata.pooling_states, cursor.get_finished_mask(), strict=True)
        ):
            if begins[i] == 0:
                state.clean()  # of what was computed before a preemption
            chunks = state.hidden_states_cache  # what vLLM keeps of a request between its chunks
            chunks.append(answers[i])
            results.append(torch.cat(chunks) if done else None)
            if done:
                state.clean()
        return results

    def _answers(self, hidden: Sequence[Tensor], questions: Sequence[Question]) -> list[Tensor]:
        """One a question, in order; those of one kind go through the head together."""
        kinds: dict[Kind, list[int]] = {}
        for i, question in enumerate(questions):
            kinds.setdefault(question.kind, []).append(i)
        answers = [hidden[0]] * len(questions)
        for members in kinds.values():
            answer = self._answer(torch.cat([hidden[i] for i in members]), [questions[i] for i in members])
            for i, rows in zip(members, answer.split([len(hidden[i]) for i in members]), strict=True):
                answers[i] = rows
        return answers

    def _answer(self, hidden_ND: Tensor, questions: Sequence[Question]) -> Tensor:
        def joined(name: str) -> Tensor:
            values = torch.cat([getattr(question, name) for question in questions])
            return values.to(hidden_ND.device, non_blocking=True)

        weight_VD = self.embedding.weight[: self.n_vocab] if self.weight_VD is None else self.weight_VD
        options: dict[str, Any] = {"bias_V": self.bias_V, "temperature": questions[0].temperature}
        token_ids_N, given = joined("token_ids_T"), questions[0].given_TU is not None
        if given and questions[0].token_logps_T is not None:
            known = (token_ids_N, joined("token_logps_T"))
            return given_logprobs(hidden_ND, weight_VD, joined("given_TU"), *known, **options)
        top = linear_topk_logprobs(
            hidden_ND, weight_VD, questions[0].kappa, token_ids_N=token_ids_N, **options
        )
        assert top.token_logp_N is not None  # ids were given
        answer = [top.ids_NS.float(), top.logps_NS, top.token_logp_N[:, None]]
        if given:
            known = (token_ids_N, top.token_logp_N)
            answer.append(given_logprobs(hidden_ND, weight_VD, joined("given_TU"), *known, **options))
        return torch.cat(answer, 1)


class TeacherWorker:
    """What vLLM's worker can do in addition, by name through `collective_rpc`."""

    model_runner: Any

    def serve_teacher(self, path: str) -> None:
        """Puts the head of the model at `path` behind the decoder, which holds that model's weights."""
        model = self.model_runner.get_model()
        embedding = next(
            module
            for module in model.modules()
            if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
        )
        config = text_config(path)
        name = None
        if not config.tie_word_embeddings:
            name = HEAD
        elif embedding.tp_size > 1:  # this rank has a part of it
            name = TIED_HEAD
        source = (path, config.vocab_size, head_identity(path, name) if name else None)
        poolers = model.pooler.poolers_by_task
        if getattr(poolers[TASK], "source", None) == source:
            return
        weight_VD = bias_V = None
        if name is not None:
            weight_VD, bias_V = read_head(path, name, embedding.weight.dtype, embedding.weight.device)
        poolers[TASK] = TeacherPooler(source, embedding, config.vocab_size, weight_VD, bias_V)


def ask(
    llm: LLM, rollouts: Sequence[Rollout], questions: Sequence[Question], lora: LoRARequest | None
) -> Tensor:
    """The pooler's answers, joined in flat order. A response's last token is predicted and never read."""
    answers = llm.encode(
        [TokensPrompt(prompt_token_ids=[*r.prompt_ids, *r.response_ids[:-1].tolist()]) for r in rollouts],
        [PoolingParams(task=TASK, extra_kwargs=question.packed()) for question in questions],
        pooling_task=TASK,
        lora_request=lora,
        use_tqdm=False,
    )
    return torch.cat([answer.outputs.data for answer in answers])


def unsupported_head(path: str) -> str | None:
    """Why the pooler cannot apply the head of the model at `path`, or None where it can."""
    config = text_config(path)
    try:
        if (scale := logit_scale(config)) != 1:
            return f"its logits are scaled by {scale:g}"
    except ValueError as error:
        return str(error)
    if config.vocab_size > EXACT_IDS:
        return f"its vocabulary of {config.vocab_size} is over {EXACT_IDS}"
    if not config.tie_word_embeddings and not _find(path, f"{HEAD}.weight"):
        return f"its checkpoint has no {HEAD}.weight in safetensors"
    return None


def text_config(path: str) -> PretrainedConfig:
    """The config of the language model at `path`, which may be part of a larger one."""
    return AutoConfig.from_pretrained(path).get_text_config()


def read_head(
    path: str, name: str, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """The weight (V, D) and, where there is one, the bias (V,) that the checkpoint has under `name`."""
    found: list[Tensor | None] = []
    for kind in ("weight", "bias"):
        place = _find(path, f"{name}.{kind}")
        if place is None:
            found.append(None)
            continue
        with safe_open(place[0], "pt") as file:
            found.append(file.get_tensor(place[1]).to(device, dtype))
    weight_VD, bias_V = found
    if weight_VD is None:
        raise ValueError(f"model {path}: its checkpoint has no {name}.weight in safetensors")
    return weight_VD, bias_V


def head_identity(path: str, name: str) -> HeadIdentity:
    """Where the head is and when that was written: another value for another head."""
    place = _find(path, f"{name}.weight")
    if place is None:
        return (None,)
    status = Path(place[0]).stat()
    return (*place, status.st_mtime_ns, status.st_size)


def _find(path: str, name: str) -> tuple[str, str] | None:
    """The file and the full name of the weight whose name ends in `name`."""
    for full, shard in weight_places(path).items():
        if full == name or full.endswith(f".{name}"):
            file = file_at(path, shard)
            return None if file is None else (file, full)
    return None
