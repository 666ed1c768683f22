"""What smopd.ops refuses and in which words, the debug mode, the backends, and the light import."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch

from smopd import ops
from smopd.kernels import dispatch

ROOT = Path(__file__).resolve().parents[3]
N, V, S = 5, 11, 3
LOGITS = torch.zeros(N, V)
IDS = torch.zeros(N, dtype=torch.int64)
TARGET = (torch.arange(S).expand(N, S), torch.full((N, S), -2.0))
TEACHERS = (torch.arange(S).expand(N, 2, S), torch.full((N, 2, S), -2.0), torch.zeros(2))
REWARDS = (torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))


def tokens(**more) -> ops.LossTokens:
    return ops.LossTokens(
        **{"token_ids_N": IDS, "adv_N": torch.ones(N), "pg_weight_N": torch.ones(N), **more}
    )


CASES = {
    "logits shape": (
        lambda: ops.topk_logprobs(torch.zeros(5), 2),
        r"^topk_logprobs: logits_NV has shape \(5,\), expected \(N, V\)$",
    ),
    "logits dtype": (
        lambda: ops.topk_logprobs(torch.zeros(5, 3, dtype=torch.int64), 2),
        r"^topk_logprobs: logits_NV has dtype int64, expected float64 or float32 or bfloat16 or float16$",
    ),
    "logits stride": (
        lambda: ops.topk_logprobs(torch.zeros(V, N).T, 2),
        r"^topk_logprobs: logits_NV has stride 5 along V, expected 1$",
    ),
    "empty vocabulary": (lambda: ops.topk_logprobs(torch.zeros(2, 0), 0), r"expected V of at least 1$"),
    "kappa too large": (
        lambda: ops.topk_logprobs(LOGITS, 12),
        r"^topk_logprobs: kappa is 12, expected at most V = 11$",
    ),
    "temperature": (
        lambda: ops.topk_logprobs(LOGITS, 1, temperature=0.0),
        r"temperature is 0.0, expected a finite number above 0$",
    ),
    "no teachers": (
        lambda: ops.topk_logprobs([], 1),
        r"^topk_logprobs: logits_NV has no teachers, expected at least 1$",
    ),
    "a teacher's shape": (
        lambda: ops.topk_logprobs([LOGITS, LOGITS[:, 1:]], 1),
        r"^topk_logprobs: logits_NV\[1\] has shape \(5, 10\), expected \(5, 11\) to match logits_NV\[0\] "
        r"\(5, 11\)$",
    ),
    "target shape": (
        lambda: ops.topk_forward_kl(LOGITS, IDS, TARGET[0][1:], TARGET[1]),
        r"^topk_forward_kl: target_ids_NS has shape \(4, 3\), expected \(5, S\) to match logits_NV "
        r"\(5, 11\)$",
    ),
    "token ids dtype": (
        lambda: ops.topk_forward_kl(LOGITS, IDS.float(), *TARGET),
        r"token_ids_N has dtype float32, expected int32 or int64$",
    ),
    "device": (
        lambda: ops.topk_forward_kl(LOGITS, IDS.to("meta"), *TARGET),
        r"token_ids_N is on meta, expected cpu to match logits_NV$",
    ),
    "teachers shape": (
        lambda: ops.teacher_mixture(TEACHERS[0][0], *TEACHERS[1:], 4),
        r"^teacher_mixture: ids_NMS has shape \(2, 3\), expected \(N, M, S\)$",
    ),
    "log_alpha": (
        lambda: ops.teacher_mixture(*TEACHERS[:2], torch.zeros(3), 4),
        r"log_alpha has shape \(3,\), expected \(M,\), \(N, M\) or what broadcasts to \(5, 2\)",
    ),
    "target without weight": (
        lambda: ops.smopd_loss(LOGITS, tokens(target_ids_NS=TARGET[0], target_logps_NS=TARGET[1])),
        r"^smopd_loss: kl_weight_N is None with a target",
    ),
    "target and teachers": (
        lambda: ops.smopd_loss(
            LOGITS,
            tokens(
                target_ids_NS=TARGET[0],
                target_logps_NS=TARGET[1],
                teacher_ids_NMS=TEACHERS[0],
                teacher_logps_NMS=TEACHERS[1],
                log_alpha=TEACHERS[2],
            ),
        ),
        r"both a target and teachers came",
    ),
    "entropy without weight": (
        lambda: ops.smopd_loss(LOGITS, tokens(), ops.LossSettings(entropy_coef=0.1)),
        r"ent_weight_N is None with entropy_coef 0.1",
    ),
    "reverse without weight": (
        lambda: ops.smopd_loss(LOGITS, tokens(reverse_adv_N=torch.ones(N))),
        r"reverse_weight_N and kl_weight_N are None with reverse_adv_N",
    ),
    "weight shape": (
        lambda: ops.linear_smopd_loss(torch.zeros(N, 4), torch.zeros(V, 3), tokens()),
        r"^linear_smopd_loss: weight_VD has shape \(11, 3\), expected \(V, 4\) to match hidden_ND \(5, 4\)$",
    ),
    "chunk_bytes": (
        lambda: ops.linear_topk_logprobs(torch.zeros(N, 4), torch.zeros(V, 4), 2, chunk_bytes=0),
        r"chunk_bytes is 0, expected at least 1$",
    ),
    "group dtype": (
        lambda: ops.grpo_advantages(REWARDS[0], REWARDS[1].int()),
        r"group_R has dtype int32, expected int64$",
    ),
    "weights": (
        lambda: ops.grpo_advantages(*REWARDS, weights_K=torch.ones(3)),
        r"weights_K has shape \(3,\), expected \(2,\)",
    ),
    "whiten": (lambda: ops.gdpo_advantages(*REWARDS, whiten="batch"), r"whiten is 'batch', expected one of"),
    "snr": (
        lambda: ops.gd2po_advantages(*REWARDS, whiten=None, snr_threshold=0.0),
        r"snr_threshold is 0.0, expected None or a number above 0$",
    ),
    "norm_eps": (lambda: ops.gdpo_advantages(*REWARDS, norm_eps=-1.0), r"norm_eps is -1.0, expected"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_named_with_what_came_and_what_was_expected(name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.topk_logprobs(1.0, 1), "logits_NV is float, expected a tensor of shape"),
        (lambda: ops.topk_logprobs([[1.0]], 1), r"logits_NV\[0\] is list, expected a tensor of shape"),
        (lambda: ops.smopd_loss(LOGITS, {}), "tokens is dict, expected LossTokens"),
        (lambda: ops.smopd_loss(LOGITS, tokens(), {}), "settings is dict, expected LossSettings"),
        (lambda: ops.teacher_mixture(*TEACHERS[:2], [0.5], 4), "log_alpha is list, expected a tensor"),
    ],
)
def test_a_wrong_type_is_a_type_error(call, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("clip_low", 1.5),
        ("clip_low", -0.1),
        ("clip_high", -0.1),
        ("dual_clip", 1.0),
        ("opd_coef", float("nan")),
        ("entropy_coef", "0.1"),
        ("kappa", -1),
        ("kappa", 2.5),
        ("temperature", 0.0),
        ("kl_temperature", float("inf")),
        ("reverse_kl_surrogate", "k3"),
    ],
)
def test_settings_are_checked(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^LossSettings: {name} is {value!r}, expected"):
        ops.LossSettings(**{name: value})


def test_settings_and_tokens_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ops.LossSettings().kappa = 3
    with pytest.raises(FrozenInstanceError):
        tokens().adv_N = torch.zeros(N)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: ops.topk_logprobs(LOGITS, 1, token_ids_N=IDS + V),
            r"token_ids_N holds 5 ids outside \[0, 11\)",
        ),
        (
            lambda: ops.topk_logprobs([LOGITS, LOGITS * torch.nan], 1),
            r"logits_NV\[1\]",
        ),
        (
            lambda: ops.topk_logprobs(LOGITS * torch.nan, 1),
            "logits_NV holds 55 bad values, expected finite values or -inf",
        ),
        (
            lambda: ops.topk_forward_kl(LOGITS, IDS, TARGET[0] - 1, TARGET[1]),
            r"target_ids holds 5 ids outside",
        ),
        (
            lambda: ops.topk_forward_kl(LOGITS, IDS, TARGET[0], TARGET[1] * 0),
            "target_logps has mass 3.0+, expected at most 1",
        ),
        (
            lambda: ops.smopd_loss(LOGITS, tokens(adv_N=torch.full((N,), torch.nan))),
            "adv_N holds 5 bad values",
        ),
    ],
)
def test_debug_mode_checks_values(call, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DEBUG", "1")
    with pytest.raises(ValueError, match=message):
        call()


def test_debug_mode_accepts_what_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_DEBUG", "1")
    empty = (TARGET[0].clone(), TARGET[1].clone())
    empty[0][:, 0], empty[1][:, 0] = -1, -torch.inf
    ops.topk_forward_kl(LOGITS, IDS, *empty)
    target = {"target_ids_NS": TARGET[0], "target_logps_NS": TARGET[1], "kl_weight_N": torch.ones(N)}
    ops.smopd_loss(LOGITS, tokens(**target))
    ops.linear_smopd_loss(torch.zeros(N, 2), torch.zeros(V, 2), tokens(**target))


def test_backend_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_BACKEND", "reference")
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="smopd"):
        for _ in range(3):
            ops.topk_logprobs(LOGITS, 2)
            ops.smopd_loss(LOGITS, tokens())
    assert [r.getMessage() for r in caplog.records] == [
        "the fused operations on cpu are served by the reference backend"
    ]


def test_forced_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_BACKEND", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(
        RuntimeError,
        match=r"^topk_logprobs: SMOPD_BACKEND=triton cannot serve this call: the tensor is on cpu",
    ):
        ops.topk_logprobs(LOGITS, 2)
    monkeypatch.setenv("SMOPD_BACKEND", "cpp")
    with pytest.raises(RuntimeError, match=r"the dtype is torch\.float64"):
        ops.topk_logprobs(LOGITS.double(), 2)
    monkeypatch.setattr(dispatch, "cpp_unavailable", lambda: "smopd._C cannot be loaded (no build)")
    with pytest.raises(RuntimeError, match=r"smopd\._C cannot be loaded \(no build\)"):
        ops.topk_logprobs(LOGITS, 2)
    monkeypatch.setenv("SMOPD_BACKEND", "numpy")
    with pytest.raises(ValueError, match=r"SMOPD_BACKEND is 'numpy', expected one of"):
        ops.topk_logprobs(LOGITS, 2)


@pytest.mark.skipif(dispatch.cpp_unavailable() is not None, reason="smopd._C is not built")
@pytest.mark.parametrize("forced", [False, True], ids=["chosen", "forced"])
@pytest.mark.parametrize("advantages_first", [False, True])
def test_a_cpu_has_one_line_for_all_operations(
    advantages_first: bool, forced: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SMOPD_BACKEND", raising=False)
    if forced:
        monkeypatch.setenv("SMOPD_BACKEND", "cpp")
    dispatch._log_once.cache_clear()
    calls = [lambda: ops.topk_logprobs(LOGITS, 2), lambda: ops.gdpo_advantages(*REWARDS)]
    with caplog.at_level(logging.INFO, logger="smopd"):
        for call in reversed(calls) if advantages_first else calls:
            call()
    line = "the fused operations on cpu are served by the cpp backend"
    assert [record.getMessage() for record in caplog.records] == [line]


def test_a_missing_build_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.delenv("SMOPD_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "cpp_unavailable", lambda: "not built")
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="smopd"):
        ops.topk_logprobs(LOGITS, 2)
    assert "topk_logprobs on cpu is served by the reference backend: not built" in caplog.text


def test_import_is_light() -> None:
    code = (
        "import sys, smopd.ops; "
        "print([m for m in ('transformers', 'vllm', 'pydantic', 'smopd._C') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_rows_cut_every_column_and_per_token_gates() -> None:
    whole = tokens(log_alpha=torch.zeros(N, 2), old_logp_N=torch.arange(N).float())
    part = whole.rows(1, 3)
    assert (
        part.old_logp_N.tolist() == [1.0, 2.0] and part.log_alpha.shape == (2, 2) and part.kl_weight_N is None
    )
    assert replace(whole, log_alpha=torch.zeros(2)).rows(1, 3).log_alpha.shape == (2,)
