"""TRL's GRPO trainer with two teachers compared with the reference loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="needs trl (the trl extra)")

from smopd.kernels.reference import loss as reference_loss
from smopd.kernels.reference import topk as reference
from smopd.ops import LossSettings, LossTokens
from tests.integrations.tiny_trl import (
    ADVANTAGES,
    LONGEST,
    assert_same_gradients,
    completions,
    grpo,
    loss_and_gradients,
    teacher,
    with_old_logps,
)

WEIGHTS = [0.75, 0.25]
KAPPA = 5


def logits_of(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return (N, V) logits that predict the completions."""
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits = model(input_ids=ids, attention_mask=mask).logits
    return logits[:, -LONGEST - 1 : -1][inputs["completion_mask"].bool()]


def reference_of(
    trainer: Any, inputs: dict[str, Tensor], settings: LossSettings, **columns: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the reference loss and its gradients by autograd."""
    with torch.no_grad():
        said = [
            reference.topk_logprobs(logits_of(model, inputs), KAPPA, temperature=settings.kl_temperature)
            for model in trainer.teacher_models
        ]
    tokens = LossTokens(
        token_ids_N=inputs["completion_ids"][inputs["completion_mask"].bool()],
        teacher_ids_NMS=torch.stack([topk.ids_NS for topk in said], 1),
        teacher_logps_NMS=torch.stack([topk.logps_NS for topk in said], 1),
        log_alpha=torch.tensor(WEIGHTS).log(),
        **columns,
    )
    trainer.model.zero_grad()
    logits_NV = logits_of(trainer.model, inputs)
    grad_NV = torch.empty_like(logits_NV)
    terms = reference_loss.loss_rows(logits_NV.detach(), tokens, settings, grad_NV)
    logits_NV.backward(grad_NV)
    loss, _ = reference_loss.total_loss(terms, tokens, settings)
    return loss, {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_grpo_with_two_teachers_is_the_reference(tmp_path: Path, merge: bool, tail: bool) -> None:
    shared = {"opd_coef": 0.7, "kappa": KAPPA, "merge": merge, "tail": tail, "entropy_coef": 0.01}
    temperatures = {"temperature": 0.9, "kl_temperature": 0.6}
    teachers = [teacher(1), teacher(2)]
    options = {"loss_type": "bnpo", "epsilon_high": 0.3, "teacher_weights": WEIGHTS}
    trainer = grpo(tmp_path, teachers, **shared, **temperatures, **options)
    inputs = with_old_logps(trainer, completions(trainer)) | {"advantages": ADVANTAGES}
    loss, gradients = loss_and_gradients(trainer, inputs)
    counted = inputs["completion_mask"].bool()
    weight_N = torch.full((int(counted.sum()),), 1 / (2 * float(counted.sum())))  # two micro-batches
    expected = reference_of(
        trainer,
        inputs,
        LossSettings(clip_high=0.3, **shared, **temperatures),
        adv_N=ADVANTAGES[:, None].expand_as(counted)[counted],
        old_logp_N=inputs["old_per_token_logps"][counted],
        pg_weight_N=weight_N,
        kl_weight_N=weight_N,
        ent_weight_N=weight_N,
    )
    torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-7)
    assert_same_gradients(gradients, expected[1])
