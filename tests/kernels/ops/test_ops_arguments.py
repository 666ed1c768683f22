"""Errors of smopd.ops for wrong arguments and forced backends, and the check of ids on a CPU."""

import importlib
import itertools
import logging
from dataclasses import replace

import pytest
import torch

from smopd import ops
from smopd.kernels import cpp, dispatch
from tests.kernels import cases

N, V, S = 5, 11, 3
LOGITS = torch.zeros(N, V)
IDS = torch.zeros(N, dtype=torch.int64)
TARGET = (torch.arange(S).expand(N, S), torch.full((N, S), -2.0))
TEACHERS = (torch.arange(S).expand(N, 2, S), torch.full((N, 2, S), -2.0), torch.zeros(2))
REWARDS = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
HEAD = (torch.zeros(N, 4), torch.zeros(V, 4))
NAMED = {"target_ids_NS": TARGET[0], "target_logps_NS": TARGET[1]}
UNION = {"teacher_ids_NMS": TEACHERS[0], "teacher_logps_NMS": TEACHERS[1], "log_alpha": TEACHERS[2]}
ENTROPY, REVERSE = ops.LossSettings(entropy_coef=0.1), {"reverse_adv_N": torch.ones(N)}
NAN, INF = float("nan"), float("inf")


def tokens(**more) -> ops.LossTokens:
    return ops.LossTokens(
        **{"token_ids_N": IDS, "adv_N": torch.ones(N), "pg_weight_N": torch.ones(N), **more}
    )


CASES = [
    (lambda: ops.topk_logprobs(LOGITS[0], 2), r"logits_NV has shape \(11,\), expected \(N, V\)$"),
    (lambda: ops.topk_logprobs(LOGITS.long(), 2), "logits_NV has dtype int64, expected float64 or"),
    (lambda: ops.topk_logprobs(LOGITS.T.contiguous().T, 2), "logits_NV has stride 5 along V, expected 1$"),
    (lambda: ops.topk_logprobs(LOGITS, 12), "kappa is 12, expected at most V = 11$"),
    (lambda: ops.topk_logprobs(LOGITS, 1, temperature=0.0), "temperature is 0.0, expected a finite number"),
    (
        lambda: ops.topk_forward_kl(LOGITS, IDS, TARGET[0][1:], TARGET[1]),
        r"target_ids_NS has shape \(4, 3\), expected \(5, S\) to match logits_NV \(5, 11\)$",
    ),
    (lambda: ops.topk_forward_kl(LOGITS, IDS.to("meta"), *TARGET), "token_ids_N is on meta, expected cpu"),
    (lambda: ops.teacher_mixture(*TEACHERS[:2], torch.zeros(3), 4), r"log_alpha has shape \(3,\), expected"),
    (lambda: ops.smopd_loss(LOGITS, tokens(**NAMED)), "kl_weight_N is None with a target"),
    (lambda: ops.smopd_loss(LOGITS, tokens(**NAMED, **UNION)), "got both a target and teachers"),
    (lambda: ops.smopd_loss(LOGITS, tokens(), ENTROPY), "ent_weight_N is None with entropy_coef 0.1"),
    (lambda: ops.smopd_loss(LOGITS, tokens(**REVERSE)), "reverse_weight_N and kl_weight_N are None"),
    (
        lambda: ops.linear_smopd_loss(HEAD[0], HEAD[1][:, 1:], tokens()),
        r"weight_VD has shape \(11, 3\), expected \(V, 4\) to match hidden_ND \(5, 4\)$",
    ),
    (lambda: ops.linear_topk_logprobs(*HEAD, 2, chunk_bytes=0), "chunk_bytes is 0, expected at least 1$"),
    (lambda: ops.grpo_advantages(REWARDS[0], REWARDS[1].int()), "group_R has dtype int32, expected int64$"),
    (lambda: ops.gdpo_advantages(*REWARDS, whiten="batch"), "whiten is 'batch', expected one of"),
    (lambda: ops.gdpo_advantages(*REWARDS, norm_eps=-1.0), "norm_eps is -1.0, expected"),
    (lambda: ops.gd2po_advantages(*REWARDS, snr_threshold=0.0), "snr_threshold is 0.0, expected None"),
    (lambda: ops.LossSettings(clip_low=1.5), "clip_low is 1.5, expected"),
    (lambda: ops.LossSettings(clip_high=-0.1), "clip_high is -0.1, expected"),
    (lambda: ops.LossSettings(dual_clip=1.0), "dual_clip is 1.0, expected"),
    (lambda: ops.LossSettings(opd_coef=NAN), "opd_coef is nan, expected"),
    (lambda: ops.LossSettings(entropy_coef="0.1"), "entropy_coef is '0.1', expected"),
    (lambda: ops.LossSettings(kappa=2.5), "kappa is 2.5, expected"),
    (lambda: ops.LossSettings(temperature=0.0), "temperature is 0.0, expected"),
    (lambda: ops.LossSettings(kl_temperature=INF), "kl_temperature is inf, expected"),
    (lambda: ops.LossSettings(reverse_kl_surrogate="k3"), "reverse_kl_surrogate is 'k3', expected"),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[message[:40] for _, message in CASES])
