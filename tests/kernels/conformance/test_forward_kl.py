"""topk_forward_kl on every backend against float64; its rows are loss_rows, tested in test_loss.py."""

from __future__ import annotations

import pytest

from tests.kernels import backends, cases
from tests.kernels.cases import check_kl, kl_case
from tests.kernels.pairwise import label, pairwise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from numpy in the interpreter
each_backend = backends.each("loss_rows", but=("triton split",))
FACTORS = {
    "shape": (cases.SHAPES[1], cases.SHAPES[0], cases.SHAPES[2]),
    "dtype": tuple(cases.DTYPES),
    "target": ("given", "repeats"),
    "tail": (False, True),
    "temperature": (1.0, 0.7),
    "upstream": ("both", "logp", "kl"),
    "layout": cases.LAYOUTS,
}


@each_backend
@pytest.mark.parametrize("row", pairwise(FACTORS), ids=label)
def test_equals_float64(row: dict, backend: str) -> None:
    options = {name: row[name] for name in row if name != "layout"}
    if backend != "reference":  # only the reference gets float64
        options["dtype"] = row["dtype"].replace("fp64", "fp32")
    check_kl(backend, kl_case(**options), row["layout"])
