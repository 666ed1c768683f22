"""linear_smopd_loss: against float64 and the dense loss; what backward does; its operator."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from smopd.kernels.head import chunks
from smopd.kernels.ops import linear, linear_topk
from smopd.kernels.ops.loss import flat_objective
from smopd.ops import (
    LossSettings,
    LossStats,
    linear_smopd_loss,
    linear_topk_logprobs,
    smopd_loss,
)
from tests.kernels import float64
from tests.kernels.head import linear_cases as cases

ROW_BYTES = 8 * 48  # of float64: V is padded to 128 bytes
CHUNKS = [1, ROW_BYTES, 5 * ROW_BYTES, 1 << 28]
ENTROPY = LossSettings(entropy_coef=0.1)


def build(dtype: torch.dtype = torch.float64, dead: tuple[int, ...] = (2,), settings: LossSettings = ENTROPY):
    """hidden, weight and bias, and tokens of which those at dead count nowhere."""
    leaves = cases.head(dtype)
    tokens = cases.loss_tokens(cases.dense(*leaves), settings)
    columns = {}
    for name in ("pg_weight_N", "kl_weight_N", "ent_weight_N"):
        columns[name] = 0.1 + getattr(tokens, name)
        columns[name][list(dead)] = 0.0
    return leaves, replace(tokens, **columns)


def loss_of(leaves, tokens, settings: LossSettings = ENTROPY, **options) -> tuple[Tensor, LossStats]:
    return linear_smopd_loss(*leaves[:2], tokens, settings, bias_V=leaves[2], **options)


@pytest.mark.parametrize("chunk_bytes", CHUNKS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_equals_the_dense_loss(chunk_bytes: int, bias: bool) -> None:
    settings = LossSettings(entropy_coef=0.1, temperature=0.7)
    leaves, tokens = build(settings=settings)
    leaves = leaves if bias else (*leaves[:2], None)
    wanted = [leaf for leaf in leaves if leaf is not None]
    want, want_stats = smopd_loss(cases.dense(*leaves), tokens, settings)
    got, stats = loss_of(leaves, tokens, settings, chunk_bytes=chunk_bytes)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    cases.assert_same_stats(stats, want_stats, rtol=1e-9, atol=1e-12)
    grads = [torch.autograd.grad(0.5 * loss, wanted) for loss in (got, want)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_gradcheck() -> None:
    leaves, tokens = build()
    function = lambda *leaves: loss_of(leaves, tokens, chunk_bytes=4 * ROW_BYTES)[0]  # noqa: E731
    assert torch.autograd.gradcheck(function, leaves, **float64.ALL_AT_ONCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", cases.SETTINGS)
def test_low_precision_is_within_the_rule(name: str, dtype: torch.dtype) -> None:
    leaves, settings = cases.head(dtype), cases.SETTINGS[name]
    tokens = cases.loss_tokens(cases.dense(*leaves), settings, "given" if "pooled" in name else "teachers")
    loss, _ = loss_of(leaves, tokens, settings, chunk_bytes=2 * ROW_BYTES)
    grads = torch.autograd.grad(loss, leaves)
    assert loss.dtype == torch.float32 and all(grad.dtype == dtype for grad in grads)
    cases.assert_by_the_rule(loss, grads, leaves, tokens, settings)


def test_the_weights_gradient_is_summed_in_fp32() -> None:
    """4096 equal contributions of one token each: a bf16 sum would stop growing after 256 of them."""
    n_tokens, one = 4096, torch.ones(4096)
    hidden = torch.ones(n_tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    columns = {"token_ids_N": torch.zeros(n_tokens, dtype=torch.int64), "adv_N": one, "pg_weight_N": one}
    more = dict.fromkeys(("old_logp_N", "reverse_adv_N"))
    tokens = float64.random_tokens(n_tokens, 2, torch.zeros(n_tokens, 2), 1.0, 0, **columns, **more)
    linear_smopd_loss(hidden, weight, tokens, chunk_bytes=8)[0].backward()
    assert weight.grad[:, 0].tolist() == [-n_tokens / 2, n_tokens / 2]


def test_tokens_that_count_nowhere_add_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their hidden states, and no product is made of them."""
    dead = (0, 2, 3, 12)
    (hidden, weight, bias), tokens = build(dead=dead)
    index = torch.tensor([n for n in range(cases.N) if n not in dead])
    columns = {f.name: getattr(tokens, f.name) for f in fields(tokens) if f.name != "log_alpha"}
    kept = replace(tokens, **{name: x[index] for name, x in columns.items() if x is not None})
    want, want_stats = loss_of((hidden[index], weight, bias), kept)
    want_grads = torch.autograd.grad(want, (hidden, weight, bias))
    broken = hidden.detach().clone()
    broken[list(dead)] = torch.tensor([torch.inf, torch.nan, -torch.inf, 1e300], dtype=torch.float64)[:, None]
    broken.requires_grad_()
    rows, logits_into = [], linear.logits_into
    monkeypatch.setattr(linear, "logits_into", lambda *a: rows.append(len(a[1])) or logits_into(*a))
    got, stats = loss_of((broken, weight, bias), tokens, chunk_bytes=4 * ROW_BYTES)
    assert sum(rows) == len(index)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got, (broken, weight, bias))
    assert not grads[0][list(dead)].any()
    for gradient, truth in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-13)
    for name in (field.name for field in fields(LossStats) if field.name.endswith("_N")):
        value = getattr(stats, name)
        assert not value[list(dead)].any(), name
        torch.testing.assert_close(value[index], getattr(want_stats, name))


