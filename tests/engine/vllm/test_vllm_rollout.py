"""Sampling with vLLM: tokens, log-probabilities and ends as transformers has them, seeds, limits."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm")

from smopd.engine import distributed
from smopd.engine.local.rollout import nucleus
from smopd.engine.settings import VllmSettings
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm.engines import engine
from smopd.engine.vllm.rollout import VllmRollout, request_seed
from tests.engine.tiny import END, tiny_model

SETTINGS = VllmSettings(kv_cache_bytes=32 << 20, max_model_len=64)
PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (7,), (30, 31)]
GROUPS = [3, 8, 9, 11, 40]


@pytest.fixture(scope="module", autouse=True)
def group(lasting_group):
    return dist.group.WORLD


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of each model."""
    folders = {}
    for tied in (False, True):
        folders[tied] = tmp_path_factory.mktemp("tied" if tied else "untied")
        tiny_model(seed=1, tied=tied).save_pretrained(folders[tied])
    return folders


@pytest.fixture(scope="module")
def rollouts(saved) -> VllmRollout:
    return VllmRollout(saved[False], [END], SETTINGS)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in rollouts]


def logits(model, rollout: Rollout) -> torch.Tensor:
    """(T, V) of the positions that predict the response."""
    ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
    return model.eval()(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].detach()


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_equals_transformers(saved, tied):
    model = tiny_model(seed=1, tied=tied).eval()
    made = VllmRollout(saved[tied], [END], SETTINGS).generate(
        PROMPTS, GROUPS, Sampling(temperature=0.0, max_new_tokens=20)
    )
    for prompt, rollout in zip(PROMPTS, made, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )[0, len(prompt) :]
        assert rollout.response_ids.equal(expected)
        logps = logits(model, rollout).log_softmax(-1).gather(-1, rollout.response_ids[:, None])[:, 0]
        torch.testing.assert_close(rollout.logps, logps, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (0.7, 0.8), (1.3, 0.5)])
def test_log_probabilities_are_those_of_the_distribution_drawn_from(rollouts, temperature, top_p):
    model = tiny_model(seed=1)
    sampling = Sampling(n=3, temperature=temperature, top_p=top_p, max_new_tokens=15, seed=4)
    for rollout in rollouts.generate(PROMPTS, GROUPS, sampling):
        logps_TV = (logits(model, rollout) / temperature).log_softmax(-1)
        if top_p < 1:
            logps_TV = nucleus(logps_TV, top_p)
        expected = logps_TV.gather(-1, rollout.response_ids[:, None])[:, 0]
        assert expected.isfinite().all()
        torch.testing.assert_close(rollout.logps, expected, rtol=0, atol=1e-4)


def test_draws_follow_the_distribution(rollouts):
    made = rollouts.generate([(7,)], [0], Sampling(n=3000, temperature=0.7, top_p=0.9, max_new_tokens=1))
    found = torch.cat([rollout.response_ids for rollout in made]).bincount(minlength=53) / len(made)
    expected = nucleus((logits(tiny_model(seed=1), made[0]) / 0.7).log_softmax(-1), 0.9)[0].exp()
    spread = (expected * (1 - expected) / len(made)).sqrt()
    assert ((found - expected).abs() <= 4.5 * spread).all()


def test_draws_do_not_depend_on_the_batch(rollouts):
    sampling = Sampling(n=4, temperature=1.0, max_new_tokens=12, seed=7)
    together = tokens(rollouts.generate(PROMPTS, GROUPS, sampling))
    alone = [rollouts.generate([p], [g], sampling) for p, g in zip(PROMPTS, GROUPS, strict=True)]
    backwards = rollouts.generate(PROMPTS[::-1], GROUPS[::-1], sampling)
    by_group = {group: tokens(backwards)[4 * i : 4 * i + 4] for i, group in enumerate(GROUPS[::-1])}
    assert together == [ids for made in alone for ids in tokens(made)]
    assert together == [ids for group in GROUPS for ids in by_group[group]]


def test_equal_prompts_and_samples_differ_and_seeds_change_them(rollouts):
    sampling = Sampling(n=4, max_new_tokens=12, seed=7)
    made = tokens(rollouts.generate(PROMPTS, GROUPS, sampling))
    assert made[4:8] != made[12:16], "groups 8 and 11 have the same prompt but their own draws"
    assert len({tuple(ids) for ids in made[:4]}) == 4
    assert made != tokens(rollouts.generate(PROMPTS, GROUPS, replace(sampling, seed=8)))


def test_request_seeds_are_63_bits_and_differ():
    seeds = {request_seed(s, g, n) for s in range(3) for g in range(20) for n in range(20)}
    assert len(seeds) == 3 * 20 * 20
    assert min(seeds) >= 0 and 1 << 62 < max(seeds) < 1 << 63
    assert request_seed(1, 12, 3) != request_seed(11, 2, 3)


