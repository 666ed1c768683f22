"""Every metric of a step equals dense arithmetic on the same fixed responses."""

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from smopd.engine.types import Sampling
from smopd.record.metrics import GIB, Metrics
from smopd.record.recorder import Recorder
from tests.engine.tiny import own_ids, plain_logits, tiny_model
from tests.smopd.recipes import metric_lines
from tests.smopd.run.invariance_worker import (
    GROUP_SIZE,
    PROMPTS,
    SETTINGS,
    FixedRewarder,
    FixedRollouts,
    Numbers,
    prompt_set,
    settings_of,
    train,
)

KAPPA, TEMPERATURE, KL_TEMPERATURE = 6, SETTINGS["rollout"]["temperature"], 1.3
ONE_UPDATE = {"loop": {"updates_per_step": 1}}


def lines(folder, device, opd, **changes):
    train(folder, device, changes={**ONE_UPDATE, "opd": {"kappa": KAPPA, **opd}, **changes})
    return metric_lines(folder, times=True)


@pytest.fixture(scope="module")
def merged(device, tmp_path_factory):
    opd = {"temperature": KL_TEMPERATURE, "schedule": "linear", "final_coef": 0.0, "decay_steps": 1}
    return lines(tmp_path_factory.mktemp("merged"), device, opd)


@pytest.fixture(scope="module")
def pooled(device, tmp_path_factory):
    opd = {"target": "pooled", "tail": False, "schedule": "constant"}
    return lines(tmp_path_factory.mktemp("pooled"), device, opd, loss={"importance_cap": 1.2})


@pytest.fixture(scope="module")
def reverse(device, tmp_path_factory):
    opd = {"divergence": "reverse_kl_sampled", "schedule": "constant", "temperature": KL_TEMPERATURE}
    return lines(tmp_path_factory.mktemp("reverse"), device, opd)


@pytest.fixture(scope="module")
def rollouts():
    """Rollouts of the first step, in any order of prompts."""
    prompts = [prompt.token_ids for prompt in prompt_set()]
    return FixedRollouts().generate(prompts, range(PROMPTS), Sampling(n=GROUP_SIZE))


@pytest.fixture(scope="module")
def logits_NV(rollouts):
    """The student's, and the teachers'."""
    with torch.no_grad():
        student, *teachers = (plain_logits(tiny_model(i).eval(), rollouts).double() for i in range(3))
    return student, teachers


def at_tokens(logps_NV, rollouts):
    return logps_NV.gather(-1, own_ids(rollouts)[:, None])[:, 0]


def sparse(teachers_NV, temperature):
    """Return each teacher's kappa largest probabilities, and 0 for other tokens."""
    kept = []
    for logits in teachers_NV:
        p_NV = (logits / temperature).softmax(-1)
        kept.append(p_NV * (p_NV >= p_NV.topk(KAPPA).values[:, -1:]))
    return kept


