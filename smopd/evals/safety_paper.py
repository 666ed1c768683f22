"""The paper's safe-alignment tables: tab:safe_align, tab:gate_safe, tab:anchor_ablation, tab:opd_ablation."""

from __future__ import annotations

from collections.abc import Mapping

from smopd.evals import paper

BACKBONES = ("Qwen2.5-3B", "Qwen2.5-7B", "Llama-3.2-3B")
METHODS = ("GRPO", "GDPO", "GD2PO", "Useful Teacher", "Harmless Teacher", "SMOPD")
GATES = ("SMOPD (seq gate)", "SMOPD (token gate)")
LABELS = tuple(f"{backbone} {method}" for backbone in BACKBONES for method in (*METHODS, *GATES))
KEYS = (
    *(f"{group}_{key}" for group in ("hh", "pku", "alpaca") for key in ("useful", "harmless", "avg")),
    "overall",
)
VALUES = (
    (4.400, 5.690, 5.045, 5.372, 6.878, 6.125, 5.281, 6.020, 5.650, 5.607),
    (4.382, 5.704, 5.043, 5.373, 6.883, 6.128, 5.247, 6.001, 5.624, 5.598),
    (4.485, 5.730, 5.107, 5.406, 6.879, 6.143, 5.379, 6.023, 5.701, 5.650),
    (4.448, 5.472, 4.960, 5.303, 6.700, 6.001, 5.407, 5.736, 5.572, 5.511),
    (4.320, 5.784, 5.052, 5.375, 6.919, 6.147, 5.149, 6.176, 5.662, 5.620),
    (4.511, 5.743, 5.127, 5.426, 6.869, 6.147, 5.392, 6.071, 5.732, 5.669),
    (4.493, 5.776, 5.134, 5.422, 6.881, 6.152, 5.360, 6.079, 5.720, 5.669),
    (4.471, 5.749, 5.110, 5.408, 6.876, 6.142, 5.355, 6.079, 5.717, 5.656),
    (4.237, 5.469, 4.853, 5.386, 6.834, 6.110, 4.976, 5.647, 5.312, 5.425),
    (4.318, 5.439, 4.878, 5.329, 6.766, 6.048, 5.323, 5.813, 5.568, 5.498),
    (4.379, 5.511, 4.945, 5.390, 6.801, 6.096, 5.434, 5.909, 5.672, 5.571),
    (4.515, 5.313, 4.914, 5.430, 6.658, 6.044, 5.513, 5.572, 5.543, 5.500),
    (4.220, 5.607, 4.913, 5.354, 6.889, 6.122, 5.021, 6.041, 5.531, 5.522),
    (4.475, 5.656, 5.065, 5.448, 6.837, 6.143, 5.421, 6.036, 5.729, 5.646),
    (4.497, 5.664, 5.080, 5.447, 6.826, 6.136, 5.383, 5.991, 5.687, 5.635),
    (4.495, 5.669, 5.082, 5.452, 6.847, 6.149, 5.402, 6.044, 5.723, 5.651),
    (4.264, 5.510, 4.887, 5.117, 6.645, 5.881, 5.340, 5.891, 5.615, 5.461),
    (4.414, 5.642, 5.028, 5.315, 6.761, 6.038, 5.366, 5.998, 5.682, 5.583),
    (4.438, 5.657, 5.047, 5.319, 6.776, 6.047, 5.429, 6.012, 5.721, 5.605),
    (4.174, 5.177, 4.676, 5.198, 6.512, 5.855, 5.296, 5.489, 5.393, 5.308),
    (3.917, 5.271, 4.594, 5.046, 6.626, 5.836, 4.869, 5.724, 5.296, 5.242),
    (4.437, 5.633, 5.035, 5.349, 6.756, 6.052, 5.406, 5.962, 5.684, 5.590),
    (4.413, 5.588, 5.001, 5.337, 6.731, 6.034, 5.427, 5.974, 5.701, 5.578),
    (4.422, 5.611, 5.016, 5.329, 6.738, 6.034, 5.416, 5.919, 5.667, 5.572),
)
ACROSS = ("useful", "harmless", "overall")
"""Means over the benchmarks, all that the tables of ablations print."""
ABLATIONS = {
    "GDPO": (4.990, 6.006, 5.498),
    "Useful Teacher": (5.153, 5.848, 5.500),
    "Harmless Teacher": (4.865, 6.179, 5.522),
    "OPD only, kappa 32": (5.011, 6.077, 5.544),
    "SMOPD": (5.115, 6.176, 5.646),
    "SMOPD, kappa 32": (5.099, 6.178, 5.639),
    "SMOPD, kappa 64": (5.102, 6.181, 5.642),
    "SMOPD, sampled reverse KL": (5.034, 6.093, 5.563),
}
"""Of Qwen2.5-7B; some rows stand in the main table too."""


def rows() -> Mapping[str, Mapping[str, float]]:
    """label -> column -> value, as printed."""
    found = {label: dict(row) for label, row in paper.rows(LABELS, KEYS, VALUES, [1.0] * len(KEYS)).items()}
    for method, values in ABLATIONS.items():
        found.setdefault(f"{BACKBONES[1]} {method}", {}).update(zip(ACROSS, values, strict=True))
    return found
