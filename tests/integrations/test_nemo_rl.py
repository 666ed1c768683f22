"""SmopdLossFn compared with smopd.ops.

NeMo-RL is source only and imports Ray and CUDA packages. A stand-in has the protocol of
nemo_rl/algorithms/loss/interfaces.py in versions 0.6 to 0.8.
"""

from __future__ import annotations

import enum
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.nemo_rl_loss import SmopdLossFn, stack_teachers
from smopd.ops import LossSettings, LossTokens, smopd_loss

ROOT = Path(__file__).resolve().parents[2]
B, T, V, M, S = 3, 7, 50, 2, 6


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for an installed NeMo-RL 0.8."""
    kinds = {"LossType": enum.Enum("LossType", "TOKEN_LEVEL"), "LossInputType": enum.Enum("Input", "LOGIT")}
    interfaces = SimpleNamespace(**kinds)
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", interfaces)
    monkeypatch.setattr("smopd.integrations.shared.version", lambda name: "0.8.0")


def batch() -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and data of a micro-batch in NeMo-RL's form."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=generator).requires_grad_()
    teachers = [torch.randn(B, T, V, generator=generator).topk(S) for _ in range(M)]
    answers = [{"topk_logits": values, "topk_indices": ids} for values, ids in teachers]
    data = {
        "input_ids": torch.randint(V, (B, T), generator=generator),
        "token_mask": (torch.arange(T) >= 2).float().expand(B, T),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        **stack_teachers(answers),
    }
    return logits, data


def call(loss_fn: SmopdLossFn, logits: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Call the loss as NeMo-RL's workers do, by keyword."""
    counts = {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": trained(data).sum()}
    return loss_fn(logits=logits, data=data, **counts)


def trained(data: dict[str, Tensor]) -> Tensor:
    return (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]


@pytest.mark.parametrize("padding", [0, 3], ids=["whole", "padded logits"])
def test_mixture_and_policy_gradient_are_smopd_loss(host: None, padding: int) -> None:
    logits, data = batch()
    generator = torch.Generator().manual_seed(1)
    data["advantages"] = torch.randn(B, 1, generator=generator).expand(B, T)
    data["prev_logprobs"] = -4 * torch.rand(B, T, generator=generator)
    data["teacher_topk_logprobs"] = data["teacher_topk_logits"].log_softmax(-1) - 0.1
    settings = LossSettings(opd_coef=0.7, dual_clip=3.0)
    longer = torch.cat([logits, logits.new_full((B, padding, V), 9.0)], dim=1)
    loss, metrics = call(SmopdLossFn([0.3, 0.7], settings), longer, data)
    mask = trained(data).flatten()
    tokens = LossTokens(
        token_ids_N=data["input_ids"][:, 1:].flatten(),
        adv_N=data["advantages"][:, 1:].flatten(),
        pg_weight_N=mask / mask.sum(),
        old_logp_N=data["prev_logprobs"][:, 1:].flatten(),
        kl_weight_N=mask / mask.sum(),
        teacher_ids_NMS=data["teacher_topk_indices"][:, :-1].flatten(0, 1),
        teacher_logps_NMS=data["teacher_topk_logprobs"][:, :-1].flatten(0, 1),
        log_alpha=torch.tensor([0.3, 0.7]).log(),
    )
    expected, stats = smopd_loss(logits[:, :-1].flatten(0, 1), tokens, settings)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, logits)[0], torch.autograd.grad(expected, logits)[0], rtol=1e-5, atol=1e-6
    )
    assert metrics["num_valid_samples"] == B
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["kl_loss"] == pytest.approx(stats.kl_loss.item(), rel=1e-5)
    assert metrics["pg_loss"] == pytest.approx(stats.pg_loss.item(), rel=1e-5)
    assert metrics["teacher_mass"] == pytest.approx(
        (stats.teacher_mass_N @ (mask / mask.sum())).item(), rel=1e-5
    )


def test_the_example_learns(
    host: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nemo_rl_loss.py", "--steps", "15"])
    runpy.run_path(str(ROOT / "examples" / "nemo_rl_loss.py"), run_name="__main__")
    printed = capsys.readouterr().out
    first, last = (float(line.split("kl_loss ")[1].split(",")[0]) for line in printed.splitlines())
    assert last < 0.5 * first, printed
