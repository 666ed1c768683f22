"""The Triton kernels with more than 2^31 logits on a GPU, a few rows of them against float64."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from smopd import ops
from smopd.kernels import dispatch
from smopd.kernels.reference import topk as reference
from smopd.kernels.types import LossSettings, LossTokens
from tests.kernels import backends, float64
from tests.kernels.cases import DTYPES

MOST_OFFSETS = 2**31  # of a 32-bit integer
DEVICE = backends.device("triton")
ROWS_AT_ONCE = 256  # in int64 or fp32
SPARE_BYTES = 4 << 30  # besides logits and gradient
LOG_RATIOS = (-0.5, -0.1, 0.1, 0.5)  # inside and outside of the clip, at no edge

pytestmark = [pytest.mark.gpu, pytest.mark.huge, pytest.mark.xdist_group("large memory")]


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


SIZES = (  # each with more logits than a 32-bit offset reaches
    Size(32_768, 151_936, 16, "bf16", True),
    Size(32_768, 128_256, 64, "fp16", False),
    Size(32_768, 152_064, 32, "fp32", True),
    Size(98_304, 32_000, 16, "fp32", False),
)


@pytest.fixture(autouse=True)
def _triton_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(dispatch.ENV, "triton")
    yield
    torch.cuda.empty_cache()


def some_rows(size: Size) -> Tensor:
    """Return the first and last rows, and those where offsets or bytes exceed 31 and 32 bits."""
    rows = {0, 1, size.n_rows // 2, size.n_rows - 2, size.n_rows - 1}
    for row_size in (size.n_vocab, size.n_vocab * DTYPES[size.dtype].itemsize):
        for most in (MOST_OFFSETS, 2 * MOST_OFFSETS):
            rows |= {most // row_size + shift for shift in (-1, 0, 1)}
    return torch.tensor(sorted(row for row in rows if row < size.n_rows), device=DEVICE)


def make(size: Size) -> tuple[Tensor, LossTokens]:
    """Return logits that require a gradient and tokens with two teachers, made on the device."""
    needed = 2 * size.n_rows * size.n_vocab * DTYPES[size.dtype].itemsize + SPARE_BYTES
    if torch.cuda.mem_get_info()[0] < needed:
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
    second_N = first_N + torch.arange(n_rows, device=DEVICE) % 2  # in every other row the teachers agree
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


def sampled(call: Callable[[], dict[str, Tensor]], rows: Tensor) -> dict[str, Tensor]:
    """Return the results at these rows; check that a second call has the same bits."""

    def at_rows() -> dict[str, Tensor]:
        return {name: value.detach()[rows] if value.dim() else value for name, value in call().items()}

    first, second = at_rows(), at_rows()
    assert all(backends.same(first[name], second[name]) for name in first)
    return first


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_top_kappa_and_loss(size: Size) -> None:
    logits_NV, tokens = make(size)
    rows = some_rows(size)
    rows_NV, of_rows = logits_NV.detach()[rows], tokens.at(rows)

    def top() -> dict[str, Tensor]:
        return vars(ops.topk_logprobs(logits_NV, size.kappa, token_ids_N=tokens.token_ids_N))

    found = sampled(top, rows)
    true_top = reference.topk_logprobs(rows_NV.double(), size.kappa, token_ids_N=of_rows.token_ids_N)
    assert torch.equal(found["ids_NS"], true_top.ids_NS)
    for name in ("logps_NS", "token_logp_N"):
        float64.check_term(found[name], getattr(true_top, name), name)

    union = {"kappa": size.kappa, "merge": size.tail, "tail": size.tail}
    settings = LossSettings(**union, entropy_coef=0.1, opd_coef=0.7, dual_clip=3.0)

    def loss() -> dict[str, Tensor]:
        total, stats = ops.smopd_loss(logits_NV, tokens, settings)
        return {"loss": total, "gradient": torch.autograd.grad(total, logits_NV)[0], **vars(stats)}

    found = sampled(loss, rows)
    true = float64.defined_loss(rows_NV, of_rows, settings)
    for name in ("logp_N", "entropy_N", "kl_N", "teacher_mass_N", "student_mass_N"):
        float64.check_term(found[name], getattr(true.terms, name), name)
    assert torch.equal(found["clipped_N"], true.terms.clipped_N)
    float64.check_gradient(found["gradient"], true, "triton")
    parts = found["pg_loss"] + 0.7 * (found["kl_loss"] + found["reverse_loss"]) - 0.1 * found["entropy"]
    torch.testing.assert_close(found["loss"], parts, rtol=1e-4, atol=1e-4)
