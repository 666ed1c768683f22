"""smopd._C_cuda without a GPU: its kernel run by threads of the host, and its build by nvcc.

The kernel (csrc/cuda/loss_rows.h) is compiled for the host with barriers, bulk copies and shuffles emulated
(emulated.h), compared with dense float64 and with the reference, and run under ThreadSanitizer. What only a
GPU can show is not tested here.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from smopd.kernels import cuda, reference_loss
from smopd.kernels.types import TokenTerms
from smopd.ops import LossSettings, LossTokens
from tests.kernels import ops_truth
from tests.patience import HANG_SECONDS

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "cuda"
INF = math.inf
THREADS = 64  # of an emulated block, with a ring of 4; 160 with a ring of 3 for more than 63 target entries
CHUNK = THREADS * 2 * 8  # elements
COLUMNS = (
    "adv_N",
    "pg_weight_N",
    "old_logp_N",
    "kl_weight_N",
    "ent_weight_N",
    "reverse_adv_N",
    "reverse_weight_N",
)
TERMS = ("logp_N", "entropy_N", "kl_N", "teacher_mass_N", "student_mass_N", "surrogate_N", "reverse_N")
ATOL = 2e-5  # of the loss's terms
UNTOUCHED = -1  # int16, as the program fills the gradient's memory


def compiled(folder: Path, name: str, *flags: str) -> Path:
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = folder / name
    command = [
        compiler,
        "-std=c++20",
        "-pthread",
        "-Wall",
        "-Werror",
        *flags,
        SOURCE / "emulated.cpp",
        "-o",
        program,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and "-fsanitize=thread" in flags and "tsan" in done.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("emulated"), "emulated", "-O1")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("sanitized"), "sanitized", "-O1", "-g", "-fsanitize=thread")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How the rows lie in memory and who computes them. Offsets: elements behind a 16-byte boundary."""

    threads: int = THREADS
    clusters: int = 1
    grad: str | None = "own"  # or "in place", or None
    pad: int = 0  # elements between rows
    offset: int = 0
    grad_pad: int = 0
    grad_offset: int = 0


def block_of(tensor: Tensor) -> bytes:
    data = tensor.contiguous().numpy().tobytes()
    return data + bytes(-len(data) % 16)


