"""True results of the loss benchmarks, computed in float64 from the rounded inputs, n rows at a time."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from bench.harness.accuracy import LINEAR_NORM, LOGP, gradient_bound
from bench.harness.inputs import CHUNK_ELEMENTS, Scenario, chunks, pieces
from bench.harness.objective import exact
from bench.harness.types import Expected

CHECKED_ELEMENTS = 1 << 26  # limit for the rows that are compared element by element
LEAST_ROWS = 8
TERMS = ("logp", "entropy", "kl", "surrogate")


def checked_rows(n_rows: int, width: int, device: str) -> Tensor:
    """Return all rows if they are few, else the first, the last and evenly spaced rows between."""
    most = max(LEAST_ROWS, CHECKED_ELEMENTS // max(width, 1))
    if n_rows <= most:
        return torch.arange(n_rows, device=device)
    return torch.linspace(0, n_rows - 1, most, dtype=torch.float64, device=device).round().long()


def in_chunks(rows: Tensor, width: int) -> tuple[Tensor, ...]:
    return rows.split(max(1, CHUNK_ELEMENTS // max(width, 1)))


def loss_truth(scenario: Scenario) -> dict[str, Expected]:
    """Return all terms, the loss, gradients of checked rows, and the probe times the weight's gradient."""
    case, tokens, weight_VD = scenario.case, scenario.tokens, scenario.weight_VD
    checked = checked_rows(case.N, case.V, str(tokens.adv_N.device))
    columns: dict[str, list[Tensor]] = defaultdict(list)
    along_probe_D = torch.zeros(case.D, dtype=torch.float64, device=checked.device)
    for rows in chunks(case):
        part, gradient, scale = exact(scenario.chunk(rows), tokens.at(rows), scenario.settings)
        for name in (*TERMS, "weighted"):
            columns[name].append(getattr(part, name))
        inside = checked[(checked >= rows.start) & (checked < rows.stop)] - rows.start
        if weight_VD is None:
            columns["gradient"].append(gradient[inside])
            bound = gradient_bound(gradient[inside], case.torch_dtype, scale[inside])
            columns["bound"].append(bound.float())
        else:
            assert scenario.probe_V is not None and scenario.hidden_ND is not None
            columns["gradient"].append(through_head(gradient[inside], weight_VD))
            along_probe_D += (gradient @ scenario.probe_V.double()) @ scenario.hidden_ND[rows].double()
    found = {name: torch.cat(parts) for name, parts in columns.items()}
    loss, linear = found["weighted"].sum(), weight_VD is not None
    bound = LINEAR_NORM[case.torch_dtype] if linear else LOGP
    expected = {name: Expected(found[name], bound, norm=linear) for name in TERMS}
    expected["loss"] = Expected(loss, bound * max(1.0, abs(float(loss))))
    # For other libraries: the surrogate with advantage 1, and the mean cross entropy.
    ratio_N = (found["logp"] - tokens.old_logp_N).exp()
    least, most = 1 - scenario.settings.clip_low, 1 + scenario.settings.clip_high
    expected["even_surrogate"] = Expected(-torch.minimum(ratio_N, ratio_N.clamp(least, most)))
    expected["cross_entropy"] = Expected(-found["logp"].mean())
    if not linear:
        expected["dlogits"] = Expected(found["gradient"], found["bound"], rows=checked)
        return expected
    probe_V = scenario.probe_V
    along = Expected(along_probe_D, bound, norm=True, of=lambda dweight_VD: probe_V @ dweight_VD.float())
    expected |= {"dhidden": Expected(found["gradient"], bound, rows=checked, norm=True), "dweight": along}
    return expected


def through_head(gradient_nV: Tensor, weight_VD: Tensor) -> Tensor:
    """Return gradient @ weight, (n, D) in float64."""
    parts = zip(
        gradient_nV.split([len(piece) for piece in pieces(weight_VD)], 1), pieces(weight_VD), strict=True
    )
    total = torch.zeros(len(gradient_nV), weight_VD.shape[1], dtype=torch.float64, device=weight_VD.device)
    for gradient, piece in parts:
        total += gradient @ piece.double()
    return total
