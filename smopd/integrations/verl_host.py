"""verl's modules that the integration reads or changes, and the one way in which it changes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from smopd.integrations.hosts import require_host, require_parameters

HOST_VERSION = require_host("verl", "0.9.1", "0.9.2")
core_algos = import_module("verl.trainer.ppo.core_algos")
losses = import_module("verl.trainer.distillation.losses")
fsdp_losses = import_module("verl.trainer.distillation.fsdp.losses")
ray_trainer = import_module("verl.trainer.ppo.ray_trainer")
v1_trainer = import_module("verl.trainer.ppo.v1.trainer_base")
teacher_manager = import_module("verl.experimental.teacher_loop.teacher_manager")
teacher_model = import_module("verl.experimental.teacher_loop.teacher_model")
torch_functional = import_module("verl.utils.torch_functional")
filesystem = import_module("verl.utils.fs")
tokenizers = import_module("verl.utils.tokenizer")
ulysses = import_module("verl.utils.ulysses")
worker_config = import_module("verl.workers.config")

ORIGINALS: dict[str, Callable[..., Any]] = {}  # verl's functions that were replaced, by their names


def replace(owner: Any, ours: Callable[..., Any], *parameters: str) -> str:
    """Puts ours in the place of the owner's function of that name, wherever verl has imported it already."""
    name = ours.__name__
    original = getattr(owner, name)
    require_parameters(original, *parameters)
    ORIGINALS[name] = original
    setattr(owner, name, ours)
    for module in [module for key, module in sys.modules.items() if key.startswith("verl.")]:
        if vars(module).get(name) is original:
            setattr(module, name, ours)
    return f"{original.__module__}.{original.__qualname__}"
