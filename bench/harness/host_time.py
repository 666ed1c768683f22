"""Host time of a call of each operation at a tiny size: plain, and through its registered operator.

python -m bench.harness.host_time [stub]

One JSON line an operation, in microseconds of this thread's time: the lower decile of rounds of 10 calls, the
two ways in turn. stub: a backend that does nothing serves, so what is left are the checks, the choice of the
backend, the dispatcher, and of the loss the sums of its terms.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from smopd import ops
from smopd.kernels import checks, dispatch
from smopd.kernels.ops import library
from smopd.kernels.reference.loss import total_loss
from smopd.kernels.types import TokenTerms

N, V, M, S, KAPPA, R, K = 4, 32, 2, 4, 4, 8, 2
ROUNDS, CALLS = 150, 10


def calls() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    logits = torch.randn(N, V)
    leaf = logits.clone().requires_grad_()
    token_ids = torch.randint(V, (N,))
    ids, logps = torch.randint(V, (N, M, S)), torch.randn(N, M, S).log_softmax(-1)
    log_alpha = torch.full((M,), 1 / M).log()
    columns = {name: torch.rand(N) for name in ("adv_N", "pg_weight_N", "old_logp_N", "kl_weight_N")}
    teachers = {"teacher_ids_NMS": ids, "teacher_logps_NMS": logps, "log_alpha": log_alpha}
    tokens = ops.LossTokens(token_ids_N=token_ids, **columns, **teachers)
    rewards, group = torch.randn(R, K), torch.arange(R) // 4

    def kl(logits: torch.Tensor) -> torch.Tensor:
        return ops.topk_forward_kl(logits, token_ids, ids[:, 0], logps[:, 0])[1]

    return {
        "topk_logprobs": lambda: ops.topk_logprobs(logits, KAPPA, token_ids_N=token_ids),
        "topk_logprobs, two teachers": lambda: ops.topk_logprobs([logits, logits], KAPPA),
        "teacher_mixture": lambda: ops.teacher_mixture(ids, logps, log_alpha, KAPPA),
        "teacher_product": lambda: ops.teacher_product(ids, logps, log_alpha[1:], KAPPA),
        "topk_forward_kl": lambda: kl(logits),
        "topk_forward_kl, gradient": lambda: torch.autograd.grad(kl(leaf).sum(), leaf),
        "teacher_forward_kl": lambda: ops.teacher_forward_kl(logits, token_ids, ids, logps, log_alpha, KAPPA),
        "smopd_loss": lambda: ops.smopd_loss(logits, tokens),
        "smopd_loss, gradient": lambda: torch.autograd.grad(ops.smopd_loss(leaf, tokens)[0], leaf),
        "grpo_advantages": lambda: ops.grpo_advantages(rewards, group),
        "gdpo_advantages": lambda: ops.gdpo_advantages(rewards, group),
        "gd2po_advantages": lambda: ops.gd2po_advantages(rewards, group, whiten="responses"),
    }


def stub() -> SimpleNamespace:
    """A backend's module that has its results ready."""
    ids, logps, column = torch.zeros(N, KAPPA, dtype=torch.int32), torch.zeros(N, KAPPA), torch.zeros(N)
    mixture, gradient = ops.Mixture(ids, logps, column), torch.zeros(N, V)
    rows = [
        torch.zeros(N, dtype=torch.int8 if name == "clipped_N" else None)
        for name in TokenTerms.__annotations__
    ]
    terms, rewards = TokenTerms(*rows), (torch.zeros(R), torch.zeros(R, dtype=torch.bool))

    def topk_logprobs(logits: Any, kappa: int, *, token_ids_N: Any, temperature: float) -> ops.TopK:
        return ops.TopK(ids, logps, None if token_ids_N is None else column)

    return SimpleNamespace(
        unavailable=lambda: None,
        topk_logprobs=topk_logprobs,
        teacher_mixture=lambda *_, **__: mixture,
        teacher_product=lambda *_, **__: mixture,
        forward_kl_rows=lambda *_: (column, torch.zeros_like(column)),
        forward_kl_gradient=lambda *_: gradient,
        loss_rows=lambda *_: terms,
        total_loss=total_loss,
        scale_=lambda *_: None,
        advantages=lambda *_: rewards,
    )


def timed(call: Callable[[], Any]) -> dict[str, float]:
    """Microseconds a call by the way that it goes."""
    took: dict[str, list[float]] = {"registered": [], "plain": []}
    for _ in range(ROUNDS):
        for way, times in took.items():
            with mock.patch.object(library, "watched", lambda: True) if way == "registered" else ExitStack():
                call()
                start = time.thread_time_ns()
                for _ in range(CALLS):
                    call()
                times.append((time.thread_time_ns() - start) / CALLS / 1e3)
    lowest = {way: statistics.quantiles(times, n=10, method="inclusive")[0] for way, times in took.items()}
    return {way: round(found, 1) for way, found in lowest.items()}


def main(arguments: list[str]) -> None:
    with ExitStack() as patches:
        if arguments == ["stub"]:
            module = stub()
            patches.enter_context(mock.patch.object(dispatch, "_module", lambda name: module))
            for name in ("require_token_ids", "require_target_ids", "require_loss_ids"):  # of a CPU alone
                patches.enter_context(mock.patch.object(checks, name, lambda *_, **__: None))
        for name, call in calls().items():
            print(json.dumps({"call": name, "backend": " ".join(arguments) or "served", **timed(call)}))


if __name__ == "__main__":
    main(sys.argv[1:])
