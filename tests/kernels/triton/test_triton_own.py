"""What is the Triton kernels' own: launch shapes, limits, memory far apart, ranks, CUDA graphs.

Their results are held to float64 with the other backends' in tests/kernels/conformance.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.triton.device import DEVICE, gpu, needs_cuda

# isort: split
from smopd import ops
from smopd.kernels.ops.loss import packed_stats
from smopd.kernels.reference import advantages as reference_advantages
from smopd.kernels.reference import topk as reference
from smopd.kernels.triton import advantages as triton_advantages
from smopd.kernels.triton import loss as triton_loss
from smopd.kernels.triton import mixture as triton_mixture
from smopd.kernels.triton import product as triton_product
from smopd.kernels.triton import target as triton_target
from smopd.kernels.triton import topk as triton_topk
from smopd.kernels.triton import totals as triton_totals
from smopd.kernels.triton import whiten as triton_whiten
from smopd.kernels.types import AdvantageOptions, KlOptions, LossTokens, SparseTarget
from tests.kernels import backends, cases
from tests.kernels.cases import LossCase, check_loss, loss_case, run_loss
from tests.patience import HANG_SECONDS

INF = math.inf
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of the interpreter's numpy
    pytest.mark.usefixtures("poisoned_memory"),
]


@pytest.mark.parametrize("part", [None, 1008], ids=["whole", "parts"])
@pytest.mark.parametrize("n_support", [7, 64, 200])
def test_where_a_targets_support_lies(n_support: int, part: int | None) -> None:
    """Distinct ids, repeats, and repeats beside empty slots and NaN; 200 slots have two warps."""
    n_vocab, lanes, repeats, consecutive = 5000, 32, 2, 8
    block = lanes * repeats * consecutive
    generator = torch.Generator().manual_seed(n_support)
    ids_NS = torch.stack([torch.randperm(n_vocab, generator=generator)[:n_support] for _ in range(3)])
    ids_NS[1:] = ids_NS[1:] % (n_support // 2) * 7
    logps_NS = torch.randn(3, n_support, generator=generator).log_softmax(-1) - 0.2
    logps_NS[2, 1::3], logps_NS[2, 0], ids_NS[2, 1::6] = -INF, math.nan, n_vocab + 3
    given = SparseTarget(ids_NS.int().to(DEVICE), logps_NS.to(DEVICE))
    layout = (lanes, repeats, consecutive)
    ready = backends.moved(triton_target.row_targets(given, n_vocab, *layout, tail=True, part=part), "cpu")
    for row in range(3):
        merged, wanted, left, numbers = {}, set(), [0] * lanes, set()
        for entry, logp in zip(ids_NS[row].tolist(), logps_NS[row].double().tolist(), strict=True):
            if logp > -INF:
                merged[entry] = merged.get(entry, 0.0) + math.exp(logp)
                number, place = divmod(entry, part or n_vocab)
                wanted.add(entry)
                left[place // consecutive % lanes] |= 1 << place // block
                numbers.add((number * lanes + place // consecutive % lanes) << 6 | place // block)
        logps_K, live_K = ready.logps_NK[row], ready.logps_NK[row] > -INF
        assert int(logps_K.isnan().sum()) == int(logps_NS[row].isnan().sum())
        got = dict(zip(ready.ids_NK[row, live_K].tolist(), logps_K[live_K].exp().tolist(), strict=True))
        assert got == pytest.approx(merged, rel=1e-6) and len(got) == int(live_K.sum())
        if part is None:
            assert ready.skipped_NL[row].tolist() == left
        else:
            assert sorted(set(ready.skipped_NL[row].tolist()) - {-1}) == sorted(numbers)
            assert (ready.skipped_NL[row] >= 0).equal(ready.holes_NK[row] != 0)
        holes = [
            (entry // (part or n_vocab) * (part or n_vocab), entry % (part or n_vocab), bits)
            for entry, bits in zip(ready.ids_NK[row].tolist(), ready.holes_NK[row].tolist(), strict=True)
            if bits
        ]
        held = [
            first + place // block * block + element // consecutive * lanes * consecutive
            + place // consecutive % lanes * consecutive + element % consecutive
            for first, place, bits in holes for element in range(16) if bits >> element & 1
        ]  # fmt: skip
        assert sorted(held) == sorted(wanted), "each id in one slot's segment"


def test_more_blocks_than_an_int32_has_bits(streamed: None) -> None:
    case = loss_case((1, 15003, 1, 3), target="given")
    ids_NS = torch.arange(16, dtype=torch.int32)[None] * 1000 + 2
    logps_NS = torch.randn(1, 16, generator=torch.manual_seed(0)).log_softmax(-1) - 0.1
    tokens = replace(case.tokens, target_ids_NS=ids_NS, target_logps_NS=logps_NS)
    check_loss("triton", LossCase(case.logits_NV, tokens, case.settings))


@pytest.mark.parametrize("dtype", cases.HALF)
def test_every_vocabulary_has_a_configuration(dtype: str) -> None:
    sizes = (1, 7, 513, 2048, 2049, 8192, 16_384, 50_257, 151_936, 262_144, 300_001, triton_loss.MAX_VOCAB)
    slots = (1, 128, 256, triton_loss.MAX_SUPPORT)
    for n_vocab, aligned, n_slots in itertools.product(sizes, (False, True), slots):
        shape = triton_loss._configuration(n_vocab, cases.DTYPES[dtype], n_slots, aligned=aligned)
        blocks = -(-n_vocab // (shape.warps * 32 * shape.elements))
        assert blocks <= 64 and shape.held >= 2 and shape.elements <= 16 and n_slots <= shape.warps * 128


def test_the_last_chunk_of_the_widest_vocabulary() -> None:
    """Its number fills the key's 16 bits; the values around it are the lowest and the largest."""
    logits_NV = torch.full((2, triton_topk.MAX_VOCAB), -INF, dtype=torch.bfloat16)
    logits_NV[0, -3:] = torch.tensor([-1.0, 2.0, -3.0])
    logits_NV[1] = 5.0
    got = backends.call("triton", "topk_logprobs", logits_NV, 5)
    true = reference.topk_logprobs(logits_NV.double(), 5)
    assert torch.equal(got.ids_NS, true.ids_NS)
    torch.testing.assert_close(got.logps_NS.double(), true.logps_NS, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_teachers_further_apart_than_32_bits_reach(merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":  # the interpreter copies each storage onto itself, and would touch all of it
        monkeypatch.setattr("triton.runtime.interpreter.GridExecutor._restore_args_dev", lambda *_: None)
    ids, logps, log_alpha = cases.random_teachers(3, 40, 4, 3)
    far = 2**30 + 8  # elements from one teacher to the next; what lies between is never touched
    torch.utils.deterministic.fill_uninitialized_memory = False

    def far_apart(values: Tensor) -> Tensor:
        return values.to(DEVICE).new_empty(3 * far).as_strided(values.shape, (4, far, 1)).copy_(values)

    try:
        far_ids, far_logps = far_apart(ids.clamp(0, 39).to(torch.int8)), far_apart(logps.half())
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    got = triton_mixture.teacher_mixture(far_ids, far_logps, log_alpha.to(DEVICE), 6, merge=merge)
    near = (far_ids.contiguous(), far_logps.contiguous(), log_alpha.to(DEVICE))
    assert backends.same(got, triton_mixture.teacher_mixture(*near, 6, merge=merge))


@pytest.mark.parametrize("bad", [-1, -2, 2**32 + 5])
def test_a_product_reads_no_more_than_its_lists(bad: int) -> None:
    """31 entries, so that one of the 32 that are compared at a time is padding; behind them lies 123."""
    ids, memory = torch.arange(31).expand(1, 2, 31).clone(), torch.full((70,), 123.0)
    ids[0, 0, 0] = bad
    memory[:62] = -4.0
    lists = ids.to(DEVICE), memory.to(DEVICE)[:62].view(1, 2, 31), torch.ones(1, device=DEVICE), 40
    got = triton_product.teacher_product(*lists, reference=0, clip=math.inf, keep_raised=math.inf)
    assert got.ids_NS[0, :31].tolist() == [*range(1, 31), 0]
    assert bool((got.logps_NS[0, :30] + math.log(30)).abs().max() < 1e-5)


@pytest.mark.parametrize("bad", [-1, -100, 300, 2**32 + 5, -(2**32) + 5])
@pytest.mark.parametrize("target", ["token", "given", "pooled", "merged"])
def test_an_id_outside_the_vocabulary_makes_its_row_nan(target: str, bad: int) -> None:
    """On a GPU nobody looks at ids before. Nothing is read or written where they point."""
    case = loss_case((3, 300, 2, 8), target="given" if target == "token" else target)
    wide = {name: getattr(case.tokens, name) for name in ("token_ids_N", "target_ids_NS", "teacher_ids_NMS")}
    tokens = replace(case.tokens, **{name: ids if ids is None else ids.long() for name, ids in wide.items()})
    name = {"token": "token_ids_N", "given": "target_ids_NS"}.get(target, "teacher_ids_NMS")
    ids = getattr(tokens, name).clone()
    ids[1].view(-1)[-1:] = bad
    for live in (tokens.target_logps_NS, tokens.teacher_logps_NMS):
        if live is not None and target != "token":
            live[1].view(-1)[-1:] = -0.5  # no empty slot, and none that kappa leaves out

    def run(tokens: LossTokens) -> tuple[Any, Tensor]:
        memory = torch.full((9, 300), 7.0, dtype=case.logits_NV.dtype, device=DEVICE)
        logits_NV = memory[3:6]
        logits_NV.copy_(case.logits_NV)
        terms = triton_loss.loss_rows(logits_NV, backends.moved(tokens, DEVICE), case.settings, logits_NV)
        assert bool((memory[:3] == 7).all() and (memory[6:] == 7).all()), "written outside the rows"
        return backends.moved(terms, "cpu"), logits_NV.cpu()

    fine, fine_NV = run(tokens)
    terms, grad_NV = run(replace(tokens, **{name: ids}))
    others = torch.tensor([0, 2])
    assert torch.equal(grad_NV[others], fine_NV[others]) and not bool(fine_NV.isnan().any())
    assert bool(grad_NV[1].isnan().all())
    for term in ("logp_N", "kl_N"):
        assert torch.equal(getattr(terms, term)[others], getattr(fine, term)[others])
    assert (terms.logp_N if target == "token" else terms.kl_N)[1].isnan()


@pytest.mark.parametrize("bad", [-1, 300, 2**32 + 5])
def test_an_id_outside_the_vocabulary_has_the_log_probability_nan(bad: int) -> None:
    logits_NV = cases.random_logits(3, 300)
    got = backends.call("triton", "topk_logprobs", logits_NV, 4, token_ids_N=torch.tensor([1, bad, 3]))
    fine = backends.call("triton", "topk_logprobs", logits_NV, 4, token_ids_N=torch.tensor([1, 2, 3]))
    assert got.token_logp_N.isnan().tolist() == [False, True, False]
    assert torch.equal(got.ids_NS, fine.ids_NS) and torch.equal(got.logps_NS, fine.logps_NS)


def test_the_padding_of_labels_is_no_part_of_a_forward_kl() -> None:
    """A token of -100, whose log-probability nobody asks for, leaves the row's gradient as it is."""
    logits_NV, target = cases.random_logits(2, 300), cases.target_of("given", 2, 300, 8, 2)
    options, slopes = KlOptions(tail=True, temperature=1.0), (None, torch.ones(2))

    def run(*tokens: int) -> tuple[Tensor, Tensor]:
        arguments = (logits_NV, torch.tensor(tokens), target, options)
        _, kl_N, kept = backends.call("triton", "forward_kl_rows", *arguments)
        return kl_N, backends.call("triton", "forward_kl_gradient", *arguments, *slopes, kept)

    for mine, theirs in zip(run(5, -100), run(5, 7), strict=True):
        assert torch.equal(mine, theirs)


def test_what_follows_the_rows_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel of torch's, neither for the sums nor for an operator's packed statistics."""
    case = loss_case((3, 300, 2, 8), target="merged")
    terms, tokens = backends.moved((run_loss("triton", case)[0], case.tokens), DEVICE)
    columns_CN = torch.stack([getattr(terms, field.name) for field in fields(terms)]).float()
    terms = replace(terms, **{f.name: c for f, c in zip(fields(terms), columns_CN, strict=True)})
    launched, asked = [], []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    class Kernel:
        def __getitem__(self, grid: tuple) -> Any:
            return lambda *_, **__: launched.append(grid)

    monkeypatch.setattr(triton_totals, "_totals_kernel", Kernel())
    with Noted(), torch.no_grad():
        _, stats = triton_totals.total_loss(terms, tokens, case.settings)
        packed_stats(stats)
    made_of_memory_alone = {"new_empty", "empty", "unbind", "detach", "as_strided"}
    assert launched == [(1,)] and set(asked) <= made_of_memory_alone


@pytest.mark.parametrize("kind", ["grpo", "gdpo", "gd2po"])
def test_a_groups_advantages_depend_on_nothing_around_it(kind: str) -> None:
    """Each response adds its own group up, from its first on."""
    generator = torch.Generator().manual_seed(5)
    rewards, group = torch.randn(42, 3, generator=generator), torch.arange(42) // 6
    options = AdvantageOptions(kind, whiten=None)
    whole = backends.call("triton", "advantages", rewards, group, options)
    for start in (6, 30):
        alone = backends.call("triton", "advantages", rewards[start : start + 6], group[:6], options)
        for mine, theirs in zip(alone, whole, strict=True):
            assert mine is None or torch.equal(mine, theirs[start : start + 6])


def test_slots_are_merged_into_the_moments_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven programs' slots, one of them empty, in four blocks."""
    monkeypatch.setattr(triton_whiten, "SLOT_BLOCK", 2)
    adv_R = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) + 9
    parts = [adv_R[10 * i : 10 * i + 10] for i in range(3)] + [adv_R[:0], *adv_R[30:].split(10)]
    slots = [[len(part), float(part.mean()), float((part - part.mean()).square().sum())] for part in parts]
    moments = torch.tensor(slots, dtype=torch.float64).nan_to_num(0.0)
    out_R = torch.empty(60, device=DEVICE)
    triton_whiten.whiten_(adv_R.to(DEVICE), None, None, moments.to(DEVICE), out_R, 1e-6)
    want_R = ((adv_R - adv_R.mean()) / (adv_R.std() + 1e-6)).float()
    torch.testing.assert_close(out_R.cpu(), want_R, rtol=1e-6, atol=1e-7)


def test_what_is_not_served_is_said() -> None:
    logits_NV, most = torch.zeros(2, 200), triton_loss.MAX_SUPPORT
    for module, op, tensor, facts, expected in (
        (triton_topk, "topk_logprobs", logits_NV, {"kappa": 128}, None),
        (triton_topk, "topk_logprobs", logits_NV, {"kappa": 129}, "kappa is 129"),
        (triton_topk, "topk_logprobs", logits_NV.double(), {"kappa": 1}, "float64"),
        (triton_topk, "topk_logprobs", wide(triton_topk.MAX_VOCAB), {"kappa": 1}, "V is 524289"),
        (triton_mixture, "teacher_mixture", logits_NV, {"n_pooled": 1024}, None),
        (triton_mixture, "teacher_mixture", logits_NV.double(), {"n_pooled": 8}, "float64"),
        (triton_loss, "loss_rows", logits_NV, {"n_support": most}, None),
        (triton_loss, "loss_rows", logits_NV, {"n_pooled": 2**20}, "expected at most"),
        (triton_loss, "loss_rows", wide(triton_loss.MAX_VOCAB), {}, "V is 524289"),
        (triton_advantages, "grpo_advantages", torch.zeros(2, 32), {}, None),
        (triton_advantages, "grpo_advantages", torch.zeros(2, 33), {}, "K is 33"),
    ):
        why_not = module.unserved(op, tensor, **facts)
        assert why_not is None if expected is None else expected in str(why_not)
    with pytest.raises(ValueError, match="topk_logprobs: kappa is 129, expected at most 128"):
        triton_topk.topk_logprobs(logits_NV.to(DEVICE), 129)
    pool = (torch.zeros(1, 8, 129, dtype=torch.int64), torch.zeros(1, 8, 129), torch.zeros(8))
    with pytest.raises(ValueError, match=r"teacher_mixture: M \* S is 1032, expected at most 1024"):
        backends.call("triton", "teacher_mixture", *pool, 4)
    case = loss_case((2, 1271, 1, most + 1), target="given")
    with pytest.raises(ValueError, match="entries, expected at most"):
        run_loss("triton", case)
    group = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"gdpo_advantages: the dtype is torch\.float64"):
        backends.call("triton", "advantages", logits_NV.double()[:, :3], group, AdvantageOptions("gdpo"))


