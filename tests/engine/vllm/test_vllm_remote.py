"""Sampling at a URL: real servers of vLLM, which are killed and started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
import yaml

pytest.importorskip("vllm")

from smopd.engine.errors import NoServer
from smopd.engine.remote.rollout import RemoteRollout
from smopd.engine.remote.servers import RetryPolicy, Servers
from smopd.engine.types import Sampling
from smopd.worlds.models import world_model
from tests.engine.tiny import assert_sampled_by
from tests.engine.vllm.served import ROLLOUTS, ROOT, serve, serving
from tests.engine.vllm.vllm_worker import assert_followed, on_two_ranks, save_models
from tests.patience import HANG_SECONDS
from tests.smopd.recipes import command, environment, metric_lines, write_recipe

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (30, 31), (40,)]
GROUPS = [3, 8, 9, 11, 40]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
QUICK = RetryPolicy(deadline_seconds=120.0, retries=3, backoff_seconds=0.01, concurrency=2)
ENDS = [1]
LENGTH = 128  # positions of a server
VOCABULARY = world_model(0)[0].config.vocab_size


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    for part in world_model(0):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pair(model_folder):
    """Two servers as engine/remote/rollout.py says to start them; the second may be killed."""
    logs = [model_folder.parent / name for name in ("first.log", "second.log")]
    both = [serve(model_folder, log, *ROLLOUTS, length=LENGTH) for log in logs]
    with serving(*both):
        yield both


@pytest.fixture(scope="module")
def server(pair):
    """The URL of the first, which lives as long as the tests."""
    return pair[0].url


def remote(*urls: str, longest: int = 32, seed: int | None = 0, transfer: str = "files") -> RemoteRollout:
    """With the weights of the world's model of `seed` sent."""
    rollouts = RemoteRollout(Servers(urls, QUICK), ENDS, longest, VOCABULARY, transfer)
    if seed is not None:
        rollouts.load_weights(weights_of(seed), 0)
    return rollouts


def weights_of(seed: int):
    return world_model(seed)[0].state_dict().items()


@pytest.mark.parametrize("transfer", ["files", "inline"])
def test_samples_with_the_weights_that_it_was_sent(server, transfer, monkeypatch):
    monkeypatch.setattr("smopd.engine.weights.transport.PART_BYTES", 100_000)  # several parts
    rollouts = remote(server, transfer=transfer)
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


def test_the_same_version_of_another_run_is_not_ours(server):
    first, second = remote(server, seed=4), remote(server, seed=5)
    with pytest.raises(NoServer, match="holds the weights"):
        first.generate(PROMPTS, GROUPS, GREEDY)
    assert_sampled_by(world_model(5)[0], second.generate(PROMPTS, GROUPS, GREEDY))


@pytest.mark.parametrize("transfer", ["files", "inline"])
def test_half_sent_weights_are_never_served(server, transfer):
    rollouts = remote(server, transfer=transfer)

    def failing():
        yield from list(weights_of(4))[:9]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        rollouts.load_weights(failing(), 1)
    label = httpx.get(f"{server}/weight_info").json()["weight_version"]
    assert label.startswith("part of ") and label.endswith("-1")
    rollouts.load_weights(weights_of(5), 1)
    assert_sampled_by(world_model(5)[0], rollouts.generate(PROMPTS, GROUPS, GREEDY))


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # an import of it fails
from smopd.engine.remote.rollout import RemoteRollout
from smopd.engine.remote.servers import Servers
from smopd.engine.types import Sampling
from smopd.worlds.models import world_model
from tests.engine.tiny import assert_sampled_by
from tests.engine.vllm.vllm_worker import assert_followed, on_two_ranks, save_models
from tests.patience import HANG_SECONDS
model = world_model(6)[0]
rollouts = RemoteRollout(Servers([sys.argv[1]]), [1], 32, model.config.vocab_size)
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


@pytest.mark.parametrize("transfer", ["files", "inline"])
def test_a_weight_of_another_shape_is_refused_and_nothing_is_served_for_it(server, transfer):
    rollouts = remote(server, transfer=transfer)
    model, _ = world_model(7)
    weights = dict(model.state_dict())
    name = "model.norm.weight"
    with pytest.raises(NoServer):
        rollouts.load_weights((weights | {name: torch.zeros(3)}).items(), 1)
    rollouts.load_weights(weights.items(), 2)
    assert_sampled_by(model, rollouts.generate(PROMPTS, GROUPS, GREEDY))


