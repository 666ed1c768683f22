"""`merge.method: product`: its target against whole vocabularies in float64, its settings, and whole runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smopd.config.schedule import product_reference
from smopd.config.settings import Gate, Opd, Settings, merged
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import Packing
from smopd.engine.types import TeacherTopK
from smopd.gates import change_weights, failure, log_alpha, path_weights
from smopd.objective import Objective, Signals, Target, teacher_target, teachers_rewards
from smopd.ops import Mixture, TopK
from smopd.record.token_view import token_records
from smopd.report.page import Report, write_report
from smopd.worlds.models import world_model
from tests.engine.local.teacher_truth import whole_logprobs
from tests.engine.tiny import VOCABULARY, ragged_rollouts, tiny_model
from tests.smopd.recipes import metric_lines, train_here, write_recipe
from tests.smopd.run.invariance_worker import SETTINGS
from tests.smopd.run.test_resume import after_lines, kill_when
from tests.smopd.test_objective import batch_of

KAPPA = 6
CPU = torch.device("cpu")
PRODUCT = {"merge": {"method": "product"}}
ROLLOUTS = ragged_rollouts(0)


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(merged(merged(SETTINGS, PRODUCT), changes))


def models() -> list:
    """Two teachers and the reference; the second teacher is near it."""
    first, reference = tiny_model(1), tiny_model(3)
    near = tiny_model(3)
    with torch.no_grad():
        for parameter in near.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return [first, near, reference]


def target_of(own: Settings, scored: list, rewards_RK: Tensor | None = None) -> tuple[Target, Any]:
    teachers = LocalTeachers(scored, Packing(micro_batch_tokens=60), VOCABULARY)
    topk = teachers.score(ROLLOUTS, KAPPA, own.kl_temperature, union=own.unites)
    batch = batch_of(ROLLOUTS)
    if rewards_RK is None:
        rewards_RK = torch.zeros(len(ROLLOUTS), 2, dtype=torch.float64)
    target = teacher_target(own, topk, batch, rewards_RK, CPU)
    assert target is not None
    return target, batch


def whole_product(
    scored: list, temperature: float, weights_NM: Tensor, clip: float | None, keep: float | None
) -> list[dict[int, float]]:
    """Each token's product from whole vocabularies, on the union of the kappa best, before the cut."""
    logps_MNV = torch.stack(
        [whole_logprobs(model.eval(), ROLLOUTS, temperature) for model in scored]
    ).double()
    base_NV = logps_MNV[-1]
    changes_MNV = (logps_MNV[:-1] - base_NV).clamp(-(clip or math.inf), clip or math.inf)
    changes_MNV = changes_MNV * weights_NM.double().T[..., None]
    total_NV = changes_MNV.sum(0)
    if keep is not None:
        total_NV = torch.where(changes_MNV.amax(0) > keep, changes_MNV.clamp(min=0).sum(0), total_NV)
    logq_NV = base_NV + total_NV
    rows = []
    for n in range(len(logq_NV)):
        union = sorted({int(i) for model in logps_MNV[:, n] for i in model.topk(KAPPA).indices})
        values = logq_NV[n, union].log_softmax(-1)
        rows.append(dict(zip(union, values.tolist(), strict=True)))
    return rows


def assert_product(found: Mixture, expected: list[dict[int, float]]) -> None:
    assert len(found.ids_NS) == len(expected) and found.ids_NS.shape[1] == KAPPA
    for ids, logps, mass, row in zip(found.ids_NS, found.logps_NS, found.mass_N, expected, strict=True):
        best = sorted(row.values(), reverse=True)[:KAPPA]
        assert logps.tolist() == pytest.approx(best, abs=2e-4)
        assert [row[token] for token in ids.tolist()] == pytest.approx(best, abs=2e-4)
        assert float(mass) == pytest.approx(sum(math.exp(value) for value in best), abs=1e-4)


