"""Rollout servers with malformed responses, and servers that are not set up for rollouts."""

import json
import re
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist

from smopd.engine.errors import NoServer
from smopd.engine.remote.rollout import GENERATE, PROBE, RemoteRollout
from smopd.engine.remote.servers import Servers
from smopd.engine.types import Sampling
from tests.ranks import forks

VOCABULARY, END = 50, 1
SAMPLING = Sampling(n=4, max_new_tokens=3)


def good(label, **changes):
    """Body of a valid response, with changes."""
    logps = changes.pop("logps", (-0.5, -1.0, -0.1))
    choice = {
        "token_ids": (5, 7, END),
        "logprobs": {"content": [{"logprob": logp} for logp in logps]},
        "finish_reason": "stop",
        "weight_versions": [{"version": label}],
    }
    return {"choices": [choice | changes]}


class Sampler:
    """A rollout server that responds with the body `answer(label)`."""

    def __init__(self, loopback, answer):
        self.label, self.probed, self.breaks_at = "", 0.0, ""
        server = loopback(lambda path, body: self.reply(path, answer, body) if body else self.describe(path))
        self.url, self.calls = server.url, server.calls

    def reply(self, path, answer, body):
        if path == self.breaks_at:
            return None
        if path == GENERATE and json.loads(body) == PROBE.json:
            return 200, good(self.label, logps=(self.probed,))
        return 200, answer(self.label) if path == GENERATE else {}

    def describe(self, path):
        if path == "/weight_info":
            return 200, {"weight_version": self.label}
        return 405 if path == GENERATE else 200, {"data": [{"max_model_len": 64}]}


@pytest.fixture
def sampling(loopback):
    def make(*answers):
        """Return a client and one server for each of `answers`."""
        servers = [Sampler(loopback, answer) for answer in answers]
        rollouts = RemoteRollout(Servers([one.url for one in servers]), [END], 8, VOCABULARY)
        for one in servers:
            one.label = rollouts.label(0)
        return rollouts, servers

    return make


def with_(**changes):
    return lambda label: good(label, **changes)


BAD = {
    "an id of the vocabulary's size": with_(token_ids=(5, VOCABULARY, END)),
    "a negative id": with_(token_ids=(5, -1, END)),
    "float ids": with_(token_ids=(5.5, 7.5, 1.0)),
    "ids of two dimensions": with_(token_ids=((5,), (7,), (END,))),
    "an id of 2^70": with_(token_ids=(5, 1 << 70, END)),
    "ids as text": with_(token_ids=("5", "7", "1")),
    "more tokens than asked": with_(token_ids=(5,) * 9, logps=(-0.1,) * 9, finish_reason="length"),
    "a log-probability fewer": with_(logps=(-0.5, -1.0)),
    "no log-probability": with_(logps=(-0.5, None, -0.1)),
    "a positive one": with_(logps=(-0.5, 5.0, -0.1)),
    "NaN": with_(logps=(-0.5, float("nan"), -0.1)),
    "-inf": with_(logps=(-0.5, float("-inf"), -0.1)),
    "ended by something else": with_(finish_reason="abort"),
    "other weights": with_(weight_versions=[{"version": "other"}]),
    "no JSON": lambda label: b"<html>busy</html>",
}


@pytest.mark.parametrize("answer", BAD.values(), ids=BAD)
def test_a_bad_response_is_asked_elsewhere_and_never_taken(sampling, answer):
    rollouts, (bad, _) = sampling(answer, good)
    made = rollouts.generate([(5, 9), (7,), (8,)], [0, 1, 2], SAMPLING)
    assert GENERATE in bad.calls[3:] and list(rollouts.servers.removed) == [bad.url]
    assert [(r.group, r.response_ids.tolist(), r.finished) for r in made] == [
        (group, [5, 7, END], True) for group in range(3) for _ in range(SAMPLING.n)
    ]
    alone, (bad,) = sampling(answer)
    with pytest.raises(NoServer, match=rf"no server is left: {bad.url}: "):
        alone.generate([(5, 9)], [0], SAMPLING)
    assert alone.policy_version == 0


