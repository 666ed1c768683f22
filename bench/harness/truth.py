"""What the loss benchmarks should give, in float64 from the inputs as they are rounded.

Every token's terms and the loss; gradients of as many rows as are cheap, a chunk of rows at a time.

Shapes: N tokens, n of them at a time, V vocabulary, D hidden.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from bench.harness.accuracy import LINEAR_NORM, LOGP, gradient_bound
from bench.harness.inputs import (
    CHUNK_ELEMENTS,
    Scenario,
    anchor_tokens,
    chunks,
    head_products,
    head_steps,
    label_tokens,
    pieces,
    teacher_hidden,
)
from bench.harness.objective import Exact, exact, sway, take
from bench.harness.types import Expected
from smopd.ops import LossSettings, LossTokens

CHECKED_ELEMENTS = 1 << 26  # of the rows that are compared element by element
PEER_ROWS = 8  # of what peers compute


def checked_rows(n_rows: int, width: int, device: str, most: int | None = None) -> Tensor:
    """All rows if they are cheap, else the first, the last and what lies evenly between."""
    most = max(PEER_ROWS, CHECKED_ELEMENTS // max(width, 1)) if most is None else most
    if n_rows <= most:
        return torch.arange(n_rows, device=device)
    return torch.linspace(0, n_rows - 1, most, dtype=torch.float64, device=device).round().long()


def in_chunks(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    return rows.split(max(1, CHUNK_ELEMENTS // max(width, 1)))


def loss_truth(scenario: Scenario) -> dict[str, Expected]:
    """All tokens' terms and the loss; the gradient of the checked rows, or for a head of all."""
    case, tokens, settings = scenario.case, scenario.tokens, scenario.settings
    linear = scenario.logits_NV is None
    gradients = _HeadGradients(scenario) if linear else None
    parts, moved = [], []
    for rows in chunks(case):
        part = exact(scenario.chunk(rows), take(tokens, rows), settings, gradient=linear)
        if gradients is not None:
            gradients.add(part.gradient, rows)
            moved.append(_sway(scenario, rows))
        parts.append(replace(part, gradient=None, scale=None))
    counted = tokens.kl_weight_N != 0
    columns = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name in ("logp", "entropy", "kl", "surrogate", "weighted")
    }
    loss = columns.pop("weighted").sum()
    columns = {name: torch.where(counted, column, 0.0) for name, column in columns.items()}
    peers = _parts_of_peers(scenario)
    if gradients is not None:
        bound = LINEAR_NORM[case.torch_dtype]
        besides = {n: torch.where(counted, torch.cat([part[n] for part in moved]), 0.0) for n in moved[0]}
        expected = {
            name: Expected(column, bound, norm=True, besides=besides.get(name))
            for name, column in columns.items()
        }
        expected["loss"] = Expected(loss, bound * max(1.0, abs(float(loss))))
        return expected | gradients.expected(bound) | peers
    expected = {name: Expected(column, LOGP) for name, column in columns.items()}
    expected["loss"] = Expected(loss, LOGP * max(1.0, abs(float(loss))))
    return expected | {"dlogits": _logits_gradient(scenario)} | peers


def _sway(scenario: Scenario, rows: slice) -> dict[str, Tensor]:
    """How far the terms of these rows move where a 16-bit head's logits may be rounded either way."""
    assert scenario.hidden_ND is not None and scenario.weight_VD is not None
    if scenario.case.torch_dtype == torch.float32:
        return {}
    step = head_steps(scenario.hidden_ND[rows], scenario.weight_VD)
    return sway(scenario.chunk(rows), step, take(scenario.tokens, rows), scenario.settings)


def _to_one_teacher(scenario: Scenario) -> Expected:
    """The hidden states' gradient of the mean KL to that teacher over the whole vocabulary."""
    assert scenario.hidden_ND is not None and scenario.weight_VD is not None
    rows, weight_VD = _peer_rows(scenario), scenario.weight_VD
    hidden = scenario.hidden_ND[rows]
    student, teacher = (head_products(h, weight_VD).softmax(-1) for h in (hidden, teacher_hidden(hidden)))
    gradient = through_head(student - teacher, weight_VD) / scenario.case.N
    return Expected(gradient, LINEAR_NORM[scenario.case.torch_dtype], rows=rows, norm=True)


