"""The sections of a recipe that say what samples, scores and trains: the engine's settings. Loads no torch.

Defaults are ours; what the paper states stands in the recipes.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from smopd.sections import Section

Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]


class Vllm(Section):
    """Where a vLLM engine runs and what it may take; for `engine: vllm`."""

    placement: Literal["colocated", "process"] = "colocated"
    """In the training process, on every rank, or in a process of its own."""
    transfer: Literal["files", "ipc"] = "files"
    """How new weights reach a process of its own: files in shared memory, or CUDA's handles of memory on the
    GPU that both are on."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    """Most positions of a prompt and its response; null is what data and rollout settings need."""
    gpu_memory_share: float | None = Field(default=None, gt=0, lt=1)
    """Of the device's whole memory; null chooses by what shares the device."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    enforce_eager: bool = False
    sleep: bool = True
    """Weights and cache leave the GPU while something else computes; of the engines that share a process the
    first one alone can. Nothing happens on a CPU."""


class TeacherVllm(Vllm):
    """As `Vllm`, and how many engines there are."""

    engines: int | None = Field(default=None, ge=1)
    """That the teachers' models share; null is one each. With fewer, models of one architecture take turns in
    an engine, and the weights of each are read from its files once a step, and with `union` twice."""


class Rollout(Section):
    """Sampling of the responses that a step learns from."""

    engine: Literal["local", "vllm"] = "local"
    vllm: Vllm = Vllm()
    urls: list[str] = Field(default=[])
    """vLLM servers on other hosts, which sample instead of an engine here, in a dtype of their own."""
    group_size: int = Field(default=8, ge=1)
    """G, rollouts per prompt."""
    temperature: float = Field(default=1.0, gt=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int = Field(default=1024, ge=1)
    max_batch_tokens: int = Field(default=262_144, ge=1)
    """Local engine: most key-value cache positions held at once; more responses are sampled in turns."""
    dtype: Dtype = "float32"


class Teacher(Section):
    model: str
    """A run of this recipe, a path or hub id, a LoRA adapter's folder, or its servers' URLs (with commas)."""
    reward: str
    """The reward dimension that this teacher stands for."""


class Teachers(Section):
    """The models that the student learns from in a merge run."""

    engine: Literal["local", "vllm"] = "local"
    vllm: TeacherVllm = TeacherVllm()
    route: Literal["auto", "pooler", "prompt_logprobs"] = "auto"
    """vLLM: our pooler over hidden states, or its own prompt log-probabilities (KL temperature 1 alone)."""
    union: bool = False
    """Every teacher's value on every teacher's top-kappa ids, not on its own alone."""
    models: list[Teacher] = Field(default=[])
    dtype: Dtype = "float32"


class Remote(Section):
    """How servers at URLs are asked."""

    deadline_seconds: float = Field(default=600.0, gt=0)
    """Of one request."""
    retries: int = Field(default=5, ge=0)
    """Further attempts at a server before it is taken out and its requests go to the others."""
    concurrency: int = Field(default=64, ge=1)
    """Requests in flight at one server."""
    transfer: Literal["files", "gloo", "nccl"] = "files"
    """How new weights reach rollout servers: files in transfer_folder, or a process group with each."""
    transfer_folder: str | None = None
    """For files, where every server reads it under the same path; null is this host's memory."""
    logprobs_dtype: Literal["float16", "float32"] = "float32"
    """Of the teachers' log-probabilities on the way."""


class Lora(Section):
    """Low-rank adapters: what trains where `student.lora` is given."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: list[str] = Field(default=["all-linear"])
    """Names of linear layers inside the decoder; all-linear is every one of them."""
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Student(Section):
    """Optimiser, precision and packing of whatever model is being trained, teachers in stage 1 included."""

    strategy: Literal["fsdp2", "deepspeed"] = "fsdp2"
    shard_size: int | None = Field(default=None, ge=1)
    """FSDP2: ranks that hold one copy of the model between them (HSDP); null is all ranks."""
    zero_stage: Literal[2, 3] = 2
    """DeepSpeed: 2 shards gradients and optimiser state, 3 parameters as well."""
    deepspeed_config: str | None = None
    """DeepSpeed: a JSON file of its own settings; "auto" in it takes the value from here."""
    offload_optimizer: bool = False
    """Keep masters and optimiser state in host memory and step there."""
    lora: Lora | None = None
    """Train adapters alone; null trains every weight."""
    learning_rate: float = Field(default=1e-6, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_eps: float = Field(default=1e-8, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    compute_dtype: Dtype = "bfloat16"
    compile: bool = False
    """torch.compile of each decoder layer."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """sdpa masks packed rows; flash takes variable lengths (CUDA); auto takes flash where it can run."""
    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Most tokens of one forward and backward; a longer sequence goes alone."""
    row_tokens: int = Field(default=0, ge=0)
    """Length of the rows under a mask; 0 is the batch's longest sequence. flash packs without padding."""
    share_prompts: bool = True
    """Compute each prompt once for all its rollouts (an attention mask over the tree)."""
    head_chunk_bytes: int | None = Field(default=None, ge=1)
    """Most bytes of logits that the fused head holds at once; null is the device's default."""
    gradient_checkpointing: bool = False
    max_skipped_updates: int = Field(default=3, ge=0)
    """The run stops after this many updates with a gradient that is not finite."""


class KlRef(Section):
    """KL to a reference policy, on the sampled tokens; off at coef 0."""

    coef: float = Field(default=0.0, ge=0)
    place: Literal["loss", "reward"] = "loss"
    """loss: a clipped term of its own; reward: one more dimension, minus the response's KL."""
    model: str = "init"
    """`init` is what the run starts from; else a run of this recipe, a path or a hub id."""