def emulate(
    program: Path, logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, launch: Launch, folder: Path
) -> tuple[TokenTerms, Tensor | None]:
    """The terms and the gradient; what lies around the gradient's rows is asserted to be untouched."""
    n_rows, n_vocab = logits_NV.shape
    stride, grad_stride = n_vocab + launch.pad, n_vocab + launch.grad_pad
    memory = torch.full((launch.offset + n_rows * stride + 8,), UNTOUCHED, dtype=torch.int16)
    rows = memory[launch.offset : launch.offset + n_rows * stride].view(n_rows, stride)
    rows[:, :n_vocab] = logits_NV.view(torch.int16)
    grad_offset = launch.grad_offset
    if launch.grad == "in place":
        grad_stride, grad_offset, grad_memory = stride, launch.offset, -1
    else:
        grad_memory = 0 if launch.grad is None else grad_offset + n_rows * grad_stride + 8
    columns = [getattr(tokens, name) for name in COLUMNS]
    ids_NS, logps_NS = tokens.target_ids_NS, tokens.target_logps_NS
    has_target = ids_NS is not None
    n_support = ids_NS.shape[1] if has_target else 0
    dual = INF if settings.dual_clip is None else settings.dual_clip
    header = struct.pack(
        "=21i7f",
        *(launch.threads, launch.clusters, n_rows, n_vocab, n_support),
        *(stride, launch.offset, grad_stride, grad_offset, memory.numel(), grad_memory),
        *(column is not None for column in columns),
        *(has_target, settings.tail, settings.reverse_kl_surrogate == "ppo"),
        *(1.0 - settings.clip_low, 1.0 + settings.clip_high, dual, settings.opd_coef, settings.entropy_coef),
        *(settings.temperature, settings.kl_temperature),
    )
    blocks = [header + bytes(-len(header) % 16), block_of(memory), block_of(tokens.token_ids_N.int())]
    blocks += [block_of(column.float()) for column in columns if column is not None]
    if has_target:
        blocks += [block_of(ids_NS.int()), block_of(logps_NS.float())]
    (folder / "input").write_bytes(b"".join(blocks))
    done = subprocess.run(
        [program, folder / "input", folder / "output"], capture_output=True, text=True, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stderr
    output = bytearray((folder / "output").read_bytes())
    terms = torch.frombuffer(output, dtype=torch.float32, count=7 * n_rows).view(7, n_rows)
    clipped = torch.frombuffer(output, dtype=torch.int8, offset=28 * n_rows, count=n_rows)
    result = TokenTerms(**dict(zip(TERMS, terms, strict=True)), clipped_N=clipped)
    if launch.grad is None:
        assert len(output) == 29 * n_rows
        return result, None
    written = torch.frombuffer(bytearray(output[29 * n_rows :]), dtype=torch.int16)
    end = grad_offset + n_rows * grad_stride
    around = torch.cat([written[:grad_offset], written[end : end + 8]])
    rows = written[grad_offset:end].view(n_rows, grad_stride)
    assert (around == UNTOUCHED).all() and (rows[:, n_vocab:] == UNTOUCHED).all()
    return result, rows[:, :n_vocab].contiguous().view(torch.bfloat16)


@pytest.fixture
def run(program: Path, tmp_path: Path) -> Callable[..., tuple[TokenTerms, Tensor]]:
    def run_(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings, **launch):
        return emulate(program, logits_NV, tokens, settings, Launch(**launch), tmp_path)

    return run_


SETTINGS = {
    "defaults": LossSettings(),
    "paper": LossSettings(merge=False, tail=False),
    "entropy": LossSettings(entropy_coef=0.3, tail=False),
    "entropy-tail": LossSettings(entropy_coef=0.3),
    "two-temperatures": LossSettings(temperature=0.7),
    "two-temperatures-entropy": LossSettings(temperature=0.7, entropy_coef=0.2),
    "one-temperature": LossSettings(temperature=0.7, kl_temperature=0.7, tail=False),
    "dual-ppo": LossSettings(dual_clip=1.5, reverse_kl_surrogate="ppo", opd_coef=0.3, clip_high=0.28),
    "no-opd": LossSettings(opd_coef=0.0),
}


def target_of(n_rows: int, n_vocab: int, n_support: int, *, repeats: bool = True) -> dict[str, Tensor]:
    """Log-probabilities of mass below 1, some slots empty, and with repeats each id about twice."""
    ids, logps = ops_truth.random_topk(n_rows, n_vocab, min(n_support, n_vocab), seed=5)
    if repeats and ids.shape[1] > 1:
        half = (ids.shape[1] + 1) // 2
        ids = torch.cat([ids[:, :half], ids[:, : ids.shape[1] - half].flip(1)], 1)
        logps = logps - math.log(2.0)
    if ids.shape[1] > 2:
        logps[::2, 1] = -INF
    return {"target_ids_NS": ids, "target_logps_NS": logps.float().double()}


def rows_of(n_rows: int, n_vocab: int, settings: LossSettings, n_support: int = 12, **more):
    generator = torch.Generator().manual_seed(n_vocab)
    logits_NV = (3 * torch.randn(n_rows, n_vocab, generator=generator)).bfloat16()
    more = {**target_of(n_rows, n_vocab, n_support), **more}
    tokens = ops_truth.random_tokens(n_rows, n_vocab, logits_NV, settings.temperature, n_vocab, **more)
    if (
        n_rows > 1 and tokens.target_ids_NS is not None and tokens.target_ids_NS.shape[1] > 0
    ):  # one token inside its target
        tokens.token_ids_N[1] = tokens.target_ids_NS[1, -1]
    rounded = {
        field.name: value.float().double()
        for field in fields(tokens)
        if isinstance(value := getattr(tokens, field.name), Tensor) and value.dtype == torch.float64
    }
    return logits_NV, replace(tokens, **rounded)


def check(terms: TokenTerms, grad_NV: Tensor | None, logits_NV: Tensor, tokens: LossTokens, settings) -> None:
    """Against float64 from the same rounded inputs, by the bounds that every backend is held to."""
    wide_NV = logits_NV.double().requires_grad_()
    want_loss, stats = ops_truth.loss(wide_NV, tokens, settings)
    want = reference_loss.loss_rows(logits_NV.double(), tokens, settings, None)
    counted_N = reference_loss.counted(tokens)
    torch.testing.assert_close(torch.where(counted_N, stats["kl_N"], 0.0), want.kl_N)  # the truth's own
    for name in TERMS:
        torch.testing.assert_close(
            getattr(terms, name).double(),
            getattr(want, name),
            rtol=ATOL,
            atol=ATOL,
            msg=lambda m, n=name: f"{n}: {m}",
        )
    assert torch.equal(terms.clipped_N, want.clipped_N)
    if grad_NV is None:
        return
    want_NV = torch.autograd.grad(want_loss, wide_NV)[0]
    rest = gradient_scale(logits_NV, tokens, settings) * 2.0**-20
    ulp_NV = torch.exp2(want_NV.abs().clamp(min=2.0**-126).log2().floor() - 7)
    worst = ((grad_NV.double() - want_NV).abs() - ulp_NV - rest).max()
    assert worst <= 0, f"the gradient is off by {float(worst):.3e} above its bound"


def gradient_scale(logits_NV: Tensor, tokens: LossTokens, settings: LossSettings) -> Tensor:
    """w (p_v + sum q + |c_pg|) term by term, (N, V); the entropy's is its largest product."""
    logq_NV = (logits_NV.double() / settings.temperature).log_softmax(-1)
    logp_N = logq_NV.gather(-1, tokens.token_ids_N[:, None])[:, 0]
    ratio_N = torch.ones_like(logp_N) if tokens.old_logp_N is None else (logp_N - tokens.old_logp_N).exp()

    def size(name: str) -> Tensor:
        value = getattr(tokens, name)
        return torch.zeros_like(logp_N) if value is None else value.abs()

    reverse_N = size("kl_weight_N") if tokens.reverse_weight_N is None else size("reverse_weight_N")
    policy_N = size("pg_weight_N") * size("adv_N") + settings.opd_coef * reverse_N * size("reverse_adv_N")
    entropy_N = abs(settings.entropy_coef) * size("ent_weight_N") * 2 * logq_NV.abs().clamp(max=80).amax(-1)
    scale_NV = (policy_N * ratio_N)[:, None] + entropy_N[:, None] * logq_NV.exp()
    scale_NV = scale_NV / settings.temperature
    if tokens.target_logps_NS is None:
        return scale_NV
    p_NV = (logits_NV.double() / settings.kl_temperature).softmax(-1)
    mass_N1 = tokens.target_logps_NS.exp().sum(-1, keepdim=True)
    return (
        scale_NV
        + settings.opd_coef * size("kl_weight_N")[:, None] * (p_NV + mass_N1) / settings.kl_temperature
    )


@pytest.mark.parametrize("name", SETTINGS)
def test_loss_and_gradient(name: str, run) -> None:
    """Rows over all chunks and ring uses, repeats, empty slots, a token in the target, weights of 0."""
    logits_NV, tokens = rows_of(6, 4 * CHUNK + 3, SETTINGS[name])
    check(*run(logits_NV, tokens, SETTINGS[name]), logits_NV, tokens, SETTINGS[name])


@pytest.mark.parametrize(
    "n_vocab", [1, 2, 7, 8, 9, 16, 31, 1000, CHUNK, 2 * CHUNK + 1, 8 * CHUNK - 16], ids="V{}".format
)
@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
def test_every_length_of_a_row(n_vocab: int, tail: bool, run) -> None:
    """From one entry, all of it the target's, to the capacity; an odd one moves the rows off 16 bytes."""
    settings = LossSettings(tail=tail, entropy_coef=0.1)
    logits_NV, tokens = rows_of(5, n_vocab, settings)
    check(*run(logits_NV, tokens, settings), logits_NV, tokens, settings)


@pytest.mark.parametrize("offset", range(8))
def test_every_alignment(offset: int, run) -> None:
    """The gradient aligned like the logits, and not; nothing is written beside the rows."""
    settings = LossSettings(entropy_coef=0.1)
    for n_vocab, pad in ((300, 4), (CHUNK + 5, 3)):
        logits_NV, tokens = rows_of(3, n_vocab, settings)
        alike = run(logits_NV, tokens, settings, offset=offset, pad=pad, grad_offset=offset, grad_pad=pad + 8)
        other = run(logits_NV, tokens, settings, offset=offset, pad=pad, grad_offset=3, grad_pad=1)
        inside = run(logits_NV, tokens, settings, offset=offset, pad=pad, grad="in place")
        check(*alike, logits_NV, tokens, settings)
        assert equal(alike, other) and equal(alike, inside)


def equal(a: tuple[TokenTerms, Tensor], b: tuple[TokenTerms, Tensor]) -> bool:
    """Bit by bit."""
    pairs = [(getattr(a[0], field.name), getattr(b[0], field.name)) for field in fields(TokenTerms)]
    pairs.append((a[1].view(torch.int16), b[1].view(torch.int16)))
    return all(torch.equal(x, y) for x, y in pairs)


def test_a_row_depends_on_no_other(run) -> None:
    """In any place of any cluster's walk, and where its ring slots come into their second and third phase."""
    settings = LossSettings(entropy_coef=0.1, temperature=0.9)
    logits_NV, tokens = rows_of(9, 2 * CHUNK + 8, settings)
    whole = run(logits_NV, tokens, settings)
    assert equal(whole, run(logits_NV, tokens, settings, clusters=4))
    for n in (0, 5, 8):
        alone = run(logits_NV[n : n + 1], tokens.rows(n, n + 1), settings)
        part = TokenTerms(*(getattr(whole[0], field.name)[n : n + 1] for field in fields(TokenTerms)))
        assert equal((part, whole[1][n : n + 1]), alone)


@pytest.mark.parametrize("n_support", [0, 1, 32, 33, 63, 100, 128])
@pytest.mark.parametrize("repeats", [False, True], ids=["distinct", "repeats"])
def test_every_size_of_a_target(n_support: int, repeats: bool, run) -> None:
    threads = THREADS if n_support < THREADS else 160
    for tail in (False, True):
        settings = LossSettings(tail=tail, temperature=0.8 if tail else 1.0)
        given = target_of(4, 700, n_support, repeats=repeats)
        logits_NV, tokens = rows_of(4, 700, settings, **given)
        check(*run(logits_NV, tokens, settings, threads=threads), logits_NV, tokens, settings)


def test_without_gradient_and_without_columns(run) -> None:
    settings = LossSettings(opd_coef=0.5)
    nothing = dict.fromkeys(("target_ids_NS", "target_logps_NS", "old_logp_N", "ent_weight_N", "kl_weight_N"))
    logits_NV, tokens = rows_of(4, 500, settings, **nothing, reverse_adv_N=None)
    check(*run(logits_NV, tokens, settings), logits_NV, tokens, settings)
    logits_NV, tokens = rows_of(4, 2 * CHUNK, settings, reverse_weight_N=torch.rand(4).double())
    terms, grad_NV = run(logits_NV, tokens, settings)
    check(terms, grad_NV, logits_NV, tokens, settings)
    assert equal((terms, grad_NV), (run(logits_NV, tokens, settings, grad=None)[0], grad_NV))


@pytest.mark.parametrize("log_ratio", [0.0, 0.4, -0.4, 3.0, -3.0, 25.0, -25.0])
def test_every_case_of_the_clip(log_ratio: float, run) -> None:
    signs = torch.tensor([1.0, 1.0, -1.0, -1.0, 0.0]).double()
    for settings in (LossSettings(dual_clip=2.0), LossSettings(reverse_kl_surrogate="ppo")):
        logits_NV, tokens = rows_of(5, 40, settings, adv_N=signs, reverse_adv_N=signs.roll(1))
        logp_N = logits_NV.double().log_softmax(-1).gather(-1, tokens.token_ids_N[:, None])[:, 0]
        tokens = replace(tokens, old_logp_N=(logp_N - log_ratio).float().double())
        terms, grad_NV = run(logits_NV, tokens, settings)
        want = reference_loss.loss_rows(logits_NV, tokens, settings, want_NV := torch.empty_like(logits_NV))
        assert torch.equal(terms.clipped_N, want.clipped_N)
        for name in ("surrogate_N", "reverse_N"):
            torch.testing.assert_close(getattr(terms, name), getattr(want, name), rtol=ATOL, atol=ATOL)
        torch.testing.assert_close(grad_NV.float(), want_NV.float(), rtol=0.01, atol=1e-5)


ALL = slice(None)
HOSTILE = {
    "nan": [(3, math.nan)],
    "+inf": [(13, INF)],
    "+inf in the target": [(0, INF)],
    "-inf": [(3, -INF), (14, -INF), (700, -INF)],
    "-inf in the target": [(0, -INF), (1, -INF)],
    "all -inf": [(ALL, -INF)],
    "all -inf off the target": [(slice(12, None), -INF)],
    "one finite": [(ALL, -INF), (699, -3.0)],
    "largest": [(0, 2.0e38), (14, 2.0e38), (600, -3.0e38)],
    "tail far below": [(slice(0, 12), 95.0), (slice(12, None), -5.0)],
    "tail underflows": [(slice(0, 12), 800.0), (slice(12, None), -200.0)],
}


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("name", ["defaults", "paper", "entropy", "entropy-tail", "two-temperatures-entropy"])
def test_hostile_rows_match_the_reference(case: str, name: str, run) -> None:
    """A hostile row between two plain ones; then the same without any weight."""
    settings = SETTINGS[name]
    ids = torch.arange(12).repeat(3, 1)
    logps = torch.full((3, 12), math.log(0.07), dtype=torch.float64)
    given = {"target_ids_NS": ids, "target_logps_NS": logps, "token_ids_N": torch.tensor([3, 13, 0])}
    logits_NV, tokens = rows_of(3, 1001, settings, **given, pg_weight_N=torch.ones(3).double())
    for place, value in HOSTILE[case]:
        logits_NV[1, place] = value
    want_NV = torch.empty_like(logits_NV)
    want = reference_loss.loss_rows(logits_NV, tokens, settings, want_NV)
    terms, grad_NV = run(logits_NV, tokens, settings)
    for field in fields(TokenTerms):
        got, expected = getattr(terms, field.name), getattr(want, field.name)
        torch.testing.assert_close(
            got, expected, rtol=ATOL, atol=ATOL, equal_nan=True, msg=lambda m, f=field.name: f"{f}: {m}"
        )
    torch.testing.assert_close(grad_NV.float(), want_NV.float(), rtol=0.01, atol=2e-6, equal_nan=True)

    none_N = torch.tensor([1.0, 0.0, 1.0]).double()
    idle = replace(
        tokens, pg_weight_N=none_N, kl_weight_N=none_N, ent_weight_N=none_N, reverse_weight_N=none_N
    )
    terms, grad_NV = run(logits_NV, idle, settings)
    assert all(getattr(terms, field.name)[1] == 0 for field in fields(TokenTerms))
    assert (grad_NV[1] == 0).all() and grad_NV[[0, 2]].isfinite().all() and (grad_NV[0] != 0).any()


@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
def test_a_nan_of_the_target_is_not_lost(tail: bool, run) -> None:
    settings = LossSettings(tail=tail, entropy_coef=0.1)
    logits_NV, tokens = rows_of(3, 1001, settings)
    tokens.target_logps_NS[1, 4] = math.nan
    want_NV = torch.empty_like(logits_NV)
    want = reference_loss.loss_rows(logits_NV, tokens, settings, want_NV)
    terms, grad_NV = run(logits_NV, tokens, settings)
    assert terms.kl_N.isnan().tolist() == [False, True, False] and bool(terms.entropy_N.isfinite().all())
    for field in fields(TokenTerms):
        values = getattr(terms, field.name), getattr(want, field.name)
        torch.testing.assert_close(*values, rtol=ATOL, atol=ATOL, equal_nan=True)
    torch.testing.assert_close(grad_NV.float(), want_NV.float(), rtol=0.01, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("tail", [False, True], ids=["truncated", "tail"])
@pytest.mark.parametrize("temperature", [1.0, 0.7], ids=["one temperature", "two"])
def test_no_nan_of_the_target_where_the_kl_has_no_coefficient(tail: bool, temperature: float, run) -> None:
    """The gradient is, bit for bit, that of an empty slot; the KL says NaN."""
    settings = LossSettings(tail=tail, temperature=temperature, kl_temperature=1.0, entropy_coef=0.1)
    logits_NV, tokens = rows_of(3, 1001, settings, pg_weight_N=torch.ones(3).double())
    unweighted = replace(tokens, kl_weight_N=torch.tensor([1.0, 0.0, 1.0]).double())
    for given, options in ((tokens, replace(settings, opd_coef=0.0)), (unweighted, settings)):
        given.target_logps_NS[1, 4] = -INF
        _, empty_NV = run(logits_NV, given, options)
        given.target_logps_NS[1, 4] = math.nan
        terms, grad_NV = run(logits_NV, given, options)
        assert terms.kl_N.isnan().tolist() == [False, True, False]
        assert torch.equal(grad_NV, empty_NV) and bool(grad_NV[1].any())


def test_rounding_of_the_teachers_mass_is_no_tail(run) -> None:
    """Mass 1 - 5e-7 on all that the student can say: a tail of 5e-7 would have an infinite KL."""
    settings = LossSettings()
    logps = torch.tensor([[0.5, 0.5 - 5e-7]]).log()
    logits_NV, tokens = rows_of(
        1, 90, settings, target_ids_NS=torch.tensor([[7, 80]]), target_logps_NS=logps.double()
    )
    tokens.token_ids_N[0] = 80
    logits_NV[0] = -INF
    logits_NV[0, [7, 80]] = torch.tensor([1.0, 2.0]).bfloat16()
    terms, grad_NV = run(logits_NV, tokens, settings)
    assert float(terms.kl_N) == pytest.approx(
        0.5 * math.log(0.25) - 0.5 * (1 - 2 * math.log1p(math.e)), abs=ATOL
    )
    assert grad_NV.isfinite().all() and (grad_NV != 0).sum() == 2


def test_a_small_tail(run) -> None:
    """1 - Q is a difference: off the support the KL's gradient is nothing but what is left of it."""
    settings, n_support = LossSettings(), 16
    logits_NV = torch.randn(4, 90, generator=torch.Generator().manual_seed(3))
    logits_NV[:, n_support:] -= 20.0
    logits_NV = logits_NV.bfloat16()
    logps_NS = logits_NV[:, :n_support].double().log_softmax(-1) + math.log1p(-3e-6)
    ids_NS = torch.arange(n_support).expand(4, -1)
    tokens = rows_of(4, 90, settings, target_ids_NS=ids_NS, target_logps_NS=logps_NS)[1]
    columns = {"pg_weight_N": torch.zeros(4), "kl_weight_N": torch.ones(4)}
    tokens = replace(tokens, ent_weight_N=None, reverse_adv_N=None, **columns)
    true_NV = torch.empty_like(logits_NV, dtype=torch.float64)
    reference_loss.loss_rows(logits_NV.double(), tokens, settings, true_NV)
    grad_NV = run(logits_NV, tokens, settings)[1]
    off = slice(n_support, None)
    torch.testing.assert_close(grad_NV[:, off].double(), true_NV[:, off], rtol=2.0**-8, atol=0.0)


@pytest.mark.parametrize("n_vocab", [151936, cuda.MAX_VOCAB], ids="V{}".format)
def test_the_gpu_s_own_geometry(n_vocab: int, run) -> None:
    settings = LossSettings(entropy_coef=0.1)
    logits_NV, tokens = rows_of(2, n_vocab, settings, n_support=32)
    check(*run(logits_NV, tokens, settings, threads=512), logits_NV, tokens, settings)


def test_an_id_outside_the_vocabulary_is_nan_and_touches_nothing(run) -> None:
    settings = LossSettings()
    logits_NV, tokens = rows_of(3, 60, settings)
    tokens.target_ids_NS[1, 0] = 60
    tokens.token_ids_N[2] = -7
    terms, grad_NV = run(logits_NV, tokens, settings)
    assert terms.kl_N.isnan().tolist() == [False, True, False]
    assert terms.logp_N.isnan().tolist() == [False, True, True]
    assert grad_NV[0].isfinite().all()


def test_no_thread_races(sanitized: Path, tmp_path: Path) -> None:
    """Every access to memory that threads share is ordered by a barrier, in place and over several rows."""
    settings = SETTINGS["two-temperatures-entropy"]
    logits_NV, tokens = rows_of(4, 3 * CHUNK, settings)
    for launch in (Launch(grad="in place"), Launch(offset=3, grad_offset=1, clusters=2)):
        terms, grad_NV = emulate(sanitized, logits_NV, tokens, settings, launch, tmp_path)
        check(terms, grad_NV, logits_NV, tokens, settings)


@pytest.fixture(scope="module")
def tools() -> ModuleType:
    spec = importlib.util.spec_from_file_location("smopd_nvcc", SOURCE / "nvcc.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def nvcc(tools: ModuleType) -> Path:
    found = tools.find_nvcc()
    if found is None:
        pytest.skip("nvcc was not found (SMOPD_NVCC or CUDA_HOME tells where it is)")
    return found


def built(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_kernels_compile_without_spills(nvcc: Path, tools: ModuleType, tmp_path: Path) -> None:
    output = tmp_path / "loss_rows.cubin"
    report = built(tools.cubin_command(nvcc, Path(torch.__file__).parent, output))
    assert output.read_bytes()[:4] == b"\x7fELF"
    assert len(re.findall(r"Compiling entry function '\w*loss_rows_kernel\w*' for 'sm_90'", report)) == 4
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert frames == [("0", "0", "0")] * 4
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == 4 and max(registers) <= 65536 // 512  # or a block of 512 threads cannot start


LOAD = """
import importlib.util, os, sys, torch
sys.setdlopenflags(os.RTLD_LAZY)  # a torch without CUDA lacks the function that asks for the stream
spec = importlib.util.spec_from_file_location("smopd._C_cuda", sys.argv[1])
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(torch.ops.smopd.loss_rows_cuda.default._schema)
column = torch.zeros(2)
try:
    settings = 0.2, 0.2, None, 1.0, 0.0, True, 1.0, 1.0, False
    torch.ops.smopd.loss_rows_cuda(torch.zeros(2, 3), column, column, column, *[None] * 7, *settings, None)
except NotImplementedError as error:
    print("CPU" in str(error))
"""


def test_the_library_links_and_registers(nvcc: Path, tools: ModuleType, tmp_path: Path) -> None:
    """With this torch's headers and libraries, whatever they were built for, and without a GPU's driver."""
    library = tmp_path / "_C_cuda.abi3.so"
    command = tools.library_command(nvcc, Path(torch.__file__).parent, library)
    built([*command, "-Xlinker", "-z", "-Xlinker", "lazy"])
    done = subprocess.run([sys.executable, "-c", LOAD, library], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    schema, refuses_cpu = done.stdout.splitlines()
    assert schema.startswith("smopd::loss_rows_cuda(Tensor logits,") and refuses_cpu == "True"
    names = [field.name.removesuffix("_N") for field in fields(TokenTerms)]
    assert schema.endswith("(" + ", ".join(f"Tensor {name}" for name in names) + ")")
    needed = re.findall(rb"lib(?:cuda|cudart|torch|torch_cpu|c10)\.so[\w.]*", library.read_bytes())
    assert {b"libtorch.so", b"libtorch_cpu.so", b"libc10.so"} <= set(needed)
    assert not any(name.startswith(b"libcudart") for name in needed)


def test_where_nvcc_is_looked_for(tools: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("given", "home/bin", "path"):
        program = tmp_path / folder / "nvcc"
        program.parent.mkdir(parents=True)
        program.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.9, V12.9.86\n")
        program.chmod(0o755)
    for name in ("SMOPD_NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    assert tools.find_nvcc() == tmp_path / "path" / "nvcc"
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    assert tools.find_nvcc() == tmp_path / "home" / "bin" / "nvcc"
    monkeypatch.setenv("SMOPD_NVCC", str(tmp_path / "absent"))
    assert tools.find_nvcc() is None
    monkeypatch.setenv("SMOPD_NVCC", str(tmp_path / "given" / "nvcc"))
    assert tools.find_nvcc() == tmp_path / "given" / "nvcc"


@pytest.mark.parametrize(
    ("line", "cuda_version"),
    [
        ("cuda: Optional[str] = None", None),
        ("cuda: Optional[str] = '12.8'", "12.8"),
        ("cuda = '13.0'", "13.0"),
        ("hip: Optional[str] = '6.4'", None),
    ],
)
def test_the_cuda_of_a_torch(line: str, cuda_version: str | None, tools: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\ndebug = False\n{line}\n")
    assert tools.torch_cuda(tmp_path) == cuda_version


@pytest.mark.parametrize(("mode", "fails"), [("auto", False), ("0", False), ("1", True)])
def test_without_nvcc_only_a_demanded_build_fails(mode: str, fails: bool) -> None:
    environment = {**os.environ, "SMOPD_BUILD_CUDA": mode, "SMOPD_NVCC": "/nonexistent/nvcc"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--name"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert (done.returncode != 0) == fails
    assert ("SMOPD_BUILD_CUDA=1 demands it" in done.stderr) == fails
    assert ("_C_cuda" in done.stderr) == fails


def test_the_limits_are_the_kernel_s() -> None:
    machine, arithmetic = (SOURCE / name for name in ("hopper.cuh", "row_math.h"))

    def constant(file: Path, name: str) -> int:
        found = re.search(rf"constexpr int32_t {name} = (\d+);", file.read_text())
        assert found is not None
        return int(found[1])

    ring = constant(machine, "kRing") * constant(machine, "kThreads") * 2 * 8
    assert 2 * ring - 16 == cuda.MAX_VOCAB
    assert constant(arithmetic, "kMaxSupport") == cuda.MAX_SUPPORT


def test_what_is_not_served_is_named() -> None:
    assert "expected a CUDA device" in (cuda.unserved("loss_rows", torch.zeros(2, 3).bfloat16()) or "")
    assert cuda.unserved("topk_logprobs", torch.zeros(2, 3)) == "there is no cuda kernel for it"
    if torch.version.cuda is None:
        assert cuda.unavailable() == "torch was built without CUDA"


@pytest.mark.gpu
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("n_vocab", [1, 29, 5003, 151936, cuda.MAX_VOCAB], ids="V{}".format)
def test_on_a_gpu(n_vocab: int, name: str) -> None:
    settings = SETTINGS[name]
    n_rows = 7 if n_vocab > 10000 else 300  # more than there are clusters
    logits_NV, tokens = rows_of(n_rows, n_vocab, settings)
    why_not = cuda.unserved("loss_rows", logits_NV.cuda(), n_support=tokens.target_ids_NS.shape[1])
    if why_not is not None:
        pytest.skip(why_not)
    there = {
        field.name: value.cuda()
        for field in fields(tokens)
        if isinstance(value := getattr(tokens, field.name), Tensor)
    }
    moved = replace(tokens, **there)
    results = []
    for _ in range(2):
        place_NV = logits_NV.cuda()
        grad_NV = torch.full_like(place_NV, math.nan)
        results.append((cuda.loss_rows(place_NV, moved, settings, grad_NV), grad_NV))
        results.append((cuda.loss_rows(place_NV, moved, settings, place_NV), place_NV))
    on_host = [
        (TokenTerms(*(getattr(terms, field.name).cpu() for field in fields(TokenTerms))), grad_NV.cpu())
        for terms, grad_NV in results
    ]
    check(*on_host[0], logits_NV, tokens, settings)
    assert all(equal(on_host[0], other) for other in on_host[1:])
