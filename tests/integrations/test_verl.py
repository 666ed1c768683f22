"""verl's distillation through smopd.integrations.verl: losses, its FSDP engine, its teachers, on the CPU.

Compared with verl's functions if they agree by definition, and otherwise with smopd.ops. Needs verl 0.9.1:
`make test-verl` runs these in an environment of their own.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("verl", reason="verl is not installed: make test-verl runs these in its environment")

import torch.distributed as dist
from omegaconf import OmegaConf
from tensordict import TensorDict
from tokenizers import Tokenizer, models
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedTokenizerFast
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.utils.losses import ppo_loss

from smopd.integrations import verl as smopd_verl
from smopd.ops import teacher_mixture, topk_forward_kl

N, V, S = 24, 97, 6
LENGTHS = (9, 15)  # tokens of the two sequences
PROMPTS = (3, 5)


def nested(rows: Tensor) -> Tensor:
    offsets = torch.tensor([0, LENGTHS[0], sum(LENGTHS)])
    return torch.nested.nested_tensor_from_jagged(rows, offsets=offsets)


def logits(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(1, N, V, generator=generator)).to(dtype).requires_grad_()


def top(seed: int) -> tuple[Tensor, Tensor]:
    """A teacher's top S: ids and log-probabilities (N, S)."""
    generator = torch.Generator().manual_seed(seed)
    values, ids = (2 * torch.randn(N, V, generator=generator)).log_softmax(-1).topk(S)
    return ids, values


def data_of(
    ids: Tensor,
    logps: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    remove_padding: bool = True,
    task_rewards: bool = False,
) -> TensorDict:
    """Two responses to two prompts as verl's v1 trainer sends them to its actor."""
    generator = torch.Generator().manual_seed(5)
    rows = torch.randint(V, (N,), generator=generator).split(LENGTHS)
    responses = [row[prompt:] for row, prompt in zip(rows, PROMPTS, strict=True)]

    def column(rows: list[Tensor]) -> Tensor:
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    columns = {
        "input_ids": nested(torch.cat(rows)),
        "position_ids": nested(torch.cat([torch.arange(length) for length in LENGTHS])),
        "prompts": column([row[:prompt] for row, prompt in zip(rows, PROMPTS, strict=True)]),
        "responses": column(responses),
        "response_mask": column([torch.ones_like(row) for row in responses]),
        "old_log_probs": column([-4 * torch.rand(len(row), generator=generator) for row in responses]),
        "advantages": column([torch.randn(len(row), generator=generator) for row in responses]),
        "teacher_ids": nested(ids.int()),
        "teacher_logprobs": nested(logps),
    }
    data = TensorDict(columns, batch_size=[2])
    if isinstance(temperature, Tensor):
        data["temperature"] = temperature
    else:
        tu.assign_non_tensor_data(data, "temperature", temperature)
    tu.assign_non_tensor(
        data,
        dp_size=1,
        global_batch_size=2,
        use_remove_padding=remove_padding,
        pad_mode=DatasetPadMode.NO_PADDING,
        use_fused_kernels=False,
        calculate_entropy=False,
        distillation_use_topk=True,
        distillation_only=not task_rewards,
        batch_num_tokens=sum(len(row) for row in responses),
    )
    return data


def predicting_responses() -> Tensor:
    """Return an (N,) mask of the rows that predict response tokens."""
    places = [torch.arange(length) for length in LENGTHS]
    kept = [
        (place >= prompt - 1) & (place < length - 1)
        for place, prompt, length in zip(places, PROMPTS, LENGTHS, strict=True)
    ]
    return torch.cat(kept)


ACTOR = FSDPActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=2)


def distillation(loss_config: Any) -> SimpleNamespace:
    return SimpleNamespace(distillation_loss=loss_config)


def host_config(**settings: Any) -> Any:
    """verl's forward_kl_topk, supervised and without a maximum."""
    chosen = {"loss_mode": "forward_kl_topk", "topk": S}
    chosen |= {"use_policy_gradient": False, "use_task_rewards": False}
    clamps = {"loss_max_clamp": None, "log_prob_min_clamp": None}
    return smopd_verl.worker_config.DistillationLossConfig(**{**chosen, **clamps, **settings})


def our_config(**settings: Any) -> Any:
    return smopd_verl.SmopdLossConfig(**{"topk": S, "use_task_rewards": False, **settings})