@pytest.mark.parametrize("limits", [{}, {"protect_above": 0.1, "weights": [1.0, 0.5]}], ids=str)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_target_is_the_product_of_whole_vocabularies(temperature: float, limits: dict) -> None:
    own = settings(opd={"temperature": temperature, "product": limits})
    target, _ = target_of(own, models())
    n_tokens = len(target.topk.token_logps_NM)
    weights_NM = torch.tensor(limits.get("weights", [1.0, 1.0])).expand(n_tokens, 2)
    wanted = whole_product(models(), temperature, weights_NM, None, limits.get("protect_above"))
    assert target.product is not None
    assert_product(target.product, wanted)


def test_a_gate_weighs_the_changes() -> None:
    rewards_RK = torch.rand(len(ROLLOUTS), 2, generator=torch.Generator().manual_seed(0)).double()
    own = settings(opd={"gate": {"kind": "token"}, "product": {"weights": [2.0, 1.0]}})
    target, batch = target_of(own, models(), rewards_RK)
    ids_NMS, logps_NMS = target.topk.ids_NMS[:, :2, :KAPPA], target.topk.logps_NMS[:, :2, :KAPPA]
    failures = failure(*teachers_rewards(own, rewards_RK))
    alpha_NM = log_alpha(own.opd.gate, ids_NMS, logps_NMS, failures, batch.response_N).exp()
    assert alpha_NM.shape == (len(batch.token_ids_N), 2) and float(alpha_NM.std(0).max()) > 0.01
    torch.testing.assert_close(target.log_alpha.exp(), alpha_NM)
    weights_NM = torch.tensor([2.0, 1.0]) * 2 * alpha_NM
    assert target.product is not None
    assert_product(target.product, whole_product(models(), 1.0, weights_NM, None, None))


def test_changes_off_a_teachers_path_weigh_less() -> None:
    own = settings(opd={"gate": {"kind": "token"}, "product": {"prefix_floor": 0.2}})
    target, batch = target_of(own, models())
    path_NM = path_weights(target.changes_NM, batch.response_N, 0.2)
    assert float(path_NM.min()) == pytest.approx(0.2) and len(path_NM.unique()) > 4
    weights_NM = 2 * target.log_alpha.exp() * path_NM
    assert target.product is not None
    assert_product(target.product, whole_product(models(), 1.0, weights_NM, None, None))


def test_the_path_is_the_least_share_so_far_of_each_response() -> None:
    changes = [[0.5, -1.0], [-1.5, 0.25], [2.0, -math.inf], [0.0, 0.0]]
    changes += [[-0.25, math.nan], [0.1, 0.5], [0.0, 0.0]]
    response_N = torch.tensor([0, 0, 0, 0, 2, 2, 2])  # the second has no token
    expected = [[1, 1], [1, math.exp(-1)], [math.exp(-1), math.exp(-1)], [math.exp(-1), 0.05]]
    expected += [[1, 1], [math.exp(-0.25), 1], [math.exp(-0.25), 1]]
    found = path_weights(torch.tensor(changes), response_N, 0.05)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32))
    assert path_weights(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), 0.1).shape == (0, 2)


def test_weights_without_a_gate_are_exact() -> None:
    uniform = torch.full((3,), -math.log(3))
    assert change_weights(Gate(), None, uniform).tolist() == [1.0] * 3
    assert change_weights(Gate(), [0.1, 2.0, 0.0], uniform).tolist() == pytest.approx([0.1, 2.0, 0.0])


def test_the_loss_is_given_the_product_and_the_metrics_each_change() -> None:
    own = settings(loop={"updates_per_step": 2})
    target, _ = target_of(own, models())
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


class Letters:
    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i) for i in ids)


