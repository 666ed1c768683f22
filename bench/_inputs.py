"""Inputs that look like a training step's: a peaked student, teachers near it, tokens that they sampled.

Shapes: N tokens, V vocabulary, D hidden, M teachers, S support entries (kappa).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from bench._accuracy import LINEAR_NORM, LOGP, gradient_bound
from bench._objective import Exact, exact, take
from bench._types import Case, Expected
from smopd.ops import LossSettings, LossTokens

SPREAD = 4.0  # standard deviation of the logits
TEACHER_NOISE = 0.5  # of the teachers' logits around the student's
OLD_NOISE = 0.1  # of the behaviour policy's log-probabilities around the student's: some ratios are clipped
TEACHER_SHARE = 0.9  # of the student's hidden states, in a teacher with its own
MASKED = 0.1  # share of tokens whose weights are 0
CHECKED_ROWS = 8
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, eq=False)
class Scenario:
    """A loss's inputs. logits_NV, or hidden_ND and weight_VD for the linear form."""

    case: Case
    tokens: LossTokens
    settings: LossSettings
    logits_NV: Tensor | None = None
    hidden_ND: Tensor | None = None
    weight_VD: Tensor | None = None
    probe_V: Tensor | None = (
        None  # random signs: the whole (V, D) gradient is checked by its product with them
    )

    def without_anchor(self) -> Scenario:
        """The forward KL alone."""
        tokens = replace(self.tokens, pg_weight_N=torch.zeros_like(self.tokens.pg_weight_N))
        return replace(self, tokens=tokens, settings=replace(self.settings, entropy_coef=0.0))

    def chunk(self, start: int, stop: int) -> Tensor:
        """Some rows' logits: exact ones, or fp32 products rounded as the head rounds them."""
        if self.logits_NV is not None:
            return self.logits_NV[start:stop].double()
        assert self.hidden_ND is not None and self.weight_VD is not None
        product = self.hidden_ND[start:stop].float() @ self.weight_VD.float().T
        return product.to(self.hidden_ND.dtype).float()


def random_logits(case: Case, device: str) -> Tensor:
    return torch.randn(case.N, case.V, dtype=case.torch_dtype, device=device) * SPREAD


def random_head(case: Case, device: str) -> tuple[Tensor, Tensor]:
    """(N, D) hidden states and (V, D) weights whose logits have SPREAD."""
    hidden_ND = torch.randn(case.N, case.D, dtype=case.torch_dtype, device=device)
    weight_VD = torch.randn(case.V, case.D, dtype=case.torch_dtype, device=device)
    return hidden_ND, weight_VD * (SPREAD / math.sqrt(case.D))


def checked_rows(n_rows: int, device: str) -> Tensor:
    """First, last and what lies evenly between."""
    return torch.linspace(0, n_rows - 1, min(CHECKED_ROWS, n_rows), device=device).round().long()