def wide(most: int) -> Tensor:
    return torch.empty(1, most + 1, device="meta")


def _rank(rank: int, store: str, world: int) -> None:
    backend = "nccl" if DEVICE == "cuda" and torch.cuda.device_count() >= world else "gloo"
    torch.distributed.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=HANG_SECONDS),
    )
    generator = torch.Generator().manual_seed(9)
    rewards, group = torch.randn(11, 2, generator=generator), torch.arange(11) // 4
    weights, lengths = torch.tensor([0.3, 0.9]), torch.arange(11) * 7 % 50
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    for whiten, cut in (("responses", 2), ("tokens", 2), ("tokens", 3)):  # the last leaves rank 1 nothing
        mine = (group < cut) == (rank == 0)
        options = AdvantageOptions("gdpo", weights_K=weights, lengths_R=lengths, whiten=whiten)
        own = replace(options, weights_K=weights.to(device), lengths_R=lengths[mine].to(device))
        shard = (rewards[mine].to(device), group[mine].to(device))
        got, _ = triton_advantages.advantages(*shard, own, torch.distributed.group.WORLD)
        want, _ = reference_advantages.advantages(rewards, group, options)
        torch.testing.assert_close(got.cpu(), want[mine], rtol=1e-6, atol=1e-9)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="two ranks take two GPUs")