def test_the_token_view_shows_each_change(tmp_path: Path) -> None:
    ids, logps = torch.tensor([[[1, 2], [2, 1], [2, 3]]]), torch.full((1, 3, 2), 0.5).log()
    topk = TeacherTopK(ids, logps, torch.tensor([[-0.5, -3.0, -1.0]]))
    product = Mixture(ids[:, 0].int(), logps[:, 0], torch.ones(1))
    uniform = torch.full((2,), 0.5).log()
    target = Target(topk, uniform, torch.zeros(2), torch.ones(2), product)
    student = TopK(torch.tensor([[4, 5]]), torch.tensor([[-0.1, -3.0]]))
    (record,) = token_records(Letters(), torch.tensor([1]), target, Opd(kappa=2), student, slice(0, 1))
    assert record["changes"] == [0.5, -2.0] and "shares" not in record
    assert record["reference"] == [["c", 0.5], ["d", 0.5]] and len(record["teachers"]) == 2
    lost = record | {"changes": [None, -2.0]}
    views = {"student": [{"step": 1, "prompt": "p", "tokens": [record, lost]}]}
    write_report(tmp_path / "report.html", Report("t", tokens=views, teachers=["one", "two"]))
    page = (tmp_path / "report.html").read_text()
    assert "one +0.50" in page and "two -2.00" in page and "<b>reference</b>" in page
    assert "one no number" in page


def teacher(model: str, reward: str) -> dict[str, str]:
    return {"model": model, "reward": reward}


def test_the_reference_is_what_the_teachers_started_from() -> None:
    runs = {
        "half": {"stage": "specialize"},
        "a": {"stage": "specialize", "init": "half"},
        "b": {"stage": "specialize", "init": "half"},
        "c": {"stage": "specialize"},
        "student": {"stage": "merge", "init": "half"},
    }

    def of(*models: str, **product: Any) -> str | None:
        taught = [teacher(model, reward) for model, reward in zip(models, ("dense", "sparse"), strict=True)]
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


URLS = [teacher("http://a:1", "dense"), teacher("http://b:1,http://c:1", "sparse")]
AT_URLS = {"teachers": {"models": URLS}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"opd": {"product": {"weights": [1.0]}}}, "opd.product.weights: got 1, expected 2, one a teacher"),
        ({"opd": {"product": {"protect_above": -1.0}}}, "greater than or equal to 0"),
        ({"opd": {"product": {"prefix_floor": 1.5}}}, "less than or equal to 1"),
        (AT_URLS, "opd.product.reference: got 'init' beside teachers at URLs, expected one kind"),
        ({"opd": {"product": {"reference": "http://r:1"}}}, "got 'http://r:1' beside teachers at paths"),
        ({"opd": {"divergence": "reverse_kl_sampled"}}, "merge.method: the product is known on the ids"),
        ({"opd": {"target": "m:f"}}, "opd.target: got m:f, but merge.method product has a target of its own"),
    ],
)
def test_settings_that_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        settings(**changes)


def test_a_server_of_the_reference_is_waited_for_and_asked_twice() -> None:
    own = settings(**merged(AT_URLS, {"opd": {"product": {"reference": "http://r:1"}}}))
    assert own.waiting_seconds == pytest.approx(own.remote.deadline_seconds * (2 * 4 + 1) + 60)


def mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict) -> str:
    from smopd.config.cli import parse

    with pytest.raises(SystemExit):
        parse([str(write_recipe(tmp_path, merged(PRODUCT, changes)))])
    return capsys.readouterr().err


