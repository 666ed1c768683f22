"""The tiles' Triton passes by themselves, in the heads that use them, and over shards.

Their results on whole rows are held to float64 with the other backends' in tests/kernels/conformance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from tests.kernels import backends, cases, float64

# isort: split
from smopd.kernels import dispatch
from smopd.kernels.head.shards import Shard
from smopd.kernels.head.tiles import finish, over_shards, sharded_loss_rows
from smopd.kernels.triton import tiles
from smopd.kernels.triton.tiles import TileLoss
from smopd.kernels.types import LossTokens
from smopd.ops import linear_smopd_loss
from tests.kernels.cases import LossCase, loss_case
from tests.kernels.head import linear_cases

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
    pytest.mark.usefixtures("poisoned_memory"),
]
DEVICE = backends.device("triton")
NEW_ROWS = 3


@pytest.fixture(autouse=True)
def runs_here() -> None:
    backends.need("triton")


def small_case(dtype: str = "bf16", target: str = "repeats", **options) -> LossCase:
    case = loss_case((13, 1271, 2, 16), dtype, target, **options)
    return case.at(torch.arange(NEW_ROWS))


def on_device(case: LossCase) -> tuple[Tensor, LossTokens]:
    return case.logits_NV.to(DEVICE, copy=True), backends.moved(case.tokens, DEVICE)


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
def test_a_scan_leaves_the_tile_and_a_gradient_writes_nothing_else(tail: bool) -> None:
    case = small_case(tail=tail, temperatures=(0.7, 1.0))
    logits_NV, tokens = on_device(case)
    memory_NV = torch.full((2 * NEW_ROWS, 1300), math.nan, dtype=logits_NV.dtype, device=DEVICE)
    tile_NV = memory_NV[::2, 5:1276]
    tile_NV.copy_(logits_NV)
    plan = TileLoss.plan_of(tokens, case.settings, logits_NV.dtype)
    passes, sums_CN = TileLoss(plan), plan.empty_sums()
    passes.scan(sums_CN, tile_NV, 0, 0)
    assert torch.equal(tile_NV, logits_NV), "the support was not put back"
    merged = finish(plan, sums_CN)
    passes.gradient_(merged, tile_NV, 0, 0)
    float64.check_gradient(tile_NV.cpu(), case.truth, "triton tiles")
    first_NV = tile_NV.clone()
    tile_NV.copy_(logits_NV)
    passes.gradient_(merged, tile_NV, 0, 0)
    assert torch.equal(tile_NV, first_NV)
    tile_NV.fill_(math.nan)
    assert bool(memory_NV.isnan().all()), "written outside the rows"


@pytest.mark.parametrize("which", ["token_ids_N", "target_ids_NS"])
@pytest.mark.parametrize("bad", [-100, 1271, 2**31 - 1, 2**33 + 7], ids=str)
def test_an_id_that_no_tile_has_makes_its_row_nan(bad: int, which: str) -> None:
    """It is not asked on a GPU, which would synchronise; no other row's numbers change."""
    case = small_case(target="given")
    ids = getattr(case.tokens, which).long().clone()
    ids[1, ...] = bad
    one_N = torch.ones(NEW_ROWS)
    columns = {"pg_weight_N": one_N, "kl_weight_N": one_N}
    (terms, grad_NV), (want, want_NV) = (
        cases.run_loss("triton tiles", case.but(**columns, **more)) for more in ({which: ids}, {})
    )
    kept = torch.tensor([0, 2])
    assert torch.equal(grad_NV[kept], want_NV[kept]) and bool(grad_NV[1].isnan().all())
    wrong_N = terms.logp_N if which == "token_ids_N" else terms.kl_N
    assert wrong_N.isnan().tolist() == [False, True, False]
    assert torch.equal(terms.entropy_N[kept], want.entropy_N[kept])


