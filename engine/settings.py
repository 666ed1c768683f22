"""Settings of the engines, used as sections of a recipe. This module does not import torch."""

from typing import Annotated, Any, Literal, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from smopd.engine.imports import IMPORT_PATH

Beta = Annotated[float, Field(ge=0, lt=1)]
Dtype = Literal["float32", "bfloat16"]
REQUEST_SECONDS = 600.0
"""Ours: timeout of one HTTP request, including the response body."""
WeightTransport = Literal["files", "inline"]
"""How weights reach an engine in another process (see engine/weights/transport.py)."""


def _import_path(value: str) -> str:
    if not IMPORT_PATH.fullmatch(value):
        raise ValueError(f"got {value!r}, expected `package.module:function`")
    return value


ImportPath = Annotated[
    str, AfterValidator(_import_path), Field(json_schema_extra={"format": "package.module:function"})
]
"""The import path of a user's function (docs/extending.md). A union with a Literal adds built-in names."""


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
        """Accept a single value for a list. Reject a boolean for a number, and a float for text."""
        kind = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and kind in (int, float, int | None, float | None):
            raise ValueError(f"got {str(value).lower()}, expected a number")
        if isinstance(value, float) and kind in (str, str | None):
            raise ValueError(f"got the number {value:g}, expected text; put it in quotes")
        return [value] if get_origin(kind) is list and isinstance(value, (str, float, int, dict)) else value


class Lora(Section):
    """Low-rank adapters, trained instead of the full weights."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    targets: list[str] = Field(default=["all-linear"])
    """Names of linear layers in the decoder, or all-linear for all of them."""


class Optimiser(Section):
    """Sharding, precision and optimizer of a model in training."""

    strategy: Literal["fsdp2", "deepspeed"] = "fsdp2"
    shard_size: int | None = Field(default=None, ge=1)
    """FSDP2: number of ranks that share one copy of the model (HSDP); null for all ranks."""
    zero_stage: Literal[2, 3] = 2
    """DeepSpeed: 2 shards gradients and optimizer state, 3 shards parameters too."""
    deepspeed_config: str | None = None
    """DeepSpeed: a JSON file with further DeepSpeed settings."""
    offload_optimizer: bool = False
    """Keep fp32 weights and optimizer state in host memory and step on the CPU."""
    lora: Lora | None = None
    """Train adapters only; null trains all weights."""
    optimizer: Literal["adamw"] | ImportPath = "adamw"
    """adamw, or a function (parameters, settings) -> optimizer; see engine/student/optimizers.py."""
    schedule: Literal["constant", "linear", "cosine"] | ImportPath = "constant"
    """Learning rate after warm-up; linear and cosine fall to 0. Or a function (update, updates) -> factor."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Tune it first. The paper uses 1e-6 for 1.5 and 3 billion parameters. Our runs use 2e-5 for 135 million
    and 1e-3 for 0.14 million parameters, and ten times as much with LoRA."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_eps: float = Field(default=1e-8, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    router_aux_loss_coef: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of a mixture of experts, over the responses of each micro-batch."""
    compute_dtype: Dtype = "bfloat16"
    compile: bool = False
    """Compile each decoder layer with torch.compile."""
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    """sdpa masks packed rows; flash computes one sequence at a time; auto chooses flash if device and model
    support it. Short rows on a CPU are always masked."""


class Packing(Section):
    """How sequences are packed into micro-batches. Changes speed and memory, not results."""

    micro_batch_tokens: int = Field(default=16_384, ge=1)
    """Maximum tokens per forward pass; a longer sequence is processed alone."""
    share_prompts: bool = True
    """Compute each prompt once for all its responses."""


class TrainSettings(Packing, Optimiser):  # pydantic lists the fields of the last base first
    """Optimizer, precision and packing of a model in training, including teachers in stage 1."""

    gradient_checkpointing: bool = False


class Vllm(Section):
    """A vLLM engine; used with `engine: vllm`."""

    placement: Literal["colocated", "process"] = "colocated"
    """colocated: in the training process of every rank; process: in a separate process."""
    engine_kwargs: dict[str, Any] = Field(default={})
    """Arguments of vllm.LLM, such as tensor_parallel_size, max_model_len, gpu_memory_utilization,
    kv_cache_memory_bytes, enforce_eager or enable_sleep_mode. Arguments that are not given get defaults."""

    @field_validator("engine_kwargs")
    @classmethod
    def _in_range(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in ("tensor_parallel_size", "max_model_len", "kv_cache_memory_bytes"):
            number = value.get(name)
            if number is not None and not (isinstance(number, int) and number >= 1):
                raise ValueError(f"{name}: got {number!r}, expected an integer of at least 1")
        share = value.get("gpu_memory_utilization")
        if share is not None and not (isinstance(share, float) and 0 < share < 1):
            raise ValueError(f"gpu_memory_utilization: got {share!r}, expected a number between 0 and 1")
        return value

    @property
    def dtype(self) -> str:
        return str(self.engine_kwargs.get("dtype", "float32"))

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