def test_a_recipes_reference_is_checked_at_once(tmp_path: Path, capsys) -> None:
    late = {"runs": {"late": {"stage": "train"}}, "opd": {"product": {"reference": "late"}}}
    assert "'late' does not come before the run 'student'" in mistake(tmp_path, capsys, late)
    typo = {"opd": {"product": {"reference": "format_teachr"}}}
    assert "is no run of this recipe" in mistake(tmp_path, capsys, typo)
    gone = {"opd": {"product": {"reference": "./nowhere"}}}
    assert "no file './nowhere'" in mistake(tmp_path, capsys, gone)
    chain = {"runs": {"format_teacher": {"init": "accuracy_teacher"}}}
    assert "the teachers started from accuracy_teacher and base" in mistake(tmp_path, capsys, chain)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Folders of two teachers and of the model that they started from, as far as a product can tell."""
    folder, made = tmp_path_factory.mktemp("models"), []
    for name in ("one", "two", "start"):
        made.append(str(folder / name))
        for part in world_model(len(made)):
            part.save_pretrained(made[-1])
    return made


def merge_alone(folder: Path, worlds: list[str], **changes: Any) -> Path:
    """A recipe of one run, which merges models by path."""
    folder.mkdir(exist_ok=True)
    taught = [teacher(worlds[0], "accuracy"), teacher(worlds[1], "format")]
    own = {"model": {"factory": None, "path": worlds[2]}, "teachers": {"models": taught}}
    recipe = write_recipe(folder, merged(merged(PRODUCT, own), changes), drop=("warm_start", "runs"))
    recipe.write_text(recipe.read_text() + "runs: {student: {stage: merge}}\n")
    return recipe


@pytest.mark.slow
def test_a_killed_run_ends_as_the_straight_one(tmp_path: Path, worlds: list[str]) -> None:
    limits = {"product": {"protect_above": 0.5, "prefix_floor": 0.1}, "gate": {"kind": "token"}}
    done = train_here(merge_alone(tmp_path / "straight", worlds, opd=limits))
    assert done.returncode == 0, done.stderr[-4000:]
    straight = tmp_path / "straight/runs/tiny"
    lines = metric_lines(straight / "student")
    for line in lines:
        assert line["kl"] >= -1e-6 and 0.2 < line["teacher_mass"] <= 1 + 1e-5
        assert line["teacher_0/change"] != line["teacher_1/change"]
    assert "<b>reference</b>" in (straight / "report.html").read_text()

    recipe, folder = merge_alone(tmp_path / "killed", worlds, opd=limits), tmp_path / "killed/runs/tiny"
    assert kill_when(after_lines("student", 3), recipe, folder, tmp_path / "log")
    done = train_here(recipe)
    assert done.returncode == 0, done.stderr[-4000:]
    assert metric_lines(folder / "student") == lines
    for file in ("samples.jsonl", "tokens.jsonl", "responses.jsonl", "export/model.safetensors"):
        assert (folder / "student" / file).read_bytes() == (straight / "student" / file).read_bytes(), file


def test_lora_teachers_and_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference is the adapters' own base, which is loaded once."""
    pytest.importorskip("peft")
    from smopd.engine.local import teachers

    model, tokenizer = world_model(0)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    changes = {
        "model": {"factory": None, "path": str(tmp_path / "model")},
        "data": {"evaluation": None},
        "student": {"lora": {"rank": 4, "alpha": 8.0}, "learning_rate": 1e-2},
        "loss": {"entropy_coef": 0.1},  # moves the teachers where no reward differs
        "loop": {"steps": 2},
        "runs": {"student": {"stage": "merge", "set": {"student": {"lora": None}, "loop": {"steps": 1}}}},
    }
    loaded: list[str] = []
    actual = teachers.load_model
    monkeypatch.setattr(
        teachers, "load_model", lambda path, *rest: loaded.append(str(path)) or actual(path, *rest)
    )
    done = train_here(write_recipe(tmp_path, merged(PRODUCT, changes), drop=("warm_start",)))
    assert done.returncode == 0, done.stderr[-4000:]
    assert [Path(path).resolve() for path in loaded] == [tmp_path / "model"]
    (line,) = metric_lines(tmp_path / "runs/tiny/student")
    assert abs(line["teacher_0/change"]) > 1e-5 and abs(line["teacher_1/change"]) > 1e-5
    assert math.isfinite(line["kl"]) and 0 < line["teacher_mass"] <= 1 + 1e-5