def test_a_token_of_statistics_alone_adds_nothing_to_the_weights_gradient() -> None:
    """0 * inf would be NaN."""
    (hidden, weight, _), tokens = build()
    settings, zero = LossSettings(opd_coef=0.0), tokens.pg_weight_N.clone()
    zero[4] = 0.0
    tokens = replace(tokens, pg_weight_N=zero)
    broken = hidden.detach().clone()
    broken[4] = torch.inf
    grads = [
        torch.autograd.grad(linear_smopd_loss(states, weight, tokens, settings)[0], weight)[0]
        for states in (hidden, broken)
    ]
    assert torch.equal(*grads)


@pytest.mark.parametrize("dead", [tuple(range(cases.N)), None], ids=["none counts", "none is there"])
def test_nothing_to_do(dead: tuple[int, ...] | None) -> None:
    leaves, tokens = build(dead=dead or ())
    rows = cases.N if dead else 0
    loss, stats = loss_of((leaves[0][:rows], *leaves[1:]), tokens.rows(0, rows))
    loss.backward()
    assert loss.item() == 0.0 and not stats.logp_N.any() and stats.kl_N.shape == (rows,)
    assert not any(leaf.grad.any() for leaf in leaves)
    top = linear_topk_logprobs(leaves[0][:0], leaves[1], 4, token_ids_N=tokens.token_ids_N[:0])
    assert top.ids_NS.shape == (0, 4) and top.token_logp_N.shape == (0,)


