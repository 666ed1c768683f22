"""FSDP2 and HSDP with fp32 master weights. Gradients are summed in fp32."""

import math
import pickle
from collections.abc import Collection
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from smopd.engine import distributed
from smopd.engine.files import DamagedFile
from smopd.engine.models.loading import decoder_layers
from smopd.engine.settings import TrainSettings
from smopd.engine.student.optimizers import optimizer
from smopd.engine.student.strategy import Output, Policy, Stats, ThroughHead
from smopd.engine.types import TokenBatch

ROOT_ONLY = 1_000_000_000  # parameters (ours) at which wrapping only the root takes 8 GB more
_PLAIN: dict[str, Collection[str]] = {
    dcp.metadata.__name__: [name for name, found in vars(dcp.metadata).items() if isinstance(found, type)],
    "torch.distributed.checkpoint.filesystem": ["_StorageInfo"],
    "torch.serialization": ["_get_layout"],
    "torch": ["Size"],
    "pathlib": ["PosixPath", "PurePosixPath"],
    "pathlib._local": ["PosixPath", "PurePosixPath"],
}
"""Module -> its names that a checkpoint's metadata may use. dtypes of these modules are allowed, too."""


class Fsdp2:
    name = "fsdp2"
    reshards = True

    def __init__(self, policy: Policy, settings: TrainSettings, device: torch.device):
        self.device = device
        self.max_grad_norm = settings.max_grad_norm
        self.policy = _shard(policy, settings, device)
        self.optimizer = optimizer(self.policy, settings)

    def forward(self, batch: TokenBatch, through_head: ThroughHead[Output]) -> Output:
        return self.policy(batch, through_head)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def trial(
        self, batch: TokenBatch, through_head: ThroughHead[tuple[Tensor, Stats]]
    ) -> tuple[float, Stats]:
        loss, stats = self.policy(batch, through_head)
        loss.backward()
        grad_norm = self._clip()
        self.optimizer.zero_grad()
        return grad_norm, stats

    def _clip(self) -> float:
        """Clip the gradient and return its global norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> float:
        grad_norm = self._clip()
        if math.isfinite(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm

    def full(self, parameter: Tensor) -> Tensor:
        value = parameter.detach().to(self.device)
        return value.full_tensor() if isinstance(value, DTensor) else value

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=str(folder))

    def restore(self, folder: Path) -> None:
        require_plain(folder / ".metadata")
        state = self._state()
        dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(
            self.policy,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=not self._frozen()),
        )

    def _state(self) -> dict[str, Any]:
        options = StateDictOptions(ignore_frozen_params=self._frozen())
        if not self.optimizer.state:  # torch initializes it by a step with zero gradients: reset the counter
            get_state_dict(self.policy, self.optimizer, options=options)
            for state in self.optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()
        model, optimizer = get_state_dict(self.policy, self.optimizer, options=options)
        trained = {name for name, value in self.policy.named_parameters() if value.requires_grad}
        if self._frozen():  # of a frozen tied weight, torch leaves out only one name
            model = {name: value for name, value in model.items() if name in trained}
        return {"model": model, "optimizer": optimizer}

    def _frozen(self) -> bool:
        return not all(parameter.requires_grad for parameter in self.policy.parameters())


def _grid(shard_size: int | None, device: torch.device) -> DeviceMesh | None:
    """Return the (replica, shard) mesh, or None to shard over all ranks."""
    ranks = distributed.world_size()
    if shard_size is None or shard_size == ranks:
        return None
    if ranks % shard_size:
        raise ValueError(f"shard_size: got {shard_size}, expected a divisor of the {ranks} ranks")
    shape = (ranks // shard_size, shard_size)
    return init_device_mesh(device.type, shape, mesh_dim_names=("replica", "shard"))


def _shard(policy: Policy, settings: TrainSettings, device: torch.device) -> Policy:
    """Shard each decoder layer and the root in place. Gradients are summed over ranks, not averaged.

    On one rank, only the root of a small model is wrapped, because a layer's hooks take more host time than
    the layer takes on a GPU. Large models are wrapped by layer, because wrapping only the root keeps two
    extra fp32 copies of the whole model's gradients.
    """
    offload, several = settings.offload_optimizer, distributed.world_size() > 1
    cast = None if settings.compute_dtype == "float32" else getattr(torch, settings.compute_dtype)
    options: dict[str, Any] = {
        "mesh": _grid(settings.shard_size, device),
        "mp_policy": fsdp.MixedPrecisionPolicy(cast, torch.float32),
        "offload_policy": fsdp.CPUOffloadPolicy(device.type == "cuda") if offload else fsdp.OffloadPolicy(),
    }
    if several or offload or sum(parameter.numel() for parameter in policy.parameters()) > ROOT_ONLY:
        for layer in decoder_layers(policy.model):
            fsdp.fully_shard(layer, **options)
    fsdp.fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            if several:  # on one rank this would only copy the gradient
                module.set_gradient_divide_factor(1.0)
    return policy


def _member(enumeration: Any, name: str) -> Enum:
    """Return the member `name`. Python 3.11.0 to 3.11.3 pickle a member of an Enum as a call of getattr."""
    if not (isinstance(enumeration, type) and issubclass(enumeration, Enum)):
        raise pickle.UnpicklingError(f"it names builtins.getattr of {enumeration!r}")
    return enumeration[name]


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler restricted to the names that torch writes into a checkpoint's metadata."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        found = super().find_class(module, name) if module in _PLAIN else None
        if found is not None and (name in _PLAIN[module] or isinstance(found, torch.dtype)):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def require_plain(metadata: Path) -> None:
    """Raise DamagedFile if a checkpoint's `.metadata` (a pickle) does more than describe tensors."""
    try:
        with metadata.open("rb") as file:
            _PlainUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError) as error:
        raise DamagedFile(f"{metadata}: does not only describe tensors ({error})") from error
