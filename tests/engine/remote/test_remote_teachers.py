"""Teachers behind URLs: a real server of ours in this process, asked over the loopback."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace

import httpx
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save

from smopd.engine.errors import NoServer
from smopd.engine.local.teachers import load_teachers
from smopd.engine.models.loading import UnusableModel
from smopd.engine.remote.servers import RetryPolicy
from smopd.engine.remote.teachers import Probe, RemoteTeachers, _parse, portions
from smopd.engine.remote.wire import pack_request, pack_values, unpack_answer, unpack_request, unpack_values
from smopd.engine.settings import Packing
from smopd.engine.types import Rollout
from smopd.worlds.models import world_model
from tests.engine.tiny import ragged_rollouts

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")

PACKING = Packing(micro_batch_tokens=200)
QUICK = RetryPolicy(deadline_seconds=30.0, retries=1, backoff_seconds=0.01, concurrency=2)


def test_a_server_takes_its_gpus_whole():
    from smopd.engine.teacher_server import arguments, server_settings

    alone = server_settings(arguments().parse_args(["a/b", "--vocabulary", "9"]))
    assert (alone.gpu_memory_share, alone.sleep, alone.placement) == (0.9, False, "colocated")
    more = ["--gpu-memory-share", "0.5", "--tensor-parallel-size", "2"]
    shared = server_settings(arguments().parse_args(["a/b", "--vocabulary", "9", *more]))
    assert (shared.gpu_memory_share, shared.tensor_parallel_size, shared.placement) == (0.5, 2, "process")


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
    given = {"probe": probe, "kappa": 4, "temperature": 1.0, "retry": QUICK} | options
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
    teachers = remote(world, dtype="float16")
    found = teachers.score(rollouts, 4, 1.0)
    assert found.ids_NMS.equal(local.ids_NMS)
    torch.testing.assert_close(found.logps_NMS, local.logps_NMS, rtol=2**-11, atol=1e-5)
    alone = teachers.score(rollouts, 0, 1.0)
    assert alone.ids_NMS.shape[-1] == 0
    torch.testing.assert_close(alone.token_logps_NM, local.token_logps_NM, rtol=0, atol=1e-5)


class Vllm:
    """A vLLM server as far as a client looks before it asks.

    Args:
        tokens: of any text.
        most: log-probabilities a position.
    """

    def __init__(self, loopback, tokens, most=20):
        self.tokens, self.most = tokens, most
        self.replaced = None  # status and body of whatever else has taken the port
        server = loopback(self.answer)
        self.url, self.calls, self.stop = server.url, server.calls, server.stop

    def answer(self, path, body):
        if self.replaced is not None and path != "/health":
            return self.replaced
        if path == "/describe":
            return 404, {}
        if path == "/tokenize":
            return 200, {"tokens": list(self.tokens)}
        if not body:
            return 200, {"data": [{"id": "model"}]}
        return 200 if json.loads(body)["prompt_logprobs"] <= self.most else 400, {}


@pytest.fixture
def vllm(world, loopback):
    return lambda tokens=world[3].token_ids, **options: Vllm(loopback, tokens, **options)


def of_servers(world, *urls, **options):
    """One teacher with several servers."""
    _, _, vocabulary, probe = world
    given = {"probe": probe, "kappa": 4, "temperature": 1.0, "retry": QUICK} | options
    return RemoteTeachers([list(urls)], vocabulary, **given)


def test_each_server_of_a_teacher_is_asked(world, vllm):
    first, second = vllm(), vllm()
    assert of_servers(world, first.url, second.url).ours == [False]
    assert first.calls == second.calls == ["/describe", "/tokenize", "/v1/models", "/v1/completions"]


def test_a_second_server_that_does_not_fit_is_refused(world, vllm):
    fits, ours = vllm(), world[1][0]
    with pytest.raises(UnusableModel, match=r"models\.0: http.* has another tokenizer than the student"):
        of_servers(world, fits.url, vllm((*world[3].token_ids, 1)).url)
    few = vllm(most=3)
    with pytest.raises(UnusableModel, match=rf"{few.url} gives no 4 log-probabilities .*--max-logprobs 4"):
        of_servers(world, fits.url, few.url)
    with pytest.raises(UnusableModel, match=r"log-probabilities at temperature 1, asked for 0\.7"):
        of_servers(world, fits.url, temperature=0.7)
    for urls in ((fits.url, ours.url), (ours.url, fits.url)):
        with pytest.raises(UnusableModel, match=rf"{urls[1]} is of another kind"):
            of_servers(world, *urls)


def test_an_unavailable_server_is_removed_and_none_is_an_error(world, vllm):
    gone, odd, fits = vllm(), vllm(), vllm()
    gone.stop()
    odd.replaced = (200, [])
    found = of_servers(world, gone.url, odd.url, fits.url)
    assert list(found.teachers[0].removed) == [gone.url, odd.url] and found.ours == [False]
    assert "gave a bad answer" in found.teachers[0].removed[odd.url]
    with pytest.raises(NoServer, match=rf"{gone.url}: ConnectError"):
        of_servers(world, gone.url)


def test_a_server_of_ours_that_cannot_serve_is_refused(world):
    _, servers, vocabulary, probe = world
    with pytest.raises(UnusableModel, match=rf"started for a vocabulary of {vocabulary}, expected .* 7 "):
        RemoteTeachers([[servers[0].url]], 7, probe, 4, 1.0, retry=QUICK)
    with pytest.raises(UnusableModel, match=rf"{servers[0].url} cannot answer what will be asked .*400"):
        of_servers(world, servers[0].url, temperature=-1.0)


def test_what_only_pads_a_vocabulary_is_counted_on_the_other_side(world, caplog):
    paths, _, vocabulary, _ = world
    smaller, probe = vocabulary - 40, Probe("1 2", (144, 145))
    rollouts = [r for r in ragged_rollouts(7) if max(r.response_ids.tolist()) < smaller]
    server = Serving(load_teachers(paths[:1], PACKING, smaller, torch.float32), paths[0], smaller)
    found = RemoteTeachers([[server.url]], smaller, probe, 8, 1.0, retry=QUICK)
    top = found.score(rollouts, 8, 1.0)
    server.stop()
    assert found.dropped == int((top.logps_NMS == -torch.inf).sum()) > 0
    found.score([], 8, 1.0)
    assert caplog.text.count("only pad a vocabulary") == 2  # the server's engine, and here


def test_a_server_has_a_row_for_each_token_of_the_student(world):
    paths, servers, vocabulary, probe = world
    larger = vocabulary + 12
    server = Serving(load_teachers(paths[:1], PACKING, larger, torch.float32, tokens=1), paths[0], larger)
    rollouts = ragged_rollouts(8)
    padded = replace(probe, tokens=vocabulary)
    found = RemoteTeachers([[server.url]], larger, padded, 4, 1.0, retry=QUICK).score(rollouts, 4, 1.0)
    assert found.logps_NMS.equal(of_servers(world, servers[0].url).score(rollouts, 4, 1.0).logps_NMS)
    with pytest.raises(UnusableModel, match=f"has {vocabulary} rows, the student has {vocabulary + 1} t"):
        more = replace(probe, tokens=vocabulary + 1)
        RemoteTeachers([[server.url]], larger, more, 4, 1.0, retry=QUICK)
    server.stop()


@pytest.mark.parametrize("replaced", [None, (404, {}), (200, {}), (200, []), "tokenizer"])
def test_a_restored_server_fits_as_at_the_start(world, vllm, replaced):
    other = vllm()
    found = of_servers(world, vllm().url, other.url)
    if replaced == "tokenizer":
        other.tokens = (*world[3].token_ids, 1)
    else:
        other.replaced = replaced
    found.teachers[0].remove(other.url, "gone")
    found._restore(0)
    assert list(found.teachers[0].removed) == ([] if replaced is None else [other.url])


def packed_answer(**changes):
    """An answer for two tokens and kappa 2, with tensors changed; None drops one."""
    logps_NS = torch.tensor([[0.5, 0.25]] * 2).log()
    tensors = {
        "ids_NS": torch.tensor([[4, 3], [2, 1]], dtype=torch.int32),
        "logps_NS": logps_NS,
        "token_logps_N": logps_NS[:, 0],
        "dropped": torch.tensor(0),
    } | changes
    return save({name: value.contiguous() for name, value in tensors.items() if value is not None})


BAD = {
    "one row for all": packed_answer(ids_NS=torch.tensor([[4, 3]], dtype=torch.int32)),
    "one row of log-probabilities": packed_answer(logps_NS=torch.tensor([[-1.0, -2.0]])),
    "fewer entries": packed_answer(ids_NS=torch.tensor([[4], [2]], dtype=torch.int32)),
    "one token's own": packed_answer(token_logps_N=torch.tensor([-1.0])),
    "positive": packed_answer(logps_NS=torch.full((2, 2), 5.0)),
    "positive own": packed_answer(token_logps_N=torch.full((2,), 5.0)),
    "a mass of 2": packed_answer(logps_NS=torch.zeros(2, 2)),
    "NaN": packed_answer(logps_NS=torch.full((2, 2), torch.nan)),
    "NaN own": packed_answer(token_logps_N=torch.full((2,), torch.nan)),
    "all empty": packed_answer(logps_NS=torch.full((2, 2), -torch.inf)),
    "an id twice": packed_answer(ids_NS=torch.tensor([[4, 4], [2, 1]], dtype=torch.int32)),
    "negative ids": packed_answer(ids_NS=torch.tensor([[4, -3], [2, 1]], dtype=torch.int32)),
    "float ids": packed_answer(ids_NS=torch.tensor([[4.0, 3.0], [2.0, 1.0]])),
    "unsigned ids": packed_answer(ids_NS=torch.tensor([[4, 3], [2, 1]], dtype=torch.uint32)),
    "a negative count": packed_answer(dropped=torch.tensor(-1)),
    "a tensor missing": packed_answer(token_logps_N=None),
    "cut short": packed_answer()[:-7],
    "HTML": b"<html>busy</html>",
    "nothing": b"",
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_answer_is_never_taken(content):
    """That its server is removed and another asked is `Servers`' promise (test_servers.py)."""
    assert unpack_answer(packed_answer(), 2, 2)[0].tolist() == [[4, 3], [2, 1]]
    with pytest.raises((ValueError, KeyError, SafetensorError)):
        unpack_answer(content, 2, 2)


