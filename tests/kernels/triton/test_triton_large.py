"""The Triton kernels at real sizes on a GPU: more than 2^31 logits, real vocabularies, float64 on a few rows.

Each operation runs as users call it: twice, and replayed from a CUDA graph, it has to give the same bits.
The large cases run on a GPU alone, one after the other: one holds logits and a gradient, 2 x 18.6 GiB at
most. The tiny ones run everywhere, in Triton's interpreter where there is no GPU, which has no graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from tests.kernels.triton import device

# isort: split
from smopd import ops
from smopd.kernels import dispatch
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import KlOptions, LossSettings, LossStats, LossTokens, SparseTarget
from tests.kernels import float64
from tests.kernels.cases import DTYPES, picked
from tests.kernels.pairwise import pairwise

Named: TypeAlias = "dict[str, Tensor]"
DEVICE = torch.device(device.DEVICE)
N_ROWS = 32_768
MOST_OFFSETS = 2**31  # of a 32-bit integer
ROWS_AT_ONCE = 256  # what works on all rows in int64 or fp32 holds so many
SPARE_BYTES = 4 << 30  # beside logits and gradient
LOG_RATIOS = (-0.5, -0.1, 0.1, 0.5)  # on both sides of the clip and at none of its edges
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # by an element's bytes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # triton.runtime.interpreter


@dataclass(frozen=True)
class Size:
    n_rows: int
    n_vocab: int
    kappa: int
    dtype: str
    tail: bool

    def __str__(self) -> str:
        tail = "-tail" if self.tail else ""
        return f"N{self.n_rows}-V{self.n_vocab}-kappa{self.kappa}-{self.dtype}{tail}"

    @property
    def bytes(self) -> int:
        """Of the logits."""
        return self.n_rows * self.n_vocab * DTYPES[self.dtype].itemsize


def rows_for(n_vocab: int) -> int:
    """A multiple of N_ROWS with more logits than a 32-bit offset reaches."""
    return N_ROWS * (MOST_OFFSETS // (N_ROWS * n_vocab) + 1)


FACTORS = {
    "n_vocab": (151_936, 128_256, 152_064, 32_000),
    "kappa": (16, 32, 64),
    "dtype": ("bf16", "fp32", "fp16"),
    "tail": (True, False),
}
TINY = [
    Size(3, 1271, kappa, dtype, kappa == 16) for kappa, dtype in ((16, "bf16"), (3, "fp32"), (16, "fp16"))
]
LARGE = [Size(rows_for(row["n_vocab"]), **row) for row in pairwise(FACTORS)]
SIZES = [
    *TINY,
    *(
        pytest.param(size, marks=[pytest.mark.gpu, pytest.mark.huge, pytest.mark.xdist_group("large memory")])
        for size in LARGE
    ),
]
each_size = pytest.mark.parametrize("size", SIZES, ids=str)


@pytest.fixture(autouse=True)
def _triton_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(dispatch.ENV, "triton")
    yield
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def some_rows(size: Size) -> Tensor:
    """The first, the last, and those around where offsets in elements and in bytes leave 31 and 32 bits."""
    rows = {0, 1, size.n_rows // 2, size.n_rows - 2, size.n_rows - 1}
    for row_size in (size.n_vocab, size.n_vocab * DTYPES[size.dtype].itemsize):
        for most in (MOST_OFFSETS, 2 * MOST_OFFSETS):
            rows |= {most // row_size + shift for shift in (-1, 0, 1)}
    return torch.tensor(sorted(row for row in rows if row < size.n_rows), device=DEVICE)


def make(size: Size) -> tuple[Tensor, LossTokens]:
    """Logits that need a gradient, and tokens with two teachers, made on the device a few rows at a time."""
    needed = 2 * size.bytes + SPARE_BYTES
    if DEVICE.type == "cuda" and torch.cuda.mem_get_info()[0] < needed:
        pytest.skip(f"needs {math.ceil(needed / 2**30)} GiB of free GPU memory")
    generator = torch.Generator(DEVICE).manual_seed(size.n_vocab + size.kappa)
    n_rows, n_vocab, kappa = size.n_rows, size.n_vocab, size.kappa

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=DEVICE)

    def randint(most: int, *shape: int) -> Tensor:
        return torch.randint(most, shape, generator=generator, device=DEVICE)

    logits_NV = torch.empty(n_rows, n_vocab, dtype=DTYPES[size.dtype], device=DEVICE)
    for part in logits_NV.split(ROWS_AT_ONCE):
        part.normal_(0.0, 3.0, generator=generator)
    steps_S = torch.arange(kappa, device=DEVICE) * (n_vocab // kappa)
    first_N = randint(n_vocab, n_rows)
    second_N = (
        first_N + torch.arange(n_rows, device=DEVICE) % 2
    )  # every other row's teachers agree on the ids
    ids_NMS = (torch.stack([first_N, second_N], 1)[:, :, None] + steps_S) % n_vocab
    token_ids_N = torch.where(randint(3, n_rows) == 0, ids_NMS[:, 0, 0], randint(n_vocab, n_rows))
    pieces = zip(logits_NV.split(ROWS_AT_ONCE), token_ids_N.split(ROWS_AT_ONCE), strict=True)
    logp_N = torch.cat([x.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0] for x, ids in pieces])
    tokens = LossTokens(
        token_ids_N=token_ids_N,
        adv_N=2.0 * rand(n_rows) - 1.0,
        pg_weight_N=rand(n_rows),
        old_logp_N=logp_N - torch.tensor(LOG_RATIOS, device=DEVICE)[randint(len(LOG_RATIOS), n_rows)],
        kl_weight_N=rand(n_rows),
        ent_weight_N=rand(n_rows),
        teacher_ids_NMS=ids_NMS.int(),
        teacher_logps_NMS=(3.0 * rand(n_rows, 2, kappa)).log_softmax(-1) + math.log(0.9),
        log_alpha=torch.tensor([0.4, 0.6], device=DEVICE).log(),
    )
    return logits_NV.requires_grad_(), tokens


def digest(value: Tensor) -> Tensor:
    """A number a row that another bit anywhere in it changes (but for one chance in 2^64)."""
    bits_NC = value.detach().reshape(value.shape[0] if value.dim() else 1, -1).view(BITS[value.itemsize])
    generator = torch.Generator(DEVICE).manual_seed(0)
    shape = (bits_NC.shape[1],)
    odd_C = 2 * torch.randint(-(2**62), 2**62, shape, generator=generator, device=DEVICE) + 1
    return torch.cat([(part.long() * odd_C).sum(-1) for part in bits_NC.split(ROWS_AT_ONCE)])


def digests(results: Named) -> Named:
    return {name: digest(value) for name, value in results.items()}


def assert_same(found: Named, wanted: Named, what: str) -> None:
    for name, value in wanted.items():
        differ = (found[name] != value).nonzero().flatten().tolist()
        assert not differ, f"{name}: {what} differs in {len(differ)} rows, {differ[:5]} among them"


def poison(results: Named) -> None:
    """What a replay does not write shows."""
    for value in results.values():
        value.detach().fill_(math.nan if value.is_floating_point() else 77)


def sampled(call: Callable[[], Named], logits_NV: Tensor, rows: Tensor) -> Named:
    """The results at these rows (whole where there is one for all); their bits are the same every time."""

    def fresh() -> Named:
        poisoned = torch.full_like(logits_NV, math.nan)
        del poisoned  # the memory that the gradient gets
        return call()

    results = fresh()
    kept = {name: value.detach()[rows] if value.dim() else value.detach() for name, value in results.items()}
    wanted = digests(results)
    del results
    assert_same(digests(fresh()), wanted, "a second run")
    if DEVICE.type == "cuda":
        replay(call, wanted)
    return kept


def replay(call: Callable[[], Named], wanted: Named) -> None:
    torch.cuda.empty_cache()  # what a graph holds comes from no cache
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for what in ("a replay", "a second replay"):
        poison(results)
        graph.replay()
        assert_same(digests(results), wanted, what)


def assert_close(found: Tensor, wanted: Tensor, name: str) -> None:
    float64.check_term(found, wanted, name)


@pytest.mark.slow
@each_size
def test_topk_logprobs(size: Size) -> None:
    logits_NV, tokens = make(size)
    logits_NV.requires_grad_(False)

    def call() -> Named:
        top = ops.topk_logprobs(logits_NV, size.kappa, token_ids_N=tokens.token_ids_N)
        assert top.token_logp_N is not None
        return {"ids": top.ids_NS, "logps": top.logps_NS, "token_logp": top.token_logp_N}

    rows = some_rows(size)
    found = sampled(call, logits_NV, rows)
    true = reference.topk_logprobs(logits_NV[rows].double(), size.kappa, token_ids_N=tokens.token_ids_N[rows])
    assert torch.equal(found["ids"], true.ids_NS)
    assert_close(found["logps"], true.logps_NS, "logps")
    assert true.token_logp_N is not None
    assert_close(found["token_logp"], true.token_logp_N, "token_logp")


@each_size
def test_smopd_loss(size: Size) -> None:
    logits_NV, tokens = make(size)
    settings = LossSettings(
        kappa=size.kappa, merge=size.tail, tail=size.tail, entropy_coef=0.1, opd_coef=0.7, dual_clip=3.0
    )

    def call() -> Named:
        loss, stats = ops.smopd_loss(logits_NV, tokens, settings)
        (grad_NV,) = torch.autograd.grad(loss, logits_NV)
        told = {field.name: getattr(stats, field.name) for field in fields(LossStats)}
        return {"loss": loss.detach(), "gradient": grad_NV, **told}

    rows = some_rows(size)
    found = sampled(call, logits_NV, rows)
    true = float64.defined_loss(logits_NV.detach()[rows], picked(tokens, rows), settings)
    terms = true.terms
    for name in ("logp_N", "entropy_N", "kl_N", "teacher_mass_N", "student_mass_N"):
        assert_close(found[name], getattr(terms, name), name)
    assert torch.equal(found["clipped_N"], terms.clipped_N)
    float64.check_gradient(found["gradient"], true, "triton")
    parts = found["pg_loss"] + 0.7 * (found["kl_loss"] + found["reverse_loss"]) - 0.1 * found["entropy"]
    torch.testing.assert_close(found["loss"], parts, rtol=1e-4, atol=1e-4)


@each_size
def test_topk_forward_kl(size: Size) -> None:
    logits_NV, tokens = make(size)
    assert tokens.teacher_ids_NMS is not None and tokens.teacher_logps_NMS is not None
    target = SparseTarget(tokens.teacher_ids_NMS[:, 0], tokens.teacher_logps_NMS[:, 0])
    slopes = {"dlogp_N": tokens.adv_N, "dkl_N": tokens.kl_weight_N}

    def call() -> Named:
        logp_N, kl_N = ops.topk_forward_kl(
            logits_NV, tokens.token_ids_N, target.ids_NS, target.logps_NS, tail=size.tail
        )
        (grad_NV,) = torch.autograd.grad([logp_N, kl_N], logits_NV, list(slopes.values()))
        return {"logp": logp_N.detach(), "kl": kl_N.detach(), "gradient": grad_NV}

    rows = some_rows(size)
    found = sampled(call, logits_NV, rows)
    few = SparseTarget(target.ids_NS[rows], target.logps_NS[rows])
    options = KlOptions(tail=size.tail, temperature=1.0)
    few_slopes = {name: slope[rows] for name, slope in slopes.items()}
    true = float64.defined_kl(logits_NV.detach()[rows], tokens.token_ids_N[rows], few, options, **few_slopes)
    assert_close(found["logp"], true.logp_N, "logp")
    assert_close(found["kl"], true.kl_N, "kl")
    float64.check_gradient(found["gradient"], true, "triton")


def test_the_large_cases_need_offsets_of_more_than_32_bits_and_fit() -> None:
    assert {size.n_vocab for size in LARGE} == set(FACTORS["n_vocab"])
    for size in LARGE:
        assert size.n_rows % N_ROWS == 0 and size.n_rows * size.n_vocab > MOST_OFFSETS
        assert 2 * size.bytes + SPARE_BYTES < 45 << 30
        rows = some_rows(size).tolist()
        beyond = [row for row in rows if row * size.n_vocab >= MOST_OFFSETS]
        assert rows[0] == 0 and rows[-1] == size.n_rows - 1 and 0 < len(beyond) < len(rows)


def test_a_digest_sees_one_bit() -> None:
    value = torch.zeros(3, 7, dtype=torch.bfloat16, device=DEVICE)
    other = value.clone()
    other[1, 3] = -0.0
    assert (digest(value) == digest(other)).tolist() == [True, False, True]


def test_a_call_whose_bits_change_is_refused() -> None:
    values = iter((0.0, 1.0))
    logits_NV = torch.zeros(3, 7, device=DEVICE)
    with pytest.raises(AssertionError, match=r"column: a second run differs in 1 rows, \[2\]"):
        sampled(
            lambda: {"column": torch.tensor([1.0, 2.0, next(values)], device=DEVICE)},
            logits_NV,
            torch.tensor([0], device=DEVICE),
        )