@pytest.mark.parametrize("tail", [True, False], ids=["tail", "no tail"])
def test_two_shards_are_the_whole(tail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank's sums of its own columns, gathered; each makes its own columns' gradient."""
    case = small_case("fp32", tail=tail, entropy=True, temperatures=(1.0, 0.7))
    logits_NV, tokens = on_device(case)
    sizes, plan = (700, 571), TileLoss.plan_of(tokens, case.settings, logits_NV.dtype)
    parts = [part.contiguous() for part in logits_NV.split(sizes, 1)]
    sums = []
    for start, part_NP in zip((0, 700), parts, strict=True):
        sums.append(plan.empty_sums())
        TileLoss(plan).scan(sums[-1], part_NP, 0, start)
    monkeypatch.setattr(Shard, "gather", lambda *_: torch.stack(sums))
    for rank, start in enumerate((0, 700)):
        merged = finish(plan, over_shards(plan, sums[rank], Shard(start, sizes, "both")))
        TileLoss(plan).gradient_(merged, parts[rank], 0, start)
        float64.check_terms(backends.moved(merged.terms, "cpu"), case.truth.terms)
    float64.check_gradient(torch.cat(parts, 1).cpu(), case.truth, "triton tiles")


def test_a_shard_of_all_is_the_loss_of_rows() -> None:
    case = small_case()
    logits_NV, tokens = on_device(case)
    options = {"shard": Shard(0, (1271,)), "tile_loss": TileLoss}
    own_NV, kept_NV = torch.full_like(logits_NV, math.nan), logits_NV.clone()
    terms = sharded_loss_rows(logits_NV, tokens, case.settings, own_NV, **options)
    assert torch.equal(logits_NV, kept_NV)
    in_place = sharded_loss_rows(logits_NV, tokens, case.settings, logits_NV, **options)
    assert torch.equal(logits_NV, own_NV) and backends.same(in_place, terms)
    float64.check_terms(backends.moved(terms, "cpu"), case.truth.terms)
    float64.check_gradient(own_NV.cpu(), case.truth, "triton tiles")


@pytest.mark.parametrize("name", ["merged-tail", "two-temperatures", "pooled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_head_with_recompute(dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and every gradient by the rule; the same bits again."""
    monkeypatch.setenv(dispatch.ENV, "triton")
    settings, leaves = linear_cases.SETTINGS[name], linear_cases.head(dtype)
    assert leaves[2] is not None
    logits = linear_cases.dense(*leaves).detach()
    tokens = linear_cases.loss_tokens(logits, settings, "given" if name == "pooled" else "teachers")
    there = [leaf.detach().to(DEVICE).requires_grad_() for leaf in leaves]
    moved = backends.moved(tokens, DEVICE)
    runs = []
    for _ in range(2):
        options = {"bias_V": there[2], "recompute": True}
        loss, _ = linear_smopd_loss(there[0], there[1], moved, settings, **options)
        runs.append([loss.detach(), *torch.autograd.grad(0.5 * loss, there)])
    assert all(map(torch.equal, *runs))
    loss, *grads = (value.cpu() for value in runs[0])
    linear_cases.assert_by_the_rule(loss, tuple(grads), leaves, tokens, settings, factor=0.5)


def test_it_is_what_serves_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the row kernel's supports; above them the reference, or an error where it is forced."""
    tensor = torch.zeros(1, 4, device=DEVICE)
    monkeypatch.setenv(dispatch.ENV, "triton")
    for form in ("recompute", "tp_group"):
        assert dispatch.tile_loss("some_op", form, tensor, n_support=512) is TileLoss
        with pytest.raises(RuntimeError, match="some_op: SMOPD_BACKEND=triton cannot serve this call: the"):
            dispatch.tile_loss("some_op", form, tensor, n_support=513)


def test_a_target_is_made_on_the_tokens_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launches too, where another device is the current one."""
    case, entered = small_case(target="given"), []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        entered.append(True)
        yield
        entered.pop()

    def target_of(*arguments: object, **options: object) -> None:
        assert entered
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(tiles, "target_of", target_of)
    with pytest.raises(InterruptedError):
        TileLoss.plan_of(case.tokens, case.settings, torch.bfloat16)


def test_a_target_is_not_the_callers_memory() -> None:
    case = small_case(target="given")
    target = replace(case.tokens)
    plan = TileLoss.plan_of(backends.moved(target, DEVICE), case.settings, torch.bfloat16)
    assert plan.target is not None and isinstance(plan.target, tiles.TileTarget)
    given = {target.target_ids_NS.data_ptr(), target.target_logps_NS.data_ptr()}
    own = {getattr(plan.target, name).data_ptr() for name in ("ids_NS", "logps_NS", "joined_NS")}
    assert not given & own