@pytest.mark.parametrize(
    "logps_NU", [torch.zeros(1, 3), torch.zeros(2, 2), torch.full((2, 3), torch.nan), torch.ones(2, 3)]
)
def test_bad_log_probabilities_of_given_ids_are_never_taken(logps_NU):
    assert unpack_values(pack_values(torch.zeros(2, 3), torch.float16), 2, 3).tolist() == [[0.0] * 3] * 2
    with pytest.raises(ValueError, match="logps_NU"):
        unpack_values(pack_values(logps_NU, torch.float32), 2, 3)


def rows(**changes):
    """vLLM's `prompt_logprobs` of a prompt of one token and a response of two."""
    entry = {"logprob": -0.5, "rank": 1} | changes
    return [None, {"7": entry}, {"9": {"logprob": -0.1, "rank": 1}}]


@pytest.mark.parametrize(
    "answered",
    [
        rows(logprob=None),
        rows(logprob=5.0),
        rows(logprob=float("nan")),
        rows(rank=None),
        rows(rank=2),  # the row has no largest then
        rows(rank=0),
        rows(rank=-3),
        rows()[:2],
        [],
        None,
        {"a": 1},
        [None, {}, {}],
        [None, {"7": {}}, {"9": {}}],
    ],
)
def test_json_of_another_form_is_not_taken(answered):
    rollout = Rollout((3,), torch.tensor([7, 9]), torch.zeros(2), 0, True)
    ids, _, own = _parse(rows(), rollout, 1)
    assert (ids.tolist(), own.tolist()) == ([[7], [9]], pytest.approx([-0.5, -0.1]))
    with pytest.raises((ValueError, LookupError, TypeError, AttributeError)):
        _parse(answered, rollout, 1)