def test_an_error_names_argument_value_and_expectation(call, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^\w+: .*{message}"):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.smopd_loss(LOGITS, {}), "tokens is dict, expected LossTokens"),
        (lambda: ops.smopd_loss(LOGITS, tokens(), {}), "settings is dict, expected LossSettings"),
        (lambda: ops.teacher_mixture(*TEACHERS[:2], [0.5], 4), "log_alpha is list, expected a tensor"),
    ],
)
def test_a_wrong_type_is_a_type_error(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("forced", "dtype", "error", "message"),
    [
        ("triton", torch.float32, RuntimeError, "triton cannot serve this call: the tensor is on cpu"),
        ("cpp", torch.float64, RuntimeError, r"the dtype is torch\.float64"),
        ("numpy", torch.float32, ValueError, "SMOPD_BACKEND is 'numpy', expected one of"),
    ],
)
def test_a_forced_backend_serves_or_raises(forced: str, dtype, error, message: str, monkeypatch) -> None:
    monkeypatch.setenv(dispatch.ENV, forced)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(error, match=message):
        ops.topk_logprobs(LOGITS.to(dtype), 2)


ROWS, WIDTH, BAD = 64, 2000, 60  # BAD: a late row
KINDS = {"repeats": "target_ids_NS", "pooled": "teacher_ids_NMS"}
built = pytest.mark.skipif(cpp.unavailable() is not None, reason="smopd._C is not built")


@pytest.fixture(params=["reference", pytest.param("cpp", marks=built)])
def backend(request, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(dispatch.ENV, request.param)
    return request.param


def with_bad_row(of: ops.LossTokens, **values: float) -> ops.LossTokens:
    """Replace the first entry of row BAD."""
    columns = {name: getattr(of, name).clone() for name in values}
    for name, value in values.items():
        columns[name][BAD].view(-1)[0] = value
    return replace(of, **columns)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_id_is_a_value_error_before_anything_is_written(kind: str, backend: str) -> None:
    case = cases.loss_case((ROWS, WIDTH, 2, 6), target=kind)
    logits_NV, given = case.logits_NV, replace(case.tokens, reverse_weight_N=torch.ones(ROWS))
    for name, value in itertools.product((KINDS[kind], "token_ids_N"), (2**32 + 4, WIDTH)):
        broken = with_bad_row(given, **{name: value})
        own_NV = logits_NV.clone().requires_grad_() * 1.0
        with pytest.raises(ValueError, match=rf"^smopd_loss: {name} holds 1 ids outside \[0, {WIDTH}\)"):
            ops.smopd_loss(own_NV, broken, inplace=True)
        assert torch.equal(own_NV, logits_NV)
        with pytest.raises(ValueError, match=rf"^linear_smopd_loss: {name} holds 1 ids"):
            ops.linear_smopd_loss(torch.zeros(ROWS, 2), torch.zeros(WIDTH, 2), broken)
    with pytest.raises(ValueError, match=r"^topk_logprobs: token_ids_N holds 1 ids"):
        ops.topk_logprobs(logits_NV, 2, token_ids_N=broken.token_ids_N)
    target = (torch.zeros(ROWS, 1, dtype=torch.int64), torch.zeros(ROWS, 1))
    with pytest.raises(ValueError, match=r"^topk_forward_kl: token_ids_N holds 1 ids"):
        ops.topk_forward_kl(logits_NV, broken.token_ids_N, *target)
    weights = ("pg_weight_N", "kl_weight_N", "ent_weight_N", "reverse_weight_N")
    idle = with_bad_row(given, **dict.fromkeys(weights, 0.0))  # its ids are not read
    ignored = with_bad_row(idle, **{"token_ids_N": -100, KINDS[kind]: WIDTH})
    head = [cases.random_logits(size, 4) for size in (ROWS, WIDTH)]
    for loss, leaves in ((ops.smopd_loss, [logits_NV]), (ops.linear_smopd_loss, head)):
        assert torch.equal(*(loss(*leaves, each)[0] for each in (idle, ignored)))


@built
def test_a_library_that_cannot_be_used_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> None:
        raise ImportError("GLIBCXX_3.4.32 not found")

    reason_of = cpp.unavailable.__wrapped__
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(cpp, "LOSS_ARGUMENTS", 24)  # a library of older sources
        assert "reinstall smopd" in reason_of()
        patch.setattr(importlib, "import_module", broken)
        assert "GLIBCXX_3.4.32 not found" in reason_of()
        assert len(caplog.records) == 2
    assert reason_of() is None
