"""Sampling with vLLM: log-probabilities, draws, seeds, ends, limits, and the end of an engine's process."""

import logging
import os
import random
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("vllm")

from smopd.engine import distributed
from smopd.engine.process import below, runs
from smopd.engine.settings import Vllm
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm import engines
from smopd.engine.vllm.rollout import VllmRollout
from tests.engine.tiny import END, assert_sampled_by, tiny_model
from tests.patience import HANG_SECONDS
from tests.ranks import forked, wait_until

KWARGS = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 64}
SETTINGS = Vllm(engine_kwargs=KWARGS)
PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (7,), (30, 31)]
GROUPS = [3, 8, 9, 11, 40]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_model(seed=1).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def rollouts(saved) -> VllmRollout:
    return VllmRollout(saved, [END], SETTINGS)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in rollouts]


def test_the_caller_is_left_alone(saved, request):
    """It comes first, as the others share its engine."""

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

    before, others = state(), [*engines._engines.values()]
    rollouts = request.getfixturevalue("rollouts")
    rollouts.generate(PROMPTS, GROUPS, Sampling(n=2, max_new_tokens=4))
    assert rollouts.engine not in others, "it is made here"
    for i, (old, new) in enumerate(zip(before, state(), strict=True)):
        assert old == new, f"part {i} has changed"
    assert distributed.all_reduce(torch.ones(1)) == 1


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_log_probabilities_are_those_of_the_distribution_drawn_from(rollouts, temperature):
    sampling = Sampling(n=3, temperature=temperature, max_new_tokens=15, seed=4)
    made = rollouts.generate(PROMPTS, GROUPS, sampling)
    assert_sampled_by(tiny_model(seed=1), made, temperature, greedy=False)


def test_draws_follow_the_distribution(rollouts):
    made = rollouts.generate([(7,)], [0], Sampling(n=3000, temperature=0.7, max_new_tokens=1))
    found = torch.cat([rollout.response_ids for rollout in made]).bincount(minlength=53) / len(made)
    expected = (tiny_model(seed=1)(torch.tensor([[7]])).logits[0, 0].detach() / 0.7).softmax(-1)
    spread = (expected * (1 - expected) / len(made)).sqrt()
    assert ((found - expected).abs() <= 4.5 * spread).all()


def test_draws_depend_on_seed_group_and_sample_alone(rollouts):
    sampling = Sampling(n=4, max_new_tokens=12, seed=7)
    together = tokens(rollouts.generate(PROMPTS, GROUPS, sampling))
    alone = [rollouts.generate([p], [g], sampling) for p, g in zip(PROMPTS, GROUPS, strict=True)]
    backwards = rollouts.generate(PROMPTS[::-1], GROUPS[::-1], sampling)
    by_group = {group: tokens(backwards)[4 * i : 4 * i + 4] for i, group in enumerate(GROUPS[::-1])}
    assert together == [ids for made in alone for ids in tokens(made)]
    assert together == [ids for group in GROUPS for ids in by_group[group]]
    assert together[4:8] != together[12:16], "groups 8 and 11 have the same prompt but their own draws"
    assert len({tuple(ids) for ids in together[:4]}) == 4
    assert together != tokens(rollouts.generate(PROMPTS, GROUPS, replace(sampling, seed=8)))
    assert rollouts.generate([], [], sampling) == []


def test_responses_end_at_end_tokens_or_at_the_limit(saved):
    ends = (END, 17, 30)
    made = VllmRollout(saved, ends, SETTINGS).generate(
        PROMPTS, GROUPS, Sampling(n=8, max_new_tokens=6, seed=1)
    )
    assert [(rollout.group, rollout.prompt_ids) for rollout in made] == [
        pair for pair in zip(GROUPS, PROMPTS, strict=True) for _ in range(8)
    ]
    for rollout in made:
        ids = rollout.response_ids.tolist()
        assert rollout.finished == (ids[-1] in ends)
        assert len(ids) == 6 or rollout.finished
        assert not set(ids[:-1]) & set(ends)
        assert (rollout.logps.dtype, rollout.response_ids.dtype) == (torch.float32, torch.int64)
    assert {rollout.finished for rollout in made} == {True, False}