def test_a_wrong_question_names_what_is_wrong(world):
    with pytest.raises(ValueError, match="kappa is -1"):
        remote(world).score(ragged_rollouts(5), -1, 1.0)


def test_requests_survive_the_wire(monkeypatch):
    rollouts = ragged_rollouts(6)
    again = unpack_request(pack_request(rollouts), 1000)
    assert [r.prompt_ids for r in again] == [r.prompt_ids for r in rollouts]
    assert all(a.response_ids.equal(b.response_ids) for a, b in zip(again, rollouts, strict=True))
    monkeypatch.setattr("smopd.engine.remote.teachers.REQUEST_TOKENS", 20)
    parts = portions(rollouts)
    assert len(parts) > 1
    assert [id(r) for part in parts for r in part] == [id(r) for r in rollouts]


def request(tokens=(1, 2, 3), lengths=((1, 2),), dtype=torch.int32):
    return save(
        {"tokens": torch.tensor(tokens, dtype=dtype), "lengths": torch.tensor(lengths, dtype=torch.int32)}
    )


@pytest.mark.parametrize(
    ("content", "params"),
    [
        (b"", {}),
        (b"not safetensors", {}),
        (request(tokens=(1, 2, 10_000)), {}),
        (request(tokens=(1, 2, -3)), {}),
        (request(lengths=((1, -1), (1, 2))), {}),
        (request(lengths=((1, 1),)), {}),
        (request(lengths=((0, 3),)), {}),
        (request(lengths=((3,),)), {}),
        (request(dtype=torch.float32), {}),
        (save({"tokens": torch.zeros(3, dtype=torch.int32)}), {}),
        (request(), {"kappa": "x"}),
        (request(), {"kappa": "-1"}),
        (request(), {"kappa": "100000"}),
        (request(), {"temperature": "1e-300"}),
        (request(), {"temperature": "nan"}),
        (request(), {"dtype": "int8"}),
    ],
)
def test_what_is_no_request_is_answered_by_400(world, content, params):
    url = world[1][0].url
    answer = httpx.post(f"{url}/score", params={"kappa": "4"} | params, content=content)
    assert answer.status_code == 400 and ": " in answer.text
    assert httpx.post(f"{url}/score", params={"kappa": "4"}, content=request()).is_success


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{}", b'{"prompt": 3}', b"[" * 100_000, b'{"prompt": "' + b"a" * (1 << 21) + b'"}']
)
def test_what_is_no_text_is_answered_by_400(world, body):
    assert httpx.post(f"{world[1][0].url}/tokenize", content=body).status_code == 400


def test_a_request_has_a_largest_size(world, monkeypatch):
    monkeypatch.setattr("smopd.engine.teacher_server.MAX_REQUEST_BYTES", 1000)
    answer = httpx.post(f"{world[1][0].url}/score", params={"kappa": "4"}, content=b"x" * 100_000)
    assert answer.status_code == 413


def test_a_token_is_asked_for_where_one_is_set(world, monkeypatch):
    paths, _, vocabulary, probe = world
    monkeypatch.setenv("SMOPD_SERVER_TOKEN", "right")
    guarded = Serving(load_teachers(paths[:1], PACKING, vocabulary, torch.float32), paths[0], vocabulary)
    assert httpx.get(f"{guarded.url}/health").status_code == 401
    assert RemoteTeachers([[guarded.url]], vocabulary, probe, 4, 1.0, retry=QUICK).ours == [True]
    monkeypatch.setenv("SMOPD_SERVER_TOKEN", "wrong")
    with pytest.raises(NoServer, match="status 401: no or another token"):
        RemoteTeachers([[guarded.url]], vocabulary, probe, 4, 1.0, retry=QUICK)
    guarded.stop()
