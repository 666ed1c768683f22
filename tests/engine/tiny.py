"""Small random models, ragged rollouts, and checks of sampled responses, for the engine's tests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from smopd.engine.types import Rollout

VOCABULARY = 53
END = 1


def model_of(family: str, **options: Any) -> PreTrainedModel:
    """Return a small random model of a transformers family; `options` go to its config."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 0,
        "eos_token_id": END,
    }
    if "text_config" in options:
        options["text_config"] = shape | options["text_config"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **shape | options))


def tiny_model(
    seed: int = 0, *, tied: bool = False, family: str = "qwen2", layers: int = 2
) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = model_of(family, tie_word_embeddings=tied, num_hidden_layers=layers, pad_token_id=None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def ragged_rollouts(seed: int, groups: int = 5, group_size: int = 3, longest: int = 12) -> list[Rollout]:
    """Return prompts and responses of many lengths, one of them a single token."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, n: int = 1) -> torch.Tensor:
        return torch.randint(low, high, (n,), generator=generator)

    rollouts = []
    for group in range(groups):
        prompt = tuple(integers(2, VOCABULARY, int(integers(1, longest))).tolist())
        for sample in range(group_size):
            length = 1 if group == sample == 0 else int(integers(1, longest))
            response = integers(2, VOCABULARY, length)
            logps = -torch.rand(length, generator=generator) * 4
            rollouts.append(Rollout(prompt, response, logps, group, finished=True))
    return rollouts


def with_turns(rollouts: Sequence[Rollout], seed: int = 0) -> list[Rollout]:
    """Give every other rollout tokens of an environment, at random places but the first and the last."""
    generator = torch.Generator().manual_seed(seed)
    changed = list(rollouts)
    for i in range(0, len(changed), 2):
        mask = torch.rand(len(changed[i].response_ids), generator=generator) < 0.5
        mask[[0, -1]] = True
        changed[i] = replace(changed[i], loss_mask=mask, logps=changed[i].logps * mask)
    return changed


def own_ids(rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return the (N,) policy's tokens."""
    return torch.cat([rollout.of_policy(rollout.response_ids) for rollout in rollouts])


def plain_logits(model: Callable[[torch.Tensor], Any], rollouts: Sequence[Rollout]) -> torch.Tensor:
    """Return the (N, V) logits that predict the policy's tokens, one sequence at a time."""
    rows = []
    for rollout in rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
        rows.append(rollout.of_policy(model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]))
    return torch.cat(rows)


def plain_logps(
    model: Callable[[torch.Tensor], Any], rollouts: Sequence[Rollout], temperature: float = 1.0
) -> torch.Tensor:
    """Return the (N,) log-probabilities of the policy's tokens."""
    logps_NV = (plain_logits(model, rollouts) / temperature).log_softmax(-1)
    return logps_NV.gather(-1, own_ids(rollouts)[:, None])[:, 0]


def assert_sampled_by(model, rollouts: list[Rollout], temperature: float = 1.0, greedy: bool = True) -> None:
    """Assert that the log-probabilities, and for greedy sampling the tokens, are the model's."""
    with torch.no_grad():
        assert not greedy or plain_logits(model.eval(), rollouts).argmax(-1).equal(own_ids(rollouts))
        logps_N = plain_logps(model.eval(), rollouts, temperature)
    torch.testing.assert_close(torch.cat([each.logps for each in rollouts]), logps_N, rtol=0, atol=1e-4)


def differ(a: list[Rollout], b: list[Rollout]) -> bool:
    """Whether every pair of responses differs in its first token or in that token's log-probability."""
    pairs = zip(a, b, strict=True)
    return not any(
        x.response_ids[0] == y.response_ids[0] and torch.allclose(x.logps[:1], y.logps[:1], atol=1e-3)
        for x, y in pairs
    )
