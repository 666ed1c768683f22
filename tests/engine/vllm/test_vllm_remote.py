"""Servers of vLLM, killed and restarted, our teacher server, and a preference model."""

from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("starlette")

from smopd.engine.errors import NoServer
from smopd.engine.local.teachers import load_teachers
from smopd.engine.remote.rollout import RemoteRollout
from smopd.engine.remote.servers import Servers
from smopd.engine.remote.teachers import Probe, RemoteTeachers
from smopd.engine.settings import Packing
from smopd.engine.types import Sampling
from smopd.rewards.preference_model import preference_reward
from smopd.worlds.models import world_model
from tests.engine.tiny import assert_sampled_by, ragged_rollouts
from tests.engine.vllm.served import ROLLOUTS, Process, serve, serving
from tests.engine.vllm.vllm_worker import assert_followed, on_two_ranks
from tests.patience import HANG_SECONDS
from tests.ranks import forked, wait_until
from tests.smopd.recipes import json_lines, metric_lines, save_world, write_recipe
from tests.smopd.rewards.tiny_preference import byte_tokenizer, save

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (30, 31), (40,)]
GROUPS = [3, 8, 9, 11, 40]
GREEDY = Sampling(temperature=0.0, max_new_tokens=8)
KAPPA = 6
VOCABULARY = world_model(0)[0].config.vocab_size


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("smopd.engine.remote.servers.BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr("smopd.engine.remote.servers.CONCURRENCY", 2)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return Path(save_world(tmp_path_factory.mktemp("served") / "untied"))


@pytest.fixture(scope="module")
def pair(model_folder):
    """Servers with the options of engine/remote/rollout.py, of which one runs."""
    logs = [model_folder.parent / name for name in ("first.log", "second.log")]
    first, second = (serve(model_folder, log, *ROLLOUTS, length=128) for log in logs)
    with serving(first):
        yield first, second
        second.stop()


def remote(*servers: Process, transfer: str = "files") -> RemoteRollout:
    return RemoteRollout(Servers([one.url for one in servers]), [1], 32, VOCABULARY, transfer)


def weights_of(seed: int):
    return world_model(seed)[0].state_dict().items()


def assert_serves(rollouts: RemoteRollout, seed: int, repeats: int = 1) -> None:
    made = rollouts.generate(PROMPTS * repeats, GROUPS * repeats, GREEDY)
    assert [rollout.group for rollout in made] == GROUPS * repeats
    assert {rollout.policy_version for rollout in made} == {rollouts.policy_version}
    assert_sampled_by(world_model(seed)[0], made)


@pytest.mark.parametrize("transfer", ["files", "inline"])
def test_serves_the_weights_that_it_was_sent_and_never_others(pair, transfer, monkeypatch):
    monkeypatch.setattr("smopd.engine.weights.transport.PART_BYTES", 100_000)  # several parts
    rollouts = remote(pair[0], transfer=transfer)
    for version, seed in enumerate((4, 5), start=1):
        rollouts.load_weights(weights_of(seed), version)
        assert_serves(rollouts, seed)
    sampled = rollouts.generate(PROMPTS, GROUPS, Sampling(n=2, temperature=0.7, max_new_tokens=8, seed=3))
    assert len(sampled) == 2 * len(PROMPTS)
    assert_sampled_by(world_model(5)[0], sampled, temperature=0.7, greedy=False)

    def failing():
        yield from list(weights_of(4))[:9]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        rollouts.load_weights(failing(), 3)
    label = httpx.get(f"{pair[0].url}/weight_info").json()["weight_version"]
    assert label.startswith("part of ") and label.endswith("-3")
    rollouts.load_weights(weights_of(6), 3)
    assert_serves(rollouts, 6)
    with pytest.raises(NoServer):
        rollouts.load_weights((dict(weights_of(7)) | {"model.norm.weight": torch.zeros(3)}).items(), 4)
    rollouts.load_weights(weights_of(7), 5)
    assert_serves(rollouts, 7)


def test_a_server_that_comes_gets_the_weights_and_goes_with_those_of_another_run(pair, monkeypatch, caplog):
    monkeypatch.setattr("smopd.engine.weights.transport.PART_BYTES", 100_000)
    second = pair[1]
    rollouts = remote(*pair, transfer="inline")
    rollouts.load_weights(weights_of(4), 1)
    assert list(rollouts.servers.removed) == [second.url]
    assert_serves(rollouts, 4)
    second.start()
    rollouts.load_weights(weights_of(5), 2)
    assert f"{second.url} is restored" in caplog.text and rollouts.servers.removed == {}
    for one in pair:
        alone = remote(one)
        alone.run, alone.policy_version = rollouts.run, 2
        assert_serves(alone, 5)
    remote(second).load_weights(weights_of(6), 2)  # of another run
    assert_serves(rollouts, 5, repeats=16)  # enough for both servers
    assert "holds the weights" in rollouts.servers.removed[second.url]


def test_a_run_goes_on_when_a_server_is_killed(pair, model_folder, tmp_path):
    steps, per_step = 4, 16
    changes = {
        "model": {"factory": None, "path": str(model_folder)},
        "rollout": {"engine": "vllm", "urls": [pair[1].url, pair[0].url]},
        "teachers": {"models": []},
        "data": {"evaluation": None},
        "checkpoint": {"every": 0},
        "loop": {"steps": steps, "updates_per_step": 1},
        "log": {"samples_per_step": per_step},
        "runs": {"alone": {"stage": "specialize", "reward_weights": [0.5, 0.5]}},
    }
    recipe = write_recipe(tmp_path, changes, drop=("warm_start", "runs"))
    metrics, log = tmp_path / "run/alone/metrics.jsonl", tmp_path / "log"
    words = ("-m", "smopd.train", str(recipe), "--output", "run")
    pair[1].start()
    with forked(1, *words, cwd=tmp_path, output=[log, log]) as (run,):
        wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, run, log)
        pair[1].kill()
        run.join(HANG_SECONDS)
    text = log.read_text()
    assert run.exitcode == 0, text[-4000:]
    assert f"{pair[1].url} is removed" in text and f"{pair[0].url} is removed" not in text
    lines = [line for line in metric_lines(tmp_path / "run/alone") if "tokens" in line]
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    assert all(line["rollout_mismatch"] < 1e-3 for line in lines)
    samples = json_lines(tmp_path / "run/alone/samples.jsonl")
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, steps + 1), per_step)


