"""SMOPD inside verl: every teacher on every token, an unclamped forward KL, weighted GDPO and GD2PO.

    VERL_USE_EXTERNAL_MODULES=smopd.integrations.verl python -m verl.trainer.main_ppo ... \\
        distillation.distillation_loss.loss_mode=smopd_forward_kl algorithm.adv_estimator=smopd_gdpo

Importing this module registers these names, replaces functions of verl and prints which.
"""

from __future__ import annotations

import sys

import smopd

try:
    from smopd.integrations.verl_patches import (
        ESTIMATORS,
        HOST_VERSION,
        LOSS_MODE,
        ORIGINALS,
        SmopdLossConfig,
    )
except Exception as refusal:  # printed on a line of its own, because verl's traceback is long
    print(f"smopd.integrations.verl is not loaded: {refusal}", file=sys.stderr)
    raise

replaced = ", ".join(f"{original.__module__}.{original.__qualname__}" for original in ORIGINALS.values())
print(
    f"smopd {smopd.__version__} in verl {HOST_VERSION}: registered loss_mode {LOSS_MODE}, adv_estimator "
    f"{', '.join(ESTIMATORS)}; replaced {replaced}"
)

__all__ = ["SmopdLossConfig"]
