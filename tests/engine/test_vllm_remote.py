"""Sampling at a URL: a real `vllm serve`, reached directly and through a relay that fails on purpose."""

from __future__ import annotations

import os
import subprocess
import sys

import httpx
import pytest
import torch

pytest.importorskip("vllm")

from smopd.engine.remote_rollout import RemoteRollout
from smopd.engine.servers import NoServer, Patience, Refused, Servers
from smopd.engine.types import Sampling
from smopd.small_models import world_model
from tests.engine.served import ROLLOUTS, ROOT, Relay, serve, serving
from tests.engine.tiny import assert_sampled_by
from tests.patience import HANG_SECONDS

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (30, 31), (40,)]
GROUPS = [3, 8, 9, 11, 40]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
QUICK = Patience(deadline_seconds=120.0, retries=3, backoff_seconds=0.01, concurrency=2)
ENDS = [1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The URL of a server as engine/remote_rollout.py says to start it."""
    folder = tmp_path_factory.mktemp("served")
    model, tokenizer = world_model(0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    process = serve(folder / "model", folder / "log", *ROLLOUTS)
    with serving(process):
        yield process.url


def remote(*urls: str, longest: int = 32, seed: int | None = 0) -> RemoteRollout:
    """With the weights of the world's model of `seed` sent."""
    rollouts = RemoteRollout(Servers(urls, QUICK), ENDS, longest)
    if seed is not None:
        rollouts.load_weights(weights_of(seed), 0)
    return rollouts


def weights_of(seed: int):
    return world_model(seed)[0].state_dict().items()


def test_samples_with_the_weights_that_it_was_sent(server):
    rollouts = remote(server)
    for version, seed in enumerate((4, 5), start=1):
        model, _ = world_model(seed)
        rollouts.load_weights(model.state_dict().items(), version)
        made = rollouts.generate(PROMPTS, GROUPS, GREEDY)
        assert [rollout.group for rollout in made] == GROUPS
        assert {rollout.policy_version for rollout in made} == {version}
        assert_sampled_by(model, made)
    warm = rollouts.generate(PROMPTS, GROUPS, Sampling(n=2, temperature=0.7, max_new_tokens=8, seed=3))
    assert len(warm) == 2 * len(PROMPTS)
    assert_sampled_by(model, warm, temperature=0.7, greedy=False)


def test_what_a_killed_server_was_asked_goes_to_the_others(server, caplog):
    dying = Relay(server, dies_after=1, shares=True)
    rollouts = remote(server, dying.url)
    sampling = Sampling(n=4, max_new_tokens=8, seed=5)
    made = rollouts.generate(PROMPTS, GROUPS, sampling)
    assert dying.served == 1
    assert list(rollouts.servers.out) == [dying.url]
    assert f"{dying.url} is taken out" in caplog.text
    alone = remote(server).generate(PROMPTS, GROUPS, sampling)
    assert [m.response_ids.tolist() for m in made] == [m.response_ids.tolist() for m in alone]


def test_a_server_that_comes_back_gets_the_weights_first(server):
    dying = Relay(server, dies_after=0)
    rollouts = remote(dying.url)
    with pytest.raises(NoServer):
        rollouts.generate(PROMPTS, GROUPS, GREEDY)
    assert list(rollouts.servers.out) == [dying.url]
    dying.left = None
    dying.start()
    model, _ = world_model(6)
    rollouts.load_weights(model.state_dict().items(), 1)
    assert rollouts.servers.out == {}
    assert_sampled_by(model, rollouts.generate(PROMPTS, GROUPS, GREEDY))
    dying.stop()


def test_a_server_that_was_started_again_is_found_by_its_answers(server, caplog):
    fresh = Relay(server, shares=True)
    rollouts = remote(fresh.url, server)
    fresh.holds = "default"  # what vLLM calls the weights that it starts with
    sampling = Sampling(n=4, max_new_tokens=8, seed=5)
    made = rollouts.generate(PROMPTS, GROUPS, sampling)
    assert {rollout.policy_version for rollout in made} == {0} and len(made) == 4 * len(PROMPTS)
    assert list(rollouts.servers.out) == [fresh.url]
    assert f"{fresh.url} is taken out: holds the weights default, expected" in caplog.text
    rollouts.load_weights(weights_of(4), 1)
    assert rollouts.servers.out == {}
    assert_sampled_by(world_model(4)[0], rollouts.generate(PROMPTS, GROUPS, GREEDY))
    fresh.stop()


def test_the_same_version_of_another_run_is_not_ours(server):
    first, second = remote(server, seed=4), remote(server, seed=5)
    with pytest.raises(NoServer, match="holds the weights"):
        first.generate(PROMPTS, GROUPS, GREEDY)
    assert_sampled_by(world_model(5)[0], second.generate(PROMPTS, GROUPS, GREEDY))


def test_half_sent_weights_are_never_served(server):
    rollouts = remote(server)

    def failing():
        yield from list(weights_of(4))[:9]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        rollouts.load_weights(failing(), 1)
    label = httpx.get(f"{server}/weight_info").json()["weight_version"]
    assert label.startswith("part of ") and label.endswith("-1")
    rollouts.load_weights(weights_of(5), 1)
    assert_sampled_by(world_model(5)[0], rollouts.generate(PROMPTS, GROUPS, GREEDY))


def test_a_busy_server_is_asked_again(server):
    busy = Relay(server, busy=3)
    rollouts = remote(busy.url)
    assert len(rollouts.generate(PROMPTS, GROUPS, GREEDY)) == len(PROMPTS)
    assert (busy.busy, rollouts.servers.out) == (0, {})
    busy.busy = 1000
    with pytest.raises(NoServer, match="status 503"):
        rollouts.generate(PROMPTS, GROUPS, GREEDY)
    busy.stop()


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # an import of it fails
from smopd.engine.remote_rollout import RemoteRollout
from smopd.engine.servers import Servers
from smopd.engine.types import Sampling
from smopd.small_models import world_model
from tests.engine.tiny import assert_sampled_by
from tests.patience import HANG_SECONDS
rollouts = RemoteRollout(Servers([sys.argv[1]]), [1], 32)
model = world_model(6)[0]
rollouts.load_weights(model.state_dict().items(), 1)
made = rollouts.generate([(5, 9, 11), (7,)], [0, 1], Sampling(temperature=0.0, max_new_tokens=8))
assert_sampled_by(model, made)
print(len(made), "sampled")
"""


def test_a_client_needs_no_vllm(server):
    command = [sys.executable, "-c", WITHOUT_VLLM, server]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG_SECONDS)
    assert done.stdout == "2 sampled\n", done.stderr[-4000:]


def test_a_server_without_room_is_refused(server):
    with pytest.raises(ValueError, match="room for 64 tokens, expected 65"):
        remote(server, longest=65)


def test_a_weight_of_another_shape_is_refused_and_nothing_is_served_for_it(server):
    rollouts = remote(server)
    model, _ = world_model(7)
    weights = dict(model.state_dict())
    name = "model.norm.weight"
    with pytest.raises((NoServer, Refused)):
        rollouts.load_weights((weights | {name: torch.zeros(3)}).items(), 1)
    rollouts.load_weights(weights.items(), 2)
    assert_sampled_by(model, rollouts.generate(PROMPTS, GROUPS, GREEDY))
