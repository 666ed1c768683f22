"""`merge.method: product`: the target equals float64 over the vocabulary; settings; a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from smopd.config.cli import parse
from smopd.config.schedule import product_reference
from smopd.config.settings import Settings, merged
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import REQUEST_SECONDS, Packing
from smopd.gates import failure, log_alpha
from smopd.objective import Objective, Signals, Target, teacher_target, teachers_rewards
from smopd.worlds.models import world_model
from tests.engine.local.teacher_truth import whole_logprobs
from tests.engine.tiny import VOCABULARY, ragged_rollouts, tiny_model
from tests.smopd.recipes import metric_lines, train_here, write_recipe
from tests.smopd.run.invariance_worker import SETTINGS
from tests.smopd.test_objective import batch_of

KAPPA = 6
CPU = torch.device("cpu")
PRODUCT = {"merge": {"method": "product"}}
NAMES = ("dense", "sparse")
ROLLOUTS = ragged_rollouts(0)


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(merged(merged(SETTINGS, PRODUCT), changes))


def models() -> list:
    """Return two teachers and the reference; the second teacher is close to it."""
    first, reference = tiny_model(1), tiny_model(3)
    near = tiny_model(3)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return [first, near, reference]


def target_of(own: Settings, rewards_RK: Tensor) -> tuple[Target, Any]:
    teachers = LocalTeachers(models(), Packing(micro_batch_tokens=60), VOCABULARY)
    topk = teachers.score(ROLLOUTS, KAPPA, own.kl_temperature, union=own.unites)
    batch = batch_of(ROLLOUTS)
    target = teacher_target(own, topk, batch, rewards_RK, CPU)
    assert target is not None
    return target, batch


def assert_product(target: Target, temperature: float, weights_NM: Tensor, keep: float | None = None) -> None:
    """Compare the target with float64 over the vocabulary, on the union of each model's top kappa."""
    logps_MNV = torch.stack(
        [whole_logprobs(model.eval(), ROLLOUTS, temperature) for model in models()]
    ).double()
    changes_MNV = (logps_MNV[:-1] - logps_MNV[-1]) * weights_NM.double().T[..., None]
    total_NV = changes_MNV.sum(0)
    if keep is not None:
        total_NV = torch.where(changes_MNV.amax(0) > keep, changes_MNV.clamp(min=0).sum(0), total_NV)
    logq_NV = logps_MNV[-1] + total_NV
    found = target.product
    assert found is not None and found.ids_NS.shape == (len(logq_NV), KAPPA)
    for n, logq_V in enumerate(logq_NV):
        union = sorted({int(i) for model in logps_MNV[:, n] for i in model.topk(KAPPA).indices})
        row = dict(zip(union, logq_V[union].log_softmax(-1).tolist(), strict=True))
        best = sorted(row.values(), reverse=True)[:KAPPA]
        assert found.logps_NS[n].tolist() == pytest.approx(best, abs=2e-4)
        assert [row[token] for token in found.ids_NS[n].tolist()] == pytest.approx(best, abs=2e-4)
        assert float(found.mass_N[n]) == pytest.approx(sum(math.exp(value) for value in best), abs=1e-4)


@pytest.mark.parametrize(
    ("temperature", "gate", "limits"),
    [
        (0.7, "uniform", {}),
        (1.0, "uniform", {"protect_above": 0.1, "weights": [1.0, 0.5]}),
        (1.0, "token", {"weights": [2.0, 1.0]}),
    ],
    ids=str,
)
def test_the_target_is_the_product_over_the_vocabulary(temperature: float, gate: str, limits: dict) -> None:
    """A gate multiplies the exponents by the number of teachers times its weights."""
    own = settings(opd={"temperature": temperature, "gate": {"kind": gate}, "product": limits})
    rewards_RK = torch.rand(len(ROLLOUTS), 2, generator=torch.Generator().manual_seed(0)).double()
    target, batch = target_of(own, rewards_RK)
    weights_NM = torch.tensor(limits.get("weights", [1.0, 1.0])).expand(len(batch.token_ids_N), 2)
    if gate == "token":
        ids_NMS, logps_NMS = target.topk.ids_NMS[:, :2, :KAPPA], target.topk.logps_NMS[:, :2, :KAPPA]
        failures = failure(*teachers_rewards(own, rewards_RK))
        alpha_NM = log_alpha(own.opd.gate, ids_NMS, logps_NMS, failures, batch.response_N).exp()
        torch.testing.assert_close(target.log_alpha.exp(), alpha_NM)
        assert float(alpha_NM.std(0).max()) > 0.01
        weights_NM = weights_NM * 2 * alpha_NM
    assert_product(target, temperature, weights_NM, limits.get("protect_above"))


