"""The operators under torch.library.opcheck; the public functions traced, exported and on fake tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from smopd import ops
from smopd.kernels.ops.loss import flat_objective
from tests.kernels import float64

N, V, D, M, S, KAPPA = 5, 37, 3, 2, 4, 6
SETTINGS = ops.LossSettings(entropy_coef=0.1, kappa=KAPPA, dual_clip=3.0, kl_temperature=0.8)


def teachers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, logps = float64.random_teachers(N, M, V, S, seed=1, dtype=torch.float32)
    return ids, logps, torch.tensor([0.4, 0.6]).log()


def loss_tokens(logits: torch.Tensor) -> ops.LossTokens:
    ids, logps, log_alpha = teachers()
    more = {"teacher_ids_NMS": ids, "teacher_logps_NMS": logps, "log_alpha": log_alpha}
    return float64.random_tokens(N, V, logits, 1.0, 2, **more)


def arguments() -> dict[str, tuple]:
    torch.manual_seed(0)
    logits = torch.randn(N, V, requires_grad=True)
    token_ids = torch.randint(0, V, (N,))
    ids, logps, log_alpha = teachers()
    objective = flat_objective(loss_tokens(logits), SETTINGS)
    rewards, group = torch.randn(8, 2), torch.arange(8) // 4
    return {
        "topk_logprobs": (logits.detach(), KAPPA, token_ids, 0.7),
        "topk_logprobs_teachers": ([logits.detach(), torch.randn(N, V)], KAPPA, token_ids, 0.7),
        "teacher_mixture": (ids, logps, log_alpha, KAPPA, True),
        "teacher_product": (ids, logps, log_alpha[1:], KAPPA, 1, 1.5, float("inf")),
        "forward_kl": (logits, token_ids, ids, logps, log_alpha, KAPPA, True, True, 0.7),
        "forward_kl_gradient": (
            *(logits.detach(), token_ids, ids[:, 0], logps[:, 0], None, 0, False, False, 1.0),
            *(torch.zeros(0, N), torch.randn(N), None),
        ),
        "loss": (logits, *objective, True),
        "grpo_advantages": (rewards, group, None, 1e-6),
        "gdpo_advantages": (rewards, group, torch.tensor([0.9, 0.1]), None, "responses", 1e-6),
        "gd2po_advantages": (rewards, group, None, torch.arange(8), "tokens", 0.5, 1e-6),
    }


@pytest.mark.parametrize("name", arguments())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.smopd, name).default, arguments()[name])


def test_opcheck_without_optional_arguments() -> None:
    logits = torch.randn(N, V)
    tokens = ops.LossTokens(
        token_ids_N=torch.zeros(N, dtype=torch.int32), adv_N=torch.ones(N), pg_weight_N=torch.ones(N)
    )
    flat = flat_objective(tokens, ops.LossSettings())
    torch.library.opcheck(torch.ops.smopd.loss.default, (logits, *flat, False))
    torch.library.opcheck(torch.ops.smopd.topk_logprobs.default, (logits, 0, None, 1.0))
    torch.library.opcheck(torch.ops.smopd.topk_logprobs_teachers.default, ([logits], 2, None, 1.0))


def compiled_equals_eager(function, *inputs: torch.Tensor) -> None:
    def run(call) -> list[torch.Tensor]:
        leaves = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
        outputs = [out for out in call(*leaves) if out is not None]
        total = sum(out.sum() for out in outputs if out.requires_grad)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = torch.autograd.grad(total, wanted) if isinstance(total, torch.Tensor) else ()
        return [*outputs, *grads]

    got = run(torch.compile(function, fullgraph=True, backend="aot_eager"))
    for a, b in zip(got, run(function), strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)


def test_compile_fullgraph() -> None:
    torch.manual_seed(3)
    x, w = torch.randn(N, D), torch.randn(V, D)
    token_ids = torch.randint(0, V, (N,))
    ids, logps, log_alpha = teachers()
    tokens = loss_tokens(x @ w.T)
    rewards, group = torch.randn(8, 2), torch.arange(8) // 4

    def loss(x, w):
        total, stats = ops.smopd_loss(x @ w.T, tokens, SETTINGS)
        return total, stats.logp_N, stats.clipped_N

    def kl(x, w):
        return ops.teacher_forward_kl(x @ w.T, token_ids, ids, logps, log_alpha, KAPPA, merge=True, tail=True)

    def sparse(x, w):
        mixture = ops.teacher_mixture(ids, logps, log_alpha, KAPPA)
        return ops.topk_forward_kl(x @ w.T, token_ids, mixture.ids_NS, mixture.logps_NS)

    def top(x, w):
        top = ops.topk_logprobs(x @ w.T, KAPPA, token_ids_N=token_ids)
        return top.ids_NS, top.logps_NS, top.token_logp_N

    def several(x, w):
        top = ops.topk_logprobs([x @ w.T, x @ w.T + 1], KAPPA, token_ids_N=token_ids)
        return top.ids_NS, top.logps_NS, top.token_logp_N

    def advantages(rewards):
        return (
            ops.grpo_advantages(rewards, group),
            ops.gdpo_advantages(rewards, group),
            *ops.gd2po_advantages(rewards, group, whiten=None),
        )

    for function in (loss, kl, sparse, top, several):
        compiled_equals_eager(function, x, w)
    compiled_equals_eager(advantages, rewards)


TOKEN_IDS = torch.zeros(N, dtype=torch.int64)
CALLS = {
    "topk_logprobs": lambda x: ops.topk_logprobs(x, KAPPA).logps_NS,
    "topk_logprobs_teachers": lambda x: ops.topk_logprobs([x, x + 1], KAPPA).logps_NS,
    "teacher_mixture": lambda x: ops.teacher_mixture(*mixed(x), KAPPA).mass_N,
    "teacher_product": lambda x: ops.teacher_product(*mixed(x)[:2], mixed(x)[2][1:], KAPPA).mass_N,
    "forward_kl": lambda x: ops.teacher_forward_kl(x, TOKEN_IDS, *teachers(), KAPPA, tail=True)[1],
    "loss": lambda x: ops.smopd_loss(x, loss_tokens(torch.zeros(N, V)), SETTINGS)[0],
    "gdpo_advantages": lambda x: ops.gdpo_advantages(x[:, :3], torch.arange(N) // 3),
}


def mixed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids, _, log_alpha = teachers()
    return ids, x[:, : M * S].view(N, M, S), log_alpha


@pytest.mark.parametrize("name", CALLS)
def test_who_traces_or_fakes_a_call_sees_one_operator(name: str) -> None:
    x, call = torch.randn(N, V, generator=torch.manual_seed(1)), CALLS[name]
    want, target = call(x), f"smopd.{name}.default"
    graph = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)
    assert target in {str(node.target) for node in graph.graph.nodes} and torch.equal(graph(x), want)

    class Call(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(x)

    exported = torch.export.export(Call(), (x,), strict=False).graph_module
    assert target in {str(node.target) for node in exported.graph.nodes}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = call(mode.from_tensor(x))
    assert (fake.shape, fake.dtype) == (want.shape, want.dtype)


@pytest.mark.parametrize("name", ["forward_kl", "loss"])
def test_a_second_derivative_and_a_freed_graph_are_refused(name: str) -> None:
    leaf, upstream = torch.randn(N, V, requires_grad=True), torch.ones((), requires_grad=True)
    total = upstream * CALLS[name](leaf).sum()
    (grad,) = torch.autograd.grad(total, leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
    total = 0.5 * CALLS[name](leaf).sum()
    first, second = (torch.autograd.grad(total, leaf, retain_graph=keep)[0] for keep in (True, False))
    assert first.equal(second)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(total, leaf)


def test_only_the_leaves_get_a_gradient() -> None:
    """What else requires one leaves the results without."""
    logits = torch.randn(N, V)
    adv_N = torch.ones(N, requires_grad=True)
    assert not ops.smopd_loss(logits, replace(loss_tokens(logits), adv_N=adv_N), SETTINGS)[0].requires_grad
    weights_K = torch.ones(3, requires_grad=True)
    assert not ops.gdpo_advantages(logits[:, :3], TOKEN_IDS, weights_K=weights_K).requires_grad


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # torch's own import
def test_inductor_compiles_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of processes for one kernel
    torch.manual_seed(4)
    x, w = torch.randn(N, D, requires_grad=True), torch.randn(V, D)
    tokens = loss_tokens(x @ w.T)

    def loss(x):
        return ops.smopd_loss(torch.tanh(x) @ w.T, tokens, SETTINGS)[0] * 0.5

    (want,) = torch.autograd.grad(loss(x), x)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(x), x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_backward_without_the_gradient_says_so() -> None:
    logits = torch.randn(N, V, requires_grad=True)
    flat = flat_objective(loss_tokens(logits), SETTINGS)
    with pytest.raises(RuntimeError, match="need_grad=False, expected need_grad=True"):
        torch.ops.smopd.loss(logits, *flat, False)[0].backward()