def chunks(case: Case) -> list[tuple[int, int]]:
    step = max(1, CHUNK_ELEMENTS // max(case.V, 1))
    return [(start, min(start + step, case.N)) for start in range(0, case.N, step)]


def on_logits(case: Case, device: str) -> Scenario:
    blank = Scenario(case, _no_tokens(case, device), _settings(case), random_logits(case, device))
    return replace(blank, tokens=_tokens(blank, device))


def on_head(case: Case, device: str) -> Scenario:
    hidden_ND, weight_VD = random_head(case, device)
    probe_V = torch.randint(0, 2, (case.V,), device=device).float() * 2 - 1
    settings, tokens = _settings(case), _no_tokens(case, device)
    blank = Scenario(case, tokens, settings, None, hidden_ND, weight_VD, probe_V)
    return replace(blank, tokens=_tokens(blank, device))


def _settings(case: Case) -> LossSettings:
    """The paper's form; flags: tail, merge, entropy (its gradient), two-T (ratio and KL at two)."""
    return LossSettings(
        kappa=case.kappa,
        tail="tail" in case.flags,
        merge="merge" in case.flags,
        entropy_coef=0.001 if "entropy" in case.flags else 0.0,
        temperature=0.7 if "two-T" in case.flags else 1.0,
    )


def _no_tokens(case: Case, device: str) -> LossTokens:
    zeros = torch.zeros(case.N, device=device)
    return LossTokens(token_ids_N=zeros.long(), adv_N=zeros, pg_weight_N=zeros)


def _tokens(blank: Scenario, device: str) -> LossTokens:
    case = blank.case
    parts = [
        _teachers(blank.chunk(*bounds).float(), case, blank.settings.temperature) for bounds in chunks(case)
    ]
    ids_NMS, logps_NMS, token_ids_N, logp_N = (torch.cat(column) for column in zip(*parts, strict=True))
    counted_N = (torch.rand(case.N, device=device) >= MASKED).float() / case.N
    target = {"target_ids_NS": ids_NMS[:, 0].contiguous(), "target_logps_NS": logps_NMS[:, 0].contiguous()}
    if case.M:
        log_alpha = torch.full((case.M,), -math.log(case.M), device=device)
        target = {"teacher_ids_NMS": ids_NMS, "teacher_logps_NMS": logps_NMS, "log_alpha": log_alpha}
    return LossTokens(
        token_ids_N=token_ids_N,
        adv_N=torch.randn(case.N, device=device),
        pg_weight_N=counted_N,
        old_logp_N=logp_N + OLD_NOISE * torch.randn(case.N, device=device),
        kl_weight_N=counted_N,
        ent_weight_N=counted_N,
        **target,
    )


def _teachers(logits: Tensor, case: Case, temperature: float) -> tuple[Tensor, ...]:
    tops = [
        (logits + TEACHER_NOISE * torch.randn_like(logits)).log_softmax(-1).topk(case.kappa, dim=-1)
        for _ in range(max(1, case.M))
    ]
    ids = torch.stack([top.indices for top in tops], 1).to(torch.int32)
    logps = torch.stack([top.values for top in tops], 1)
    pick = torch.randint(0, max(case.kappa, 1), (logits.shape[0], 1), device=logits.device)
    token_ids = ids[:, 0].gather(-1, pick)[:, 0].long()
    logp = (logits / temperature).log_softmax(-1).gather(-1, token_ids[:, None])[:, 0]
    return ids, logps, token_ids, logp


def loss_truth(scenario: Scenario) -> dict[str, Expected]:
    """All tokens' terms and the loss; the gradient of the checked rows, or for a head of all."""
    case, tokens, settings = scenario.case, scenario.tokens, scenario.settings
    linear = scenario.logits_NV is None
    gradients = _HeadGradients(scenario) if linear else None
    parts = []
    for start, stop in chunks(case):
        part = exact(scenario.chunk(start, stop), take(tokens, slice(start, stop)), settings, gradient=linear)
        if gradients is not None:
            gradients.add(part.gradient, start, stop)
        parts.append(replace(part, gradient=None, scale=None))
    counted = tokens.kl_weight_N != 0
    columns = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("logp", "entropy", "kl", "surrogate", "weighted")
    }
    loss = columns.pop("weighted").double().sum()
    columns = {name: torch.where(counted, column, 0.0) for name, column in columns.items()}
    peers = _parts_of_peers(scenario)
    if gradients is not None:
        bound = LINEAR_NORM[case.torch_dtype]
        expected = {name: Expected(column, bound, norm=True) for name, column in columns.items()}
        expected["loss"] = Expected(loss, bound * max(1.0, abs(float(loss))))
        return expected | gradients.expected(bound) | peers
    expected = {name: Expected(column, LOGP) for name, column in columns.items()}
    expected["loss"] = Expected(loss, LOGP * max(1.0, abs(float(loss))))
    return expected | {"dlogits": _logits_gradient(scenario)} | peers


def anchor_tokens(tokens: LossTokens) -> LossTokens:
    """The policy gradient alone, with one advantage for all: what some peers compute."""
    target = dict.fromkeys(
        field.name for field in fields(tokens) if field.name.startswith(("target", "teacher"))
    )
    return replace(tokens, adv_N=torch.ones_like(tokens.adv_N), log_alpha=None, kl_weight_N=None, **target)


def label_tokens(tokens: LossTokens) -> LossTokens:
    """The mean negative log-probability of the tokens."""
    even_N = torch.full_like(tokens.adv_N, 1.0 / tokens.adv_N.shape[0])
    return replace(anchor_tokens(tokens), pg_weight_N=even_N, old_logp_N=None)


