"""Expected teacher scores from full forward passes of transformers and peft, and comparisons with them."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from smopd.engine.types import Rollout, TeacherTopK
from tests.engine.tiny import VOCABULARY, own_ids, plain_logits, ragged_rollouts, tiny_model, with_turns

ROLLOUTS = with_turns(ragged_rollouts(seed=3))


def whole_logprobs(model, rollouts: list[Rollout], temperature: float = 1.0) -> Tensor:
    """Return (N, V) log-probabilities at the policy's tokens."""
    with torch.no_grad():
        return (plain_logits(model, rollouts).float() / temperature).log_softmax(-1)


def check(
    topk: TeacherTopK, expected: list[Tensor], kappa: int, bound: float, rollouts: list[Rollout] = ROLLOUTS
) -> None:
    """Compare with each teacher's (N, V): the largest values, and the value of each id, within `bound`."""
    token_ids_N = own_ids(rollouts)
    assert topk.ids_NMS.shape == topk.logps_NMS.shape == (len(token_ids_N), len(expected), kappa)
    assert topk.ids_NMS.dtype == torch.int32
    for m, logps_NV in enumerate(expected):
        own_N = logps_NV.gather(1, token_ids_N[:, None])[:, 0]
        torch.testing.assert_close(topk.token_logps_NM[:, m], own_N, rtol=0, atol=bound)
        best_NS, best_ids_NS = logps_NV.topk(kappa)
        best_NS = best_NS.masked_fill(best_ids_NS >= VOCABULARY, -torch.inf).sort(descending=True).values
        ids_NS, found_NS = topk.ids_NMS[:, m].long(), topk.logps_NMS[:, m]
        torch.testing.assert_close(found_NS, best_NS, rtol=0, atol=bound)
        live_NS = found_NS > -torch.inf
        own_NS = logps_NV.gather(1, ids_NS)
        torch.testing.assert_close(own_NS[live_NS], found_NS[live_NS], rtol=0, atol=bound)
        assert not ids_NS[~live_NS].any()
        assert all(
            len(set(ids[live].tolist())) == live.sum() for ids, live in zip(ids_NS, live_NS, strict=True)
        )


def save_adapters(folder: Path, model: PreTrainedModel, n: int = 2) -> list[Path]:
    """Save LoRA adapters of `model` with peft; B is random, so that they change its outputs."""
    peft = pytest.importorskip("peft")
    base = folder / "base"
    model.save_pretrained(base)
    paths = []
    for i in range(n):
        torch.manual_seed(100 + i)
        config = peft.LoraConfig(
            r=4 * (i + 1), lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        made = peft.get_peft_model(type(model).from_pretrained(base), config)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
        paths.append(folder / f"adapter{i}")
        made.save_pretrained(paths[-1])
    return paths


def by_peft(base: Path, adapter: Path) -> PreTrainedModel:
    peft = pytest.importorskip("peft")
    model = type(tiny_model()).from_pretrained(base, attn_implementation="sdpa")
    return peft.PeftModel.from_pretrained(model, adapter).eval()


def at(logps_NV: Tensor, temperature: float) -> Tensor:
    return (logps_NV / temperature).log_softmax(-1)


def widened(model: PreTrainedModel, vocabulary: int, seed: int = 9) -> PreTrainedModel:
    """Return the model with random rows for padded ids, which are as likely as others."""
    torch.manual_seed(seed)
    model.resize_token_embeddings(vocabulary, mean_resizing=False)
    with torch.no_grad():
        for embedding in dict.fromkeys((model.get_input_embeddings(), model.get_output_embeddings())):
            embedding.weight[VOCABULARY:] = torch.randn_like(embedding.weight[VOCABULARY:]) * 0.1
    return model