@pytest.mark.parametrize(("path", "status"), [("/init_weight_transfer_engine", 404), (GENERATE, 401)])
def test_a_server_that_cannot_serve_is_refused_at_the_start(loopback, path, status):
    fits = Sampler(loopback, good)
    wrong = loopback(lambda at, body: (status, {}) if at == path else (405 if at == GENERATE else 200, {}))
    with pytest.raises(ValueError, match=f"{wrong.url}: {path}: status {status}.*VLLM_SERVER_DEV_MODE=1"):
        RemoteRollout(Servers([fits.url, wrong.url]), [END], 8, VOCABULARY)
    with pytest.raises(ValueError, match=f"{fits.url}: has room for 64 tokens, expected 65"):
        RemoteRollout(Servers([fits.url]), [END], 65, VOCABULARY)


WEIGHTS = [("w", torch.zeros(2))]


def synced(sampling, *logps, probed=(0.0, 0.0)):
    """Return a client and servers that hold version 1, sample with `logps` and answer the probe `probed`."""
    rollouts, servers = sampling(*(with_(token_ids=(0,), logps=(logp,)) for logp in logps))
    for one, probe in zip(servers, probed, strict=True):
        one.label, one.probed = rollouts.label(1), probe
    return rollouts, servers


@pytest.mark.parametrize(
    ("held", "logp", "reason"),
    [
        ("other", 0.0, "holds the weights other, expected .*-1"),
        (None, -3.5, r"returns log-probability -3.5 .*, expected 0 \(--logprobs-mode processed_logprobs\)"),
        (None, 0.0, None),
    ],
)
def test_a_sync_is_checked_by_what_servers_hold_and_sample(sampling, held, logp, reason):
    rollouts, (server, other) = synced(sampling, logp, 0.0)
    server.label = held or server.label
    rollouts.load_weights(WEIGHTS, 1)
    assert rollouts.policy_version == 1 and other.url not in rollouts.servers.removed
    assert list(rollouts.servers.removed) == ([server.url] if reason else [])
    assert reason is None or re.search(reason, rollouts.servers.removed[server.url])


def test_a_server_that_breaks_off_while_it_takes_weights_is_removed(sampling):
    rollouts, servers = synced(sampling, 0.0, 0.0)
    servers[0].breaks_at = "/update_weights"
    rollouts.load_weights(WEIGHTS, 1)
    assert list(rollouts.servers.removed) == [servers[0].url] and rollouts.policy_version == 1
    assert "/finish_weight_update" not in servers[0].calls
    last = [call for call in servers[1].calls if call.startswith(("/finish", "/reset"))]
    assert last == ["/finish_weight_update", "/reset_prefix_cache"], "no position is served of old weights"


def _rank(rank, store, url, broken, raised):
    def weights():
        yield WEIGHTS[0]
        if rank in broken:
            raise ValueError(f"of rank {rank}")

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    rollouts = RemoteRollout(Servers([url]), [END], 8, VOCABULARY)
    rollouts.run = "run"
    with pytest.raises(ValueError, match=raised[rank]) if raised[rank] else nullcontext():
        rollouts.load_weights(weights(), 1)
    dist.destroy_process_group()


@pytest.mark.parametrize(("broken", "raised"), [((0, 1), ["of rank 0"] * 2), ((1,), [None, "of rank 1"])])
def test_ranks_whose_weights_break_off_wait_for_each_other(loopback, tmp_path, broken, raised):
    server = Sampler(loopback, with_(token_ids=(0,), logps=(0.0,)))
    server.label = "run-1"
    forks(_rank, (tmp_path / "store", server.url, broken, raised), nprocs=2)


def test_a_server_with_another_config_is_removed_at_the_sync(sampling):
    """It holds the tensors that it was sent, and computes something else with them."""
    rollouts, servers = synced(sampling, 0.0, 0.0, 0.0, probed=(-3.0, -1.0, -1.05))
    rollouts.load_weights(WEIGHTS, 1)
    assert list(rollouts.servers.removed) == [servers[0].url]
    assert re.search("holds another model: .* -3 .*, not -1", rollouts.servers.removed[servers[0].url])
    rollouts, _ = synced(sampling, 0.0, 0.0, probed=(-3.0, -1.0))
    with pytest.raises(NoServer, match="servers hold different models"):  # none of two is the odd one
        rollouts.load_weights(WEIGHTS, 1)