def test_two_ranks_share_a_server_and_the_first_sends_the_weights(pair, model_folder):
    ranks = on_two_ranks(model_folder.parent, {}, urls=(pair[0].url,))
    assert_followed([rank["untied"] for rank in ranks], world_model(0)[0], world_model(0)[0])


def test_a_preference_model_at_vllms_pooling_server_scores_as_here(tmp_path):
    save(tmp_path / "model", byte_tokenizer())
    server = serve(tmp_path / "model", tmp_path / "log", "--runner", "pooling", length=512)
    pairs = ["How are you?", "x", "Long " * 30], ["Fine.", "", "yes"]
    asked = {"model": str(tmp_path / "model"), "max_tokens": 512}
    with serving(server):
        assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"] == 512
        here, there = (preference_reward(*pairs, **asked, **at) for at in ({}, {"url": server.url}))
    assert there == pytest.approx(here, abs=1e-3)


def test_a_teacher_server_with_vllm(model_folder, tmp_path):
    """It returns the model's log-probabilities."""
    arguments = [str(model_folder), "--vocabulary", str(VOCABULARY), "--max-model-len", "64"]
    ours = Process("smopd.engine.teacher_server", tmp_path / "log", arguments)
    text, rollouts = "call the", ragged_rollouts(1)
    probe = Probe(text, tuple(world_model(0)[1].encode(text, add_special_tokens=False)))
    local = load_teachers([model_folder] * 2, Packing(micro_batch_tokens=200), VOCABULARY, torch.float32)
    with serving(ours):
        urls = [[ours.url], [ours.url]]
        there = RemoteTeachers(urls, VOCABULARY, probe, KAPPA, 0.7)
        found = there.score(rollouts, KAPPA, 0.7)
    expected = local.score(rollouts, KAPPA, 0.7)
    assert found.ids_NMS.equal(expected.ids_NMS)
    for name in ("logps_NMS", "token_logps_NM"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-4)
