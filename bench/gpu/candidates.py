"""Targets and the forward KL's gradient as they are beside as they were (before.py): checked, then timed.

    python -m bench.gpu.candidates --output FILE

Without a GPU and with TRITON_INTERPRET=1 both are run and checked at a small size, and not timed. A row for
each form and case; a form that is wrong has what is wrong with it, and no time.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench import topk_forward_kl
from bench.gpu import before
from bench.harness import ceiling, record
from bench.harness.accuracy import LOGP, judge
from bench.harness.providers import forced
from bench.harness.timing import Turn, clock_for, interleaved
from bench.harness.types import Case, Expected, Outputs, Provider
from smopd.kernels.triton import loss, target
from smopd.kernels.types import Candidates, KlOptions, SparseTarget

CHECKED_ROWS = 64
TARGET_SECONDS, KL_SECONDS = 0.3, 2.5  # of timing a case
PLACES = (512, 2, 8)  # lanes, repeats and consecutive elements of the row kernel's blocks, V 151,936 in bf16
FORMS = {"old": before.row_targets, "new": target.row_targets}
TILES = ((4, 2), (8, 2), (8, 4))  # warps and 16-byte loads of a lane, beside what ships


def target_cases(size: Case) -> Iterator[tuple[Case, Any]]:
    """Two teachers as in the paper (not merged), merged with tail, and one teacher."""
    for kappa, n_teachers, flags in (
        (16, 2, ()), (16, 2, ("merge", "tail")), (16, 0, ("tail",)),
        (64, 0, ("tail",)), (64, 0, ()), (64, 2, ()), (64, 2, ("tail",)),
    ):  # fmt: skip
        yield replace(size, kappa=kappa, M=n_teachers, flags=flags), target_of(size, kappa, n_teachers, flags)


def target_of(size: Case, kappa: int, n_teachers: int, flags: tuple[str, ...]) -> SparseTarget | Candidates:
    """Random ids, of several teachers half in common; kappa may be more than a small vocabulary has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (size.N, max(1, n_teachers), kappa)
    ids = torch.rand(size.N, shape[1] * kappa, device=device).mul(size.V / (shape[1] * kappa)).int()
    ids += torch.arange(shape[1] * kappa, device=device, dtype=torch.int32) * (size.V // (shape[1] * kappa))
    ids = ids.view(shape)
    if n_teachers:
        ids[:, 1:, : kappa // 2] = ids[:, :1, : kappa // 2]
    logps = torch.randn(shape, device=device).mul(2).log_softmax(-1) - 0.05
    if not n_teachers:
        return SparseTarget(ids[:, 0].contiguous(), logps[:, 0].contiguous())
    log_alpha = torch.full((n_teachers,), 1.0 / n_teachers, device=device).log()
    return Candidates(ids.contiguous(), logps, log_alpha, kappa, "merge" in flags)


def kept(given: SparseTarget | Candidates) -> SparseTarget:
    if isinstance(given, SparseTarget):
        return given
    mixture = before.teacher_mixture(
        given.ids_NMS, given.logps_NMS, given.log_alpha, given.kappa, merge=given.merge
    )
    return SparseTarget(mixture.ids_NS, mixture.logps_NS)


def dense(values_NS: Tensor, ids_NS: Tensor, n_vocab: int) -> Tensor:
    rows_NV = torch.zeros(len(ids_NS), n_vocab, dtype=torch.float64, device=ids_NS.device)
    return rows_NV.scatter_add_(1, ids_NS.long().clamp(0, n_vocab - 1), values_NS.double())


def target_truth(given: SparseTarget, n_vocab: int, tail: bool) -> dict[str, Expected]:
    """Each id's mass, the masses, and with the tail the support with the segments that lanes leave out."""
    q_NS = given.logps_NS.double().exp()
    q_NV = dense(q_NS, given.ids_NS, n_vocab)
    truth = {"q": Expected(q_NV, LOGP), "mass": Expected(q_NS.sum(1), LOGP)}
    if tail:
        lanes, repeats, consecutive = PLACES
        block = lanes * repeats * consecutive
        ids_NS = given.ids_NS.long().masked_fill(given.logps_NS == -torch.inf, 0)
        lane_NS, bit_NS = (ids_NS // consecutive) % lanes, 1 << (ids_NS // block)
        bit_NS = bit_NS.masked_fill(given.logps_NS == -torch.inf, 0)
        left_NL = torch.zeros(len(ids_NS), lanes, dtype=torch.int64, device=ids_NS.device)
        for slot in range(ids_NS.shape[1]):  # or, one slot after the other
            at_N1 = lane_NS[:, slot : slot + 1]
            left_NL.scatter_(1, at_N1, left_NL.gather(1, at_N1) | bit_NS[:, slot : slot + 1])
        truth |= {
            "tail": Expected((1.0 - q_NS.sum(1)).clamp(min=0.0), LOGP),
            "support": Expected((q_NV > 0).long(), exact=True),
            "skipped": Expected(left_NL, exact=True),
        }
    return truth


def target_outputs(ready: target.RowTargets, n_vocab: int) -> Outputs:
    logps_NK = ready.logps_NK if ready.id_logps_NK is None else ready.id_logps_NK
    outputs = {"q": dense(logps_NK.double().exp(), ready.ids_NK, n_vocab), "mass": ready.masses_2N[0]}
    if ready.holes_NK is None or ready.skipped_NL is None:
        return outputs
    lanes, repeats, consecutive = PLACES
    block = lanes * repeats * consecutive
    element_E = torch.arange(repeats * consecutive, device=logps_NK.device)
    held_NKE = (ready.holes_NK.clamp(min=0)[..., None] >> element_E) & 1
    ids_NK1 = ready.ids_NK.long().clamp(min=0)[..., None]
    start_NK1 = ids_NK1 // block * block + ids_NK1 // consecutive % lanes * consecutive
    ids_NKE = start_NK1 + element_E // consecutive * (lanes * consecutive) + element_E % consecutive
    support_NV = dense(held_NKE.flatten(1), ids_NKE.flatten(1), n_vocab)
    return outputs | {"tail": ready.masses_2N[1], "support": support_NV, "skipped": ready.skipped_NL}


def targets(size: Case, tell: Callable[[dict], None], timed: bool) -> int:
    wrong = 0
    for case, given in target_cases(size):
        tail = "tail" in case.flags
        few = _few(given)
        truth = target_truth(kept(few), case.V, tail)
        right = {}
        for name, form in FORMS.items():
            outputs = target_outputs(form(few, case.V, *PLACES, tail=tail), case.V)
            fault, errors, _ = judge(Provider(name=name, run=lambda _: {}, kind="ours"), outputs, truth)
            if fault is None:
                right[name] = Turn(run=lambda _, f=form, g=given, t=tail: f(g, size.V, *PLACES, tail=t))
            else:
                wrong += 1
                tell(_head("target", case, name) | {"refused": fault, "errors": errors})
        if isinstance(given, Candidates):  # both have this before them
            right["mixture alone"] = Turn(run=lambda _, g=given: kept(g))
        _time("target", case, right, TARGET_SECONDS, tell, timed)
    return wrong


def _few(given: SparseTarget | Candidates) -> SparseTarget | Candidates:
    if isinstance(given, SparseTarget):
        return SparseTarget(given.ids_NS[:CHECKED_ROWS], given.logps_NS[:CHECKED_ROWS])
    return replace(
        given, ids_NMS=given.ids_NMS[:CHECKED_ROWS], logps_NMS=given.logps_NMS[:CHECKED_ROWS].contiguous()
    )


@contextmanager
def old_forms() -> Iterator[None]:
    with (
        forced("triton"),
        mock.patch.object(loss, "row_targets", before.row_targets),
        mock.patch.object(loss, "forward_kl_gradient", before.forward_kl_gradient),
    ):
        yield


@contextmanager
def new_forms(warps: int = loss._TILE_WARPS, vectors: int = loss._TILE_VECTORS) -> Iterator[None]:
    with (
        forced("triton"),
        mock.patch.object(loss, "_TILE_WARPS", warps),
        mock.patch.object(loss, "_TILE_VECTORS", vectors),
    ):
        yield


def forward_kls(size: Case, tell: Callable[[dict], None], timed: bool) -> int:
    """The operation, and its gradient alone."""
    contexts: dict[str, Callable[[], Any]] = {"old": old_forms, "new": new_forms}
    contexts |= {f"new, {w} warps x {v}": partial(new_forms, w, v) for w, v in TILES}
    run = topk_forward_kl.run(topk_forward_kl.fused)
    wrong = 0
    for kappa, flags in ((16, ()), (64, ("tail",))):
        case = replace(size, kappa=kappa, flags=flags)
        few = topk_forward_kl.inputs(replace(case, N=min(case.N, CHECKED_ROWS)), _device())
        truth, right, grads = topk_forward_kl.truth(few), [], {}
        for name, context in contexts.items():
            with context():
                outputs = run(few)
                fault, errors, _ = judge(Provider(name=name, run=run, kind="ours"), outputs, truth)
                again = run(few)["dlogits"]
            if fault is None and not torch.equal(again, outputs["dlogits"]):
                fault = "two runs differ"
            grads[name] = again
            if fault is None:
                right.append(name)
            else:
                wrong += 1
                tell(_head("forward kl", case, name) | {"refused": fault, "errors": errors})
        if {"old", "new"} <= set(right):
            differ = int((grads["old"] != grads["new"]).sum())
            tell(_head("forward kl", case, "new") | {"differ_from_old": differ, "of": grads["new"].numel()})
        if not timed:
            continue
        scenario = topk_forward_kl.inputs(case, _device())
        tokens = scenario.tokens
        given = SparseTarget(tokens.target_ids_NS, tokens.target_logps_NS)
        options = KlOptions(tail=scenario.settings.tail, temperature=1.0)
        arguments = (scenario.logits_NV, tokens.token_ids_N, given, options)
        *_, statistics_4N = loss.forward_kl_rows(*arguments)
        slopes = (None, tokens.kl_weight_N, statistics_4N)
        run_gradient = partial(_gradient, (*arguments, *slopes))
        turns = {f"{name} gradient": Turn(run=run_gradient, context=contexts[name]) for name in right}
        for name in ("old", "new"):
            if name in right:
                turns[name] = Turn(run=lambda _, s=scenario: run(s), context=contexts[name])
        copy = ceiling.copy(scenario.logits_NV)
        turns["copy"] = Turn(run=lambda _, c=copy: c.run())
        _time("forward kl", case, turns, KL_SECONDS, tell, timed)
        del scenario, arguments, slopes, run_gradient, turns, copy
    return wrong


def _gradient(arguments: tuple, _: Any) -> Tensor:
    return loss.forward_kl_gradient(*arguments)


def _time(
    name: str, case: Case, turns: dict[str, Turn], seconds: float, tell: Callable[[dict], None], timed: bool
) -> None:
    if not timed:
        tell(_head(name, case, ", ".join(turns)) | {"checked": True})
        return
    times = interleaved(turns, clock_for("cuda"), seconds)
    bound = times["copy"].median if "copy" in times else None
    for form, measured in times.items():
        low, median, high = measured.quantiles()
        row = {"us": round(median * 1e6, 2), "p20_us": round(low * 1e6, 2), "p80_us": round(high * 1e6, 2)}
        row |= {} if bound is None else {"of_copy": round(bound / median, 4)}
        tell(_head(name, case, form) | row | {"repeats": len(measured.seconds)})


def _head(name: str, case: Case, form: str) -> dict:
    return {"benchmark": name, "case": case.label, "provider": form, "kind": "candidate"}


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.candidates", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="rows go to this file")
    parsed = parser.parse_args()
    timed = torch.cuda.is_available()
    if not timed and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("no GPU: expected TRITON_INTERPRET=1")
    torch.manual_seed(0)
    size = Case(N=8192 if timed else 2, V=151_936 if timed else 20_000, dtype="bfloat16")
    with parsed.output.open("a") as file:
        tell = record.teller(_device(), file)
        wrong = targets(size, tell, timed) + forward_kls(size, tell, timed)
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())