def test_more_prompts_than_one_batch_takes(rollouts):
    """On a CPU a seeded request cannot be split between batches."""
    budget = rollouts.engine.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    prompts = [tuple(2 + (i * 7 + j) % 50 for j in range(50)) for i in range(budget // 50 + 3)]
    sampling = Sampling(max_new_tokens=2, seed=4)
    made = rollouts.generate(prompts, range(len(prompts)), sampling)
    (alone,) = rollouts.generate(prompts[-1:], [len(prompts) - 1], sampling)
    assert len(made) == len(prompts) and made[-1].response_ids.equal(alone.response_ids)


def test_what_the_engine_cannot_sample_is_refused(rollouts, saved):
    with pytest.raises(
        ValueError, match=r"a prompt of 6 tokens and max_new_tokens 59 exceed .* 64 positions"
    ):
        rollouts.generate(PROMPTS, GROUPS, Sampling(max_new_tokens=59))
    rollouts.generate([PROMPTS[2]], [0], Sampling(max_new_tokens=58))
    with pytest.raises(ValueError, match=r"temperature 0\.005, expected 0 or at least 0\.01"):
        rollouts.generate(PROMPTS, GROUPS, Sampling(temperature=0.005, max_new_tokens=5))
    with pytest.raises(ValueError, match=r"tensor_parallel_size: got 2, expected a divisor of the 1 ranks"):
        VllmRollout(saved, [END], Vllm(engine_kwargs={**KWARGS, "tensor_parallel_size": 2}))


def test_the_next_run_takes_the_engine_with_its_own_weights(rollouts, tmp_path):
    tiny_model(seed=2).save_pretrained(tmp_path)
    other = VllmRollout(tmp_path, [END], SETTINGS)
    assert other.engine is rollouts.engine
    made = other.generate(PROMPTS, GROUPS, Sampling(temperature=0.0, max_new_tokens=8))
    assert_sampled_by(tiny_model(seed=2), made)


CALLER = """
import multiprocessing, os, signal, sys, time
from smopd.engine.settings import Vllm
from smopd.engine.types import Sampling
from smopd.engine.vllm.rollout import VllmRollout
from tests.engine.tiny import END
from tests.engine.vllm.served import start_engines_by
if __name__ == "__main__":
    os.setsid()
    start_engines_by(multiprocessing.get_context("fork"))  # a spawned one imports vLLM once more
    kwargs = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 64}
    rollouts = VllmRollout(sys.argv[1], [END], Vllm(placement="process", engine_kwargs=kwargs))
    asked = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(print("asked to end", flush=True)))
    print("made", flush=True)
    while not asked:
        time.sleep(0.1)  # not pause(), which a signal just before would not end
    made = rollouts.generate([(5, 9, 11)], [0], Sampling(temperature=0.0, max_new_tokens=4))
    print(len(made), "sampled", flush=True)
    signal.pause()
"""


@pytest.mark.slow
def test_an_engine_outlives_a_terminals_interrupt_and_ends_with_a_caller_that_is_killed(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    script, out, log = (tmp_path / name for name in ("caller.py", "out", "log"))
    script.write_text(CALLER)
    with forked(1, str(script), str(tmp_path), cwd=tmp_path, output=[out, log]) as (caller,):
        wait_until(lambda: "made\n" in out.read_text(), caller, log)
        engines = below(caller.pid)
        assert engines
        os.killpg(caller.pid, signal.SIGINT)
        wait_until(lambda: "asked to end\n1 sampled\n" in out.read_text(), caller, log)
    deadline = time.monotonic() + HANG_SECONDS
    while any(runs(process) for process in engines):
        assert time.monotonic() < deadline, engines
        time.sleep(0.2)
