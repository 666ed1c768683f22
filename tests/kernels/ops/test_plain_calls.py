"""A plain eager call skips the registered operator; whoever has to see it does, with the same results.

The oracle is the registered operator itself: the same call with every call taken for watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from smopd import ops
from smopd.kernels.ops import library
from smopd.kernels.ops.topk import _topk
from smopd.kernels.tokens import STATS_FIELDS
from tests.kernels import float64

N, V, M, S, KAPPA = 5, 37, 2, 4, 6
SETTINGS = ops.LossSettings(entropy_coef=0.1, kappa=KAPPA, dual_clip=3.0, kl_temperature=0.8)

torch.manual_seed(0)
LOGITS = torch.randn(N, V)
TOKEN_IDS = torch.randint(0, V, (N,))
IDS, LOGPS = float64.random_teachers(N, M, V, S, seed=1, dtype=torch.float32)
LOG_ALPHA = torch.tensor([0.4, 0.6]).log()
TEACHERS = {"teacher_ids_NMS": IDS, "teacher_logps_NMS": LOGPS, "log_alpha": LOG_ALPHA}
TOKENS = float64.random_tokens(N, V, LOGITS, 1.0, 2, **TEACHERS)
GROUP = torch.tensor([0, 0, 0, 1, 1])


def loss(
    logits: Tensor, tokens: ops.LossTokens = TOKENS, settings: ops.LossSettings = SETTINGS
) -> list[Tensor]:
    total, stats = ops.smopd_loss(logits, tokens, settings)
    return [total, *(getattr(stats, name) for name in STATS_FIELDS)]


def columns(mixture: ops.Mixture) -> list[Tensor]:
    return [mixture.ids_NS, mixture.logps_NS, mixture.mass_N]


def topk(logits: Any, **options: Any) -> list[Tensor]:
    top = ops.topk_logprobs(logits, KAPPA, token_ids_N=TOKEN_IDS, **options)
    return [top.ids_NS, top.logps_NS, top.token_logp_N]


# Operator -> a call of its public function on (N, V) logits. Where there is a gradient, it is the logits'.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "topk_logprobs": topk,
    "topk_logprobs_teachers": lambda x: topk([x, x + 1]),
    "teacher_mixture": lambda x: columns(
        ops.teacher_mixture(IDS, x[:, : M * S].view(N, M, S), LOG_ALPHA, KAPPA)
    ),
    "teacher_product": lambda x: columns(
        ops.teacher_product(IDS, x[:, : M * S].view(N, M, S), LOG_ALPHA[1:], KAPPA)
    ),
    "forward_kl": lambda x: ops.teacher_forward_kl(x, TOKEN_IDS, IDS, LOGPS, LOG_ALPHA, KAPPA, tail=True),
    "loss": loss,
    "grpo_advantages": lambda x: [ops.grpo_advantages(x[:, :3], GROUP)],
    "gdpo_advantages": lambda x: [ops.gdpo_advantages(x[:, :3], GROUP)],
    "gd2po_advantages": lambda x: ops.gd2po_advantages(x[:, :3], GROUP, whiten="responses"),
}
DIFFERENTIABLE = ("forward_kl", "loss")
every = pytest.mark.parametrize("name", CALLS)
differentiable = pytest.mark.parametrize("name", DIFFERENTIABLE)


@contextmanager
def everything_registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "watched", lambda: True)
        yield


def dispatched(call: Callable[[], Any]) -> set[str]:
    """The registered operators that went through the dispatcher, those of the C++ backend left out."""
    with torch.autograd.profiler.profile() as profile:
        call()
    names = {
        event.name.removeprefix("smopd::") for event in profile.function_events if "smopd::" in event.name
    }
    return {name for name in names if not name.endswith("_cpu")}


def same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        assert a.detach().equal(b.detach())


def with_gradient(call: Callable[[Tensor], Any], upstream: float) -> list[Tensor]:
    leaf = LOGITS.clone().requires_grad_()
    outputs = call(leaf)
    total = sum(upstream * out.sum() for out in outputs if out.requires_grad)
    return [*outputs, *torch.autograd.grad(total, leaf)]


@every
def test_a_plain_call_is_not_dispatched(name: str) -> None:
    for grad in (False, True):
        assert not dispatched(lambda grad=grad: CALLS[name](LOGITS.clone().requires_grad_(grad)))
    with everything_registered():
        assert name in dispatched(lambda: CALLS[name](LOGITS))  # the test would see it


@differentiable
def test_a_plain_backward_is_not_dispatched(name: str) -> None:
    assert not dispatched(lambda: with_gradient(CALLS[name], 0.5))


@every
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_same_results(name: str, context: Callable[[], Any]) -> None:
    with context():
        got = list(CALLS[name](LOGITS))
        with everything_registered():
            same(got, CALLS[name](LOGITS))


@every
def test_same_results_under_autocast(name: str) -> None:
    def call() -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return list(CALLS[name](LOGITS @ torch.eye(V)))

    got = call()
    assert not dispatched(call)
    with everything_registered():
        same(got, call())


@differentiable
@pytest.mark.parametrize("upstream", [1.0, 0.5])
def test_same_gradients(name: str, upstream: float) -> None:
    got = with_gradient(CALLS[name], upstream)
    with everything_registered():
        same(got, with_gradient(CALLS[name], upstream))


@differentiable
def test_a_second_derivative_is_refused(name: str) -> None:
    leaf = LOGITS.clone().requires_grad_()
    upstream = torch.ones((), requires_grad=True)
    total = sum(upstream * out.sum() for out in CALLS[name](leaf) if out.requires_grad)
    (grad,) = torch.autograd.grad(total, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@differentiable
def test_a_retained_graph_serves_twice_and_a_freed_one_does_not(name: str) -> None:
    leaf = LOGITS.clone().requires_grad_()
    total = sum(0.5 * out.sum() for out in CALLS[name](leaf) if out.requires_grad)
    first, second = (torch.autograd.grad(total, leaf, retain_graph=keep)[0] for keep in (True, False))
    assert first.equal(second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(total, leaf)


class SeenByDispatch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


class SeenByFunction(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(function))
        return function(*args, **(kwargs or {}))


@every
@pytest.mark.parametrize("mode", [SeenByDispatch, SeenByFunction])
def test_a_mode_sees_the_operator(name: str, mode: type) -> None:
    want = CALLS[name](LOGITS)
    with mode() as seen:
        same(CALLS[name](LOGITS), want)
    assert f"smopd.{name}.default" in seen.names


@differentiable
def test_a_mode_sees_the_operator_of_the_backward(name: str) -> None:
    leaf = LOGITS.clone().requires_grad_()
    total = sum(out.sum() for out in CALLS[name](leaf) if out.requires_grad)
    with SeenByDispatch() as seen:
        torch.autograd.grad(total, leaf)
    assert ("smopd.forward_kl_gradient.default" in seen.names) == (name == "forward_kl")


def targets(graph: torch.fx.GraphModule) -> set[str]:
    return {str(node.target) for node in graph.graph.nodes}


@every
@pytest.mark.parametrize("options", [{}, {"tracing_mode": "symbolic"}, {"pre_dispatch": True}], ids=str)
def test_make_fx_traces_the_operator(name: str, options: dict[str, Any]) -> None:
    graph = make_fx(lambda x: list(CALLS[name](x)), _allow_non_fake_inputs=True, **options)(LOGITS)
    assert f"smopd.{name}.default" in targets(graph)
    same(graph(LOGITS), CALLS[name](LOGITS))


@every
def test_compile_and_export_hold_the_operator(name: str) -> None:
    seen = set()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.update(targets(graph))
        return graph.forward

    torch._dynamo.reset()
    got = torch.compile(lambda x: list(CALLS[name](x)), fullgraph=True, backend=backend)(LOGITS)
    assert f"smopd.{name}.default" in seen
    same(got, CALLS[name](LOGITS))

    class Call(torch.nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return list(CALLS[name](x))

    assert f"smopd.{name}.default" in targets(
        torch.export.export(Call(), (LOGITS,), strict=False).graph_module
    )


@every
def test_fake_tensors_get_the_fake_kernel(name: str) -> None:
    want = CALLS[name](LOGITS)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(LOGITS)
        inside = list(CALLS[name](fake))
    for got in (inside, list(CALLS[name](fake))):
        assert [(out.shape, out.dtype) for out in got] == [(out.shape, out.dtype) for out in want]


def test_meta_tensors_get_the_fake_kernel() -> None:
    meta = LOGITS.to("meta")
    assert dispatched(lambda: ops.topk_logprobs(meta, KAPPA)) == {"topk_logprobs"}
    assert ops.topk_logprobs([meta, meta], KAPPA).ids_NS.is_meta


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_records_the_operator() -> None:
    traced = torch.jit.trace(lambda x: tuple(topk(x)), LOGITS)
    assert "smopd::topk_logprobs(" in str(traced.graph)


class Sub(Tensor):
    pass


@every
def test_a_subclass_goes_through_the_dispatcher(name: str) -> None:
    sub = LOGITS.as_subclass(Sub)
    assert name in dispatched(lambda: CALLS[name](sub))
    assert dispatched(lambda: CALLS[name](torch.nn.Parameter(LOGITS))) == set()


def error_of(call: Callable[[], Any]) -> tuple[type, str]:
    with pytest.raises(Exception) as caught:
        call()
    return type(caught.value), str(caught.value).splitlines()[0]


def both_refuse(call: Callable[[], Any]) -> None:
    got = error_of(call)
    with everything_registered():
        assert got == error_of(call)


@every
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_as_before(name: str) -> None:
    """torch loops over the registered operator."""
    batch = torch.stack([LOGITS, 2 * LOGITS])
    mapped = torch.func.vmap(lambda x: list(CALLS[name](x)))
    if name == "topk_logprobs_teachers":  # not over a list of tensors
        return both_refuse(lambda: mapped(batch))
    return same(mapped(batch), [torch.stack(column) for column in zip(*map(CALLS[name], batch), strict=True)])


@differentiable
def test_a_function_transform_is_as_before(name: str) -> None:
    both_refuse(lambda: torch.func.grad(lambda x: sum(out.sum() for out in CALLS[name](x)))(LOGITS))


def test_what_the_schema_refuses_is_refused() -> None:
    both_refuse(lambda: ops.teacher_mixture(IDS, LOGPS, LOG_ALPHA, KAPPA, merge="yes"))  # type: ignore[arg-type]
    both_refuse(lambda: loss(LOGITS, settings=replace(SETTINGS, tail="no")))  # type: ignore[arg-type]


def test_what_the_schema_converts_is_converted() -> None:
    whole = [replace(SETTINGS, opd_coef=kind(2), temperature=kind(1)) for kind in (float, int)]
    same(*(loss(LOGITS, settings=settings) for settings in whole))
    for number in (1, torch.ones(())):
        same(*([ops.grpo_advantages(LOGITS, GROUP, norm_eps=eps)] for eps in (1.0, number)))
        assert dispatched(lambda number=number: ops.grpo_advantages(LOGITS, GROUP, norm_eps=number))


def test_a_gradient_that_is_not_the_logits_is_refused_as_before() -> None:
    adv_N = TOKENS.adv_N.clone().requires_grad_()
    tokens = replace(TOKENS, adv_N=adv_N)
    both_refuse(lambda: loss(LOGITS, tokens)[0].backward())
    weights_K = torch.ones(3, requires_grad=True)
    both_refuse(lambda: ops.gdpo_advantages(LOGITS[:, :3], GROUP, weights_K=weights_K).sum().backward())


def test_what_is_no_memory_of_its_values_is_made_so() -> None:
    assert dispatched(lambda: topk(torch._neg_view(-LOGITS))) == {"topk_logprobs"}
    same(topk(torch._neg_view(-LOGITS)), topk(LOGITS))
    weights = [torch._efficientzerotensor((1,)), torch.zeros(1)]
    zero, want = (lambda w=w: columns(ops.teacher_product(IDS, LOGPS, w, KAPPA)) for w in weights)
    assert dispatched(zero) == {"teacher_product"}
    same(zero(), want())


@every
def test_forward_mode_is_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMOPD_BACKEND", "reference")  # of torch's operations, which would make tangents

    def call() -> list[Any]:
        with forward_ad.dual_level():
            outputs = CALLS[name](forward_ad.make_dual(LOGITS, torch.ones_like(LOGITS)))
            return [forward_ad.unpack_dual(out).tangent for out in outputs]

    got = call()
    with everything_registered():
        assert got == call()


def test_an_operator_without_a_gradient_is_asked_for_none_in_a_plain_call() -> None:
    leaf, rest = LOGITS.clone().requires_grad_(), (KAPPA, TOKEN_IDS, 1.0)
    assert _topk.skips(leaf.detach(), *rest) and not _topk.skips(leaf, *rest)
    with torch.no_grad():
        assert _topk.skips(leaf, *rest)
