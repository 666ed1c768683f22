"""Teachers behind URLs: a real server of ours in this process, asked over the loopback."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from smopd.engine.models import UnusableModel
from smopd.engine.remote_teachers import Probe, RemoteTeachers, portions
from smopd.engine.servers import Patience
from smopd.engine.teacher_wire import pack_request, unpack_request
from smopd.engine.teachers import load_teachers
from smopd.engine.types import Packing
from smopd.small_models import world_model
from tests.engine.tiny import ragged_rollouts

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

PACKING = Packing(200, 0, True)
QUICK = Patience(deadline_seconds=30.0, retries=1, backoff_seconds=0.01, concurrency=2)


class Serving:
    def __init__(self, teacher, path, vocabulary):
        from smopd.engine.teacher_server import application

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        app = application(teacher, path, vocabulary)
        self.server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = True
        self.thread.join()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Two teachers over the quickstart's vocabulary, with a server each."""
    folder = tmp_path_factory.mktemp("teachers")
    paths = []
    for seed in range(2):
        model, tokenizer = world_model(seed)
        paths.append(str(folder / str(seed)))
        model.save_pretrained(paths[-1])
        tokenizer.save_pretrained(paths[-1])
    vocabulary = model.config.vocab_size
    servers = [
        Serving(load_teachers([path], PACKING, vocabulary, torch.float32), path, vocabulary) for path in paths
    ]
    text = "call the"
    probe = Probe(text, tuple(tokenizer.encode(text, add_special_tokens=False)))
    yield paths, servers, vocabulary, probe
    for server in servers:
        server.stop()


def remote(world, **options):
    _, servers, vocabulary, probe = world
    given = {"probe": probe, "kappa": 4, "temperature": 1.0, "patience": QUICK} | options
    return RemoteTeachers([[server.url] for server in servers], vocabulary, **given)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_remote_teachers_say_what_local_ones_say(world, temperature):
    paths, _, vocabulary, _ = world
    rollouts = ragged_rollouts(1)
    local = load_teachers(paths, PACKING, vocabulary, torch.float32).score(rollouts, 4, temperature)
    found = remote(world, temperature=temperature).score(rollouts, 4, temperature)
    assert found.ids_NMS.equal(local.ids_NMS)
    torch.testing.assert_close(found.logps_NMS, local.logps_NMS, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.token_logps_NM, local.token_logps_NM, rtol=0, atol=1e-5)


def test_half_precision_on_the_way_costs_its_rounding(world):
    paths, _, vocabulary, _ = world
    rollouts = ragged_rollouts(2)
    local = load_teachers(paths, PACKING, vocabulary, torch.float32).score(rollouts, 4, 1.0)
    found = remote(world, dtype="float16").score(rollouts, 4, 1.0)
    assert found.ids_NMS.equal(local.ids_NMS)
    torch.testing.assert_close(found.logps_NMS, local.logps_NMS, rtol=2**-11, atol=1e-5)


def test_kappa_zero_gives_the_tokens_alone(world):
    found = remote(world).score(ragged_rollouts(3), 0, 1.0)
    assert found.ids_NMS.shape[-1] == 0
    assert bool((found.token_logps_NM < 0).all())


def test_another_tokenizer_is_refused(world):
    probe = Probe(world[3].text, (*world[3].token_ids, 1))
    with pytest.raises(UnusableModel, match=r"teachers\.models\.0: http.* has another tokenizer"):
        remote(world, probe=probe)


def test_a_replica_that_dies_is_replaced_by_the_other(world):
    paths, servers, vocabulary, probe = world
    teacher = load_teachers(paths[:1], PACKING, vocabulary, torch.float32)
    dying = Serving(teacher, paths[0], vocabulary)
    found = RemoteTeachers(
        [[dying.url, servers[0].url]], vocabulary, probe, kappa=4, temperature=1.0, patience=QUICK
    )
    rollouts = ragged_rollouts(4)
    before = found.score(rollouts, 4, 1.0)
    dying.stop()
    after = found.score(rollouts, 4, 1.0)
    assert after.ids_NMS.equal(before.ids_NMS)
    assert list(found.teachers[0].out) == [dying.url]


def test_a_wrong_question_names_what_is_wrong(world):
    with pytest.raises(ValueError, match="kappa is -1"):
        remote(world).score(ragged_rollouts(5), -1, 1.0)
    with pytest.raises(ValueError, match=r"status 400: .*temperature is -1"):
        remote(world).score(ragged_rollouts(5), 4, -1.0)


def test_requests_survive_the_wire(monkeypatch):
    rollouts = ragged_rollouts(6)
    again = unpack_request(pack_request(rollouts))
    assert [r.prompt_ids for r in again] == [r.prompt_ids for r in rollouts]
    assert all(a.response_ids.equal(b.response_ids) for a, b in zip(again, rollouts, strict=True))
    monkeypatch.setattr("smopd.engine.remote_teachers.REQUEST_TOKENS", 20)
    parts = portions(rollouts)
    assert len(parts) > 1
    assert [id(r) for part in parts for r in part] == [id(r) for r in rollouts]
