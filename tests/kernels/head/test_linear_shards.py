"""A head cut over the vocabulary, on two gloo ranks, against the whole head: loss, statistics, gradients."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from smopd.kernels.head.shards import shard_of
from smopd.ops import LossSettings, LossStats, linear_smopd_loss, linear_topk_logprobs
from tests.kernels.head import linear_cases as cases
from tests.kernels.ops import two_ranks

SIZES = {"uneven": (15, 22), "one-row": (36, 1), "narrow": (2, 35)}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
RELATIVE = 1e-11  # of a gradient's norm in fp64
ROW_BYTES = 8 * 128  # more than a row of the widest shard takes


def build(dtype: str, settings: str, target: str, sizes: str, recompute: bool) -> tuple[str, dict, dict]:
    hidden, weight, bias = (leaf.detach() for leaf in cases.head(DTYPES[dtype]))
    setting = cases.SETTINGS[settings]
    case = {
        "hidden": hidden,
        "weight": weight,
        "bias": bias,
        "sizes": SIZES[sizes],
        "tokens": cases.loss_tokens(cases.dense(hidden, weight, bias), setting, target),
        "settings": setting,
        "main_grad": recompute == (sizes == "uneven"),
        "upstream": 0.5,
    }
    options: dict[str, Any] = {"recompute": recompute, "chunk_bytes": 4 * ROW_BYTES}
    if sizes == "one-row":
        options["shard_sizes"] = SIZES[sizes]
    return "loss", case, options


LOSSES = {
    f"{dtype}-{settings}-{target}-{sizes}-{'recompute' if recompute else 'rows'}": build(
        dtype, settings, target, sizes, recompute
    )
    for dtype, settings, target, sizes in [
        *[("fp64", settings, "teachers", "uneven") for settings in cases.SETTINGS],
        ("fp64", "pooled-tail-entropy", "given", "one-row"),
        ("fp64", "merged-tail", "none", "uneven"),
        ("fp32", "merged-tail", "teachers", "uneven"),
        ("fp32", "two-temperatures", "given", "one-row"),
        ("fp32", "pooled", "given", "uneven"),
        ("bf16", "merged-tail", "teachers", "uneven"),
        ("bf16", "entropy", "given", "one-row"),
    ]
    for recompute in (False, True)
}
KAPPAS = (0, 1, 9, 30, cases.V)


def build_topk(kappa: int, sizes: str, finite: int = cases.V) -> tuple[str, dict, dict]:
    """finite: ids from this one on have a logit of -inf, so that the last of the kappa are ties."""
    hidden, weight, bias = (leaf.detach() for leaf in cases.head(torch.float32))
    weight[20], bias[20] = weight[3], bias[3]  # a tie between the ranks
    bias[10] = -torch.inf
    bias[finite:] = -torch.inf
    token_ids = torch.arange(cases.N) * 3 % cases.V
    case = {"hidden": hidden, "weight": weight, "bias": bias, "sizes": SIZES[sizes], "token_ids": token_ids}
    return "topk", case, {"kappa": kappa, "temperature": 0.7, "chunk_bytes": 4 * ROW_BYTES}


TOPKS = {f"kappa{kappa}-{sizes}": build_topk(kappa, sizes) for kappa in KAPPAS for sizes in SIZES}
TOPKS |= {f"kappa9-{sizes}-4 finite": build_topk(9, sizes, finite=4) for sizes in SIZES}
ALL = {**LOSSES, **TOPKS}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """For each rank, what every case gave, twice."""
    results = two_ranks.run(list(ALL.values()), tmp_path_factory.mktemp("ranks"))
    return [dict(zip(ALL, result, strict=True)) for result in results]


def relative(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("name", LOSSES)
def test_loss_statistics_and_gradients_are_the_whole_heads(
    name: str, ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the reference's rows, which do the same arithmetic; other backends round in their own way."""
    monkeypatch.setenv("SMOPD_BACKEND", "reference")
    _, case, _ = LOSSES[name]
    dtype = name.split("-")[0]
    leaves = [case[leaf].clone().requires_grad_() for leaf in ("hidden", "weight", "bias")]
    loss, stats = linear_smopd_loss(*leaves[:2], case["tokens"], case["settings"], bias_V=leaves[2])
    whole = dict(zip(("hidden", "weight", "bias"), torch.autograd.grad(0.5 * loss, leaves), strict=True))
    tokens = case["tokens"]
    ratio_N = (stats.logp_N - tokens.old_logp_N).exp()
    size_of_pg = float((tokens.pg_weight_N * tokens.adv_N * ratio_N).abs().sum())
    start = 0
    for rank, size in enumerate(case["sizes"]):
        got = ranks[rank][name][0]
        cut = slice(start, start + size)
        close = RELATIVE if dtype == "fp64" else 1e-6  # sums of at least fp32, whatever the inputs' dtype
        torch.testing.assert_close(got["loss"], loss.detach(), rtol=close, atol=close)
        cases.assert_same_stats(got["stats"], stats, pg_atol=close * size_of_pg, rtol=close, atol=close)
        grads = (got["hidden"], got["weight"], got["bias"])
        if dtype == "fp64":
            assert relative(grads[0], whole["hidden"]) < RELATIVE
            assert relative(grads[1], whole["weight"][cut]) < RELATIVE
            assert relative(grads[2], whole["bias"][cut]) < RELATIVE
        else:
            options = {"factor": case["upstream"], "columns": cut}
            cases.assert_by_the_rule(got["loss"], grads, leaves, tokens, case["settings"], **options)
        start += size


