"""Teachers behind URLs: our own servers in this process, scripted ones, and hostile answers."""

import asyncio
import gc
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest.mock import AsyncMock
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from smopd.engine.errors import NoServer
from smopd.engine.local.teachers import LocalTeachers, load_teachers
from smopd.engine.models.loading import UnusableModel
from smopd.engine.remote.teachers import Probe, RemoteTeachers
from smopd.engine.remote.wire import pack, pack_request, unpack_answer
from smopd.engine.settings import Packing
from smopd.engine.types import TeacherTopK
from smopd.worlds.models import world_model
from tests.engine.tiny import ragged_rollouts, with_turns
from tests.smopd.recipes import metric_lines, save_world, train_here, write_recipe

pytest.importorskip("starlette")
uvicorn = pytest.importorskip("uvicorn")
application = pytest.importorskip("smopd.engine.teacher_server").application

MODEL, TOKENIZER = world_model(0)
VOCABULARY = MODEL.config.vocab_size
PROBE = Probe("call the", tuple(TOKENIZER.encode("call the", add_special_tokens=False)))


class Serving:
    def __init__(self, path: str, vocabulary: int = VOCABULARY):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.app = application(local([path], vocabulary), path, vocabulary)
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=port, log_level="error"))
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)

    def become(self, path: str) -> None:
        """Serve another model, as after a restart that no client noticed."""
        self.app.router.routes[:] = application(local([path]), path, VOCABULARY).router.routes

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def local(paths: list[str], vocabulary: int = VOCABULARY) -> LocalTeachers:
    return load_teachers(paths, Packing(micro_batch_tokens=200), vocabulary, torch.float32, tokens=1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two teachers and their base, with the quickstart's vocabulary."""
    folder = tmp_path_factory.mktemp("models")
    return [save_world(folder / str(seed), seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def start(*arguments) -> Serving:
        made.append(Serving(*arguments))
        return made[-1]

    yield start
    for server in made:
        server.stop()


@pytest.fixture(scope="module")
def urls(serve, paths: list[str]) -> list[str]:
    return [serve(path).url for path in paths]


def remote(*urls: str, kappa: int = 4, temperature: float = 1.0, **options) -> RemoteTeachers:
    """One teacher for each of `urls`, which may list several servers with commas."""
    given = {"vocabulary": VOCABULARY, "probe": PROBE} | options
    return RemoteTeachers([url.split(",") for url in urls], kappa=kappa, temperature=temperature, **given)


def assert_same(found: TeacherTopK, expected: TeacherTopK) -> None:
    assert found.ids_NMS.equal(expected.ids_NMS)
    torch.testing.assert_close(found.logps_NMS, expected.logps_NMS, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.token_logps_NM, expected.token_logps_NM, rtol=0, atol=1e-5)


def test_remote_teachers_say_what_local_ones_say(paths, urls, monkeypatch):
    rollouts = with_turns(ragged_rollouts(1))
    expected, teachers = local(paths).score(rollouts, 4, 0.7), remote(*urls, temperature=0.7)
    assert_same(teachers.score(rollouts, 4, 0.7), expected)
    monkeypatch.setattr("smopd.engine.remote.teachers.REQUEST_TOKENS", 20)  # several requests
    assert_same(teachers.score(rollouts, 4, 0.7), expected)
    assert teachers.score([], 4, 0.7).ids_NMS.shape == (0, 3, 4)
    alone = teachers.score(rollouts, 0, 0.7)
    torch.testing.assert_close(alone.token_logps_NM, expected.token_logps_NM, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="kappa is -1"):
        teachers.score(rollouts, -1, 1.0)


def test_what_only_pads_a_vocabulary_is_counted_on_the_other_side(paths, serve, caplog):
    smaller, probe = VOCABULARY - 40, Probe("1 2", (144, 145))
    rollouts = [r for r in ragged_rollouts(7) if max(r.response_ids.tolist()) < smaller]
    there = [serve(path, smaller).url for path in paths[:2]]
    teachers = remote(*there, kappa=8, vocabulary=smaller, probe=probe)
    found = teachers.score(rollouts, 8, 1.0)
    assert_same(found, local(paths[:2], smaller).score(rollouts, 8, 1.0))
    assert teachers.dropped > 0 and int(found.ids_NMS.max()) < smaller
    assert "vocabulary padding" in caplog.text


def test_a_server_has_a_row_for_each_token_of_the_student(paths, urls, serve):
    larger, rollouts = VOCABULARY + 12, ragged_rollouts(8)
    url = serve(paths[0], larger).url
    padded = replace(PROBE, tokens=VOCABULARY)
    found = remote(url, vocabulary=larger, probe=padded).score(rollouts, 4, 1.0)
    assert found.logps_NMS.equal(remote(urls[0]).score(rollouts, 4, 1.0).logps_NMS)
    with pytest.raises(UnusableModel, match=f"has {VOCABULARY} tokens, the student has {VOCABULARY + 1}"):
        remote(url, vocabulary=larger, probe=replace(PROBE, tokens=VOCABULARY + 1))


class Scripted:
    """The endpoints that a client checks: `tokens` are of any text, `most` is the largest kappa."""

    def __init__(self, loopback, tokens=PROBE.token_ids, most=20, weights="w", rows=VOCABULARY):
        self.tokens, self.most, self.weights, self.rows = tokens, most, weights, rows
        self.replaced = None  # status and body of another program on this port
        server = loopback(self.answer)
        self.url, self.calls, self.stop = server.url, server.calls, server.stop

    def answer(self, path, body):
        if self.replaced is not None and path != "/health":
            return self.replaced
        if path == "/describe":
            return 200, {"vocabulary": VOCABULARY, "rows": self.rows, "weights": self.weights}
        if path == "/tokenize":
            return 200, {"tokens": list(self.tokens)}
        if path == "/health":
            return 200, {}
        return (200 if int(parse_qs(urlsplit(path).query)["kappa"][0]) <= self.most else 400), {}


OTHER = (*PROBE.token_ids, 1)


def test_a_server_that_does_not_fit_is_refused(urls, loopback):
    """Every server of a teacher is checked, not only the first."""
    fits, few, none, ours = Scripted(loopback), Scripted(loopback, most=3), Scripted(loopback), urls[0]
    none.replaced = (404, {})
    assert len(remote(f"{fits.url},{Scripted(loopback).url}").teachers[0].alive) == 2
    smaller = Scripted(loopback, rows=VOCABULARY - 1)
    assert remote(smaller.url, fits.url).shared == VOCABULARY - 1, "ids that all teachers have"
    other = Scripted(loopback, OTHER)
    for asked, vocabulary, message in (
        ([fits.url, other.url], VOCABULARY, r"models\.0: http.* has another tokenizer than the stud"),
        ([fits.url, few.url], VOCABULARY, rf"{few.url} refuses kappa 4: "),
        ([none.url], VOCABULARY, r"models\.0: http.* is not a teacher server; start it with smopd"),
        ([ours], 7, rf"started for a vocabulary of {VOCABULARY}, expected .* 7 "),
    ):
        with pytest.raises(UnusableModel, match=message):
            remote(",".join(asked), vocabulary=vocabulary)


def test_an_unavailable_server_is_removed_and_none_is_an_error(loopback):
    gone, odd, fits = (Scripted(loopback) for _ in range(3))
    gone.stop()
    odd.replaced = (200, [])
    found = remote(f"{gone.url},{odd.url},{fits.url}")
    assert list(found.teachers[0].removed) == [gone.url, odd.url]
    assert "gave a bad answer" in found.teachers[0].removed[odd.url]
    with pytest.raises(NoServer, match=rf"{gone.url}: ConnectError"):
        remote(gone.url)


@pytest.mark.parametrize(
    "replaced",
    [{}, {"replaced": (404, {})}, {"replaced": (200, [])}, {"tokens": OTHER}, {"weights": "other"}],
)
def test_a_restored_server_fits_as_at_the_start(loopback, replaced):
    first, other = Scripted(loopback), Scripted(loopback)
    found = remote(f"{first.url},{other.url}")
    for name, value in replaced.items():
        setattr(other, name, value)
    found.teachers[0].remove(other.url, "gone")
    asked = len(other.calls)
    with pytest.raises(NoServer):  # neither has scores
        found.score(ragged_rollouts(1), 4, 1.0)
    assert any("/score" in str(call) for call in other.calls[asked:]) == (not replaced)


def test_our_servers_answer_for_the_weights_that_they_had(paths, serve):
    first, same, other = serve(paths[0]), serve(paths[0]), serve(paths[1])
    found = remote(f"{first.url},{same.url},{other.url}", other.url)
    removed = found.teachers[0].removed
    assert re.search("holds weights .*, the teacher's first server holds", removed[other.url])
    expected = found.score(rollouts := ragged_rollouts(1), 4, 1.0)
    first.become(paths[1])
    assert_same(found.score(rollouts, 4, 1.0), expected)
    assert "status 400: ValueError: this server holds the weights" in removed[first.url]


LOGPS_NS = torch.tensor([[0.5, 0.25]] * 2).log()
GOOD = {
    "ids_NS": torch.tensor([[4, 3], [2, 1]], dtype=torch.int32),
    "logps_NS": LOGPS_NS,
    "token_logps_N": LOGPS_NS[:, 0],
    "dropped": torch.tensor(0),
}
BAD = {
    "one row for all": {"ids_NS": torch.tensor([[4, 3]], dtype=torch.int32)},
    "fewer entries": {"ids_NS": torch.tensor([[4], [2]], dtype=torch.int32)},
    "one token's own": {"token_logps_N": torch.tensor([-1.0])},
    "positive": {"logps_NS": torch.full((2, 2), 5.0)},
    "positive own": {"token_logps_N": torch.full((2,), 5.0)},
    "a mass of 2": {"logps_NS": torch.zeros(2, 2)},
    "NaN": {"logps_NS": torch.full((2, 2), torch.nan)},
    "all empty": {"logps_NS": torch.full((2, 2), -torch.inf)},
    "an id twice": {"ids_NS": torch.tensor([[4, 4], [2, 1]], dtype=torch.int32)},
    "negative ids": {"ids_NS": torch.tensor([[4, -3], [2, 1]], dtype=torch.int32)},
    "float ids": {"ids_NS": torch.tensor([[4.0, 3.0], [2.0, 1.0]])},
    "a negative count": {"dropped": torch.tensor(-1)},
}


@pytest.mark.parametrize("changes", BAD.values(), ids=BAD)
def test_a_bad_answer_is_never_taken(changes):
    """test_servers.py tests that its server is removed and another one is asked."""
    assert unpack_answer(pack(**GOOD), 2, 2)[0].tolist() == [[4, 3], [2, 1]]
    with pytest.raises(ValueError, match=next(iter(changes))):
        unpack_answer(pack(**GOOD | changes), 2, 2)


@pytest.mark.parametrize("content", [pack(**GOOD)[:-7], b"<html>busy</html>", b"", save({"a": LOGPS_NS})])
def test_what_is_no_answer_is_never_taken(content):
    with pytest.raises((KeyError, SafetensorError)):
        unpack_answer(content, 2, 2)


ROLLOUTS = ragged_rollouts(2)
N_TOKENS = sum(len(rollout.response_ids) for rollout in ROLLOUTS)
REQUEST = load(pack_request(ROLLOUTS))


def changed(**changes: torch.Tensor) -> bytes:
    return save(REQUEST | changes)


def int32(*values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_REQUESTS = [
    ("score?kappa=4", changed(tokens=int32(1, 2, 3)), "lengths"),
    ("score?kappa=4", changed(tokens=REQUEST["tokens"].float()), "tokens is torch.float32"),
    ("score?kappa=4", changed(tokens=REQUEST["tokens"] + VOCABULARY), "tokens holds ids outside"),
    ("score?kappa=4", changed(tokens=REQUEST["tokens"] - VOCABULARY), "tokens holds ids outside"),
    ("score?kappa=4", changed(tokens=int32(1, 2), lengths=int32([3, -1])), "lengths"),
    ("score?kappa=4", changed(tokens=int32(1, 2), lengths=int32([0, 2])), "lengths has an empty prompt"),
    ("score?kappa=4", changed(lengths=int32([3])), "lengths is torch.int32"),
    ("score?kappa=4", changed(loss_mask=torch.ones(N_TOKENS - 1).bool()), "loss_mask is torch.bool"),
    ("score?kappa=4", b"not safetensors", "SafetensorError: "),
    ("score?kappa=4", changed()[:-5], "SafetensorError: "),
    ("score?kappa=-1", changed(), "kappa is -1"),
    ("score?kappa=100000", changed(), "kappa is 100000"),
    ("score?kappa=4&temperature=1e-300", changed(), "temperature is 1e-300"),
    ("score?kappa=4&temperature=nan", changed(), "temperature is nan"),
    ("tokenize", b'{"prompt": 3}', "prompt is not a text"),
    ("tokenize", b"[" * 100_000, "RecursionError: "),
    ("tokenize", b'{"prompt": "' + b"a" * (1 << 21) + b'"}', "prompt is not a text"),
]


@pytest.fixture
def no_collection():
    """Keep the garbage collector from running finalizers at the recursion limit, where they fail."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(("path", "content", "message"), BAD_REQUESTS, ids=range(len(BAD_REQUESTS)))
def test_what_is_no_request_is_answered_by_400(urls, path, content, message):
    answer = httpx.post(f"{urls[0]}/{path}", content=content)
    assert answer.status_code == 400 and message in answer.text


def test_a_request_that_is_cut_or_too_large_is_no_error(paths, serve, urls, monkeypatch):
    gone = AsyncMock(return_value={"type": "http.disconnect"})
    scope = {"type": "http", "method": "POST", "path": "/score", "headers": [], "query_string": b""}
    asyncio.run(serve(paths[0]).app(scope, gone, AsyncMock()))
    monkeypatch.setattr("smopd.engine.teacher_server.MAX_REQUEST_BYTES", 10_000)
    assert httpx.post(f"{urls[0]}/score", content=b"x" * 100_000).status_code == 413
    assert httpx.post(f"{urls[0]}/score", params={"kappa": "4"}, content=save(REQUEST)).is_success


def test_a_token_is_asked_for_where_one_is_set(paths, serve, monkeypatch):
    monkeypatch.setenv("SMOPD_SERVER_TOKEN", "right")
    url = serve(paths[0]).url
    assert httpx.get(f"{url}/health").status_code == 401
    assert remote(url).teachers[0].alive == [url]
    monkeypatch.setenv("SMOPD_SERVER_TOKEN", "wrong")
    with pytest.raises(NoServer, match="status 401: missing or wrong token"):
        remote(url)


def test_a_run_with_teachers_at_urls(paths, urls, tmp_path):
    """The metrics are those of a run with the same models by path."""

    def run(name: str, models: list[str]) -> dict[str, float]:
        taught = [{"model": m, "reward": r} for m, r in zip(models, ("accuracy", "format"), strict=False)]
        changes = {
            "model": {"factory": None, "path": paths[2]},
            "data": {"evaluation": None},
            "teachers": {"models": taught},
            "opd": {"kappa": 8},
            "loop": {"steps": 1},
            "runs": {"student": {"stage": "merge"}},
        }
        done = train_here(write_recipe(tmp_path, changes | {"name": name}, drop=("warm_start", "runs")))
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = metric_lines(tmp_path / "runs" / name / "student")
        return line

    here, there = run("paths", paths), run("urls", urls)
    assert here["teacher_0/top_kappa_mass"] != pytest.approx(here["teacher_1/top_kappa_mass"])
    for name in ("kl", "teacher_mass", "teacher_0/top_kappa_mass", "teacher_1/top_kappa_mass", "grad_norm"):
        assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name
