"""DeepSpeed ZeRO-2 and -3, with torch's AdamW, as a strategy of the student.

DeepSpeed averages gradients over ranks; the loss is multiplied by their number, so that the gradient is the
sum. Every micro-batch adds to it and the last one closes it: nothing is divided by their number. Masters,
accumulation and reductions are fp32. Under ZeRO-3 a parameter is whole only inside the forward of a module
that owns it: the head's weight is registered with the root, whose forward uses it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smopd.engine import distributed
from smopd.engine.models.loading import head
from smopd.engine.settings import TrainSettings
from smopd.engine.student.optimizers import optimizer
from smopd.engine.student.strategy import Output, Policy, ThroughHead
from smopd.engine.types import TokenBatch

AUTO = "auto"
TAG = "zero"  # the folder of DeepSpeed's own files in a checkpoint
OURS = ("optimizer", "scheduler", "train_batch_size")


class DeepSpeedZero:
    """Serves `Strategy`."""

    reshards = False

    def __init__(self, policy: Policy, settings: TrainSettings, device: torch.device):
        deepspeed = _package(device)
        config = configuration(settings, device)
        stage = config["zero_optimization"]["stage"]
        if settings.shard_size is not None:
            raise ValueError("shard_size: is FSDP2's, expected none under DeepSpeed")
        if settings.compile and stage == 3:
            raise ValueError("compile: ZeRO-3 gathers inside each layer, expected FSDP2 or zero_stage 2")
        self.name = f"deepspeed ZeRO-{stage}"
        self.policy = policy
        self.optimizer = optimizer(policy, settings)
        masters = _copies(
            p for p in policy.parameters() if p.requires_grad and settings.compute_dtype != "float32"
        )
        with _environment(LOCAL_RANK="0"):
            self.engine, *_ = deepspeed.initialize(model=policy, optimizer=self.optimizer, config=config)
        for parameter, master in masters:
            deepspeed.utils.safe_set_full_fp32_param(parameter, master.to(device))
        if stage == 3:
            for tensor in head(policy.model):
                if tensor is not None:
                    deepspeed.zero.register_external_parameter(policy, tensor)
        self._utils = deepspeed.utils
        self._gathered = deepspeed.zero.GatheredParameters

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output:
        return self.engine(batch, through_head)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss * distributed.world_size(), scale_wrt_gas=False)

    def step(self, learning_rate: float) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.engine.step()
        return float(self.engine.get_global_grad_norm())  # inf where DeepSpeed skipped the step

    def full(self, parameter: Tensor) -> Tensor:
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            return self._utils.safe_get_full_fp32_param(parameter).detach()
        if hasattr(parameter, "ds_id"):
            with self._gathered([parameter]):
                return parameter.detach().clone()
        return parameter.detach()

    def save(self, folder: Path) -> None:
        self.engine.save_checkpoint(str(folder), tag=TAG, save_latest=False, exclude_frozen_parameters=True)

    def restore(self, folder: Path) -> None:
        self.engine.load_checkpoint(
            str(folder), tag=TAG, load_module_strict=False, load_lr_scheduler_states=False
        )


def configuration(settings: TrainSettings, device: torch.device) -> dict[str, Any]:
    """The whole configuration: what these settings ask for, then what else the given one holds.

    "auto" is what the settings ask for, or DeepSpeed's own default.

    Raises:
        ValueError: the given one contradicts the settings, or cannot be read.
    """
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if settings.offload_optimizer and device.type != "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    asked = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "fp16": {"enabled": False},
        "bf16": {"enabled": settings.compute_dtype == "bfloat16", "check_grad_overflow": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }
    given = _read(settings.deepspeed_config)
    for section in OURS:
        if _explicit(given.pop(section, AUTO)):
            raise ValueError(f"deepspeed_config: {section} is the student's own, expected it absent or auto")
    return _filled(given, asked)


def _read(given: str | None) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        values = json.loads(Path(given).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"deepspeed_config: {given} cannot be read ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"deepspeed_config: {given} holds a {type(values).__name__}, expected an object")
    return values


def _explicit(value: Any) -> bool:
    """Whether `value` holds anything but auto, a section's type aside."""
    if isinstance(value, Mapping):
        return any(_explicit(part) for key, part in value.items() if key != "type")
    return value != AUTO


def _filled(given: Mapping[str, Any], asked: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {key: value for key, value in given.items() if value != AUTO} | {
        key: value for key, value in asked.items() if key not in given or given[key] == AUTO
    }
    for key, value in result.items():
        name = f"{place}{key}"
        if isinstance(value, Mapping):
            section = asked.get(key, {})
            result[key] = _filled(value, section if isinstance(section, Mapping) else {}, f"{name}.")
        elif key in asked and value != asked[key]:
            raise ValueError(
                f"deepspeed_config: {name} is {value!r}, the student's settings say {asked[key]!r}; "
                "expected the same, or auto"
            )
    return result


def _package(device: torch.device) -> Any:
    try:
        with _environment(**({"DS_ACCELERATOR": "cpu"} if device.type == "cpu" else {})):
            import deepspeed
    except ImportError as error:
        raise ImportError(f"strategy: 'deepspeed' needs the package deepspeed ({error})") from error
    if device.type == "cpu":
        # DeepSpeed would probe the compiler, then compile this for a minute; it serves inference alone.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    # its own calls of collectives that torch has renamed, once a call
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed


def _copies(parameters: Iterator[nn.Parameter]) -> list[tuple[nn.Parameter, Tensor]]:
    return [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in parameters]


@contextmanager
def _environment(**defaults: str) -> Iterator[None]:
    """Variables that stand only where there were none."""
    added = [name for name in defaults if name not in os.environ]
    os.environ.update({name: defaults[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