def teacher_hidden(hidden_ND: Tensor) -> Tensor:
    """A teacher with its own hidden states: the student's, a little less sure."""
    return hidden_ND * TEACHER_SHARE


def _to_one_teacher(scenario: Scenario) -> Expected:
    """The hidden states' gradient of the mean KL to that teacher over the whole vocabulary."""
    assert scenario.hidden_ND is not None and scenario.weight_VD is not None
    rows = checked_rows(scenario.case.N, str(scenario.hidden_ND.device))
    weight_VD = scenario.weight_VD.double()
    hidden = scenario.hidden_ND[rows]
    student, teacher = ((h.double() @ weight_VD.T).softmax(-1) for h in (hidden, teacher_hidden(hidden)))
    gradient = (student - teacher) @ weight_VD / scenario.case.N
    return Expected(gradient, LINEAR_NORM[scenario.case.torch_dtype], rows=rows, norm=True)


def _parts_of_peers(scenario: Scenario) -> dict[str, Expected]:
    """Gradients at the checked rows of what peers compute where that is a part."""
    plain = LossSettings(temperature=scenario.settings.temperature)
    expected = {}
    for name, part in (("anchor", anchor_tokens), ("label", label_tokens)):
        rows, exact_rows = _at_checked_rows(scenario, part(scenario.tokens), plain)
        gradient = exact_rows.gradient
        assert gradient is not None
        if scenario.weight_VD is not None:
            bound = LINEAR_NORM[scenario.case.torch_dtype]
            gradient = gradient @ scenario.weight_VD.to(gradient.dtype)
            expected[f"dhidden_{name}"] = Expected(gradient, bound, rows=rows, norm=True)
        elif exact_rows.scale is not None:
            bound = gradient_bound(gradient, scenario.case.torch_dtype, exact_rows.scale)
            expected[f"dlogits_{name}"] = Expected(gradient, bound, rows=rows)
    if scenario.weight_VD is not None:
        expected["dhidden_teacher"] = _to_one_teacher(scenario)
    return expected


def _logits_gradient(scenario: Scenario) -> Expected:
    rows, part = _at_checked_rows(scenario, scenario.tokens, scenario.settings)
    assert part.gradient is not None and part.scale is not None
    bound = gradient_bound(part.gradient, scenario.case.torch_dtype, part.scale)
    return Expected(part.gradient, bound, rows=rows)


def _at_checked_rows(scenario: Scenario, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, Exact]:
    rows = checked_rows(scenario.case.N, str(tokens.adv_N.device))
    logits = torch.cat([scenario.chunk(row, row + 1) for row in rows.tolist()])
    return rows, exact(logits, take(tokens, rows), settings, gradient=True)


class _HeadGradients:
    """The hidden states' gradient at the checked rows, and the weight's along the probe, from all rows."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        assert scenario.hidden_ND is not None and scenario.weight_VD is not None
        self.hidden_ND, self.weight_VD = scenario.hidden_ND, scenario.weight_VD
        device = str(self.hidden_ND.device)
        self.rows = checked_rows(scenario.case.N, device)
        self.at_rows: list[Tensor] = []
        self.along_probe_D = torch.zeros(scenario.case.D, dtype=torch.float64, device=device)

    def add(self, gradient: Tensor | None, start: int, stop: int) -> None:
        assert gradient is not None and self.scenario.probe_V is not None
        inside = self.rows[(self.rows >= start) & (self.rows < stop)] - start
        self.at_rows.append(gradient[inside] @ self.weight_VD.to(gradient.dtype))
        along_n = (gradient @ self.scenario.probe_V.to(gradient.dtype)).double()
        self.along_probe_D += along_n @ self.hidden_ND[start:stop].double()

    def expected(self, bound: float) -> dict[str, Expected]:
        probe_V = self.scenario.probe_V
        return {
            "dhidden": Expected(torch.cat(self.at_rows), bound, rows=self.rows, norm=True),
            "dweight": Expected(
                self.along_probe_D, bound, norm=True, of=lambda dweight_VD: probe_V @ dweight_VD.float()
            ),
        }
