"""The Triton GRPO, GDPO and GD2PO advantages against the reference, on ragged groups in any order.

Natively on a GPU; in Triton's interpreter where there is none, which costs 0.1 s a group: few groups here.
"""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.triton.device import DEVICE, gpu, needs_cuda

# isort: split
from smopd.kernels.reference import advantages as reference_advantages
from smopd.kernels.triton import advantages as triton_advantages
from smopd.kernels.triton import whiten as triton_whiten
from smopd.kernels.types import AdvantageOptions
from tests.patience import HANG_SECONDS

NAN, INF = math.nan, math.inf

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("poisoned_outputs"),
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs and blocks on few responses."""
    for name, size in (("OWNED", 8), ("TILE", 64), ("SCAN_BLOCK", 4)):
        monkeypatch.setattr(triton_advantages, name, size)
    monkeypatch.setattr(triton_whiten, "WHITEN_BLOCK", 4)


DEFAULTS: dict[str, dict] = {"grpo": {}, "gdpo": {"whiten": "responses"}, "gd2po": {"whiten": "tokens"}}


def serve(module, kind: str, rewards: Tensor, group: Tensor, process_group=None, **options):
    """A backend's result, with the public functions' defaults, as a tuple."""
    given = AdvantageOptions(kind, **DEFAULTS[kind] | options)
    adv, kept = module.advantages(rewards, group, given, process_group)
    return (adv,) if kept is None else (adv, kept)


def both(kind: str, *tensors: Tensor, **options):
    """The kernel's result and the reference's, on the CPU."""
    moved = {name: v.to(DEVICE) if isinstance(v, Tensor) else v for name, v in options.items()}
    got = serve(triton_advantages, kind, *(tensor.to(DEVICE) for tensor in tensors), **moved)
    return tuple(x.cpu() for x in got), serve(reference_advantages, kind, *tensors, **options)


def check(kind: str, *tensors: Tensor, **options) -> tuple[Tensor, ...]:
    """fp64 on both sides: what is left is the rounding of the result."""
    got, want = both(kind, *tensors, **options)
    for x, y in zip(got, want, strict=True):
        assert x.dtype == y.dtype
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)
    return got


def ragged(seed: int, n_responses: int, n_rewards: int, n_groups: int):
    gen = torch.Generator().manual_seed(seed)
    ids = torch.randint(-(2**62), 2**62, (n_groups,), generator=gen)
    group = ids[torch.randint(0, n_groups, (n_responses,), generator=gen)]
    rewards = torch.randn(n_responses, n_rewards, generator=gen)
    rewards[:, -1] = (rewards[:, -1] > 1).float()
    rewards[torch.rand(rewards.shape, generator=gen) < 0.1] = NAN
    lengths = torch.randint(0, 50, (n_responses,), generator=gen)
    return rewards, group, torch.rand(n_rewards, generator=gen), lengths


@pytest.mark.parametrize("n_rewards", [1, 3, 17])
def test_every_operation_across_programs_and_blocks(small_blocks: None, n_rewards: int) -> None:
    rewards, group, weights, lengths = ragged(n_rewards, 18 if n_rewards < 17 else 7, n_rewards, 3)
    options = {"weights_K": weights, "lengths_R": lengths}
    check("grpo", rewards, group, weights_K=weights, norm_eps=1e-4)
    check("gdpo", rewards, group, **options, whiten="responses")
    check("gdpo", rewards, group, **options, whiten="tokens")
    check("gd2po", rewards, group, **options, whiten="tokens")
    check("gd2po", rewards, group, **options, whiten=None, snr_threshold=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_strides_and_defaults(dtype) -> None:
    rewards, group, weights, lengths = ragged(4, 13, 4, 3)
    rewards = rewards.to(dtype).T.contiguous().T
    group = group.repeat_interleave(2)[::2]
    check("grpo", rewards, group)
    check("gdpo", rewards, group, weights_K=weights.double().repeat_interleave(2)[::2])
    check("gd2po", rewards, group, lengths_R=lengths.int().repeat_interleave(2)[::2])


@st.composite
def batches(draw):
    """Up to five groups, rewards that repeat, conflict, differ by rounding or cannot be scored."""
    n_responses, n_rewards = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    group = draw(st.lists(st.integers(-2, 2), min_size=n_responses, max_size=n_responses))
    value = st.sampled_from([0.0, 1.0, 1.0 + 2.0**-23, -1.0, 0.1, 0.7, 3.0, NAN, 1e-30, 1e30, INF])
    count = n_responses * n_rewards
    rewards = draw(st.lists(value, min_size=count, max_size=count))
    weights = draw(st.lists(st.sampled_from([0.0, 0.3, 1.0, -0.5]), min_size=n_rewards, max_size=n_rewards))
    lengths = draw(st.lists(st.integers(0, 9), min_size=n_responses, max_size=n_responses))
    return (
        torch.tensor(rewards).reshape(n_responses, n_rewards),
        torch.tensor(group) * (2**61),
        torch.tensor(weights),
        torch.tensor(lengths),
    )


WHITEN = st.sampled_from(["responses", "tokens", None])


@settings(max_examples=12, deadline=None)
@given(batches(), WHITEN)
def test_any_batch_gdpo(batch, whiten: str | None) -> None:
    rewards, group, weights, lengths = batch
    check("gdpo", rewards, group, weights_K=weights, lengths_R=lengths, whiten=whiten)


@settings(max_examples=12, deadline=None)
@given(batches(), WHITEN, st.sampled_from([None, 0.21, 0.83]))
def test_any_batch_gd2po(batch, whiten: str | None, snr_threshold: float | None) -> None:
    rewards, group, weights, lengths = batch
    options = {"weights_K": weights, "lengths_R": lengths, "whiten": whiten}
    check("gd2po", rewards, group, **options, snr_threshold=snr_threshold)


@settings(max_examples=12, deadline=None)
@given(batches(), st.sampled_from([0.0, 1e-6]))
def test_any_batch_grpo(batch, norm_eps: float) -> None:
    rewards, group, weights, _ = batch
    check("grpo", rewards, group, weights_K=weights, norm_eps=norm_eps)


def test_equal_rewards_are_exactly_zero() -> None:
    """SEMANTICS section 1: eight equal fp32 numbers whose mean is one ulp off."""
    rewards = torch.tensor([0.1, 0.7, 2.3, -1.1])[:, None].repeat_interleave(8, 0)
    group = torch.arange(4).repeat_interleave(8)
    for kind in ("grpo", "gdpo"):
        (adv,) = check(kind, rewards, group)
        assert not bool(adv.any())


def test_one_kept_token_and_nothing_kept_are_zero() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]])
    for lengths in ([5, 5, 1], [5, 5, 0]):
        adv, kept = check(
            "gd2po", rewards, torch.zeros(3, dtype=torch.int64), lengths_R=torch.tensor(lengths)
        )
        assert not bool(adv.any()) and kept.tolist() == [False, False, True]


def test_settings_keep_their_double_precision() -> None:
    """norm_eps and snr_threshold are not rounded to fp32 on their way into the kernel."""
    rewards = torch.tensor([[0.0], [1e-9], [0.0], [3e-9]])
    group = torch.zeros(4, dtype=torch.int64)
    got, want = both("grpo", rewards, group, norm_eps=1e-1)
    assert torch.equal(got[0], want[0])


def test_repeated_runs_bitwise_equal() -> None:
    rewards, group, weights, lengths = ragged(7, 12, 3, 3)
    runs = [both("gd2po", rewards, group, weights_K=weights, lengths_R=lengths)[0][0] for _ in range(2)]
    assert torch.equal(*runs)


def test_empty_batch_and_what_is_not_served() -> None:
    rewards, group = torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)
    for kind in ("grpo", "gdpo"):
        assert serve(triton_advantages, kind, rewards, group)[0].shape == (0,)
    adv, kept = serve(triton_advantages, "gd2po", rewards, group, lengths_R=group)
    assert adv.shape == kept.shape == (0,) and kept.dtype == torch.bool
    assert triton_advantages.unserved("grpo_advantages", torch.zeros(2, 32)) is None
    assert "K is 33" in str(triton_advantages.unserved("grpo_advantages", torch.zeros(2, 33)))
    with pytest.raises(ValueError, match=r"gdpo_advantages: the dtype is torch\.float64"):
        serve(triton_advantages, "gdpo", rewards.double(), group)


def _rank(rank: int, store: str, world: int) -> None:
    backend = "nccl" if DEVICE == "cuda" and torch.cuda.device_count() >= world else "gloo"
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=HANG_SECONDS),
    )
    rewards, _, weights, lengths = ragged(9, 11, 2, 3)
    group = torch.arange(11) // 4
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    options = {"weights_K": weights.to(device), "process_group": torch.distributed.group.WORLD}
    for whiten, cut in (("responses", 2), ("tokens", 2), ("tokens", 3)):  # the last leaves rank 1 nothing
        mine = (group < cut) == (rank == 0)
        shard = (rewards[mine].to(device), group[mine].to(device))
        options["lengths_R"], options["whiten"] = lengths[mine].to(device), whiten
        (got,) = serve(triton_advantages, "gdpo", *shard, **options)
        whole = {"weights_K": weights, "lengths_R": lengths, "whiten": whiten}
        (want,) = serve(reference_advantages, "gdpo", rewards, group, **whole)
        torch.testing.assert_close(got.cpu(), want[mine], rtol=1e-6, atol=1e-9)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="two ranks take two GPUs")
def test_ranks_whiten_together(tmp_path) -> None:
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path / "store"), 2), nprocs=2)


@gpu
@needs_cuda
@pytest.mark.parametrize("shuffled", [False, True])
def test_large_on_the_gpu(shuffled: bool) -> None:
    gen = torch.Generator().manual_seed(3)
    group = torch.arange(1024).repeat_interleave(16)
    if shuffled:
        group = group[torch.randperm(len(group), generator=gen)]
    rewards = torch.randn(len(group), 4, generator=gen)
    rewards[:, 1:] = (rewards[:, 1:] > 0.5).float()
    lengths = torch.randint(1, 1000, (len(group),), generator=gen)
    check("grpo", rewards, group)
    check("gdpo", rewards, group)
    first = check("gd2po", rewards, group, lengths_R=lengths)
    again = check("gd2po", rewards, group, lengths_R=lengths)
    assert torch.equal(first[0], again[0])


@gpu
@needs_cuda
def test_captured_in_a_graph() -> None:
    rewards, group, _, _ = (tensor.to(DEVICE) for tensor in ragged(1, 500, 4, 60))
    (want,) = serve(triton_advantages, "gdpo", rewards, group)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (got,) = serve(triton_advantages, "gdpo", rewards, group)
    graph.replay()
    assert torch.equal(got, want)
