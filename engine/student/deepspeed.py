"""DeepSpeed ZeRO-2 and ZeRO-3. Master weights, gradient accumulation and reductions are in fp32."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from smopd.engine import distributed
from smopd.engine.models.head import head
from smopd.engine.models.paths import SMALL
from smopd.engine.settings import TrainSettings
from smopd.engine.student.optimizers import optimizer
from smopd.engine.student.strategy import Output, Policy, Stats, ThroughHead
from smopd.engine.types import TokenBatch

TAG = "zero"  # DeepSpeed's folder in a checkpoint
OURS = ("optimizer", "scheduler", "train_batch_size")


class DeepSpeedZero:
    reshards = False

    def __init__(self, policy: Policy, settings: TrainSettings, device: torch.device):
        deepspeed = _package(device)
        config, stage = configuration(settings, device), settings.zero_stage
        if settings.shard_size is not None:
            raise ValueError(f"shard_size: got {settings.shard_size}, expected null under DeepSpeed")
        if settings.compile and stage == 3:
            raise ValueError("compile: got true, expected false under ZeRO-3; use FSDP2 or zero_stage 2")
        self.name = f"deepspeed ZeRO-{stage}"
        self.policy = policy
        self.optimizer = optimizer(policy, settings)
        masters = []  # DeepSpeed would initialize master weights from rounded parameters
        if settings.compute_dtype != "float32":
            trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
            masters = [(parameter, parameter.detach().to("cpu", copy=True)) for parameter in trained]
        os.environ.setdefault("LOCAL_RANK", "0")  # ZeRO-3 reads it in each forward pass
        self.engine, *_ = deepspeed.initialize(model=policy, optimizer=self.optimizer, config=config)
        for parameter, master in masters:
            deepspeed.utils.safe_set_full_fp32_param(parameter, master.to(device))
        if stage == 3:  # the root's forward uses the head's weight, which belongs to another module
            output = head(policy.model)
            for tensor in (output.weight_VD, output.bias_V):
                if tensor is not None:
                    deepspeed.zero.register_external_parameter(policy, tensor)
        self._utils = deepspeed.utils
        self._gathered = deepspeed.zero.GatheredParameters

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output:
        return self.engine(batch, through_head)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages gradients over ranks, but the loss needs their sum
        self.engine.backward(loss * distributed.world_size(), scale_wrt_gas=False)

    def trial(
        self, batch: TokenBatch, through_head: ThroughHead[tuple[Tensor, Stats]]
    ) -> tuple[float, Stats]:
        """Compute the gradients of small parameters without the engine, which would keep these gradients."""
        loss, stats = self.policy(batch, through_head)
        leaves = [each for each in self.policy.parameters() if each.requires_grad]
        leaves = [each for each in leaves if getattr(each, "ds_numel", each.numel()) <= SMALL]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        norms = [grad.float().norm() for grad in grads if grad is not None]
        return float(torch.stack(norms).norm()), stats

    def step(self) -> float:
        self.engine.step()
        return float(self.engine.get_global_grad_norm())  # inf if DeepSpeed skipped the step

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
    """Merge `settings` and deepspeed_config for DeepSpeed. Raise ValueError if they conflict."""
    zero: dict[str, Any] = {"stage": settings.zero_stage}
    if settings.offload_optimizer and device.type != "cpu":
        zero["offload_optimizer"] = {"device": "cpu"}
    asked: dict[str, Any] = {
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
    if settings.deepspeed_config is None:
        return asked
    try:
        given = dict(json.loads(Path(settings.deepspeed_config).expanduser().read_text()))
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"deepspeed_config: {settings.deepspeed_config} cannot be read ({error})") from error
    for section in OURS:
        if section in given:
            raise ValueError(f"deepspeed_config: got {section}, which smopd sets; remove it")
    return _merged(given, asked)


def _merged(given: dict[str, Any], asked: dict[str, Any], place: str = "") -> dict[str, Any]:
    result = asked | given
    for key in asked.keys() & given.keys():
        if isinstance(asked[key], dict) and isinstance(given[key], dict):
            result[key] = _merged(given[key], asked[key], f"{place}{key}.")
        elif given[key] != asked[key]:
            expected = f"{asked[key]!r} as in the student's settings, or nothing"
            raise ValueError(f"deepspeed_config: {place}{key} is {given[key]!r}, expected {expected}")
    return result


def _package(device: torch.device) -> Any:
    try:
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        import deepspeed
    except ImportError as error:
        raise ImportError(f"strategy: 'deepspeed' needs the package deepspeed ({error})") from error
    if device.type == "cpu":
        # DeepSpeed would compile this operator for a minute, but only inference uses it.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    # DeepSpeed calls deprecated collectives, and each call warns
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    return deepspeed
