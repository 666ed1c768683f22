"""Low-rank adapters (peft): attached to a model, merged into full weights, or written alone.

The base is frozen in the compute dtype; the adapters are fp32 masters like any other trained parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.files import empty_partial, replace_folder
from smopd.engine.settings import Lora

ADAPTER = "default"  # peft's own name for the only adapter
ALL_LINEAR = ["all-linear"]
BASE = ".base_layer."


def attach(model: PreTrainedModel, lora: Lora, compute_dtype: torch.dtype) -> None:
    """Puts adapters into `model` in place, the same on every rank, and freezes all else in `compute_dtype`.

    Raises:
        ValueError: a target is no linear layer of the decoder's layers.
        ImportError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(f"lora: needs the package peft ({error})") from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets(model, lora.targets),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    inject_adapter_in_model(config, model, ADAPTER)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else compute_dtype)
        if parameter.requires_grad and distributed.world_size() > 1:
            dist.broadcast(parameter.data, src=0)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """The base as if it had no adapters, for forwards without gradient.

    peft's own switch also freezes the adapters, which a sharded model would remember.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def targets(model: PreTrainedModel, wanted: list[str]) -> list[str]:
    """The names of linear layers that get adapters. Head and embeddings never do: the fused head is plain.

    Raises:
        ValueError: a name is none of theirs.
    """
    linear = {
        name.rpartition(".")[2]
        for layer in model.get_decoder().layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    chosen = linear if wanted == ALL_LINEAR else set(wanted)
    if not chosen or chosen - linear:
        raise ValueError(
            f"lora.targets: got {sorted(wanted)}, expected names among {sorted(linear)} or all-linear alone"
        )
    return sorted(chosen)


def merged(
    tensors: Mapping[str, Tensor], lora: Lora, full: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The base's weights by their own names, W + (alpha / rank) B A in fp32 where there is an adapter.

    Args:
        tensors: the model's state dict, in shards.
        full: gathers one of them; called in the same order on every rank.
    """
    for name, value in tensors.items():
        if _is_adapter(name):
            continue
        whole = full(value)
        layer, _, kind = name.rpartition(BASE)
        if layer and kind == "weight":
            a_rD, b_Dr = (full(tensors[f"{layer}.lora_{x}.{ADAPTER}.weight"]) for x in "AB")
            whole = torch.addmm(whole.float(), b_Dr.float(), a_rD.float(), alpha=lora.alpha / lora.rank)
        yield name.replace(BASE, "."), whole


def save(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], full: Callable[[Tensor], Tensor], folder: Path
) -> Path:
    """Writes adapter_config.json and adapter_model.safetensors to `folder`, whole or not at all."""
    weights = {}
    for name, value in tensors.items():
        if _is_adapter(name):
            whole = full(value)
            if distributed.rank() == 0:
                key = f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
                weights[key] = whole.detach().float().cpu().contiguous()
    if distributed.rank() == 0:
        partial = empty_partial(folder)
        model.peft_config[ADAPTER].save_pretrained(partial)
        save_file(weights, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        replace_folder(partial, folder)
    distributed.barrier()
    return folder


def _is_adapter(name: str) -> bool:
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name
