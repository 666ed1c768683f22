"""Teachers behind URLs: a real server of ours in this process, asked over the loopback."""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import torch
from safetensors.torch import load, save

from smopd.engine.errors import NoServer
from smopd.engine.local.teachers import load_teachers
from smopd.engine.models.loading import UnusableModel
from smopd.engine.remote.servers import NOT_AN_ANSWER, Refused, RetryPolicy
from smopd.engine.remote.teachers import Probe, RemoteTeachers, _parse, portions
from smopd.engine.remote.wire import pack_request, unpack_request
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


class Answering:
    """A vLLM server as far as a client looks before it asks: which statuses and tokens it gives.

    Args:
        tokens: of any text.
        most: log-probabilities a position.
    """

    def __init__(self, tokens, most=20):
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.answer({"data": [{"id": "model"}]}, 404 if self.path == "/describe" else 200)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append(self.path)
                if self.path == "/tokenize":
                    self.answer({"tokens": list(tokens)}, 200)
                else:
                    self.answer({}, 200 if body["prompt_logprobs"] <= most else 400)

            def answer(self, body, status):
                if outer.another is not None and self.path != "/health":
                    body, status = outer.another
                content = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.asked = []
        self.another = None  # the body and the status of whatever else has taken the port
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def answering():
    made = []

    def make(*arguments, **options):
        made.append(Answering(*arguments, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def of_servers(world, *urls, **options):
    """One teacher with several servers."""
    _, _, vocabulary, probe = world
    given = {"probe": probe, "kappa": 4, "temperature": 1.0, "patience": QUICK} | options
    return RemoteTeachers([list(urls)], vocabulary, **given)


def test_each_server_of_a_teacher_is_asked(world, answering):
    ids = world[3].token_ids
    first, second = answering(ids), answering(ids)
    assert of_servers(world, first.url, second.url).ours == [False]
    assert first.asked == second.asked == ["/tokenize", "/v1/completions"]


def test_a_second_server_that_does_not_fit_is_refused(world, answering):
    ids = world[3].token_ids
    fits = answering(ids)
    with pytest.raises(UnusableModel, match=r"models\.0: http.* has another tokenizer than the student"):
        of_servers(world, fits.url, answering((*ids, 1)).url)
    few = answering(ids, most=3)
    with pytest.raises(UnusableModel, match=rf"{few.url} gives no 4 log-probabilities .*--max-logprobs 4"):
        of_servers(world, fits.url, few.url)
    with pytest.raises(UnusableModel, match=r"log-probabilities at temperature 1, asked for 0\.7"):
        of_servers(world, fits.url, temperature=0.7)
    ours = world[1][0]
    for urls in ((fits.url, ours.url), (ours.url, fits.url)):
        with pytest.raises(UnusableModel, match=rf"{urls[1]} is of another kind"):
            of_servers(world, *urls)


def test_a_server_that_does_not_answer_is_left_out_and_none_is_an_error(world, answering):
    gone, fits = answering(world[3].token_ids), answering(world[3].token_ids)
    gone.stop()
    found = of_servers(world, gone.url, fits.url)
    assert list(found.teachers[0].out) == [gone.url] and found.ours == [False]
    with pytest.raises(NoServer, match=rf"{gone.url}: ConnectError"):
        of_servers(world, gone.url)


def test_a_server_of_ours_that_cannot_serve_is_refused(world):
    _, servers, vocabulary, probe = world
    with pytest.raises(UnusableModel, match=rf"started for a vocabulary of {vocabulary}, expected .* 7 "):
        RemoteTeachers([[servers[0].url]], 7, probe, 4, 1.0, patience=QUICK)
    with pytest.raises(UnusableModel, match=rf"{servers[0].url} cannot answer what will be asked .*400"):
        of_servers(world, servers[0].url, temperature=-1.0)


def test_what_only_pads_a_vocabulary_is_counted_on_the_other_side(world, caplog):
    paths, _, vocabulary, _ = world
    smaller, probe = vocabulary - 40, Probe("1 2", (144, 145))
    rollouts = [r for r in ragged_rollouts(7) if max(r.response_ids.tolist()) < smaller]
    server = Serving(load_teachers(paths[:1], PACKING, smaller, torch.float32), paths[0], smaller)
    found = RemoteTeachers([[server.url]], smaller, probe, 8, 1.0, patience=QUICK)
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
    found = RemoteTeachers([[server.url]], larger, padded, 4, 1.0, patience=QUICK).score(rollouts, 4, 1.0)
    assert found.logps_NMS.equal(of_servers(world, servers[0].url).score(rollouts, 4, 1.0).logps_NMS)
    with pytest.raises(UnusableModel, match=f"has {vocabulary} rows, the student has {vocabulary + 1} t"):
        more = replace(probe, tokens=vocabulary + 1)
        RemoteTeachers([[server.url]], larger, more, 4, 1.0, patience=QUICK)
    server.stop()


def test_a_server_that_comes_back_as_another_is_left_out(world, answering):
    tokens = list(world[3].token_ids)
    fits, changing = answering(world[3].token_ids), answering(tokens)
    found = of_servers(world, fits.url, changing.url)
    servers = found.teachers[0]
    for why in ("", "another tokenizer"):
        servers.take_out(changing.url, "gone")
        found._readmit(0)
        assert why in servers.out.get(changing.url, "") and (changing.url in servers.out) == bool(why)
        tokens.append(1)


@pytest.mark.parametrize("another", [({}, 404), ({}, 200), ([], 200)])
def test_another_program_on_a_servers_port_is_left_out(world, answering, another):
    fits, other = answering(world[3].token_ids), answering(world[3].token_ids)
    found = of_servers(world, fits.url, other.url)
    other.another = another
    found.teachers[0].take_out(other.url, "gone")
    found._readmit(0)
    assert list(found.teachers[0].out) == [other.url]


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


def spoilt(name, change):
    """One tensor of an answer changed."""

    def spoil(content):
        tensors = load(content)
        tensors[name] = change(tensors[name])
        return save(tensors)

    return spoil


def without(name):
    return lambda content: save({key: value for key, value in load(content).items() if key != name})


def twice(ids_NS):
    ids_NS[:, 1] = ids_NS[:, 0]
    return ids_NS


BAD = {
    "one row for all": spoilt("ids_NS", lambda ids_NS: ids_NS[:1].contiguous()),
    "one row of log-probabilities": spoilt("logps_NS", lambda logps_NS: logps_NS[:1].contiguous()),
    "fewer entries": spoilt("ids_NS", lambda ids_NS: ids_NS[:, 1:].contiguous()),
    "one token's own": spoilt("token_logps_N", lambda logps_N: logps_N[:1].contiguous()),
    "positive": spoilt("logps_NS", lambda logps_NS: logps_NS * 0 + 5),
    "positive own": spoilt("token_logps_N", lambda logps_N: logps_N * 0 + 5),
    "a mass of 4": spoilt("logps_NS", lambda logps_NS: logps_NS * 0),
    "NaN": spoilt("logps_NS", lambda logps_NS: logps_NS * torch.nan),
    "NaN own": spoilt("token_logps_N", lambda logps_N: logps_N * torch.nan),
    "all empty": spoilt("logps_NS", lambda logps_NS: logps_NS - torch.inf),
    "an id twice": spoilt("ids_NS", twice),
    "negative ids": spoilt("ids_NS", lambda ids_NS: -1 - ids_NS),
    "float ids": spoilt("ids_NS", lambda ids_NS: ids_NS.float()),
    "unsigned ids": spoilt("ids_NS", lambda ids_NS: ids_NS.to(torch.uint32)),
    "a negative count": spoilt("dropped", lambda dropped: dropped - 1),
    "a tensor missing": without("token_logps_N"),
    "cut short": lambda content: content[:-7],
    "HTML": lambda content: b"<html>busy</html>",
    "nothing": lambda content: b"",
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD)
def test_a_bad_answer_is_asked_elsewhere_and_never_taken(world, monkeypatch, spoil):
    paths, servers, vocabulary, probe = world
    teacher = load_teachers(paths[:1], PACKING, vocabulary, torch.float32)
    bad = Serving(teacher, paths[0], vocabulary)
    rollouts = ragged_rollouts(4)
    found = RemoteTeachers([[bad.url, servers[0].url]], vocabulary, probe, 4, 1.0, patience=QUICK)
    before = found.score(rollouts, 4, 1.0)
    unspoilt, lies = httpx.AsyncClient.stream, threading.Event()

    @asynccontextmanager
    async def stream(client, method, path, **options):
        async with unspoilt(client, method, path, **options) as answer:
            if str(client.base_url).startswith(bad.url) and path == "/score":
                lies.set()
                content = spoil(b"".join([piece async for piece in answer.aiter_bytes()]))
                answer = httpx.Response(200, content=content, request=answer.request)
            yield answer

    monkeypatch.setattr(httpx.AsyncClient, "stream", stream)
    monkeypatch.setattr("smopd.engine.remote.teachers.REQUEST_TOKENS", 20)  # so many that both are asked
    after = found.score(rollouts, 4, 1.0)
    bad.stop()
    assert lies.is_set() and after.ids_NMS.equal(before.ids_NMS)
    torch.testing.assert_close(after.logps_NMS, before.logps_NMS, rtol=0, atol=1e-5)
    assert "gave a bad answer" in found.teachers[0].out[bad.url]
    assert found.teachers[0].bad_answers >= 1


def test_a_server_whose_first_answer_is_bad_is_no_teacher(world, answering):
    fits, odd = answering(world[3].token_ids), answering(world[3].token_ids)
    odd.another = ([], 200)
    found = of_servers(world, odd.url, fits.url)
    assert "gave a bad answer" in found.teachers[0].out[odd.url]
    with pytest.raises(NoServer, match="gave a bad answer"):
        of_servers(world, odd.url)


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
    with pytest.raises(NOT_AN_ANSWER):
        _parse(answered, rollout, 1)


def test_a_wrong_question_names_what_is_wrong(world):
    with pytest.raises(ValueError, match="kappa is -1"):
        remote(world).score(ragged_rollouts(5), -1, 1.0)
    with pytest.raises(ValueError, match=r"status 400: .*temperature is -1"):
        remote(world).score(ragged_rollouts(5), 4, -1.0)


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
    monkeypatch.setattr("smopd.engine.teacher_server.LARGEST_REQUEST", 1000)
    answer = httpx.post(f"{world[1][0].url}/score", params={"kappa": "4"}, content=b"x" * 100_000)
    assert answer.status_code == 413


def test_a_token_is_asked_for_where_one_is_set(world, monkeypatch):
    paths, _, vocabulary, probe = world
    monkeypatch.setenv("SMOPD_SERVER_TOKEN", "right")
    guarded = Serving(load_teachers(paths[:1], PACKING, vocabulary, torch.float32), paths[0], vocabulary)
    assert httpx.get(f"{guarded.url}/health").status_code == 401
    assert RemoteTeachers([[guarded.url]], vocabulary, probe, 4, 1.0, patience=QUICK).ours == [True]
    monkeypatch.setenv("SMOPD_SERVER_TOKEN", "wrong")
    with pytest.raises(Refused, match="status 401: no or another token"):
        RemoteTeachers([[guarded.url]], vocabulary, probe, 4, 1.0, patience=QUICK)
    guarded.stop()