def test_a_server_that_is_started_again_serves_nothing_before_the_next_weights(pair, model_folder, caplog):
    rollouts = remote(*(each.url for each in pair), seed=4)
    pair[1].restart()
    made = rollouts.generate(PROMPTS * 16, GROUPS * 16, GREEDY)  # so many that both servers are asked
    assert_sampled_by(world_model(4)[0], made)
    assert f"{pair[1].url} is removed: holds the weights default, expected" in caplog.text
    rollouts.load_weights(weights_of(5), 1)
    assert f"{pair[1].url} is restored" in caplog.text and rollouts.servers.removed == {}
    alone = RemoteRollout(Servers([pair[1].url], QUICK), ENDS, 32, VOCABULARY)
    alone.weights.run, alone.policy_version = rollouts.weights.run, 1
    assert_sampled_by(world_model(5)[0], alone.generate(PROMPTS, GROUPS, GREEDY))


def test_a_server_that_is_killed_in_a_sync_leaves_the_others_theirs(pair, monkeypatch, caplog):
    monkeypatch.setattr("smopd.engine.weights.transport.PART_BYTES", 100_000)
    rollouts = remote(*(each.url for each in pair), seed=4, transfer="inline")
    assert rollouts.servers.removed == {}

    def killing():
        for i, weight in enumerate(weights_of(5)):
            if i == 9:
                pair[1].kill()
            yield weight

    rollouts.load_weights(killing(), 1)
    assert list(rollouts.servers.removed) == [pair[1].url]
    assert_sampled_by(world_model(5)[0], rollouts.generate(PROMPTS, GROUPS, GREEDY))
    pair[1].restart()
    rollouts.load_weights(weights_of(6), 2)
    assert rollouts.servers.removed == {}
    for each in pair:
        alone = RemoteRollout(Servers([each.url], QUICK), ENDS, 32, VOCABULARY)
        alone.weights.run, alone.policy_version = rollouts.weights.run, 2
        assert_sampled_by(world_model(6)[0], alone.generate(PROMPTS, GROUPS, GREEDY))


def test_a_run_goes_on_when_a_server_is_killed(pair, model_folder, tmp_path):
    steps, per_step = 8, 16
    changes = {
        "model": {"factory": None, "path": str(model_folder)},
        "rollout": {"engine": "vllm", "urls": [pair[1].url, pair[0].url]},
        "teachers": {"models": []},
        "loop": {"steps": steps, "updates_per_step": 1},
        "log": {"samples_per_step": per_step},
    }
    recipe = write_recipe(tmp_path, changes, drop=("warm_start", "runs"))
    values = yaml.safe_load(recipe.read_text())
    values["runs"] = {"alone": {"stage": "specialize", "reward_weights": [0.5, 0.5]}}
    recipe.write_text(yaml.safe_dump(values))
    metrics, errors = tmp_path / "run/alone/metrics.jsonl", (tmp_path / "errors").open("w")
    run = subprocess.Popen(
        command(recipe, "--output", "run"), env=environment(), cwd=tmp_path, stdout=errors, stderr=errors
    )
    try:
        while not metrics.exists() or metrics.read_text().count("\n") < 2:
            assert run.poll() is None, Path(errors.name).read_text()[-4000:]
            time.sleep(0.1)
        pair[1].kill()
        run.wait(HANG_SECONDS)
    finally:
        run.kill()
    told = Path(errors.name).read_text()
    assert run.returncode == 0, told[-4000:]
    assert f"{pair[1].url} is removed" in told and f"{pair[0].url} is removed" not in told
    lines = metric_lines(tmp_path / "run/alone")
    assert [line["step"] for line in lines if "tokens" in line] == list(range(1, steps + 1))
    assert all(line["rollout_mismatch"] < 1e-3 for line in lines if "tokens" in line)
    samples = [json.loads(line) for line in (tmp_path / "run/alone/samples.jsonl").read_text().splitlines()]
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, steps + 1), per_step)


def test_two_ranks_share_a_server_and_the_first_sends_the_weights(tmp_path):
    save_models(tmp_path)
    server = serve(tmp_path / "untied", tmp_path / "log", *ROLLOUTS)
    with serving(server):
        ranks = on_two_ranks(tmp_path, {}, server.url)
    assert_followed([rank["untied"] for rank in ranks], tied=False)
