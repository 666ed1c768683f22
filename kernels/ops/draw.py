"""One token a row, drawn by a uniform number of the caller's."""

from __future__ import annotations

from torch import Tensor

from smopd.kernels.dispatch import serving


def draw(logits_RV: Tensor, temperature: float, uniform_R: Tensor) -> tuple[Tensor, Tensor]:
    """(R,) int64 tokens and their (R,) fp32 log-probabilities at `temperature`.

    The token is the first whose cumulative probability, in the order of the vocabulary, passes uniform_R.

    Args:
        logits_RV: (R, V), unit stride along V.
        temperature: above 0.
        uniform_R: (R,) float64 in [0, 1).
    Cost: on a GPU one read of the logits, two launches, no host synchronisation.
    """
    tokens: tuple[Tensor, Tensor] = serving("draw", logits_RV)(logits_RV, temperature, uniform_R)
    return tokens
