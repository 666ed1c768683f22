"""Low-rank adapters (peft). The adapters are in fp32, and the frozen base is in the compute dtype."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from smopd.engine import distributed
from smopd.engine.models.loading import decoder_layers
from smopd.engine.settings import Lora

log = logging.getLogger(__name__)
ADAPTER = "default"  # peft's name for a single adapter
ALL_LINEAR = ["all-linear"]
BASE = ".base_layer."


def attach(model: PreTrainedModel, lora: Lora) -> None:
    """Insert fp32 adapters, equal on all ranks, and freeze the rest. Raise ValueError for bad targets."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError(f"lora: needs the package peft ({error})") from error
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=_targets(model, lora.targets),
        bias="none",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    try:
        inject_adapter_in_model(config, model, ADAPTER)
    except ValueError as error:  # the message's other lines print modules
        raise ValueError(f"lora: {str(error).splitlines()[0]}") from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            if distributed.world_size() > 1:
                dist.broadcast(parameter.data, src=0)


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters while the context is active. peft's own switch would also freeze them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _targets(model: PreTrainedModel, wanted: list[str]) -> list[str]:
    """Return the target names. Head and embeddings are excluded: the fused loss needs a plain head."""
    layers = decoder_layers(model)
    linear = {_last(name) for name, module in layers.named_modules() if isinstance(module, nn.Linear)}
    linear.discard("router")  # an adapted router would return a tensor (phimoe) or add router logits (Jamba)
    if not linear:
        raise ValueError(f"lora: the decoder of a {type(model).__name__} has no linear layers")
    stacked = (name for name, value in layers.named_parameters() if value.dim() == 3)
    experts = {_last(name) for name in stacked if ".experts." in name}
    known = _served(model, sorted(linear)) if experts else linear
    chosen = known if wanted == ALL_LINEAR else set(wanted)
    if not chosen or chosen - known:
        expected = f"names among {sorted(known)} or all-linear alone"
        raise ValueError(f"lora.targets: got {sorted(wanted)}, expected {expected}")
    if experts:
        log.warning("lora: no adapters for the experts: %s", ", ".join(sorted(experts | (linear - known))))
    return sorted(chosen)


def _last(name: str) -> str:
    """Return the last part of a dotted name or, if that is a number, the last two parts."""
    parts = name.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _served(model: PreTrainedModel, targets: list[str]) -> set[str]:
    """Return the targets that peft keeps. It moves others to fused experts, which `merged` cannot merge."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=1, target_modules=targets)
    with torch.device("meta"):
        inject_adapter_in_model(config, type(model)(model.config), ADAPTER, low_cpu_mem_usage=True)
    return set(config.target_modules or [])


def merged(
    tensors: Mapping[str, Tensor], lora: Lora, full: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights of the base. A weight W with an adapter becomes W + (alpha / rank) B A in fp32.

    tensors: the sharded state dict, in the same order on every rank. full: a function that gathers a tensor.
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
    weights = {}
    for name, value in tensors.items():
        if _is_adapter(name):
            whole = full(value)
            if distributed.rank() == 0:
                key = f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}"
                weights[key] = whole.detach().float().cpu().contiguous()
    if distributed.rank() == 0:
        model.peft_config[ADAPTER].save_pretrained(folder)
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    distributed.barrier()
    return folder


def _is_adapter(name: str) -> bool:
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name