def test_responses_end_at_end_tokens_or_at_the_limit(saved):
    ends = (END, 17, 30)
    rollouts = VllmRollout(saved[False], ends, SETTINGS)
    made = rollouts.generate(PROMPTS, GROUPS, Sampling(n=8, max_new_tokens=6, seed=1))
    assert len(made) == 8 * len(PROMPTS)
    for rollout in made:
        ids = rollout.response_ids.tolist()
        assert rollout.finished == (ids[-1] in ends)
        assert len(ids) == 6 or rollout.finished
        assert not set(ids[:-1]) & set(ends)
        assert rollout.logps.shape == rollout.response_ids.shape
        assert (rollout.logps.dtype, rollout.response_ids.dtype) == (torch.float32, torch.int64)
    assert {rollout.finished for rollout in made} == {True, False}
    assert [rollout.group for rollout in made] == [group for group in GROUPS for _ in range(8)]
    assert made[8].prompt_ids == PROMPTS[1]
    assert {rollout.policy_version for rollout in made} == {0}


def test_more_prompts_than_one_batch_takes(saved, rollouts):
    """On a CPU a seeded request cannot be cut at the edge of a batch."""
    budget = rollouts.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    prompts = [tuple(2 + (i * 7 + j) % 50 for j in range(50)) for i in range(budget // 50 + 3)]
    sampling = Sampling(max_new_tokens=2, seed=4)
    made = rollouts.generate(prompts, range(len(prompts)), sampling)
    (alone,) = rollouts.generate(prompts[-1:], [len(prompts) - 1], sampling)
    assert len(made) == len(prompts) and made[-1].response_ids.equal(alone.response_ids)


def test_no_prompts_give_no_responses(rollouts):
    assert rollouts.generate([], [], Sampling()) == []


def test_what_the_engine_cannot_sample_is_refused(rollouts):
    with pytest.raises(
        ValueError, match=r"a prompt of 6 tokens and max_new_tokens 59 exceed .* 64 positions"
    ):
        rollouts.generate(PROMPTS, GROUPS, Sampling(max_new_tokens=59))
    rollouts.generate([PROMPTS[2]], [0], Sampling(max_new_tokens=58))
    with pytest.raises(ValueError, match=r"temperature 0\.005, expected 0 or at least 0\.01"):
        rollouts.generate(PROMPTS, GROUPS, Sampling(temperature=0.005, max_new_tokens=5))


def test_the_caller_is_left_alone(saved, tmp_path, group):
    def state():
        return (
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            dict(os.environ),
            (torch.get_num_threads(), torch.set_num_threads),
            (logging.root.handlers[:], logging.root.level, logging.getLogRecordFactory()),
            logging.getLogger("vllm").handlers,
            (dist.group.WORLD, dist.get_rank(), dist.get_world_size()),
        )

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    before = state()
    rollouts = VllmRollout(saved[True], [END], SETTINGS.model_copy(update={"max_model_len": 48}))
    for i, (old, new) in enumerate(zip(before, state(), strict=True)):
        assert old == new, f"making an engine changed part {i}"
    rollouts.generate(PROMPTS, GROUPS, Sampling(n=2, max_new_tokens=4))
    for i, (old, new) in enumerate(zip(before, state(), strict=True)):
        assert old == new, f"sampling changed part {i}"
    assert distributed.all_reduce(torch.ones(1)) == 1


def test_a_role_keeps_its_engine_for_one_architecture_and_settings(saved, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "smopd.engine.vllm.engines"):
        first = engine("test", saved[False], SETTINGS, max_num_seqs=4)
    (record,) = caplog.records
    assert "test engine" in record.getMessage() and "32 MiB of cache" in record.getMessage()
    assert engine("test", saved[False], SETTINGS, max_num_seqs=4) is first
    other = tmp_path / "other"
    tiny_model(seed=2).save_pretrained(other)
    assert engine("test", other, SETTINGS, max_num_seqs=4) is first
    assert engine("test", saved[True], SETTINGS, max_num_seqs=4) is not first, "its head is tied"
    assert engine("another", saved[False], SETTINGS, max_num_seqs=4) is not first


def test_settings_that_cannot_be_served_are_refused(saved):
    with pytest.raises(ValueError, match=r"tensor_parallel_size: got 2, expected a divisor of the 1 ranks"):
        engine("rollout", saved[False], SETTINGS.model_copy(update={"tensor_parallel_size": 2}))
    with pytest.raises(
        ValueError, match=r"max_lora_rank: got 600 \(student\.lora\.rank\), expected at most 512"
    ):
        engine("rollout", saved[False], SETTINGS.model_copy(update={"max_lora_rank": 600}))
