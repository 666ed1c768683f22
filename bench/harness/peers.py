"""Functions of other libraries, called as users call them. A library is imported at the first call."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.harness.eager_forms import surrogate
from bench.harness.inputs import Scenario
from bench.harness.types import Outputs

TRL_VOCABULARY_CHUNK = 32768
GRPO_NOTE = "the policy gradient alone"
TRL_NOTE = "the policy gradient and the entropy, no KL"
LABEL_NOTE = "cross entropy of the tokens alone"


def liger_grpo_input(scenario: Scenario) -> tuple[Scenario, Tensor]:
    """Return (1, N + 1, V) logits, because the kernel expects an extra position and overwrites its input."""
    (leaf_NV,) = scenario.leaves().values()
    return scenario, torch.nn.functional.pad(leaf_NV, (0, 0, 0, 1))[None]


def liger_grpo(prepared: tuple[Scenario, Tensor]) -> Outputs:
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    scenario, logits_1NV = prepared
    tokens, settings = scenario.tokens, scenario.settings
    loss_1N, _, _ = triton_grpo_loss(
        logits_1NV,
        tokens.old_logp_N[None],
        None,
        tokens.token_ids_N[None],
        torch.ones_like(tokens.adv_N[:1]),  # an advantage of 1 for all tokens
        temperature=settings.temperature,
        beta=0.0,
        eps_low=settings.clip_low,
        eps_high=settings.clip_high,
        inplace=True,
    )
    torch.autograd.grad((tokens.pg_weight_N * loss_1N[0]).sum(), logits_1NV)
    return {"even_surrogate": loss_1N[0]}


def trl_linear(scenario: Scenario) -> Outputs:
    from trl.kernels import ChunkedLogProbFunction

    hidden_ND, weight_VD = scenario.leaves().values()
    tokens, settings = scenario.tokens, scenario.settings
    logp_N, entropy_N, *_ = ChunkedLogProbFunction.apply(
        hidden_ND,
        weight_VD,
        None,
        tokens.token_ids_N,
        settings.temperature,
        TRL_VOCABULARY_CHUNK,
        None,
        1.0,
        ("entropy",),
    )
    loss = (tokens.pg_weight_N * surrogate(logp_N, tokens, settings)).sum()
    torch.autograd.grad(loss, (hidden_ND, weight_VD))
    return {"logp": logp_N, "entropy": entropy_N}


def liger_linear(scenario: Scenario) -> Outputs:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    hidden_ND, weight_VD = scenario.leaves().values()
    token_ids_N = scenario.tokens.token_ids_N
    loss = liger_fused_linear_cross_entropy(hidden_ND, weight_VD, token_ids_N, reduction="mean")
    torch.autograd.grad(loss, (hidden_ND, weight_VD))
    return {"cross_entropy": loss}


def cut_cross_entropy(scenario: Scenario) -> Outputs:
    from cut_cross_entropy import linear_cross_entropy

    hidden_ND, weight_VD = scenario.leaves().values()
    impl = "cce" if hidden_ND.is_cuda else "torch_compile"
    loss = linear_cross_entropy(
        hidden_ND, weight_VD, scenario.tokens.token_ids_N, reduction="mean", impl=impl
    )
    torch.autograd.grad(loss, (hidden_ND, weight_VD))
    return {"cross_entropy": loss}
