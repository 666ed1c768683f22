"""The gates equal a scalar transcription of Eq. 18 to 21; edge cases."""

import math
from itertools import combinations

import pytest
import torch

from smopd import gates
from smopd.config.settings import Gate
from smopd.gates import CONFIDENCE_FLOOR, FAILURE_EPS, confidence, disagreement, failure, log_alpha

M, S, LENGTHS = 3, 5, [4, 1, 3]


def scalar_confidence(probabilities: list[float]) -> float:
    total = sum(probabilities)
    p = sorted((x / total for x in probabilities), reverse=True)
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    return 0.5 * (1 - entropy / math.log(len(p))) + 0.5 * (p[0] - p[1])


def scalar_gate(gate: Gate, confidences: list[float], failures: list[float], disagreement: float):
    m = len(confidences)
    sure = [(c + CONFIDENCE_FLOOR) ** gates.CONFIDENCE_EXPONENT for c in confidences]
    raw = [s * (f + FAILURE_EPS) ** gates.FAILURE_EXPONENT / m for s, f in zip(sure, failures, strict=True)]
    alpha = [x / sum(raw) for x in raw]
    pull = gates.BLEND * disagreement
    blended = [(1 - pull) * a + pull / m for a in alpha]
    return [gate.floor + (1 - gate.floor * m) * x / sum(blended) for x in blended]


@pytest.fixture
def teachers():
    generator = torch.Generator().manual_seed(0)
    n = sum(LENGTHS)
    logits = torch.randn(n, M, 40, generator=generator, dtype=torch.float64) * 2
    top = logits.log_softmax(-1).topk(S, dim=-1)
    failure_RM = torch.rand(len(LENGTHS), M, generator=generator, dtype=torch.float64)
    response_N = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    return top.indices, top.values, failure_RM, response_N


def scalar_signals(ids_NMS, logps_NMS):
    confidences = [[scalar_confidence(row.exp().tolist()) for row in token] for token in logps_NMS]
    pairs = list(combinations(range(M), 2))
    disagreements = [sum(int(token[a, 0] != token[b, 0]) for a, b in pairs) / len(pairs) for token in ids_NMS]
    return confidences, disagreements


@pytest.mark.parametrize("exponents", [(1, 1), (3, 2)])
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_a_gate_is_the_papers(teachers, kind, exponents, monkeypatch):
    gate = Gate(kind=kind, floor=0.1)
    monkeypatch.setattr(gates, "CONFIDENCE_EXPONENT", exponents[0])
    monkeypatch.setattr(gates, "FAILURE_EXPONENT", exponents[1])
    ids_NMS, logps_NMS, failure_RM, response_N = teachers
    found = log_alpha(gate, *teachers).exp()
    confidences, disagreements = scalar_signals(ids_NMS, logps_NMS)
    for n, r in enumerate(response_N.tolist()):
        tokens = [n] if kind == "token" else (response_N == r).nonzero()[:, 0].tolist()
        mean = [sum(confidences[i][m] for i in tokens) / len(tokens) for m in range(M)]
        disagree = sum(disagreements[i] for i in tokens) / len(tokens)
        expected = scalar_gate(gate, mean, failure_RM[r].tolist(), disagree)
        assert found[n].tolist() == pytest.approx(expected, rel=1e-5)


def test_uniform_weights_are_one_row(teachers):
    torch.testing.assert_close(log_alpha(Gate(kind="uniform"), *teachers).exp(), torch.full((M,), 1 / M))


def test_kappa_one_is_certain_and_one_teacher_never_disagrees():
    assert confidence(torch.full((3, 2, 1), -0.7)).equal(torch.ones(3, 2))
    assert disagreement(torch.tensor([[[4, 5]], [[6, 7]]])).equal(torch.zeros(2))
    ids_NMS, response_N = torch.zeros(3, 1, 4), torch.tensor([0, 0, 1])
    one = log_alpha(Gate(kind="token"), ids_NMS, torch.randn(3, 1, 4), torch.rand(2, 1), response_N)
    torch.testing.assert_close(one, torch.zeros(3, 1), atol=1e-6, rtol=0)


def test_failure_scales_clamps_and_leaves_the_unscorable_in_the_middle():
    rewards_RM = torch.tensor([[-3.0, 0.0], [3.0, 1.0], [0.0, torch.nan], [9.0, -9.0]])
    found = failure(rewards_RM, torch.tensor([-3.0, 0.0]), torch.tensor([3.0, 1.0]))
    expected = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    torch.testing.assert_close(found, expected)
    same = failure(torch.ones(2, 1), torch.ones(1), torch.ones(1))
    torch.testing.assert_close(same, torch.full((2, 1), 0.5))
