"""Sampling of one token per row with given uniform numbers."""

from __future__ import annotations

from torch import Tensor

from smopd.kernels.dispatch import serving


def draw(logits_RV: Tensor, temperature: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """Sample (R,) int64 tokens; return them with their (R,) fp32 log-probabilities at `temperature`.

    The token of a row is the first, in order of id, whose cumulative probability exceeds uniform_R.

    Args:
        logits_RV: (R, V), unit stride along V.
        temperature: above 0.
        uniform_R: (R,) float64 in [0, 1).
    """
    tokens: tuple[Tensor, Tensor] = serving("draw", logits_RV)(logits_RV, temperature, uniform_R)
    return tokens