@pytest.mark.parametrize("name", LOSSES)
def test_repeated_runs_and_both_ranks_have_the_same_bits(name: str, ranks) -> None:
    first, again = ranks[0][name]
    other = ranks[1][name][0]
    assert torch.equal(first["loss"], again["loss"]) and torch.equal(first["loss"], other["loss"])
    for leaf in ("hidden", "weight", "bias"):
        assert torch.equal(first[leaf], again[leaf])
    assert torch.equal(first["hidden"], other["hidden"])
    for field in fields(LossStats):
        values = [getattr(result["stats"], field.name) for result in (first, again, other)]
        assert all(torch.equal(values[0], value) for value in values[1:]), field.name


@pytest.mark.parametrize("name", TOPKS)
def test_topk_is_the_whole_heads(name: str, ranks) -> None:
    _, case, options = TOPKS[name]
    want = linear_topk_logprobs(
        case["hidden"], case["weight"], token_ids_N=case["token_ids"], bias_V=case["bias"], **options
    )
    for rank in range(2):
        for got in ranks[rank][name]:
            assert torch.equal(got.ids_NS, want.ids_NS) and got.ids_NS.dtype == torch.int32
            torch.testing.assert_close(got.logps_NS, want.logps_NS, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(got.token_logp_N, want.token_logp_N, rtol=1e-6, atol=1e-6)
            assert torch.equal(got.logps_NS, ranks[0][name][0].logps_NS)


def test_a_rank_without_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    with pytest.raises(ValueError, match=r"shard_sizes is \(5, 0\), expected at least 1 row at each rank"):
        shard_of("some_op", torch.zeros(5, 2), object(), (5, 0))


def test_sizes_that_do_not_fit_are_refused() -> None:
    weight = torch.zeros(5, 2)
    message = r"^some_op: shard_sizes is \(5,\) without tp_group, expected None$"
    with pytest.raises(ValueError, match=message):
        shard_of("some_op", weight, None, (5,))
    hidden, weight, _ = cases.head()
    tokens = cases.loss_tokens(cases.dense(hidden, weight, None), LossSettings())
    with pytest.raises(ValueError, match="shard_sizes"):
        linear_smopd_loss(hidden, weight, tokens, shard_sizes=(cases.V,))
