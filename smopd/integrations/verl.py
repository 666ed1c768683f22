"""SMOPD inside verl: all teachers on every token, a forward KL without a clamp, weighted GDPO and GD2PO.

    VERL_USE_EXTERNAL_MODULES=smopd.integrations.verl python -m verl.trainer.main_ppo ... \\
        distillation.distillation_loss.loss_mode=smopd_forward_kl algorithm.adv_estimator=smopd_gdpo

verl imports it for that variable alone: beside verl, an installed smopd changes nothing.
Importing this module registers those names, replaces seven functions of verl and prints which. The mixture
has SmopdLossConfig's defaults, or its settings where that is the `_target_` of `distillation_loss`. verl's
own loss_mode forward_kl_topk keeps its values, but for the rounding that verl has in bf16.
"""

from __future__ import annotations

import sys

import smopd


def register() -> None:
    """Registers the names, replaces verl's functions, and prints one line that says so."""
    settings = losses.DistillationLossSettings(names=[LOSS_MODE], use_topk=True)
    losses.register_distillation_loss(settings)(unclamped_forward_kl)
    for name in ESTIMATORS:
        core_algos.register_adv_est(name)(estimator(name))
    manager = teacher_manager.AsyncTeacherLLMServerManager
    topk = ("teacher_topk_log_probs", "teacher_topk_ids")
    replaced = (
        replace(losses, compute_topk_loss, "config", "distillation_config", "data", "student_logits"),
        replace(fsdp_losses, compute_forward_kl_topk, "student_logits", *topk, "config"),
        replace(torch_functional, logprobs_from_logits, "logits", "labels", "inplace_backward"),
        replace(teacher_model.MultiTeacherModelManager, _initialize_teacher_model_managers, "self"),
        replace(manager, compute_teacher_logprobs_single, "sequence_ids", "routing_key"),
        replace(ray_trainer, compute_advantage, "data", "adv_estimator", "config"),
        replace(v1_trainer.PPOTrainer, _compute_advantage, "batch", "metrics"),
    )
    print(
        f"smopd {smopd.__version__} in verl {HOST_VERSION}: registered loss_mode {LOSS_MODE}, adv_estimator "
        f"{', '.join(ESTIMATORS)}; replaced {', '.join(replaced)}"
    )


try:
    from smopd.integrations.verl_advantages import (
        ESTIMATORS,
        _compute_advantage,
        compute_advantage,
        estimator,
    )
    from smopd.integrations.verl_host import (
        HOST_VERSION,
        core_algos,
        fsdp_losses,
        losses,
        ray_trainer,
        replace,
        teacher_manager,
        teacher_model,
        torch_functional,
        v1_trainer,
    )
    from smopd.integrations.verl_loss import (
        LOSS_MODE,
        SmopdLossConfig,
        compute_forward_kl_topk,
        compute_topk_loss,
        logprobs_from_logits,
        unclamped_forward_kl,
    )
    from smopd.integrations.verl_teachers import (
        _initialize_teacher_model_managers,
        compute_teacher_logprobs_single,
    )

    register()
except Exception as refusal:  # said on its own line: verl's own traceback is long
    print(f"smopd.integrations.verl is not loaded: {refusal}", file=sys.stderr)
    raise

__all__ = ["SmopdLossConfig"]
