"""Inputs like those of a training step: a peaked student, similar teachers, and tokens that they favor."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.harness.types import Case
from smopd.ops import LossSettings, LossTokens

SPREAD = 4.0  # standard deviation of the logits
TEACHER_NOISE = 0.5  # standard deviation of the teachers' logits from the student's
OLD_NOISE = 0.1  # standard deviation of the old log-probabilities' noise, so that some ratios are clipped
CHUNK_ELEMENTS = 1 << 24
# (N, V) of Llama 2, GPT-2 (padded), Llama 3 and Gemma 3. The last has half the N, so that fp32 copies fit.
VOCABULARIES = ((8192, 32_000), (8192, 50_304), (8192, 128_256), (4096, 262_144))
PIECE_ELEMENTS = 1 << 22  # of a head, to convert to float64 at a time


@dataclass(frozen=True, eq=False)
class Scenario:
    """Inputs of a loss: logits_NV, or hidden_ND and weight_VD for the linear form."""

    case: Case
    settings: LossSettings
    logits_NV: Tensor | None = None
    hidden_ND: Tensor | None = None
    weight_VD: Tensor | None = None
    probe_V: Tensor | None = None
    """Random signs whose product with the (V, D) gradient is checked."""
    tokens: LossTokens | None = None

    def without_anchor(self) -> Scenario:
        """Return the inputs without policy gradient and entropy."""
        tokens = replace(self.tokens, pg_weight_N=torch.zeros_like(self.tokens.pg_weight_N))
        return replace(self, tokens=tokens, settings=replace(self.settings, entropy_coef=0.0))

    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that need gradients, by name: logits, or hidden and weight."""
        given = {"logits": self.logits_NV, "hidden": self.hidden_ND, "weight": self.weight_VD}
        return {name: value.detach().requires_grad_() for name, value in given.items() if value is not None}

    def chunk(self, rows: slice | Tensor) -> Tensor:
        """Return the logits of some rows in float64."""
        if self.logits_NV is not None:
            return self.logits_NV[rows].double()
        assert self.hidden_ND is not None and self.weight_VD is not None
        return head_logits(self.hidden_ND[rows], self.weight_VD)


def head_logits(hidden_ND: Tensor, weight_VD: Tensor) -> Tensor:
    """Compute logits in float64. If the head has 16 bits, round them to 16 bits."""
    wide_ND = hidden_ND.double()
    products_NV = torch.cat([wide_ND @ piece.double().T for piece in pieces(weight_VD)], -1)
    return products_NV if hidden_ND.dtype == torch.float32 else products_NV.to(hidden_ND.dtype).double()


def pieces(weight_VD: Tensor) -> tuple[Tensor, ...]:
    return weight_VD.split(max(1, PIECE_ELEMENTS // weight_VD.shape[1]))


def random_logits(case: Case, device: str) -> Tensor:
    return torch.randn(case.N, case.V, dtype=case.torch_dtype, device=device) * SPREAD


def random_head(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """Return (N, D) hidden states and (V, D) weights whose logits have the deviation SPREAD."""
    hidden_ND = torch.randn(case.N, case.D, dtype=case.torch_dtype, device=device)
    weight_VD = torch.randn(case.V, case.D, dtype=case.torch_dtype, device=device)
    return hidden_ND, weight_VD * (SPREAD / math.sqrt(case.D))


def chunks(case: Case) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(case.V, 1))
    return [slice(start, min(start + step, case.N)) for start in range(0, case.N, step)]


def on_logits(case: Case, device: str) -> Scenario:
    return _with_tokens(Scenario(case, _settings(case), random_logits(case, device)), device)


def on_head(case: Case, device: str) -> Scenario:
    hidden_ND, weight_VD = random_head(case, device)
    probe_V = torch.randint(0, 2, (case.V,), device=device).float() * 2 - 1
    return _with_tokens(Scenario(case, _settings(case), None, hidden_ND, weight_VD, probe_V), device)


def _settings(case: Case) -> LossSettings:
    """Return the paper's settings, changed by the flags tail, merge and entropy."""
    flags = {name: name in case.flags for name in ("tail", "merge")}
    return LossSettings(kappa=case.kappa, **flags, entropy_coef=0.001 if "entropy" in case.flags else 0.0)


def _with_tokens(scenario: Scenario, device: str) -> Scenario:
    case = scenario.case
    parts = [_teachers(scenario.chunk(rows).float(), case) for rows in chunks(case)]
    ids_NMS, logps_NMS, token_ids_N, logp_N = (torch.cat(column) for column in zip(*parts, strict=True))
    even_N = torch.full((case.N,), 1 / case.N, device=device)
    target = {"target_ids_NS": ids_NMS[:, 0].contiguous(), "target_logps_NS": logps_NMS[:, 0].contiguous()}
    if case.M:
        log_alpha = torch.full((case.M,), -math.log(case.M), device=device)
        target = {"teacher_ids_NMS": ids_NMS, "teacher_logps_NMS": logps_NMS, "log_alpha": log_alpha}
    tokens = LossTokens(
        token_ids_N=token_ids_N,
        adv_N=torch.randn(case.N, device=device),
        pg_weight_N=even_N,
        old_logp_N=logp_N + OLD_NOISE * torch.randn(case.N, device=device),
        kl_weight_N=even_N,
        ent_weight_N=even_N,
        **target,
    )
    return replace(scenario, tokens=tokens)


def _teachers(logits: Tensor, case: Case) -> tuple[Tensor, ...]:
    tops = [
        (logits + TEACHER_NOISE * torch.randn_like(logits)).log_softmax(-1).topk(case.kappa, dim=-1)
        for _ in range(max(1, case.M))
    ]
    ids = torch.stack([top.indices for top in tops], 1).to(torch.int32)
    logps = torch.stack([top.values for top in tops], 1)
    pick = torch.randint(0, max(case.kappa, 1), (logits.shape[0], 1), device=logits.device)
    token_ids = ids[:, 0].gather(-1, pick)[:, 0].long()
    logp = logits.log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    return ids, logps, token_ids, logp