def test_rewards_and_responses(merged, rollouts):
    found = merged[0]
    scores = FixedRewarder().score(None, rollouts, 0)
    for k, name in enumerate(("dense", "sparse")):
        values = scores.rewards_RK[:, k]
        known = values[~values.isnan()]
        assert found[f"reward/{name}/mean"] == pytest.approx(float(known.mean()))
        assert found[f"reward/{name}/std"] == pytest.approx(float(known.std()))
        assert found[f"reward/{name}/unscorable"] == pytest.approx(float(values.isnan().double().mean()))
        groups = defaultdict(set)
        for rollout, value in zip(rollouts, values.tolist(), strict=True):
            if not math.isnan(value):
                groups[rollout.group].add(value)
        equal = sum(len(seen) == 1 for seen in groups.values()) / len(groups)
        assert found[f"reward/{name}/zero_variance_groups"] == pytest.approx(equal)
    assert 0 < found["reward/dense/unscorable"] < 1
    assert 0 < found["reward/sparse/zero_variance_groups"] < 1
    assert found["advantage/mean"] == pytest.approx(0, abs=1e-6)
    assert found["advantage/std"] == pytest.approx(1, abs=1e-3)
    lengths = [rollout.n_tokens for rollout in rollouts]
    assert found["response/tokens"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["tokens"] == sum(lengths)
    assert found["response/truncated"] == 0


def test_the_policies(merged, pooled, rollouts, logits_NV):
    logps_NV = (logits_NV[0] / TEMPERATURE).log_softmax(-1)
    entropy = -(logps_NV.exp() * logps_NV).sum(-1).mean()
    rollout_logp_N = torch.cat([rollout.of_policy(rollout.logps) for rollout in rollouts])
    log_ratio_N = at_tokens(logps_NV, rollouts) - rollout_logp_N
    for found in (merged[0], pooled[0]):
        assert found["entropy"] == pytest.approx(float(entropy), rel=1e-5)
        assert found["rollout_mismatch"] == pytest.approx(float(log_ratio_N.abs().mean()), rel=1e-5)
        assert [found[f"clipped/{kind}"] for kind in ("low", "high", "dual", "log_ratio")] == [0, 0, 0, 0]
    truncated = (log_ratio_N.exp() > 1.2).double().mean()
    assert 0 < float(truncated) < 1
    assert pooled[0]["importance/truncated"] == pytest.approx(float(truncated))
    assert "importance/truncated" not in merged[0]


def test_the_merged_target_with_its_tail(merged, logits_NV):
    student_NV, teachers_NV = logits_NV
    kept = sparse(teachers_NV, KL_TEMPERATURE)
    mixture_NV = 0.5 * (kept[0] + kept[1])
    q_NV = mixture_NV * (mixture_NV >= mixture_NV.topk(KAPPA).values[:, -1:])
    logp_NV = (student_NV / KL_TEMPERATURE).log_softmax(-1)
    student_N = (logp_NV.exp() * (q_NV > 0)).sum(-1)
    rest_N = 1 - q_NV.sum(-1)
    kl_N = (q_NV * (q_NV.clamp(min=1e-300).log() - logp_NV)).sum(-1)
    kl_N = kl_N + rest_N * (rest_N.log() - (1 - student_N).log())
    found = merged[0]
    assert (found["opd_coef"], found["teachers/padding_entries"]) == (1, 0)
    assert found["kl"] == pytest.approx(float(kl_N.mean()), rel=1e-5)
    assert found["kl/negative"] == 0
    assert found["teacher_mass"] == pytest.approx(float(q_NV.sum(-1).mean()), rel=1e-5)
    assert found["student_mass"] == pytest.approx(float(student_N.mean()), rel=1e-5)
    for m in range(2):
        assert found[f"teacher_{m}/top_kappa_mass"] == pytest.approx(float(kept[m].sum(-1).mean()), rel=1e-5)
        assert found[f"teacher_{m}/alpha"] == pytest.approx(0.5)


def test_the_sampled_reverse_kl_is_at_the_rollouts_temperature(reverse, rollouts, logits_NV):
    found, (student_NV, teachers_NV) = reverse[0], logits_NV
    mixture_NV = sum(0.5 * (logits / TEMPERATURE).softmax(-1) for logits in teachers_NV)
    logp_NV = (student_NV / TEMPERATURE).log_softmax(-1)
    expected = at_tokens(logp_NV, rollouts) - at_tokens(mixture_NV.log(), rollouts)
    assert found["reverse_kl"] == pytest.approx(float(expected.mean()), rel=1e-5)
    assert found["loss/kl"] == 0, "the forward KL is watched and not trained on"
    assert found["loss/reverse"] != 0
    mass = [float(p_NV.sum(-1).mean()) for p_NV in sparse(teachers_NV, TEMPERATURE)]
    for m in range(2):
        assert found[f"teacher_{m}/top_kappa_mass"] == pytest.approx(mass[m], rel=1e-5)
    assert {"kl", "kl/negative", "teacher_mass", "student_mass", "clipped/reverse_low"} <= found.keys()


def test_teachers_are_watched_where_lambda_is_0(merged):
    names = {"kl", "kl/negative", "teacher_mass", "student_mass", "teacher_1/top_kappa_mass"}
    assert [line["opd_coef"] for line in merged] == [1, 0]
    assert all(names <= line.keys() and math.isfinite(line["kl"]) for line in merged)
    assert [line["loss/kl"] == 0 for line in merged] == [False, True]


def test_the_gradient_norm_is_that_before_clipping(device, tmp_path):
    updates = train(tmp_path, device, changes=ONE_UPDATE, options={"max_grad_norm": 1e-3})
    found, *_ = metric_lines(tmp_path)
    squares = sum(float(value.double().square().sum()) for value in updates[0]["gradients"].values())
    assert found["grad_norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert found["updates/skipped"] == 0


def test_terms_are_means_over_updates_and_the_mismatch_is_of_the_first(device, tmp_path):
    updates = train(tmp_path, device, changes={"loss": {"old_logps": "rollout"}})
    found, means = metric_lines(tmp_path)[0], (updates[0]["terms"] + updates[1]["terms"]) / 2
    terms = [found[f"loss/{term}"] for term in ("pg", "kl", "entropy", "reverse")]
    assert terms == pytest.approx(means.tolist()) and 0 < found["rollout_mismatch"] < 9


def test_a_deviation_beyond_the_numbers_is_nan():
    metrics = Metrics(torch.device("cpu"))
    metrics.add("reward", torch.tensor([1e200, 3e200], dtype=torch.float64), spread=True)
    found = metrics.reduce()
    assert found["reward/mean"] == pytest.approx(2e200) and math.isnan(found["reward/std"])


def test_a_resumed_run_repeats_no_alarm(tmp_path):
    line = {"step": 1, "grad_norm": 1.0, "rollout_mismatch": 1.0}
    with Recorder(tmp_path, "run", settings_of(), Numbers()) as recorder:
        recorder.metrics.write(line)
        recorder.begin(1)
        assert recorder._watch.see(line) == []


def test_the_token_view_has_the_temperature_of_the_kl(tmp_path):
    result: Any = SimpleNamespace(batch=SimpleNamespace(rollouts=[]), signals=SimpleNamespace(target=None))
    asked: list[float] = []
    student: Any = SimpleNamespace(topk=lambda rollouts, shown, temperature: asked.append(temperature))
    recorder = Recorder(tmp_path, "run", settings_of("student", opd={"temperature": 2.0}), Numbers())
    recorder.writes = False
    recorder.view_tokens(result, student)
    assert asked == [2.0]


@pytest.mark.gpu
def test_the_peak_on_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    metrics = Metrics(device)
    held = torch.cuda.memory_allocated(device) / GIB
    block = torch.empty(GIB // 4, dtype=torch.uint8, device=device)
    del block
    assert metrics.reduce()["memory/peak_gib"] == pytest.approx(held + 0.25)