def test_the_loss_is_given_the_product_and_the_metrics_each_change() -> None:
    own = settings(loop={"updates_per_step": 2})
    target, _ = target_of(own, torch.zeros(len(ROLLOUTS), 2, dtype=torch.float64))
    batch = batch_of(ROLLOUTS, updates=2)
    signals = Signals(torch.zeros(len(batch.token_ids_N)), target, None)
    adv_R = torch.zeros(len(ROLLOUTS))
    for part in batch.parts:
        tokens = Objective(own, 1.0, CPU).loss_tokens(batch, part, adv_R, signals)
        assert tokens.teacher_ids_NMS is None and tokens.log_alpha is None and target.product is not None
        assert tokens.target_ids_NS.equal(target.product.ids_NS[part.tokens])
        assert tokens.target_logps_NS.equal(target.product.logps_NS[part.tokens])
    first, second, base = target.topk.token_logps_NM.unbind(1)
    torch.testing.assert_close(target.changes_NM, torch.stack([first - base, second - base], 1))


def test_the_reference_is_what_the_teachers_started_from() -> None:
    runs = {
        "half": {"stage": "specialize"},
        "a": {"stage": "specialize", "init": "half"},
        "b": {"stage": "specialize", "init": "half"},
        "c": {"stage": "specialize"},
        "student": {"stage": "merge", "init": "half"},
    }

    def of(*models: str, **product: Any) -> str | None:
        taught = [{"model": model, "reward": reward} for model, reward in zip(models, NAMES, strict=True)]
        changes = {"teachers": {"models": taught}, **PRODUCT, "opd": {"product": product}}
        own = Settings.model_validate({**merged(SETTINGS, changes), "runs": runs})
        return product_reference(own, "student")

    assert of("a", "b") == "half"
    assert of("a", "org/other") == "half"
    assert of("org/one", "org/two") == "base"
    assert of("a", "c", reference="c") == "c"
    with pytest.raises(ValueError, match="the teachers started from base and half; name one"):
        of("a", "c")
    assert product_reference(Settings.model_validate(SETTINGS), "student") is None
    assert product_reference(settings(runs={"control": {"stage": "train"}}), "control") is None


AT_URLS = {
    "teachers": {
        "models": [
            {"model": "http://a:1", "reward": "dense"},
            {"model": "http://b:1,http://c:1", "reward": "sparse"},
        ]
    }
}


def test_a_server_of_the_reference_is_waited_for_and_asked_twice() -> None:
    own = settings(**merged(AT_URLS, {"opd": {"product": {"reference": "http://r:1"}}}))
    assert own.waiting_seconds == pytest.approx(REQUEST_SECONDS * (2 * 4 + 1) + 60)


def test_a_recipes_reference_is_checked_at_once(tmp_path: Path, capsys) -> None:
    late = {"opd": {"product": {"reference": "student"}}}
    with pytest.raises(SystemExit):
        parse([str(write_recipe(tmp_path, merged(PRODUCT, late)))])
    assert "'student' must come before the run 'student'" in capsys.readouterr().err


def test_lora_teachers_and_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the adapters' base, and is loaded once."""
    pytest.importorskip("peft")
    from smopd.engine.local import teachers

    model, tokenizer = world_model(0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    changes = {
        "model": {"factory": None, "path": str(tmp_path / "model")},
        "data": {"evaluation": None},
        "student": {"lora": {"rank": 4, "alpha": 8.0}, "learning_rate": 1e-2},
        "loss": {"entropy_coef": 0.1},  # a gradient if no reward differs
        "opd": {"product": {"protect_above": 0.5}, "gate": {"kind": "token"}},
        "loop": {"steps": 2},
        "runs": {"student": {"stage": "merge", "set": {"student": {"lora": None}, "loop": {"steps": 1}}}},
    }
    load_model = Mock(side_effect=teachers.load_model)
    monkeypatch.setattr(teachers, "load_model", load_model)
    done = train_here(write_recipe(tmp_path, merged(PRODUCT, changes), drop=("warm_start",)))
    assert done.returncode == 0, done.stderr[-4000:]
    assert [Path(call.args[0]).resolve() for call in load_model.call_args_list] == [tmp_path / "model"]
    (line,) = metric_lines(tmp_path / "runs/tiny/student")
    assert abs(line["teacher_0/change"]) > 1e-5 and abs(line["teacher_1/change"]) > 1e-5
    assert math.isfinite(line["kl"]) and 0 < line["teacher_mass"] <= 1 + 1e-5