def loss_of(config: Any, data: TensorDict, student: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """Call the loss as verl does, in the logits processor and after it."""
    compute = smopd_verl.losses.distillation_ppo_loss
    columns = compute(ACTOR, distillation(config), data=data, student_logits=student)
    output = {name: column[0] for name, column in columns.items()}
    return compute(ACTOR, distillation(config), model_output=output, data=data)


def test_one_teacher_without_tail_is_verls_loss_without_its_clamp() -> None:
    """Through verl's distillation_ppo_loss, whose clamp zeroes negative tokens and their gradients."""
    ids, logps = top(1)
    student = logits()
    with torch.no_grad():  # more mass on the support than the teacher has
        student[0, ::2] = student[0, ::2].scatter(1, ids[::2].long(), 12 + logps[::2])
    per_token = topk_forward_kl(student[0], ids[:, 0], ids, logps)[1]
    mask = predicting_responses()
    assert (per_token[mask] < 0).any() and (per_token[mask] > 0).any()
    ours, metrics = loss_of(our_config(tail=False), data_of(ids, logps), student)
    theirs, _ = loss_of(host_config(), data_of(ids, logps), student)
    torch.testing.assert_close(ours, per_token[mask].mean(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs, per_token[mask].clamp(min=0).mean(), rtol=1e-5, atol=1e-6)
    assert metrics["distillation/negative_share"] == pytest.approx(
        (per_token[mask] < 0).float().mean().item()
    )
    (our_grad,) = torch.autograd.grad(ours, student)
    (their_grad,) = torch.autograd.grad(theirs, student)
    positive, negative = mask & (per_token > 0), mask & (per_token < 0)
    torch.testing.assert_close(our_grad[0, positive], their_grad[0, positive], rtol=1e-5, atol=1e-6)
    assert not their_grad[0, negative].any() and our_grad[0, negative].abs().sum(-1).gt(0).all()
    assert not our_grad[0, ~mask].any()


def test_no_in_place_backward_on_logits_that_the_loss_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With task rewards, verl's engine computes log-probabilities from the same logits after the loss."""
    in_place = []
    replaced = lambda *_, inplace_backward: in_place.append(inplace_backward)  # noqa: E731
    monkeypatch.setitem(smopd_verl.ORIGINALS, "logprobs_from_logits", replaced)
    (ids, logps), student = top(1), logits() * 1.0
    smopd_verl.losses.compute_topk_loss(
        ACTOR, distillation(our_config()), data_of(ids, logps), student, data_format="thd"
    )
    for given in (student[0], logits()[0]):
        smopd_verl.torch_functional.logprobs_from_logits(given, torch.arange(N))
    assert in_place == [False, True]


def test_what_would_clamp_or_shard_is_refused() -> None:
    ids, logps = top(1)
    data = data_of(ids, logps, torch.tensor([1.0, 0.5]))
    with pytest.raises(ValueError, match=r"temperatures are \[0.5, 1.0\], expected one for the batch"):
        smopd_verl.compute_topk_loss(ACTOR, distillation(our_config()), data, logits(), "thd")
    with pytest.raises(ValueError, match=r"distillation_loss.use_policy_gradient is True, expected False"):
        our_config(use_policy_gradient=True)
    plain = host_config(loss_mode=smopd_verl.LOSS_MODE, log_prob_min_clamp=-10.0)
    with pytest.raises(ValueError, match=r"distillation_loss.log_prob_min_clamp is -10.0, expected None"):
        loss_of(plain, data_of(ids, logps), logits())
    megatron = SimpleNamespace(strategy="megatron")
    with pytest.raises(NotImplementedError, match="strategy megatron shards"):
        smopd_verl.compute_topk_loss(
            megatron, distillation(our_config()), data_of(ids, logps), logits(), "thd"
        )
    with pytest.raises(ValueError, match="use_fused_kernels=false"):
        smopd_verl.unclamped_forward_kl(ACTOR, distillation(our_config()), {}, data_of(ids, logps))
    ids[3, 2] = V
    with pytest.raises(ValueError, match=rf"teacher_ids holds \d+ ids outside \[0, {V}\), first {V}"):
        loss_of(our_config(), data_of(ids, logps), logits())


class Student(nn.Module):
    """A language model for verl's engine, packed or padded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.logits_of = nn.Embedding(V, V)

    def forward(self, input_ids: Tensor, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.logits_of(input_ids))


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl expects an accelerator."""
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")


def engine(student: nn.Module) -> Any:
    """Return verl's engine without process groups, as in verl's own tests."""
    made = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    made.module, made.use_ulysses_sp, made.pad_to_length = student, False, False
    made.engine_config = SimpleNamespace(entropy_checkpointing=False)
    made._autocast_dtype, made.ulysses_device_mesh = torch.float32, None
    return made


@pytest.mark.parametrize(
    ("stored", "temperature", "remove_padding", "task_rewards"),
    [(float, 1.0, True, False), (float, 0.5, True, True), (lambda t: torch.full((2,), t), 0.5, False, True)],
)
def test_the_loss_of_verls_engine(
    stored: Any, temperature: float, remove_padding: bool, task_rewards: bool
) -> None:
    """It is distillation_loss_coef times the mean KL at temperature 1, plus ppo_loss with task rewards."""
    config = our_config(use_task_rewards=task_rewards, distillation_loss_coef=0.3)
    loss_function = partial(
        smopd_verl.losses.distillation_ppo_loss, config=ACTOR, distillation_config=distillation(config)
    )
    ids, logps = top(1)
    options = {"remove_padding": remove_padding, "task_rewards": task_rewards}
    data = data_of(ids, logps, stored(temperature), **options)
    student = Student()
    loss, said = engine(student).forward_step(data, loss_function, forward_only=False)
    (grad,) = torch.autograd.grad(loss, student.parameters())

    rows_NV = student.logits_of(data["input_ids"].values())
    kl_N = topk_forward_kl(rows_NV, ids[:, 0], ids, logps, tail=True)[1]
    expected = kl_N[predicting_responses()].mean()
    if task_rewards:
        following = data["input_ids"].values().roll(-1)
        logp_N = (rows_NV / temperature).log_softmax(-1).gather(1, following[:, None])[:, 0]
        task_loss, _ = ppo_loss(ACTOR, {"log_probs": nested(logp_N)}, data)
        expected = task_loss + 0.3 * expected
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        grad, torch.autograd.grad(expected, student.parameters())[0], rtol=1e-5, atol=1e-6
    )
    assert ("log_probs" in said["model_output"]) == task_rewards
    on_support = rows_NV.detach().log_softmax(-1).gather(1, ids).exp().sum(-1)[predicting_responses()]
    assert said["metrics"]["distillation/student_mass"] == pytest.approx(on_support.mean().item(), rel=1e-5)


@contextmanager
def sequence_parallel(rank: int, size: int) -> Iterator[None]:
    """Set up verl's Ulysses group in one rank, without the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    smopd_verl.ulysses.set_ulysses_sequence_parallel_group(dist.group.WORLD)
    try:
        yield
    finally:
        smopd_verl.ulysses.set_ulysses_sequence_parallel_group(None)
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 5], ids=["24 tokens on 2 ranks", "24 tokens and one of padding on 5"])
def test_each_rank_of_a_sequence_gets_its_own_rows(size: int) -> None:
    (ids, logps), config = top(1), distillation(our_config())
    compute = smopd_verl.losses.compute_topk_loss
    whole = logits()
    expected = compute(ACTOR, config, data_of(ids, logps), whole, "thd")
    (grad,) = torch.autograd.grad(expected["distillation_losses"].sum(), whole)
    padded = torch.cat([logits(), torch.zeros(1, -N % size, V)], dim=1).detach().requires_grad_()
    parts = []
    for rank, student in enumerate(padded.chunk(size, dim=1)):
        with sequence_parallel(rank, size):
            parts.append(compute(ACTOR, config, data_of(ids, logps), student, "thd"))
    for name, column in expected.items():
        together = torch.cat([part[name] for part in parts], dim=1)[:, :N]
        torch.testing.assert_close(together, column, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    losses = torch.cat([part["distillation_losses"] for part in parts], dim=1)[:, :N]
    (ours,) = torch.autograd.grad(losses.sum(), padded)
    torch.testing.assert_close(ours[:, :N], grad, rtol=1e-6, atol=1e-6)
    assert not ours[:, N:].any()  # verl's padding: every teacher log-probability 0


class Client:
    """A teacher's server with top log-probabilities at each position and a counter of requests."""

    def __init__(self, seed: int) -> None:
        self.ids, self.logps = top(seed)
        self.asked = 0

    async def generate(
        self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> SimpleNamespace:
        self.asked += 1
        assert sampling_params["prompt_logprobs"] == S
        n = len(prompt_ids)
        fields = {"prompt_ids": self.ids[:n].tolist(), "prompt_logprobs": self.logps[:n].tolist()}
        return SimpleNamespace(extra_fields=fields)


def manager_of(config: Any, clients: dict[str, Client]) -> Any:
    manager = object.__new__(smopd_verl.teacher_manager.AsyncTeacherLLMServerManager)
    manager.distillation_loss_config = config
    manager.teacher_key = "data_source"
    inference = SimpleNamespace(temperature=1.0, max_model_len=None)
    manager.teacher_model_configs = {key: SimpleNamespace(inference=inference) for key in clients}
    manager.teacher_client = clients
    return manager


def ask(manager: Any, routing_key: str | None = None) -> tuple[Tensor, Tensor]:
    return asyncio.run(manager.compute_teacher_logprobs_single([1] * N, routing_key=routing_key))


@pytest.mark.parametrize("merge", [True, False], ids=["merged", "pooled"])
def test_all_teachers_are_asked_and_mixed_and_the_loss_is_the_mixtures(merge: bool) -> None:
    clients = {"math": Client(1), "code": Client(2)}
    config = our_config(merge=merge, teacher_weights={"math": 0.3, "code": 0.7})
    ids, logps = ask(manager_of(config, clients), routing_key="math")
    assert [client.asked for client in clients.values()] == [1, 1]
    stacked_ids = torch.stack([clients["code"].ids, clients["math"].ids], dim=1)
    stacked_logps = torch.stack([clients["code"].logps, clients["math"].logps], dim=1)
    log_alpha = torch.tensor([0.7, 0.3]).log()
    expected = teacher_mixture(stacked_ids, stacked_logps, log_alpha, S, merge=merge)
    assert ids.shape == (N, S) and torch.equal(ids, expected.ids_NS)
    torch.testing.assert_close(logps, expected.logps_NS, rtol=1e-5, atol=1e-6)
    student = logits()
    loss, metrics = loss_of(config, data_of(ids.long(), logps), student)
    supported = torch.zeros(N, V).scatter(1, ids.long(), 1.0)  # counts repeated tokens once
    mass_N = (student[0].softmax(-1) * supported).sum(-1)[predicting_responses()]
    assert metrics["distillation/student_mass"] == pytest.approx(mass_N.mean().item(), rel=1e-5)
    kl = topk_forward_kl(student[0], ids[:, 0], expected.ids_NS, expected.logps_NS, tail=True)[1]
    torch.testing.assert_close(loss, kl[predicting_responses()].mean(), rtol=1e-5, atol=1e-6)


def test_verls_own_loss_modes_still_route() -> None:
    clients = {"math": Client(1), "code": Client(2)}
    ids, logps = ask(manager_of(host_config(), clients), routing_key="code")
    assert [client.asked for client in clients.values()] == [0, 1]
    assert torch.equal(ids.long(), clients["code"].ids)
    torch.testing.assert_close(logps, clients["code"].logps)


def test_weights_of_other_teachers_are_refused() -> None:
    config = our_config(teacher_weights={"math": 1.0})
    with pytest.raises(ValueError, match=r"names \['math'\], expected the configured teachers \['code', "):
        ask(manager_of(config, {"math": Client(1), "code": Client(2)}))


TOKENS = {"<eos>": 0, "red": 1, "blue": 2, "green": 3}


def save_tokenizer(folder: Path, tokens: dict[str, int]) -> str:
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def start_teachers(config: Any, student: str, teachers: dict[str, str]) -> None:
    """Run verl's manager until it starts the teachers' servers."""
    manager = object.__new__(smopd_verl.teacher_model.MultiTeacherModelManager)
    manager.config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": student}}})
    models = {key: SimpleNamespace(model_path=path) for key, path in teachers.items()}
    manager.distillation_config = SimpleNamespace(distillation_loss=config, teacher_models=models)
    manager._initialize_teacher_model_managers()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setitem(smopd_verl.ORIGINALS, "_initialize_teacher_model_managers", found.append)
    return found


def test_teachers_tokenizers_are_compared_before_they_are_started(
    tmp_path: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    student = save_tokenizer(tmp_path / "student", TOKENS)
    with pytest.raises(ValueError, match=r"teacher_weights names \['art'\], expected the .* \['math'\]"):
        start_teachers(our_config(teacher_weights={"art": 1.0}), student, {"math": student})
    assert started == []
    other = save_tokenizer(tmp_path / "more", {**TOKENS, "pink": 4})
    with pytest.raises(
        ValueError, match=rf"'code' \({other}\) has another .*'pink' is token 4 of the teacher"
    ):
        start_teachers(our_config(), student, {"math": student, "code": other})
    assert not started
    start_teachers(our_config(), student, {"math": student})
    start_teachers(host_config(), student, {"code": other})  # verl's own loss accepts it
    (tmp_path / "elsewhere").mkdir()
    start_teachers(our_config(), student, {"code": str(tmp_path / "elsewhere")})
    assert len(started) == 3
    assert "teacher 'code' has no tokenizer here to compare" in capsys.readouterr().err
