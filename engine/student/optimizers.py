"""Optimizers and learning-rate schedules, chosen by a built-in name or the path of a user's function."""

import math
from collections.abc import Callable

import torch
from torch import nn

from smopd.engine.imports import resolve
from smopd.engine.settings import Optimiser

MakesOptimizer = Callable[["list[nn.Parameter]", Optimiser], torch.optim.Optimizer]
"""(trained parameters, settings) -> optimizer.

The parameters are sharded fp32 master weights (DTensors under FSDP2). The caller clips the gradient, sets the
learning rate of each update and skips non-finite gradients.
"""
Schedule = Callable[[int, int], float]
"""(update, number of updates) -> factor of the learning rate. The first update is 0."""


def adamw(parameters: list[nn.Parameter], settings: Optimiser) -> torch.optim.Optimizer:
    """AdamW with decoupled weight decay (arXiv 1711.05101)."""
    return torch.optim.AdamW(
        parameters,
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def constant(update: int, updates: int) -> float:
    return 1.0


def linear(update: int, updates: int) -> float:
    """Decay linearly from 1 at the first update to 0 after the last."""
    return max(0.0, 1.0 - update / max(1, updates))


def cosine(update: int, updates: int) -> float:
    """Decay along half a cosine from 1 at the first update to 0 after the last."""
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, update / max(1, updates)))


OPTIMIZERS: dict[str, MakesOptimizer] = {"adamw": adamw}
SCHEDULES: dict[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine}


def optimizer(policy: nn.Module, settings: Optimiser) -> torch.optim.Optimizer:
    """Create `settings.optimizer` for the trained parameters. Raise ValueError if it does not exist."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return resolve(settings.optimizer, OPTIMIZERS)(trained, settings)


def apply_settings(made: torch.optim.Optimizer, settings: Optimiser) -> None:
    """Set AdamW's options to `settings` again, because restoring a checkpoint has replaced them."""
    if settings.optimizer == "adamw":
        for group in made.param_groups:
            group |= {"betas": settings.betas, "eps": settings.adam_eps}
            group["weight_decay"] = settings.weight_decay


def schedule(settings: Optimiser, updates: int) -> Callable[[int], float]:
    """Return the schedule as a function, update -> factor. Raise ValueError if it does not exist."""
    factor = resolve(settings.schedule, SCHEDULES)
    return lambda update: factor(update, updates)


def last_share(update: int, updates: int, share: float) -> float:
    """Return a warm start's factor. It is 1, then falls linearly to 0 over the last `share` of updates."""
    begin = round(updates * (1 - share))
    return min(1.0, max(0.0, (updates - update) / max(1, updates - begin)))
