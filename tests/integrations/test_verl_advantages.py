"""SMOPD's advantages in verl's two trainers, compared with verl's GDPO and with smopd.ops."""

import re
from collections.abc import Iterable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("verl", reason="verl is not installed: make test-verl runs these in its environment")

import numpy as np
from omegaconf import OmegaConf
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl import DataProto
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template

from smopd.integrations import verl as smopd_verl
from smopd.ops import gd2po_advantages, gdpo_advantages

KEYS = ["accuracy", "format"]
LONG = (4, 2, 3, 1, 4, 4, 2, 3)  # response lengths
GROUPS = ["a", "a", "a", "a", "b", "b", "b", "b"]
MASK = (torch.arange(4) < torch.tensor(LONG)[:, None]).float()


def rollouts(rewards: dict[str, list[float | None]]) -> DataProto:
    tensors = {
        "token_level_rewards": torch.zeros(8, 4),
        "response_mask": MASK.clone(),
        "prompts": torch.zeros(8, 2, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(8, 2), MASK], dim=1).long(),
    }
    columns = {name: np.asarray(column, dtype=object) for name, column in rewards.items()}
    return DataProto.from_dict(tensors, non_tensors={"uid": np.asarray(GROUPS, dtype=object), **columns})


def advantages_of(estimator: str, data: DataProto, **settings: Any) -> Tensor:
    config = OmegaConf.create({"gdpo_reward_keys": KEYS, **settings})
    done = smopd_verl.ray_trainer.compute_advantage(data, adv_estimator=estimator, config=config)
    assert torch.equal(done.batch["advantages"], done.batch["returns"])
    return done.batch["advantages"]


REWARDS: dict[str, list[float | None]] = {
    "accuracy": [3.0, -3.0, 1.5, 0.0, 2.0, 2.5, -1.0, 3.0],
    "format": [0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 1.0],
}


@pytest.mark.parametrize("rejected", [[2], range(4)], ids=["one rejected", "a whole group"])
def test_gdpo_over_tokens_is_verls_gdpo(rejected: Iterable[int]) -> None:
    """Also if verl's rollout correction rejects all tokens of a response."""
    data = rollouts(REWARDS)
    data.batch["response_mask"][list(rejected)] = 0
    ours, theirs = (
        advantages_of(name, deepcopy(data), gdpo_reward_weights=[0.7, 0.3])
        for name in ("smopd_gdpo_tokens", "gdpo")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_estimators_are_smopds() -> None:
    """Also with a reward of None, which is unscorable."""
    rewards_RK = torch.tensor([REWARDS[key] for key in KEYS]).T.contiguous()
    rewards_RK[0, 1] = torch.nan
    group_R, weights_K = torch.tensor([0] * 4 + [1] * 4), torch.tensor([0.7, 0.3])
    data = rollouts({**REWARDS, "format": [None, *REWARDS["format"][1:]]})
    over_tokens = {"weights_K": weights_K, "lengths_R": torch.tensor(LONG)}
    raw_RK = torch.stack([gdpo_advantages(rewards_RK[:, [k]], group_R, whiten=None) for k in (0, 1)], 1)
    rms_K = (raw_RK.square().sum(0) / (~rewards_RK.isnan()).sum(0)).sqrt()
    balanced_R = gdpo_advantages(rewards_RK, group_R, weights_K=weights_K / rms_K)
    for name, options, adv_R in (
        ("smopd_gdpo", {}, gdpo_advantages(rewards_RK, group_R, weights_K=weights_K)),
        ("smopd_gd2po", {}, gd2po_advantages(rewards_RK, group_R, **over_tokens)[0]),
        (
            "smopd_gd2po",
            {"gd2po_snr_threshold": 0.2},
            gd2po_advantages(rewards_RK, group_R, **over_tokens, snr_threshold=0.2)[0],
        ),
        ("smopd_batch_balanced", {}, balanced_R),
    ):
        ours = advantages_of(name, deepcopy(data), gdpo_reward_weights=[0.7, 0.3], **options)
        torch.testing.assert_close(ours, adv_R[:, None] * MASK, rtol=1e-5, atol=1e-6)


class Queue:
    """The transfer queue of verl's v1 trainer; keeps what is written."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self.columns, self.put = columns, {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        found = {name: self.columns[name] for name in select_fields if name in self.columns}
        return TensorDict(found, batch_size=[len(keys)])

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> SimpleNamespace:
        self.put = fields
        return SimpleNamespace(keys=keys, partition_id=partition_id)


def v1_queue(n_padding: int) -> Queue:
    """Return a queue with the responses and n_padding of verl's padding."""
    said = [dict(zip(REWARDS, row, strict=True)) for row in zip(*REWARDS.values(), strict=True)]
    samples = [
        {
            "uid": group,
            "response_mask": torch.ones(length, dtype=torch.long),
            "rm_scores": torch.zeros(length),
            "extra_fields": {"reward_extra_info": row},
        }
        for group, length, row in zip(GROUPS, LONG, said, strict=True)
    ]
    padding, _ = construct_minimal_padding_template(samples[0], {}, eos_token_id=2)
    samples += [{**padding, "uid": "pad"}] * n_padding

    def column(name: str) -> Any:
        rows = [sample[name] for sample in samples]
        if isinstance(rows[0], Tensor):
            return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return NonTensorStack(*(NonTensorData(row) for row in rows))

    return Queue({name: column(name) for name in samples[0]})


class Batch:
    partition_id = "train"

    def __init__(self, n_padding: int) -> None:
        self.keys = [f"{group}_{i}_0" for i, group in enumerate(GROUPS + ["pad"] * n_padding)]

    def __len__(self) -> int:
        return len(self.keys)


@pytest.mark.parametrize("n_padding", [0, 3])
@pytest.mark.parametrize("estimator", ["smopd_gdpo", "smopd_gd2po", "grpo"])
def test_verls_v1_trainer_finds_the_rewards(
    estimator: str, n_padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The v1 trainer's _compute_advantage gives the same advantages as the legacy trainer."""
    queue = v1_queue(n_padding)
    monkeypatch.setattr(smopd_verl.v1_trainer, "tq", queue)
    settings = {"gdpo_reward_keys": KEYS, "gdpo_reward_weights": [0.7, 0.3], "adv_estimator": estimator}
    algorithm = {"use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0, **settings}
    config = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": {"rollout": {"n": 4}}})
    trainer = SimpleNamespace(config=config)
    smopd_verl.v1_trainer.PPOTrainer._compute_advantage(trainer, Batch(n_padding), {})
    expected = advantages_of(estimator, rollouts(REWARDS), gdpo_reward_weights=[0.7, 0.3])
    ours = queue.put["advantages"].to_padded_tensor(0.0)
    torch.testing.assert_close(ours[: len(LONG)], expected, rtol=1e-6, atol=1e-7)
    assert len(ours) == len(LONG) + n_padding and not ours[len(LONG) :].any() and not smopd_verl.REWARDS


def test_reward_keys_are_required() -> None:
    for keys in (["accuracy", "style"], []):
        with pytest.raises(ValueError, match=rf"algorithm.gdpo_reward_keys is {re.escape(str(keys))}, exp"):
            advantages_of("smopd_gdpo", rollouts(REWARDS), gdpo_reward_keys=keys)
