"""The public functions compiled and traced: each is one operator with its gradient."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from smopd import ops
from smopd.kernels import dispatch
from tests.kernels import cases

N, V, D, M, S, KAPPA = 5, 37, 3, 2, 4, 6
SETTINGS = ops.LossSettings(entropy_coef=0.1, kappa=KAPPA, dual_clip=3.0, kl_temperature=0.8)


LOGITS = torch.randn(N, V, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
IDS, LOGPS, LOG_ALPHA = cases.random_teachers(N, V, S, M)
TEACHERS = (IDS.clamp(0, V - 1), LOGPS, LOG_ALPHA[0])
TOKENS = replace(
    cases.random_tokens(LOGITS, None),
    **dict(zip(("teacher_ids_NMS", "teacher_logps_NMS", "log_alpha"), TEACHERS, strict=True)),
)
TOKEN_IDS = TOKENS.token_ids_N


def mixed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return TEACHERS[0], x[:, : M * S].view(N, M, S), TEACHERS[2]


def columns(top: ops.TopK) -> tuple[torch.Tensor, ...]:
    return top.ids_NS, top.logps_NS, top.token_logp_N


def stats_of(result: tuple[torch.Tensor, ops.LossStats]) -> tuple[torch.Tensor, ...]:
    return 0.5 * result[0], result[1].logp_N, result[1].clipped_N


GROUP = torch.arange(N) // 3
FEW = ops.LossTokens(token_ids_N=TOKEN_IDS.int(), adv_N=torch.ones(N), pg_weight_N=torch.ones(N))
CALLS = {
    "topk_logprobs": lambda x: (
        *columns(ops.topk_logprobs(x, KAPPA, token_ids_N=TOKEN_IDS)),
        *columns(ops.topk_logprobs(x, 0))[:2],
    ),
    "teacher_mixture": lambda x: (ops.teacher_mixture(*mixed(x), KAPPA).mass_N,),
    "forward_kl": lambda x: ops.topk_forward_kl(x, TOKEN_IDS, *(part[:, 0] for part in TEACHERS[:2])),
    "loss": lambda x: (*stats_of(ops.smopd_loss(x, TOKENS, SETTINGS)), *stats_of(ops.smopd_loss(x, FEW))),
    "linear_loss": lambda x: (
        *stats_of(ops.linear_smopd_loss(x[:, :D], WEIGHT, TOKENS, SETTINGS)),
        *stats_of(ops.linear_smopd_loss(x[:, :D], WEIGHT, TOKENS, SETTINGS, chunk_bytes=1)),
    ),
    "linear_topk_logprobs": lambda x: columns(
        ops.linear_topk_logprobs(x[:, :D], WEIGHT, KAPPA, token_ids_N=TOKEN_IDS)
    ),
    "advantages": lambda x: (
        ops.grpo_advantages(x[:, :3], GROUP),
        ops.gdpo_advantages(x[:, :3], GROUP),
        *ops.gd2po_advantages(x[:, :3], GROUP, whiten=None),
    ),
}


def with_gradient(call, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    outputs = call(leaf)
    roots = [out.sum() for out in outputs if out.requires_grad]
    return [*outputs, *(torch.autograd.grad(sum(roots), leaf) if roots else ())]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_one_operator_when_compiled_and_traced(name: str) -> None:
    x, call = torch.randn(N, V, generator=torch.manual_seed(1)), CALLS[name]
    want = with_gradient(call, x)
    got = with_gradient(torch.compile(call, fullgraph=True, backend="aot_eager"), x)
    assert all(map(torch.equal, got, want))
    graph = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert f"smopd.{name}.default" in {str(node.target) for node in graph.graph.nodes}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = call(mode.from_tensor(x))
    for fake, traced, value in zip(fakes, graph(x), want, strict=False):
        assert (fake.shape, fake.dtype) == (value.shape, value.dtype) and torch.equal(traced, value)


@pytest.mark.parametrize("name", ["forward_kl", "loss", "linear_loss"])
def test_a_second_derivative_and_a_freed_graph_are_refused(name: str) -> None:
    leaf, upstream = torch.randn(N, V, requires_grad=True), torch.ones((), requires_grad=True)
    total = upstream * CALLS[name](leaf)[0].sum()
    (grad,) = torch.autograd.grad(total, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    total = 0.5 * CALLS[name](leaf)[0].sum()
    first, second = (torch.autograd.grad(total, leaf, retain_graph=keep)[0] for keep in (True, False))
    assert first.equal(second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(total, leaf)


def test_only_the_leaves_get_a_gradient() -> None:
    """Not other arguments that require one."""
    logits = torch.randn(N, V)
    adv_N = torch.ones(N, requires_grad=True)
    assert not ops.smopd_loss(logits, replace(TOKENS, adv_N=adv_N), SETTINGS)[0].requires_grad
    weights_K = torch.ones(3, requires_grad=True)
    assert not ops.gdpo_advantages(logits[:, :3], TOKEN_IDS, weights_K=weights_K).requires_grad


@pytest.mark.parametrize("name", ["forward_kl", "loss", "linear_loss"])
def test_forward_mode_is_refused(name: str) -> None:
    """Its derivative would be 0."""
    x = torch.randn(N, V)
    with pytest.raises((RuntimeError, NotImplementedError), match="jvp"):
        torch.func.jvp(lambda z: CALLS[name](z)[0].sum(), (x,), (x,))


def test_a_compiled_step_takes_another_coefficient_and_another_batch() -> None:
    def loss(x: torch.Tensor, tokens: ops.LossTokens, coef: float) -> torch.Tensor:
        return ops.smopd_loss(x, tokens, replace(SETTINGS, opd_coef=coef))[0]

    compiled = torch.compile(loss, fullgraph=True, backend="eager")
    for coef, rows in ((0.5, N), (0.6, N), (0.7, N - 1)):
        names = [name for name, value in vars(TOKENS).items() if value is not None and len(value) == N]
        tokens = replace(TOKENS, **{name: getattr(TOKENS, name)[:rows] for name in names})
        assert compiled(LOGITS[:rows], tokens, coef).equal(loss(LOGITS[:rows], tokens, coef))


def test_in_place_is_one_break_of_a_compiled_step() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.smopd_loss(x * 2.0, TOKENS, SETTINGS, inplace=True)[0] * 3.0

    leaves = [LOGITS.clone().requires_grad_() for _ in range(2)]
    losses = [
        each(leaf) for each, leaf in zip((torch.compile(step, backend=count), step), leaves, strict=True)
    ]
    assert losses[0].equal(losses[1]) and len(graphs) <= 3
    for loss in losses:
        loss.backward()
    assert leaves[0].grad.equal(leaves[1].grad)


@pytest.mark.parametrize(("device", "reason"), [("xpu", "only NVIDIA GPUs"), ("cuda", "cannot start")])
def test_a_device_that_triton_cannot_serve_gets_the_reference_and_a_warning(
    device: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available() and device == "cuda":
        pytest.skip("this GPU serves it")
    monkeypatch.delenv(dispatch.ENV, raising=False)
    dispatch._log_once.cache_clear()
    tensor: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32, is_cuda=False)
    assert dispatch.backend_for("topk_logprobs", tensor) == "reference"
    (record,) = caplog.records
    assert reason in record.message and record.levelname == "WARNING"
