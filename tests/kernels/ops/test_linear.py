"""linear_smopd_loss and linear_topk_logprobs: equal to the dense operations, and their memory."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from smopd import ops
from smopd.kernels import head
from smopd.ops import LossSettings, LossStats, LossTokens, linear_smopd_loss, linear_topk_logprobs
from tests.kernels import backends, cases
from tests.kernels.conformance.test_topk import KINDS, rows_of

N, V, D = 13, 150, 6
CHUNK = 4000  # bytes of 3 to 10 rows
SETTINGS = {
    "merged": LossSettings(entropy_coef=0.1, temperature=0.7),
    "repeats": LossSettings(merge=False, tail=False, kl_temperature=0.8),
    "none": LossSettings(dual_clip=1.5, reverse_kl_surrogate="ppo"),
}
WEIGHTS = ("pg_weight_N", "kl_weight_N", "ent_weight_N", "reverse_weight_N")


def eighths(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return random multiples of 1/8: short sums of their products are exact in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul_(8).round_().div_(8).to(dtype)


def build(
    dtype: torch.dtype = torch.float64, target: str = "merged", dead: tuple[int, ...] = (2,)
) -> tuple[list[Tensor], LossTokens]:
    """Return hidden, weight and bias, and tokens; those at `dead` have no weight."""
    shapes = ((N, D), (V, D), (V,))
    leaves = [eighths(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]
    logits_NV = torch.nn.functional.linear(*leaves).detach()
    tokens = cases.random_tokens(logits_NV, cases.target_of(target, N, V, 7))
    columns = {name: 0.1 + getattr(tokens, name) for name in WEIGHTS}
    for column_N in columns.values():
        column_N[list(dead)] = 0.0
    return leaves, replace(tokens, **columns)


def loss_of(leaves, tokens: LossTokens, settings=SETTINGS["merged"], **options) -> tuple[Tensor, LossStats]:
    return linear_smopd_loss(*leaves[:2], tokens, settings, bias_V=leaves[2], **options)


def columns_of(stats: LossStats) -> list[Tensor]:
    return [getattr(stats, field.name) for field in fields(LossStats)]


@pytest.mark.parametrize("chunk_bytes", [1, CHUNK, None])
@pytest.mark.parametrize("dtype", [*cases.DTYPES, "bf16 widened"])
@pytest.mark.parametrize("target", SETTINGS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_loss_is_the_dense_loss(
    device: str, target: str, dtype: str, chunk_bytes: int | None, monkeypatch
) -> None:
    """Sums of chunks are rounded once."""
    if dtype == "bf16 widened":  # as on a CPU without bf16 instructions
        monkeypatch.setattr(head, "cpu_multiplies_bf16", lambda: False)
        monkeypatch.setattr(head, "PIECE_BYTES", 1)  # pieces of 64 tokens
    leaves, tokens = build(cases.DTYPES[dtype.split()[0]], target)
    leaves = [leaf.detach().to(device).requires_grad_() for leaf in leaves]
    tokens, given = backends.moved(tokens, device), leaves if target != "none" else [*leaves[:2], None]
    logits_NV = torch.nn.functional.linear(*given).detach().requires_grad_()
    want, want_stats = ops.smopd_loss(logits_NV, tokens, SETTINGS[target])
    got, stats = loss_of(given, tokens, SETTINGS[target], chunk_bytes=chunk_bytes)
    for mine, theirs in zip((got, *columns_of(stats)), (want, *columns_of(want_stats)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)
    grad_NV = torch.autograd.grad(want, logits_NV)[0].double()
    hidden_ND, weight_VD = leaves[0].double(), leaves[1].double()
    factors = ((grad_NV, weight_VD), (grad_NV.T, hidden_ND), (grad_NV.T, torch.ones_like(hidden_ND[:, 0])))
    info = torch.finfo(logits_NV.dtype)
    found = torch.autograd.grad(0.3 * got, [leaf for leaf in given if leaf is not None])
    for gradient, (left, right) in zip(found, factors, strict=target != "none"):
        exact, size = 0.3 * left @ right, 0.3 * left.abs() @ right.abs()
        roundings = 1 if chunk_bytes is not None and gradient is not found[0] else 2  # before the factor too
        rounded = roundings / 2 * info.eps * exact.abs()
        if device == "cuda":
            rounded = info.eps * size  # Triton's bits depend on what is aligned
        bound = rounded + V * min(info.eps, 2.0**-23) * size + info.tiny
        assert gradient.dtype == logits_NV.dtype and bool(((gradient - exact).abs() <= bound).all())


def test_tokens_without_weights_add_nothing() -> None:
    """Even with infinite hidden states."""
    dead = [0, 2, 3, 12]
    (hidden, weight, bias), tokens = build(dead=tuple(dead))
    index = torch.tensor([n for n in range(N) if n not in dead])
    kept = tokens.at(index)
    want, _ = loss_of((hidden[index], weight, bias), kept)
    want_grads = torch.autograd.grad(want, (hidden, weight, bias))
    broken = hidden.detach().clone()
    broken[dead] = torch.tensor([torch.inf, torch.nan, -torch.inf, 1e300], dtype=torch.float64)[:, None]
    broken.requires_grad_()
    got, stats = loss_of((broken, weight, bias), tokens, chunk_bytes=CHUNK)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    grads = torch.autograd.grad(got, (broken, weight, bias))
    assert not grads[0][dead].any()
    for gradient, truth in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-13)
    assert not stats.kl_N[dead].any()
    observed = replace(tokens, pg_weight_N=tokens.pg_weight_N.index_fill(0, torch.tensor(4), 0.0))
    broken = hidden.detach().index_fill(0, torch.tensor(4), torch.inf)  # 0 * inf would be NaN
    losses = [linear_smopd_loss(x, weight, observed, LossSettings(opd_coef=0.0))[0] for x in (hidden, broken)]
    assert torch.equal(*(torch.autograd.grad(loss, weight)[0] for loss in losses))


@pytest.mark.parametrize("dead", [tuple(range(N)), None], ids=["no weights", "no rows"])
def test_nothing_to_do(dead: tuple[int, ...] | None) -> None:
    leaves, tokens = build(dead=dead or ())
    rows = N if dead else 0
    loss, stats = loss_of((leaves[0][:rows], *leaves[1:]), tokens.at(slice(rows)))
    loss.backward()
    assert loss.item() == 0.0 and not stats.logp_N.any() and stats.kl_N.shape == (rows,)
    assert not any(leaf.grad.any() for leaf in leaves)
    top = linear_topk_logprobs(leaves[0][:0], leaves[1], 4, token_ids_N=tokens.token_ids_N[:0])
    assert top.ids_NS.shape == (0, 4) and top.token_logp_N.shape == (0,)


@pytest.mark.parametrize("need", [(), (0,), (1,), (2,), (0, 2)], ids=str)
def test_only_what_needs_a_gradient_gets_one(need: tuple[int, ...]) -> None:
    leaves, tokens = build()
    whole = loss_of(leaves, tokens)[0]
    want = torch.autograd.grad(whole, leaves)
    leaves = [leaf if index in need else leaf.detach() for index, leaf in enumerate(leaves)]
    loss, stats = loss_of(leaves, tokens)
    assert loss.requires_grad == bool(need) and torch.equal(loss, whole) and not stats.logp_N.requires_grad
    if need:
        loss.backward()
    for index, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (index not in need)
        assert leaf.grad is None or torch.equal(leaf.grad, want[index])


def largest_allocation(call) -> int:
    """Return the bytes of the largest tensor allocated on the CPU, also inside of operators."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    return max(event.self_cpu_memory_usage for event in profile.events())