def test_ranks_whiten_together(tmp_path) -> None:
    torch.multiprocessing.spawn(_rank, args=(str(tmp_path / "store"), 2), nprocs=2)


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", cases.HALF)
@pytest.mark.parametrize("target", ["merged", "pooled"])
def test_a_vocabulary_of_aligned_rows_on_the_gpu(target: str, dtype: str) -> None:
    check_loss("triton", loss_case((64, 152_064, 2, 16), dtype, target, target == "merged", True), "in place")


def test_alignment_is_that_of_the_address() -> None:
    """Of memory that another library lent, the offset says nothing."""
    lent = torch.from_dlpack(torch.zeros(65, dtype=torch.bfloat16)[1:])
    rows = lent.view(8, 8)
    assert rows.storage_offset() == 0 and rows.data_ptr() % 16 == 2
    assert triton_loss._aligned_elements(rows) == 1
    assert triton_loss._aligned_elements(rows.clone()) == 8


GRAPHED = (
    *("topk_logprobs", "teacher_mixture", "gdpo_advantages", "smopd_loss", "topk_forward_kl"),
    *("teacher_forward_kl", "linear_topk_logprobs", "linear_smopd_loss"),
)


@gpu
@needs_cuda
@pytest.mark.parametrize("name", GRAPHED)
def test_a_cuda_graph_replays_forward_and_backward(name: str) -> None:
    """Through the public functions: captured once, replayed on other numbers, the bits of an eager call."""
    given, pooled = (
        backends.moved(loss_case((64, 151_936, 2, 16), "bf16", target, ids=torch.int32), "cuda")
        for target in ("given", "merged")
    )
    tokens, token_ids = pooled.tokens, pooled.tokens.token_ids_N
    teachers = (tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha)
    torch.manual_seed(1)
    hidden = torch.randn(64, 128, device=DEVICE).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(151936, 128, device=DEVICE)).bfloat16().requires_grad_()
    logits = pooled.logits_NV.clone().requires_grad_()
    rewards, group = torch.randn(500, 4, device=DEVICE), torch.arange(500, device=DEVICE) // 8
    leaves = [hidden, weight] if "linear" in name else [logits]

    def call() -> list[Tensor]:
        outputs: Any
        if name == "gdpo_advantages":
            return [ops.gdpo_advantages(rewards, group)]
        if name == "teacher_mixture":
            mixture = ops.teacher_mixture(*teachers, 16, merge=True)
            return [mixture.ids_NS, mixture.logps_NS]
        if name.endswith("topk_logprobs"):
            head = (logits,) if name == "topk_logprobs" else (hidden, weight)
            top = getattr(ops, name)(*head, 16, token_ids_N=token_ids)
            return [top.ids_NS, top.logps_NS, top.token_logp_N]
        if name == "topk_forward_kl":
            target = (given.tokens.target_ids_NS, given.tokens.target_logps_NS)
            outputs = ops.topk_forward_kl(logits, token_ids, *target, tail=True)
        elif name == "teacher_forward_kl":
            outputs = ops.teacher_forward_kl(logits, token_ids, *teachers, 16, merge=True, tail=True)
        elif name == "smopd_loss":
            loss, stats = ops.smopd_loss(logits, tokens, pooled.settings)
            outputs = (loss, stats.kl_N)
        else:
            loss, stats = ops.linear_smopd_loss(hidden, weight, tokens, pooled.settings)
            outputs = (loss, stats.kl_N)
        total = sum(output.sum() for output in outputs if output.requires_grad)
        return [*(output.detach() for output in outputs), *torch.autograd.grad(total, leaves)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call()
    with torch.no_grad():
        for leaf in [*leaves, rewards]:
            leaf.copy_(torch.randn_like(leaf) * 0.1)
    graph.replay()
    for replayed, eager in zip(got, call(), strict=True):
        assert torch.equal(replayed, eager)
