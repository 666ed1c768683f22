"""Inputs of the linear forms' tests: small heads, tokens with every column, settings for every option."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from bench.harness.accuracy import LOGP, gradient_bound, ulp
from smopd.ops import LossSettings, LossStats, LossTokens
from tests.kernels import float64

N, V, D = 13, 37, 6
SUM_EPS = 2.0**-23  # of a sum in fp32, per term
N_TEACHERS, N_SUPPORT = 2, 7

SETTINGS = {
    "merged-tail": LossSettings(),
    "pooled": LossSettings(merge=False, tail=False),
    "pooled-tail-entropy": LossSettings(merge=False, tail=True, entropy_coef=0.1),
    "entropy": LossSettings(merge=True, tail=False, entropy_coef=0.1, temperature=0.7, kl_temperature=0.7),
    "two-temperatures": LossSettings(entropy_coef=0.1, temperature=0.7),
    "two-temperatures-pooled": LossSettings(merge=False, tail=False, temperature=1.3, kl_temperature=0.8),
    "dual-clip-ppo": LossSettings(dual_clip=1.5, reverse_kl_surrogate="ppo", clip_low=0.1, clip_high=0.3),
    "policy-gradient-alone": LossSettings(opd_coef=0.0),
    "kappa-0": LossSettings(kappa=0),
}
TARGETS = ("teachers", "given", "given-nothing", "none")


def eighths(*shape: int, generator: torch.Generator) -> Tensor:
    """Random multiples of 1/8: short sums of their products are exact in fp32, in any order."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(8).round_().div_(8)


def head(dtype: torch.dtype = torch.float64, bias: bool = True, seed: int = 0):
    gen = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return eighths(*shape, generator=gen).to(dtype).requires_grad_()

    return leaf(N, D), leaf(V, D), leaf(V) if bias else None


def dense(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(hidden, weight, bias)


def loss_tokens(logits: Tensor, settings: LossSettings, target: str = "teachers") -> LossTokens:
    """Some weights are 0; row 2 counts nowhere, and row 4's target is empty."""
    more: dict[str, Tensor | None] = {}
    if target == "teachers":
        ids, logps = float64.random_teachers(N, N_TEACHERS, V, N_SUPPORT, seed=3)
        logps[4] = -torch.inf
        alpha = torch.tensor([0.4, 0.6], dtype=torch.float64).log()
        more = {"teacher_ids_NMS": ids, "teacher_logps_NMS": logps, "log_alpha": alpha}
    elif target == "given":
        ids, logps = float64.random_topk(N, V, N_SUPPORT, seed=3)
        ids[1, 3], ids[1, 5] = ids[1, 0], ids[1, 0]  # one id three times
        logps[1] -= 1.0
        logps[3, 2], ids[3, 2] = -torch.inf, -1
        logps[4] = -torch.inf
        more = {"target_ids_NS": ids, "target_logps_NS": logps}
    elif target == "given-nothing":
        nothing = torch.zeros(N, 0, dtype=torch.int64)
        more = {"target_ids_NS": nothing, "target_logps_NS": nothing.double()}
    tokens = float64.random_tokens(N, V, logits, settings.temperature, 0, **more)
    rows = {}
    for name in ("pg_weight_N", "kl_weight_N", "ent_weight_N"):
        rows[name] = getattr(tokens, name).clone()
        rows[name][2] = 0.0
    return replace(tokens, **rows)


def assert_by_the_rule(
    loss: Tensor,
    grads: tuple[Tensor, ...],
    leaves: tuple[Tensor, Tensor, Tensor],
    tokens: LossTokens,
    settings: LossSettings,
    *,
    factor: float = 1.0,
    columns: slice = slice(None),
) -> None:
    """The loss and the gradients of hidden, weight, bias (times factor) against float64 from the same logits.

    Those are the exact ones (of eighths) in the leaves' dtype. Each gradient of a logit may be off as the
    rule says, and what the products sum of them by as much in all; sums are fp32, results the leaves' dtype.
    columns: of the vocabulary, which the gradients of weight and bias are of.
    """
    hidden, weight, bias = (leaf.detach().double() for leaf in leaves)
    dtype = leaves[0].dtype
    logits_NV = dense(hidden, weight, bias).to(dtype)
    truth = float64.true_loss(logits_NV, tokens, settings)
    true_NV, size_NV = truth.grad_NV, torch.maximum(truth.size_NV, truth.slope_N[:, None])
    true_loss, _ = float64.loss(logits_NV.double(), tokens, settings)
    torch.testing.assert_close(loss.double(), true_loss, rtol=2e-6, atol=LOGP)
    bound_NV = gradient_bound(true_NV, dtype, size_NV)
    one_N1 = torch.ones(N, 1, dtype=torch.float64)
    products = (
        (true_NV, bound_NV, weight, slice(None)),
        (true_NV.T, bound_NV.T, hidden, columns),
        (true_NV.T, bound_NV.T, one_N1, columns),
    )
    for grad, (left, left_bound, right, part) in zip(grads, products, strict=True):
        true, size = factor * left @ right, abs(factor) * left.abs() @ right.abs()
        bound = abs(factor) * left_bound @ right.abs() + left.shape[1] * SUM_EPS * size
        bound = (bound + ulp(true, dtype))[part].reshape(grad.shape)
        excess = (grad.double() - true[part].reshape(grad.shape)).abs() - bound
        assert float(excess.max()) <= 0.0, f"off by {float(excess.max()):.3g} beyond the rule"


def assert_same_stats(
    got: LossStats, want: LossStats, *, pg_atol: float | None = None, **tolerance: float
) -> None:
    """pg_atol: of pg_loss, whose terms may cancel: from the sum of their sizes, not from their sum."""
    for field in fields(LossStats):
        values = (getattr(got, field.name), getattr(want, field.name))
        bounds = tolerance
        if field.name == "pg_loss" and pg_atol is not None:
            bounds = {"rtol": 0.0, "atol": pg_atol}
        torch.testing.assert_close(
            *values, equal_nan=True, msg=lambda text, name=field.name: f"{name}: {text}", **bounds
        )