def test_a_chunk_of_logits_is_all_that_is_held() -> None:
    """Backward reuses the memory of the gradients."""
    hidden, weight = torch.randn(512, 64, requires_grad=True), torch.randn(5000, 64, requires_grad=True)
    logits_NV = (hidden @ weight.T).detach()
    tokens, chunk_bytes = cases.random_tokens(logits_NV, None, reverse=False), 4 << 20
    loss = []
    forward = largest_allocation(
        lambda: loss.append(linear_smopd_loss(hidden, weight, tokens, chunk_bytes=chunk_bytes)[0])
    )
    assert chunk_bytes // 2 < forward <= chunk_bytes < logits_NV.nbytes
    assert largest_allocation((0.5 * loss[0]).backward) < hidden.nbytes < weight.nbytes
    for backend_dtype in (torch.float32, torch.float64):  # pieces of the vocabulary, whole rows
        head = (hidden.detach().to(backend_dtype), weight.detach().to(backend_dtype))
        held = largest_allocation(lambda head=head: linear_topk_logprobs(*head, 8, chunk_bytes=chunk_bytes))
        assert chunk_bytes // 2 < held <= chunk_bytes


def test_repeated_runs_have_the_same_bits_and_autocast_changes_none() -> None:
    leaves, tokens = build(torch.float32)
    runs = []
    for enabled in (False, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss, stats = loss_of(leaves, tokens, chunk_bytes=CHUNK)
        runs.append([loss.detach(), *columns_of(stats), *torch.autograd.grad(loss, leaves)])
    assert backends.same(runs[0], runs[1]) and backends.same(runs[0], runs[2])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "masked"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_topk_is_the_dense_topk(dtype: str, kind: str) -> None:
    """In pieces (C++) and in chunks, with a row of NaN and with masks by a bias."""
    of = {"dtype": cases.DTYPES[dtype]}
    # With a hidden size of whole AMX steps: else oneDNN mixes a row of NaN into the row before it.
    hidden_ND = torch.eye(5, 32, **of)
    hidden_ND[1] = torch.nan
    for n_vocab in (33, 2049, 9001):
        weight_VD = torch.nn.functional.pad(rows_of(kind, 5, n_vocab).T, (0, 27)).to(**of)
        masked_V = torch.zeros(n_vocab, **of).masked_fill(
            torch.arange(n_vocab) % (n_vocab // 16) != 1, -torch.inf
        )
        options = {"token_ids_N": torch.arange(5) * 1000 % n_vocab, "temperature": 0.7}
        for bias_V, kappa in ((None, 0), (None, 32), (masked_V, 8), (masked_V, 32)):
            logits_NV = torch.nn.functional.linear(hidden_ND, weight_VD, bias_V)
            want = ops.topk_logprobs(logits_NV, kappa, **options)
            for chunk_bytes in (None, 1, 100_000):
                head = {"bias_V": bias_V, "chunk_bytes": chunk_bytes}
                got = linear_topk_logprobs(hidden_ND, weight_VD, kappa, **options, **head)
                assert torch.equal(got.ids_NS, want.ids_NS)
                torch.testing.assert_close(got.logps_NS, want.logps_NS, equal_nan=True)
                torch.testing.assert_close(got.token_logp_N, want.token_logp_N, equal_nan=True)
