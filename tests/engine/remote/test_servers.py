"""Servers that are busy, die, come back or refuse: nothing that was asked is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer

import httpx
import pytest

import smopd.engine.remote.client as client_module
import smopd.engine.remote.servers as servers_module
from smopd.engine.errors import NoServer
from smopd.engine.remote.servers import Refused, RetryPolicy, Servers, ServerUnavailable
from tests.patience import HANG_SECONDS

QUICK = RetryPolicy(deadline_seconds=20.0, retries=2, backoff_seconds=0.01, concurrency=4)


class Scripted:
    """A loopback server; `script(count of calls, body)` gives a status, or None to hang up."""

    def __init__(self, script):
        self.calls = 0
        self.answered = Counter()
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                with lock:
                    outer.calls += 1
                    status = script(outer.calls, body)
                    outer.answered[status] += 1
                if status is None:
                    self.connection.close()
                    return
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def do_GET(self):
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def scripted():
    made = []

    def make(script):
        made.append(Scripted(script))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def echo(client, item):
    return client.post("/echo", content=str(item))


def text(answer, item):
    return answer.text


def asked(servers, n=40):
    return servers.map(echo, list(range(n)), text)


def test_answers_come_in_order_from_all_servers(scripted):
    each = [scripted(lambda count, body: 200) for _ in range(2)]
    servers = Servers([server.url for server in each], QUICK)
    assert asked(servers) == [str(i) for i in range(40)]
    assert all(server.calls for server in each)
    assert sum(server.calls for server in each) == 40


def test_a_busy_server_is_asked_again(scripted):
    busy = scripted(lambda count, body: 503 if count <= 2 else 200)
    servers = Servers([busy.url], RetryPolicy(retries=4, backoff_seconds=0.01, concurrency=2))
    assert asked(servers, 8) == [str(i) for i in range(8)]
    assert busy.answered == {503: 2, 200: 8}
    assert not servers.out


def test_what_a_dying_server_held_goes_to_the_others(scripted, caplog):
    healthy = scripted(lambda count, body: 200)
    dying = scripted(lambda count, body: 200 if count <= 3 else None)
    servers = Servers([dying.url, healthy.url], QUICK)
    assert asked(servers, 60) == [str(i) for i in range(60)]
    assert list(servers.out) == [dying.url]
    assert f"{dying.url} is taken out" in caplog.text
    assert servers.readmit() == [dying.url]
    assert not servers.out


def test_no_server_left_names_each_with_its_error(scripted):
    first, second = scripted(lambda count, body: 500), scripted(lambda count, body: None)
    servers = Servers([first.url, second.url], QUICK)
    with pytest.raises(NoServer) as raised:
        asked(servers, 5)
    assert f"{first.url}: status 500" in str(raised.value)
    assert second.url in str(raised.value)
    with pytest.raises(NoServer):
        servers.each(lambda client: client.post("/echo", content=""))


def test_a_server_that_is_not_there_is_taken_out(scripted):
    gone = scripted(lambda count, body: 200)
    gone.stop()
    healthy = scripted(lambda count, body: 200)
    servers = Servers([gone.url, healthy.url], QUICK)
    assert asked(servers, 10) == [str(i) for i in range(10)]
    assert list(servers.out) == [gone.url]
    assert servers.readmit() == []


def test_a_server_that_hangs_is_out_after_one_deadline(scripted):
    released = threading.Event()
    hung = scripted(lambda count, body: released.wait(60.0) and 200)
    well = scripted(lambda count, body: 200)
    servers = Servers([hung.url, well.url], RetryPolicy(deadline_seconds=1.0, retries=5, concurrency=1))
    assert asked(servers, 4) == [str(i) for i in range(4)]
    assert hung.calls == 1
    assert servers.out == {hung.url: "no answer in 1 s"}
    released.set()


def test_a_server_that_hung_is_left_alone_and_longer_each_time(scripted, monkeypatch):
    released = threading.Event()
    hung = scripted(lambda count, body: released.wait(60.0) and 200)
    servers = Servers([hung.url], RetryPolicy(deadline_seconds=1.0, retries=0, concurrency=2))
    now = 1000.0
    monkeypatch.setattr(servers_module, "monotonic", lambda: now)
    for rest in (1.0, 2.0, 4.0):
        with pytest.raises(NoServer):
            asked(servers, 2)
        now += 0.9 * rest
        assert servers.readmit() == []
        now += 0.2 * rest
        assert servers.readmit() == [hung.url]
    released.set()


def test_a_wrong_request_is_not_repeated(scripted):
    strict = [scripted(lambda count, body: 400 if body == "3" else 200) for _ in range(2)]
    with pytest.raises(Refused, match="/echo: status 400: 3"):
        asked(Servers([server.url for server in strict], QUICK), 6)
    assert [server.answered[400] for server in strict] == [1, 1]


@pytest.mark.parametrize("status", [400, 401, 404])
def test_what_one_server_refuses_and_another_answers_goes_on(scripted, status):
    refusing, healthy = scripted(lambda count, body: status), scripted(lambda count, body: 200)
    servers = Servers([refusing.url, healthy.url], QUICK)
    assert asked(servers, 12) == [str(i) for i in range(12)]
    assert list(servers.out) == [refusing.url]


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyError("no"), TypeError("no"), AttributeError("no"), IndexError("no")]
)
def test_a_bad_answer_takes_its_server_out_and_is_counted(scripted, error):
    odd, healthy = scripted(lambda count, body: 200), scripted(lambda count, body: 200)
    servers = Servers([odd.url, healthy.url], QUICK)

    def read(answer, item):
        if answer.url.port == httpx.URL(odd.url).port:
            raise error
        return answer.text

    assert servers.map(echo, list(range(12)), read) == [str(i) for i in range(12)]
    assert servers.bad_answers >= 1
    assert servers.out == {odd.url: f"gave a bad answer ({type(error).__name__}: {error})"}
    with pytest.raises(NoServer, match=type(error).__name__):
        Servers([odd.url], QUICK).map(echo, [1], read)


class Raw:
    """A server that answers each connection by `write(send)`, as nobody should."""

    def __init__(self, write):
        class Handler(StreamRequestHandler):
            def handle(self):
                with suppress(OSError):
                    self.request.recv(1 << 16)
                    write(self.request.sendall)

        self.server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n"


def trickle_body(send):
    send(HEAD + b"\r\n")
    while True:
        send(b"x")
        time.sleep(0.05)


def trickle_headers(send):
    send(HEAD)
    while True:
        send(b"x-a: b\r\n")
        time.sleep(0.05)


@pytest.mark.parametrize("write", [trickle_body, trickle_headers])
def test_a_server_that_trickles_is_late_by_the_clock(scripted, write):
    slow, healthy = Raw(write), scripted(lambda count, body: 200)
    servers = Servers([slow.url, healthy.url], RetryPolicy(deadline_seconds=1.0, retries=5, concurrency=1))
    begun = time.monotonic()
    assert asked(servers, 4) == [str(i) for i in range(4)]
    assert time.monotonic() - begun < HANG_SECONDS
    assert servers.out == {slow.url: "no answer in 1 s"}
    slow.stop()


def test_an_answer_has_a_largest_size(scripted, monkeypatch):
    monkeypatch.setattr(servers_module, "LARGEST_ANSWER", 1 << 20)
    sent = []

    def endless(send):
        send(HEAD + b"\r\n")
        while True:
            send(b"x" * (1 << 16))
            sent.append(1 << 16)

    large, healthy = Raw(endless), scripted(lambda count, body: 200)
    servers = Servers([large.url, healthy.url], QUICK)
    assert asked(servers, 4) == [str(i) for i in range(4)]
    assert "gave a bad answer (TooLarge: an answer of more than 1048576 bytes)" in servers.out[large.url]
    assert sum(sent) < 64 << 20
    large.stop()


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/"]])
def test_urls_must_be_there_and_differ(urls):
    with pytest.raises(ValueError, match="urls"):
        Servers(urls)


@pytest.mark.slow
def test_a_rollout_client_is_imported_without_vllm():
    script = "import sys; sys.modules['vllm'] = None; import smopd.engine.remote.rollout"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])


def test_an_answer_may_take_its_server_out(scripted):
    """A client that finds a server unfit says so, and what it asked is asked elsewhere."""
    unfit, healthy = (scripted(lambda count, body: 200) for _ in range(2))

    def ask(client, item):
        if client.url == unfit.url:
            raise ServerUnavailable("holds other weights")
        return echo(client, item)

    servers = Servers([unfit.url, healthy.url], QUICK)
    assert servers.map(ask, [1, 2, 3], text) == ["1", "2", "3"]
    assert servers.out == {unfit.url: "holds other weights"}


def test_clients_that_begin_at_once_share_one_loop(scripted, monkeypatch):
    """A connection belongs to the event loop that made it."""
    each = [scripted(lambda count, body: 200) for _ in range(4)]
    for _ in range(20):
        client_module._started.cache_clear()
        servers = Servers([server.url for server in each], QUICK)
        for _ in range(3):
            assert len(servers.each(lambda client: client.post("/echo", content="a"))) == 4
        assert not servers.out


def test_what_interrupts_the_waiting_thread_ends_the_others_soon(scripted):
    slow = scripted(lambda count, body: time.sleep(0.2) or 200)
    servers = Servers([slow.url], RetryPolicy(concurrency=1))
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            asked(servers, 500)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert slow.calls < 100


def interrupted(number, frame):
    raise KeyboardInterrupt
