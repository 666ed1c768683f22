"""Optimizers and learning-rate schedules: ours by name, or a function of the user's by its import path."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from smopd.engine.imports import resolve
from smopd.engine.settings import Optimiser

MakesOptimizer = Callable[["list[nn.Parameter]", Optimiser], torch.optim.Optimizer]
"""(trained parameters, settings) -> an optimizer over them.

The parameters are fp32 masters, sharded already (DTensors under FSDP2). The caller clips, sets the learning
rate of each update and skips gradients that are not finite.
"""
Schedule = Callable[[int, int], float]
"""(update, updates of the run) -> factor of the learning rate; updates count from 0."""


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
    """1 at every update."""
    return 1.0


def linear(update: int, updates: int) -> float:
    """From 1 at the first update down to 0 behind the last one."""
    return max(0.0, 1.0 - update / max(1, updates))


def cosine(update: int, updates: int) -> float:
    """Half a cosine from 1 at the first update down to 0 behind the last one."""
    return 0.5 + 0.5 * math.cos(math.pi * min(1.0, update / max(1, updates)))


OPTIMIZERS: dict[str, MakesOptimizer] = {"adamw": adamw}
SCHEDULES: dict[str, Schedule] = {"constant": constant, "linear": linear, "cosine": cosine}


def optimizer(policy: nn.Module, settings: Optimiser) -> torch.optim.Optimizer:
    """`settings.optimizer` over the trained parameters of `policy`; ValueError as `resolve`."""
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    return resolve(settings.optimizer, OPTIMIZERS)(trained, settings)


def schedule(settings: Optimiser, updates: int) -> Callable[[int], float]:
    """`settings.schedule` over a run of so many updates; ValueError as `resolve`."""
    factor = resolve(settings.schedule, SCHEDULES)
    return lambda update: factor(update, updates)


def last_share(update: int, updates: int, share: float) -> float:
    """A warm start's factor: 1, then linearly down to 0 over the last `share` of the updates."""
    begin = round(updates * (1 - share))
    return min(1.0, max(0.0, (updates - update) / max(1, updates - begin)))
