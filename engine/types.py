"""What crosses the rooms between sampling, scoring and training: frozen, torch only.

Shapes: N response tokens of a batch in flat order (responses one after another), M teachers, S = kappa
support entries, L positions of a packed row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Draws depend only on (seed, prompt key, sample, position)."""

    n: int = 1
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    max_new_tokens: int = 1024
    seed: int = 0


@dataclass(frozen=True)
class Rollout:
    """One response to one prompt."""

    prompt_ids: tuple[int, ...]
    response_ids: Tensor
    """(T,) int64 on the CPU, the end-of-sequence token included where it was reached."""
    logps: Tensor
    """(T,) fp32, nats, under the distribution that the tokens were drawn from."""
    group: int
    """Which prompt of the global batch this answers; equal prompts keep different groups."""
    finished: bool
    """Ended by an end-of-sequence token rather than by the limit."""
    policy_version: int = 0


@dataclass(frozen=True)
class TeacherTopK:
    """The teachers' largest log-probabilities at each response token, and the sampled token's own."""

    ids_NMS: Tensor
    logps_NMS: Tensor
    token_logps_NM: Tensor


@dataclass(frozen=True)
class TokenBatch:
    """A packed micro-batch: rows of several sequences, told apart by an attention mask.

    A prompt may stand once for several responses: a position sees the prompt of its unit and its own
    response.
    """

    input_ids: Tensor
    """(rows, L) int64."""
    position_ids: Tensor
    """(rows, L) int64, from 0 in each prompt."""
    unit_ids: Tensor
    """(rows, L) int64, the prompt a position belongs to; -1 is padding."""
    sample_ids: Tensor
    """(rows, L) int64, the response a position belongs to; -1 is the prompt's own."""
    predictor_N: Tensor
    """(N,) int64, the flat position in (rows * L) whose hidden state predicts each response token."""
    token_ids_N: Tensor
    """(N,) int64, the response tokens."""
    flat_N: Tensor
    """(N,) int64, where each token stands in the flat order of the whole batch."""
    unit_starts: Tensor
    """(units + 1,) int32, the flat positions where units and stretches of padding begin, and rows * L."""
    longest_unit: int
    """Most positions between two of them."""

    def attention_mask(self) -> Tensor:
        """(rows, 1, L, L) bool, True where a position may look. Padding sees itself, so no row is empty."""
        length = self.input_ids.shape[1]
        same_unit = self.unit_ids[:, :, None] == self.unit_ids[:, None, :]
        visible = (self.sample_ids[:, None, :] < 0) | (
            self.sample_ids[:, :, None] == self.sample_ids[:, None, :]
        )
        causal = torch.ones(length, length, dtype=torch.bool, device=self.input_ids.device).tril()
        return (same_unit & visible & causal)[:, None]

    def to(self, device: torch.device) -> TokenBatch:
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


@dataclass(frozen=True)
class Packing:
    """How sequences are laid out for a forward pass; changes speed and memory, never a result."""

    micro_batch_tokens: int = 16_384
    row_tokens: int = 0
    share_prompts: bool = True


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters beside frozen linear layers: y = W x + (alpha / rank) B A x."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("all-linear",)
    """Names of linear layers inside the decoder's layers; "all-linear" is every one of them."""
    dropout: float = 0.0
    """Of the adapters' input, in updates alone: log-probabilities are computed without it."""


@dataclass(frozen=True)
class TrainSettings:
    """What the trained model's optimiser and layout need; smopd.config.settings.Student says each field."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    adam_eps: float = 1e-8
    warmup_steps: int = 0
    decay: tuple[int, int] | None = None
    """The updates between which the learning rate falls linearly to zero; None keeps it constant."""
    max_grad_norm: float = 1.0
    compute_dtype: str = "bfloat16"
    packing: Packing = Packing()
    head_chunk_bytes: int | None = None
    gradient_checkpointing: bool = False
    max_skipped_updates: int = 3
    strategy: str = "fsdp2"
    """"fsdp2" or "deepspeed"."""
    shard_size: int | None = None
    """FSDP2: ranks that hold one copy of the model between them (HSDP); None is all of them."""
    zero_stage: int = 2
    """DeepSpeed: 2 shards gradients and optimiser state, 3 parameters as well."""
    deepspeed_config: str | dict[str, Any] | None = None
    """DeepSpeed's JSON or the path of it; "auto" takes its value from these settings. None: all are auto."""
    offload_optimizer: bool = False
    """Keep masters and optimiser state in host memory and step there. On a CPU they are there anyway."""
    compile: bool = False
    """torch.compile each decoder layer."""
    attention: str = "auto"
    """"sdpa": a mask over packed rows; "flash": variable-length kernels; "auto": flash where it can run."""
    lora: Lora | None = None
    """Train adapters alone."""


@dataclass(frozen=True)
class VllmSettings:
    """Where a vLLM engine runs and what it may take."""

    placement: Literal["colocated", "process"] = "colocated"
    """Inside this Python process, or in a process of its own."""
    transfer: Literal["files", "ipc"] = "files"
    """How new weights reach a process of its own: files in shared memory, or CUDA's handles of this process's
    memory, where both are on one GPU."""
    tensor_parallel_size: int = 1
    """Over 1 and colocated: consecutive ranks of torchrun share one model."""
    dtype: str = "float32"
    max_model_len: int | None = None
    """Most positions of a prompt and its response; None is the model's own limit."""
    gpu_memory_share: float | None = None
    """Of the device's whole memory. None: see smopd.engine.vllm.memory."""
    kv_cache_bytes: int | None = None
    """None: on a GPU by smopd.engine.vllm.memory, on a CPU smopd.engine.vllm.engines.CPU_KV_CACHE_BYTES."""
    enforce_eager: bool = False
    """Nothing is compiled or captured, which on a CPU nothing ever is."""
    sleep: bool = True
    """Weights and cache leave the GPU between calls; nothing happens on a CPU."""
    max_lora_rank: int = 0
    """0: no adapters."""
    max_loras: int = 0
    """Adapters in one batch; 0 is one where max_lora_rank is not 0."""