@pytest.mark.parametrize("need", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_only_what_needs_a_gradient_gets_and_costs_one(
    need: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaves, tokens = build()
    want = torch.autograd.grad(loss_of(leaves, tokens)[0], leaves)
    made = []
    for name in ("hidden_gradient_into", "weight_gradient_into"):
        into = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda *a, n=name, f=into, **k: made.append(n) or f(*a, **k))
    leaves = [leaf if index in need else leaf.detach() for index, leaf in enumerate(leaves)]
    loss_of(leaves, tokens)[0].backward()
    for index, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (index not in need)
        assert leaf.grad is None or torch.equal(leaf.grad, want[index])
    wanted = {0: "hidden_gradient_into", 1: "weight_gradient_into"}
    assert set(made) == {wanted[index] for index in need if index in wanted}


def test_without_a_gradient_only_the_loss_is_made() -> None:
    leaves, tokens = build()
    want = loss_of(leaves, tokens)[0]
    with torch.no_grad():
        loss, stats = loss_of(leaves, tokens)
    assert not loss.requires_grad and torch.equal(loss, want.detach()) and not stats.logp_N.requires_grad


def test_no_logits_of_all_tokens_are_ever_held(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(1000, 8, requires_grad=True)
    tokens = float64.random_tokens(512, 1000, hidden.detach() @ weight.detach().T, 1.0, 0, reverse_adv_N=None)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves(out)
            largest = max([largest, *(t.numel() for t in leaves if hasattr(t, "numel"))])
            return out

    def watched(function):
        def call(*arguments):
            with Watch():
                return function(*arguments)

        return call

    for module, name in ((linear, "_in_chunks"), (linear_topk, "_by_rows"), (linear_topk, "_by_pieces")):
        monkeypatch.setattr(module, name, watched(getattr(module, name)))
    linear_smopd_loss(hidden, weight, tokens, chunk_bytes=64 * 1024 * 4)[0].backward()
    linear_topk_logprobs(hidden, weight, 4, chunk_bytes=64 * 1024 * 4)
    assert largest == 64 * 1024  # 1000 columns, in rows of a multiple of 128 bytes


@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_the_sum_of_the_weights_gradient_is_given_away(
    upstream: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """weight.grad is the memory that the chunks were summed in: no second (V, D)."""
    (hidden, weight, _), tokens = build()
    sums, into = set(), linear.weight_gradient_into
    monkeypatch.setattr(
        linear, "weight_gradient_into", lambda out, *a, **k: sums.add(out.data_ptr()) or into(out, *a, **k)
    )
    loss, _ = linear_smopd_loss(hidden, weight, tokens, chunk_bytes=4 * ROW_BYTES)
    (upstream * loss).backward()
    assert {weight.grad.data_ptr()} == sums


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("keep", [False, True])
def test_a_bf16_gradient_is_scaled_in_fp32_and_rounded_once(keep: bool, device: str) -> None:
    """Of several chunks; of one chunk the sum is in bf16 before the factor."""
    (hidden, weight, _), tokens = build(torch.bfloat16)
    columns = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    tokens = replace(tokens, **{n: x.to(device) for n, x in columns.items() if isinstance(x, Tensor)})
    hidden = hidden.detach().to(device)
    weight = weight.detach().to(device).requires_grad_()
    options = {"chunk_bytes": 2 * ROW_BYTES}
    sums: list[Tensor] = []

    def note(value: Tensor) -> Tensor:
        if value.shape == weight.shape and value.dtype == torch.float32:
            sums.append(value.clone())
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        loss, _ = linear_smopd_loss(hidden, weight, tokens, **options)
    (0.3 * loss).backward(retain_graph=keep)
    assert torch.equal(weight.grad, (sums[0] * torch.tensor(0.3, device=device)).bfloat16())


def test_backward_again() -> None:
    (hidden, weight, _), tokens = build()
    want = torch.autograd.grad(linear_smopd_loss(hidden, weight, tokens)[0], (hidden, weight))
    loss, _ = linear_smopd_loss(hidden, weight, tokens)
    for factor in (0.5, 2.0):
        grads = torch.autograd.grad(factor * loss, (hidden, weight), retain_graph=True)
        for gradient, whole in zip(grads, want, strict=True):
            torch.testing.assert_close(gradient, factor * whole)
    torch.autograd.grad(0.5 * loss, (hidden, weight))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(0.5 * loss, (hidden, weight))


def test_repeated_runs_have_the_same_bits_and_autocast_changes_none() -> None:
    leaves, tokens = build(torch.float32)
    runs = []
    for enabled in (False, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, stats = loss_of(leaves, tokens, chunk_bytes=3 * ROW_BYTES)
        grads = torch.autograd.grad(loss, leaves)
        runs.append([loss.detach(), *(getattr(stats, f.name) for f in fields(LossStats)), *grads])
    assert all(map(torch.equal, runs[0], runs[1])) and all(map(torch.equal, runs[0], runs[2]))


@pytest.mark.parametrize("chunk_bytes", [None, 2 * ROW_BYTES], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("need", [(True, True, True), (True, False, False)], ids=["all", "hidden"])
def test_opcheck(dtype: torch.dtype, need: tuple[bool, bool, bool], chunk_bytes: int | None) -> None:
    leaves, tokens = build(dtype)
    given = [leaf if needed else leaf.detach() for leaf, needed in zip(leaves, need, strict=True)]
    arguments = (*given, *flat_objective(tokens, ENTROPY), chunk_bytes, *need)
    torch.library.opcheck(torch.ops.smopd.linear_loss.default, arguments)


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_compile_fullgraph(with_bias: bool) -> None:
    leaves, tokens = build(torch.float32)
    leaves = leaves if with_bias else leaves[:2]
    tokens = replace(tokens, token_ids_N=tokens.token_ids_N.int())

    def call(hidden, weight, bias=None):
        loss, stats = linear_smopd_loss(
            hidden.tanh(), weight, tokens, ENTROPY, bias_V=bias, chunk_bytes=4 * ROW_BYTES
        )
        return 0.5 * loss, stats.kl_N, stats.clipped_N

    def run(function):
        outputs = function(*leaves)
        return [*outputs, *torch.autograd.grad(outputs[0], leaves)]

    got = run(torch.compile(call, fullgraph=True, backend="aot_eager"))
    for a, b in zip(got, run(call), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("most", [1, 5, 127, 128, 300, 4416, 10**6])
@pytest.mark.parametrize("unit", [chunks.ROW_UNIT, chunks.ROW_UNIT_CPU])
def test_blocks_are_all_rows_in_order_within_the_budget(unit: int, most: int) -> None:
    for n_rows in (0, 1, 127, 128, 129, 4300, 20_001):
        blocks = chunks.row_blocks(n_rows, most, unit)
        assert [0, *(stop for _, stop in blocks)] == [*(start for start, _ in blocks), n_rows]
        assert all(0 < stop - start <= most for start, stop in blocks)
        if most >= unit:  # columns of the tokens start at 16 bytes in every block
            assert all(start % unit == 0 for start, _ in blocks)


def test_the_default_budget_of_a_gpu_holds_half_of_8192_tokens() -> None:
    hidden_ND = torch.empty(8192, 16, dtype=torch.bfloat16, device="meta")
    most = chunks.rows_per_chunk(hidden_ND, 151_936, None)
    sizes = [stop - start for start, stop in chunks.row_blocks(8192, most, chunks.ROW_UNIT)]
    assert sizes == [4096, 4096] and chunks.rows_per_chunk(hidden_ND, 151_936, 1) == 1
