"""Sampling of one token per row in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(logits_RV: Tensor, temperature: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    logps_RV = (logits_RV.float() / temperature).log_softmax(-1)
    cumulative_RV = logps_RV.double().exp().cumsum(-1)
    total_R = cumulative_RV[:, -1]
    aim_R = torch.minimum(uniform_R * total_R, total_R.nextafter(torch.zeros_like(total_R)))
    token_R = torch.searchsorted(cumulative_RV, aim_R[:, None], right=True)[:, 0]
    return token_R, logps_RV.gather(-1, token_R[:, None])[:, 0]
