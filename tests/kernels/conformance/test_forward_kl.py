"""topk_forward_kl of every backend against float64: its rows are the loss's, held in test_loss.py."""

from __future__ import annotations

import pytest
import torch

from tests.kernels import backends, cases
from tests.kernels.cases import check_kl, kl_case, run_kl
from tests.kernels.pairwise import label, pairwise

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter's numpy
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
    if backend != "reference":  # float64 is the reference's: dispatch gives it no other
        options["dtype"] = row["dtype"].replace("fp64", "fp32")
    check_kl(backend, kl_case(**options), row["layout"])


@each_backend
def test_no_rows(backend: str) -> None:
    none = kl_case((3, 40, 2, 4), target="given").at(torch.zeros(0, dtype=torch.int64))
    assert [value.shape for value in run_kl(backend, none)] == [(0,), (0,), (0, 40)]
