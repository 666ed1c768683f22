"""What is smopd._C's own: what its operators refuse and in which words, their schemas, its import.

Its results are held to float64 with the other backends' in tests/kernels/conformance.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from smopd.kernels import cpp, dispatch
from smopd.kernels.types import LossSettings
from tests.kernels import cases

pytestmark = [
    pytest.mark.skipif(dispatch.cpp_unavailable() is not None, reason="smopd._C is not built"),
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"target_ids_NS": torch.tensor([[0, 1], [2, 3], [10, 4]])},
            "ids of row 2 hold an id outside 0 to V - 1 = 9",
        ),
        ({"token_ids_N": torch.tensor([0, 1, -1])}, r"token_ids\[2\] is -1, expected 0 to V - 1 = 9"),
        ({"adv_N": torch.zeros(2)}, r"adv has to be a CPU tensor of shape \(N,\) = \(3,\)"),
        ({"target_logps_NS": torch.zeros(3, 1)}, "logps differs from ids in dimension 1"),
    ],
)
def test_wrong_arguments_of_the_loss_are_named_before_anything_is_written(change: dict, message: str) -> None:
    logits_NV = cases.random_logits(3, 10)
    tokens = cases.random_tokens(logits_NV, None)
    target = {
        "target_ids_NS": torch.tensor([[0, 1], [2, 3], [5, 4]]),
        "target_logps_NS": torch.full((3, 2), -1.0),
    }
    own_NV = logits_NV.clone()
    with pytest.raises(RuntimeError, match="loss_rows_cpu: .*" + message):
        cpp.loss_rows(own_NV, replace(tokens, **target | change), LossSettings(), own_NV)
    assert torch.equal(own_NV, logits_NV)
    with pytest.raises(RuntimeError, match="grad differs from logits in shape or dtype"):
        cpp.loss_rows(logits_NV, tokens, LossSettings(), torch.empty(3, 10, dtype=torch.bfloat16))


def test_operator_schemas() -> None:
    logits_NV, tokens_N = cases.random_logits(3, 50), torch.tensor([1, 2, 3])
    teachers = cases.random_teachers(3, 50, 4)
    rows = (logits_NV, tokens_N, *teachers)
    columns, constants = [torch.ones(3)] * 7, (0.2, 0.2, 3.0, 1.0, 0.1, 1.0, 0.9, False)
    calls = {
        "topk_logprobs_cpu": (logits_NV, 4, tokens_N, 0.9),
        "teacher_mixture_cpu": (*teachers, 4, True),
        "forward_kl_rows_cpu": (*rows, 4, True, True, 1.0),
        "forward_kl_gradient_cpu": (logits_NV, tokens_N, *teachers, 4, True, True, 1.0, torch.ones(3), None),
        "loss_rows_cpu": (
            logits_NV,
            tokens_N,
            *columns,
            *teachers,
            4,
            True,
            True,
            *constants,
            torch.empty(3, 50),
        ),
    }
    for name, arguments in calls.items():
        operator = getattr(torch.ops.smopd, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema",))


def test_import_leaves_denormals_alone() -> None:
    """A library linked with -ffast-math would flush them in every thread that loads it."""
    code = (
        "import torch, smopd._C\n"
        "tiny = torch.full((100000,), 1e-40)\n"
        "torch.ops.smopd.topk_logprobs_cpu(torch.randn(64, 2000), 4, None, 1.0)\n"
        "assert 1e-310 * 0.5 > 0.0\n"
        "assert bool((tiny * 0.5 > 0).all())\n"
        "assert bool(torch.tensor(float('nan')).isnan()) and bool(torch.tensor(float('inf')).isinf())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
