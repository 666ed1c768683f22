"""SmopdLossFn compared with NeMo-RL's forward KL and with smopd.ops.

NeMo-RL is source only and imports Ray and CUDA packages. A stand-in has the names of
nemo_rl/algorithms/loss/interfaces.py in versions 0.6 to 0.8.
"""

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from examples.nemo_rl_loss import SmopdLossFn, stack_teachers
from smopd.ops import LossSettings, LossTokens, smopd_loss
from tests.ranks import ROOT

B, T, V, S = 3, 7, 50, 6
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in for an installed NeMo-RL 0.8."""
    kinds = SimpleNamespace(TOKEN_LEVEL="token", LOGIT="logit")
    interfaces = SimpleNamespace(LossType=kinds, LossInputType=kinds)
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.interfaces", interfaces)
    monkeypatch.setattr("smopd.integrations.shared.version", lambda name: "0.8.0")


def batch(n_teachers: int = 2) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Return logits and data of a micro-batch in NeMo-RL's form, and the mask of its trained tokens."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(B, T, V, generator=generator).requires_grad_()
    teachers = [torch.randn(B, T, V, generator=generator).topk(S) for _ in range(n_teachers)]
    data = {
        "input_ids": torch.randint(V, (B, T), generator=generator),
        "token_mask": (torch.arange(T) >= 2).float().expand(B, T),
        "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        **stack_teachers([{"topk_logits": values, "topk_indices": ids} for values, ids in teachers]),
    }
    return logits, data, (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]


def call(loss_fn: SmopdLossFn, logits: Tensor, data: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
    """Call the loss as NeMo-RL's workers do, by keyword."""
    trained = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].sum()
    counts = {"global_valid_seqs": data["sample_mask"].sum(), "global_valid_toks": trained}
    return loss_fn(data=data, **counts, logits=logits)


def test_one_teacher_without_tail_is_the_hosts_forward_kl(host: None) -> None:
    """NeMo-RL's DistillationLossFn with kl_type forward and zero_outside_topk: the teacher is normalised over
    its top k, the student over the vocabulary, and the loss a mean over the batch's trained tokens."""
    logits, data, mask = batch(n_teachers=1)
    loss, _ = call(SmopdLossFn([1.0], LossSettings(tail=False, merge=False)), logits, data)
    ids, theirs = data["teacher_topk_indices"][:, :-1, 0], data["teacher_topk_logits"][:, :-1, 0]
    student, teacher = logits[:, :-1].log_softmax(-1).gather(-1, ids), theirs.log_softmax(-1)
    expected = ((teacher.exp() * (teacher - student)).sum(-1) * mask).sum() / mask.sum()
    torch.testing.assert_close(loss, expected, **CLOSE)
    grads = [torch.autograd.grad(each, logits)[0] for each in (loss, expected)]
    torch.testing.assert_close(*grads, **CLOSE)


def test_mixture_and_policy_gradient_are_smopd_loss(host: None) -> None:
    """Also with logits that are padded beyond the data."""
    logits, data, mask_BT = batch()
    generator = torch.Generator().manual_seed(1)
    data["advantages"] = torch.randn(B, 1, generator=generator).expand(B, T)
    data["prev_logprobs"] = -4 * torch.rand(B, T, generator=generator)
    data["teacher_topk_logprobs"] = data["teacher_topk_logits"].log_softmax(-1) - 0.1
    settings = LossSettings(opd_coef=0.7, dual_clip=3.0)
    longer = torch.cat([logits, logits.new_full((B, 3, V), 9.0)], dim=1)
    loss, metrics = call(SmopdLossFn([0.3, 0.7], settings), longer, data)
    weight_N = (mask_BT / mask_BT.sum()).flatten()
    tokens = LossTokens(
        token_ids_N=data["input_ids"][:, 1:].flatten(),
        adv_N=data["advantages"][:, 1:].flatten(),
        pg_weight_N=weight_N,
        old_logp_N=data["prev_logprobs"][:, 1:].flatten(),
        kl_weight_N=weight_N,
        teacher_ids_NMS=data["teacher_topk_indices"][:, :-1].flatten(0, 1),
        teacher_logps_NMS=data["teacher_topk_logprobs"][:, :-1].flatten(0, 1),
        log_alpha=torch.tensor([0.3, 0.7]).log(),
    )
    expected, stats = smopd_loss(logits[:, :-1].flatten(0, 1), tokens, settings)
    torch.testing.assert_close(loss, expected, **CLOSE)
    grads = [torch.autograd.grad(each, logits)[0] for each in (loss, expected)]
    torch.testing.assert_close(*grads, **CLOSE)
    values = {"loss": expected, "kl_loss": stats.kl_loss, "teacher_mass": stats.teacher_mass_N @ weight_N}
    assert {name: metrics[name] for name in values} == pytest.approx(
        {name: value.item() for name, value in values.items()}, rel=1e-5
    )


def test_what_it_cannot_serve_is_refused(host: None) -> None:
    logits, data, _ = batch()
    with pytest.raises(ValueError, match="sum to 1"):
        SmopdLossFn([0.5, 0.6])
    with pytest.raises(ValueError, match="NeMo-RL divides the logits"):
        SmopdLossFn([0.5, 0.5], LossSettings(kl_temperature=0.7))
    with pytest.raises(ValueError, match=r"expected \(3, 7, 3, 'S'\) for 3 teachers"):
        call(SmopdLossFn([0.2, 0.3, 0.5]), logits, data)
    with pytest.raises(ValueError, match="without tensor or context parallelism"):
        call(SmopdLossFn([0.5, 0.5]), logits[:, : T - 1], data)
    for token in (V, -1):
        data["teacher_topk_indices"][0, 0, 0, 0] = token
        with pytest.raises(ValueError, match=rf"teacher_topk_indices holds \d+ ids outside \[0, {V}\)"):
            call(SmopdLossFn([0.5, 0.5]), logits, data)


def test_an_unknown_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ImportError, match=r"needs nemo-rl, which is not installed.*nemo-rl>=0\.6,<0\.9"):
        SmopdLossFn([1.0])
    for installed in ("0.9.0.dev1", "0.5.9"):
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
