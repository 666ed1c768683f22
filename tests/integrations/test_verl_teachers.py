"""verl's teachers through smopd.integrations.verl: their tokenizers, and the mixture of what they answer."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

if find_spec("verl") is None:
    pytest.skip(
        "verl is not installed: make test-verl runs these in its environment", allow_module_level=True
    )

from omegaconf import OmegaConf
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from smopd.integrations import verl_host
from smopd.ops import teacher_forward_kl, teacher_mixture
from tests.integrations.tiny_verl import (
    N,
    S,
    data_of,
    host_config,
    logits,
    loss_of,
    our_config,
    predicting_responses,
    top,
)


class Client:
    """A teacher's server: its top log-probabilities at each position, the questions counted."""

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
    manager = object.__new__(verl_host.teacher_manager.AsyncTeacherLLMServerManager)
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
    loss, _ = loss_of(config, data_of(ids.long(), logps), student)
    teachers = (stacked_ids, stacked_logps, log_alpha, S)
    kl = teacher_forward_kl(student[0], ids[:, 0], *teachers, merge=merge, tail=True)[1]
    expected_loss = kl[predicting_responses()].mean()
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        torch.autograd.grad(loss, student)[0],
        torch.autograd.grad(expected_loss, student)[0],
        rtol=1e-5,
        atol=1e-6,
    )


def test_verls_own_loss_modes_still_route() -> None:
    clients = {"math": Client(1), "code": Client(2)}
    ids, logps = ask(manager_of(host_config(), clients), routing_key="code")
    assert [client.asked for client in clients.values()] == [0, 1]
    assert torch.equal(ids.long(), clients["code"].ids)
    torch.testing.assert_close(logps, clients["code"].logps)


@pytest.mark.parametrize(
    "weights, message",
    [({"math": 1.0}, r"names \['math'\], expected the configured teachers \['code', 'math'\]"),
     ({"math": 0.5, "code": 0.6}, "sum to 1")],
    ids=["a teacher without weight", "no distribution"],
)  # fmt: skip
def test_wrong_weights_are_refused(weights: dict[str, float], message: str) -> None:
    manager = manager_of(our_config(teacher_weights=weights), {"math": Client(1), "code": Client(2)})
    with pytest.raises(ValueError, match=message):
        ask(manager)


TOKENS = {"<eos>": 0, "red": 1, "blue": 2, "green": 3}


def save_tokenizer(folder: Path, tokens: dict[str, int]) -> str:
    backend = Tokenizer(models.WordLevel(tokens, unk_token="<eos>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)
    return str(folder)


def start_teachers(config: Any, student: str, teachers: dict[str, str]) -> None:
    """verl's own manager, up to where it starts the teachers' servers."""
    manager = object.__new__(verl_host.teacher_model.MultiTeacherModelManager)
    manager.config = OmegaConf.create({"actor_rollout_ref": {"model": {"path": student}}})
    models = {key: SimpleNamespace(model_path=path) for key, path in teachers.items()}
    manager.distillation_config = SimpleNamespace(distillation_loss=config, teacher_models=models)
    manager._initialize_teacher_model_managers()


@pytest.mark.parametrize(
    "tokens, message",
    [
        ({**TOKENS, "red": 2, "blue": 1}, "'blue' is token 1 there and 2 here"),
        ({name: id for name, id in TOKENS.items() if id < 3}, "'green' is token None there and 3 here"),
        ({**TOKENS, "pink": 4}, "'pink' is token 4 there and None here"),
    ],
    ids=["of equal size", "smaller", "larger"],
)
def test_a_teacher_with_another_tokenizer_is_refused_before_it_is_started(
    tokens: dict[str, int], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setitem(verl_host.ORIGINALS, "_initialize_teacher_model_managers", started.append)
    student, other = save_tokenizer(tmp_path / "student", TOKENS), save_tokenizer(tmp_path / "other", tokens)
    with pytest.raises(ValueError, match=rf"teacher 'code' \({other}\) has another tokenizer .*{message}"):
        start_teachers(our_config(), student, {"math": student, "code": other})
    assert not started
    start_teachers(our_config(), student, {"math": student})
    start_teachers(host_config(), student, {"code": other})  # verl's own loss is verl's own affair
    assert len(started) == 2


def test_a_teacher_whose_tokenizer_is_elsewhere_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Any] = []
    monkeypatch.setitem(verl_host.ORIGINALS, "_initialize_teacher_model_managers", started.append)
    (tmp_path / "elsewhere").mkdir()
    student = save_tokenizer(tmp_path / "student", TOKENS)
    start_teachers(our_config(), student, {"code": str(tmp_path / "elsewhere")})
    assert len(started) == 1
    assert "teacher 'code' has no tokenizer here to compare" in capsys.readouterr().err
