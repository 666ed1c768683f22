"""The settings that the engines take, which are sections of a recipe as they stand. Imports no torch.

A value out of its range is a pydantic.ValidationError, which is a ValueError, where the settings are made.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from smopd.engine.imports import IMPORT_PATH

Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]
REQUEST_SECONDS = 600.0
"""Ours: how long a server has for one request, to the last byte of its answer."""
WeightTransport = Literal["files", "inline"]
"""How weights reach a server (engine/weights/transport.py)."""


def _import_path(value: str) -> str:
    if not IMPORT_PATH.fullmatch(value):
        raise ValueError(f"got {value!r}, expected `package.module:function`")
    return value


ImportPath = Annotated[
    str, AfterValidator(_import_path), Field(json_schema_extra={"format": "package.module:function"})
]
"""Beside a Literal, a way in: a name of ours, or a function of the user's (docs/extending.md)."""


class Section(BaseModel):
    """A group of settings. The string under a setting is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """A single value is a list of one; true is no number, and 1e3 no text."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError(f"got {str(value).lower()}, expected a number")
        if isinstance(value, float) and kind in (str, str | None):
            raise ValueError(f"got the number {value:g}, expected text; put it in quotes")
        return [value] if get_origin(kind) is list and isinstance(value, (str, float, int, dict)) else value


class Lora(Section):
    """Low-rank adapters: what trains where `student.lora` is given."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: list[str] = Field(default=["all-linear"])
    """Names of linear layers inside the decoder; all-linear is every one of them."""
    dropout: float = Field(default=0.0, ge=0, lt=1)


class Optimiser(Section):
    """How a model is laid out, computed and stepped."""

    strategy: Literal["fsdp2", "deepspeed"] = "fsdp2"
    shard_size: int | None = Field(default=None, ge=1)
    """FSDP2: ranks that hold one copy of the model between them (HSDP); null is all ranks."""
    zero_stage: Literal[2, 3] = 2
    """DeepSpeed: 2 shards gradients and optimiser state, 3 parameters as well."""
    deepspeed_config: str | None = None
    """DeepSpeed: a JSON file of its own settings, beside those that are set here."""
    offload_optimizer: bool = False
    """Keep masters and optimiser state in host memory and step there."""
    lora: Lora | None = None
    """Train adapters alone; null trains every weight."""
    optimizer: Literal["adamw"] | ImportPath = "adamw"
    """Or a function as engine/student/optimizers.py has it: (parameters, settings) -> optimizer."""
    schedule: Literal["constant", "linear", "cosine"] | ImportPath = "constant"
    """Of the learning rate, after the warm-up to 0 at the last update; or (update, updates) -> factor."""
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
    """sdpa masks packed rows; flash takes one sequence, or response beside a shared prompt, at a time; auto
    takes flash where the device and the model can. Short rows on a CPU are masked in any case."""


class Packing(Section):
    """How sequences are laid out for a forward pass; changes speed and memory, never a result."""

    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Most tokens of one forward and backward; a longer sequence goes alone."""
    share_prompts: bool = True
    """Compute each prompt once for all its rollouts."""


class TrainSettings(Packing, Optimiser):  # pydantic puts the last base's settings first
    """Optimiser, precision and packing of whatever model is being trained, teachers in stage 1 included."""

    gradient_checkpointing: bool = False


class Vllm(Section):
    """Where a vLLM engine runs, and what it is made with; for `engine: vllm`."""

    placement: Literal["colocated", "process"] = "colocated"
    """In the training process, on every rank, or in a process of its own."""
    engine_kwargs: dict[str, Any] = Field(default={})
    """Arguments of vllm.LLM: tensor_parallel_size, max_model_len, gpu_memory_utilization,
    kv_cache_memory_bytes, enforce_eager, enable_sleep_mode and any other; what is not given is chosen."""

    @property
    def tensor_parallel_size(self) -> int:
        return int(self.engine_kwargs.get("tensor_parallel_size", 1))

    @property
    def max_model_len(self) -> int | None:
        return self.engine_kwargs.get("max_model_len")

    @property
    def gpu_memory_share(self) -> float | None:
        return self.engine_kwargs.get("gpu_memory_utilization")

    @property
    def kv_cache_bytes(self) -> int | None:
        return self.engine_kwargs.get("kv_cache_memory_bytes")

    @property
    def sleep(self) -> bool:
        return bool(self.engine_kwargs.get("enable_sleep_mode", True))


class VllmSettings(Section):
    """A vLLM engine as it is made."""

    placement: Literal["colocated", "process"] = "colocated"
    tensor_parallel_size: int = Field(default=1, ge=1)
    max_model_len: int | None = Field(default=None, ge=1)
    gpu_memory_share: float | None = Field(default=None, gt=0, lt=1)
    """Of the device's whole memory; null chooses by what shares the device."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)  # null: by vllm/memory.py, vllm/engines.py
    enforce_eager: bool = False
    sleep: bool = True
    """Weights and cache leave the GPU while something else computes; of the engines that share a process the
    first one alone can. Nothing happens on a CPU."""
    dtype: str = "float32"
    max_lora_rank: int = 0
    """Of teachers' adapters, one of vLLM's ranks; 0: none."""
    max_loras: int = 0
    more: dict[str, Any] = Field(default={})
    """Further arguments of vllm.LLM."""

    def __hash__(self) -> int:  # engines are found by their settings, and `more` has no hash
        return hash(repr(self))
