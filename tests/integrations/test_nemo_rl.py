"""SmopdLossFn compared with NeMo-RL's loss protocol and forward KL, and with smopd.ops.

NeMo-RL is source only and imports Ray and CUDA packages. A stand-in has the protocol of
nemo_rl/algorithms/loss/interfaces.py in versions 0.6 to 0.8.
"""

from __future__ import annotations

import enum
import pickle
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


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for an installed NeMo-RL 0.8."""
    interfaces = SimpleNamespace(LossType=LossType, LossInputType=LossInputType)
    for name in ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", interfaces)
    monkeypatch.setattr("smopd.integrations.shared.version", lambda name: "0.8.0")


def batch(n_teachers: int = M) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and data of a micro-batch in NeMo-RL's form."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=generator).requires_grad_()
    teachers = [torch.randn(B, T, V, generator=generator).topk(S) for _ in range(n_teachers)]
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
    loss_input = {"logits": logits}
    return loss_fn(
        data=data,
        global_valid_seqs=data["sample_mask"].sum(),
        global_valid_toks=trained(data).sum(),
        **loss_input,
    )


def trained(data: dict[str, Tensor]) -> Tensor:
    return (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]


def test_it_follows_the_protocol(host: None) -> None:
    loss_fn = SmopdLossFn([0.5, 0.5])
    assert (loss_fn.loss_type, loss_fn.input_type) == (LossType.TOKEN_LEVEL, LossInputType.LOGIT)
    sent = pickle.loads(pickle.dumps(loss_fn))  # it is sent to the workers
    logits, data = batch()
    assert call(sent, logits, data)[0] == call(loss_fn, logits, data)[0]


def test_one_teacher_without_tail_is_the_hosts_forward_kl(host: None) -> None:
    """NeMo-RL's DistillationLossFn with kl_type forward and zero_outside_topk: the teacher is normalised over
    its top k, the student over the vocabulary, and the loss a mean over the batch's trained tokens."""
    logits, data = batch(n_teachers=1)
    loss, _ = call(SmopdLossFn([1.0], LossSettings(tail=False, merge=False)), logits, data)
    (grad,) = torch.autograd.grad(loss, logits)
    ids, theirs = data["teacher_topk_indices"][:, :-1, 0], data["teacher_topk_logits"][:, :-1, 0]
    student = logits[:, :-1].log_softmax(-1).gather(-1, ids)
    teacher = theirs.log_softmax(-1)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    expected = (kl * trained(data)).sum() / trained(data).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, torch.autograd.grad(expected, logits)[0], rtol=1e-5, atol=1e-6)


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


def test_what_it_cannot_serve_is_refused(host: None) -> None:
    logits, data = batch()
    for weights, message in (([0.5, 0.6], "sum to 1"), ([1.5, -0.5], "at least 0"), ([], "sum to 1")):
        with pytest.raises(ValueError, match=message):
            SmopdLossFn(weights)
    with pytest.raises(ValueError, match=r"expected \(3, 7, 3, 'S'\) for 3 teachers"):
        call(SmopdLossFn([0.2, 0.3, 0.5]), logits, data)
    with pytest.raises(ValueError, match="without tensor or context parallelism"):
        call(SmopdLossFn([0.5, 0.5]), logits[:, : T - 1], data)
    with pytest.raises(ValueError, match="NeMo-RL divides the logits"):
        SmopdLossFn([0.5, 0.5], LossSettings(kl_temperature=0.7))
    for token in (V, -1):
        data["teacher_topk_indices"][0, 0, 0, 0] = token
        with pytest.raises(ValueError, match=rf"teacher_topk_indices has tokens .* ids in \[0, {V}\)"):
            call(SmopdLossFn([0.5, 0.5]), logits, data)
    answers = [{"topk_logits": torch.zeros(1, 2, k), "topk_indices": torch.zeros(1, 2, k)} for k in (3, 4)]
    with pytest.raises(ValueError, match=r"shapes \[\(1, 2, 3\), \(1, 2, 4\)\]"):
        stack_teachers(answers)


def test_an_unknown_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"needs nemo-rl, which is not installed.*nemo-rl>=0\.6,<0\.9"):
        SmopdLossFn([1.0])
    for installed in ("0.9.0", "0.9.0.dev1", "0.5.9"):
        monkeypatch.setattr("smopd.integrations.shared.version", lambda name, found=installed: found)
        with pytest.raises(ImportError, match=rf"nemo-rl>=0\.6,<0\.9; nemo-rl {installed} is installed"):
            SmopdLossFn([1.0])


def test_the_example_learns(
    host: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["nemo_rl_loss.py", "--steps", "15"])
    runpy.run_path(str(ROOT / "examples" / "nemo_rl_loss.py"), run_name="__main__")
    printed = capsys.readouterr().out
    first, last = (float(line.split("kl_loss ")[1].split(",")[0]) for line in printed.splitlines())
    assert last < 0.5 * first, printed