def _parts_of_peers(scenario: Scenario) -> dict[str, Expected]:
    """Gradients at a few rows of what peers compute where that is a part."""
    plain = LossSettings(temperature=scenario.settings.temperature)
    rows, dtype = _peer_rows(scenario), scenario.case.torch_dtype
    expected: dict[str, Expected] = {}
    for name, part in (("anchor", anchor_tokens), ("label", label_tokens)):
        gradient, scale = _at(rows, scenario, part(scenario.tokens), plain)
        if scenario.weight_VD is not None:
            gradient = through_head(gradient, scenario.weight_VD)
            expected[f"dhidden_{name}"] = Expected(gradient, LINEAR_NORM[dtype], rows=rows, norm=True)
        else:
            bound = gradient_bound(gradient, dtype, scale)
            expected[f"dlogits_{name}"] = Expected(gradient, bound, rows=rows)
    if scenario.weight_VD is not None:
        expected["dhidden_teacher"] = _to_one_teacher(scenario)
    return expected


def _peer_rows(scenario: Scenario) -> Tensor:
    return checked_rows(scenario.case.N, 1, str(scenario.tokens.adv_N.device), PEER_ROWS)


def _logits_gradient(scenario: Scenario) -> Expected:
    case = scenario.case
    rows = checked_rows(case.N, case.V, str(scenario.tokens.adv_N.device))
    gradients: list[Tensor] = []
    bounds: list[Tensor] = []
    for some in in_chunks(rows, case.V):
        gradient, scale = _at(some, scenario, scenario.tokens, scenario.settings)
        gradients.append(gradient)
        bounds.append(gradient_bound(gradient, case.torch_dtype, scale).float())
    return Expected(torch.cat(gradients), torch.cat(bounds), rows=rows)


def _at(
    rows: Tensor, scenario: Scenario, tokens: LossTokens, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """The gradient in the logits of these rows, and the size of its terms."""
    part: Exact = exact(scenario.chunk(rows), take(tokens, rows), settings, gradient=True)
    assert part.gradient is not None and part.scale is not None
    return part.gradient, part.scale


def through_head(gradient_nV: Tensor, weight_VD: Tensor) -> Tensor:
    """(n, D) in float64."""
    total = torch.zeros(
        gradient_nV.shape[0], weight_VD.shape[1], dtype=torch.float64, device=weight_VD.device
    )
    start = 0
    for piece in pieces(weight_VD):
        total += gradient_nV[:, start : start + piece.shape[0]] @ piece.double()
        start += piece.shape[0]
    return total


class _HeadGradients:
    """The hidden states' gradient at the checked rows, and the weight's along the probe, from all rows."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        assert scenario.hidden_ND is not None and scenario.weight_VD is not None
        self.hidden_ND, self.weight_VD = scenario.hidden_ND, scenario.weight_VD
        device = str(self.hidden_ND.device)
        self.rows = checked_rows(scenario.case.N, scenario.case.V, device)
        self.at_rows: list[Tensor] = []
        self.along_probe_D = torch.zeros(scenario.case.D, dtype=torch.float64, device=device)

    def add(self, gradient: Tensor | None, rows: slice) -> None:
        assert gradient is not None and self.scenario.probe_V is not None
        inside = self.rows[(self.rows >= rows.start) & (self.rows < rows.stop)] - rows.start
        self.at_rows.append(through_head(gradient[inside], self.weight_VD))
        along_n = gradient @ self.scenario.probe_V.double()
        self.along_probe_D += along_n @ self.hidden_ND[rows].double()

    def expected(self, bound: float) -> dict[str, Expected]:
        probe_V = self.scenario.probe_V
        return {
            "dhidden": Expected(torch.cat(self.at_rows), bound, rows=self.rows, norm=True),
            "dweight": Expected(
                self.along_probe_D, bound, norm=True, of=lambda dweight_VD: probe_V @ dweight_VD.float()
            ),
        }
