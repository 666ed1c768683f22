"""Servers that are busy, die, hang, flood, come back or refuse: no request is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from socketserver import StreamRequestHandler, ThreadingTCPServer

import pytest

from smopd.engine.errors import NoServer
from smopd.engine.remote import client as client_module
from smopd.engine.remote import servers as servers_module
from smopd.engine.remote.client import Request, ServerUnavailable
from smopd.engine.remote.servers import RetryPolicy, Servers
from tests.patience import HANG_SECONDS

QUICK = RetryPolicy(deadline_seconds=20.0, retries=2, backoff_seconds=0.01, concurrency=4)
IMPATIENT = RetryPolicy(deadline_seconds=1.0, retries=5, concurrency=1)
HEALTH = Request("/health")


def echo(path, body):
    return 200, body


def asked(servers, n=40, read=lambda answer, item: answer.text):
    return servers.map(lambda url, item: Request("/echo", content=str(item).encode()), range(n), read)


def answers(n=40):
    return [str(i) for i in range(n)]


def test_answers_come_in_order_from_all_servers(loopback):
    each = [loopback(echo) for _ in range(2)]
    assert asked(Servers([server.url for server in each], QUICK)) == answers()
    assert all(server.calls for server in each)
    assert sum(len(server.calls) for server in each) == 40


def test_a_busy_server_is_asked_again(loopback):
    busy = loopback(lambda path, body: (503 if len(busy.calls) <= 2 else 200, body))
    servers = Servers([busy.url], RetryPolicy(retries=4, backoff_seconds=0.01, concurrency=2))
    assert asked(servers, 8) == answers(8)
    assert len(busy.calls) == 10 and not servers.removed


def test_requests_of_a_dying_server_go_to_the_others_and_it_is_restored(loopback, caplog):
    healthy = loopback(echo)
    dying = loopback(lambda path, body: None if path == "/echo" and len(dying.calls) > 3 else (200, body))
    gone = loopback(echo)
    gone.server.server_close()
    servers = Servers([dying.url, gone.url, healthy.url], QUICK)
    assert asked(servers, 60) == answers(60)
    assert set(servers.removed) == {dying.url, gone.url}
    assert f"{dying.url} is removed" in caplog.text
    assert servers.restore() == [dying.url]
    assert list(servers.removed) == [gone.url] and f"{dying.url} is restored" in caplog.text


def test_no_server_left_names_each_with_its_error(loopback):
    first, second = loopback(lambda *_: (500, b"\x1b[2Jno")), loopback(lambda *_: None)
    servers = Servers([first.url, second.url], QUICK)
    with pytest.raises(NoServer) as raised:
        asked(servers, 5)
    message = str(raised.value)
    assert f"{first.url}: /echo: status 500: " in message and second.url in message and message.isprintable()
    with pytest.raises(NoServer):
        servers.each(HEALTH, bool)


@pytest.mark.parametrize("status", [400, 401, 404, 413])
def test_a_refused_request_is_not_repeated_and_goes_elsewhere(loopback, status):
    refusing, healthy = loopback(lambda *_: (status, b"no")), loopback(echo)
    servers = Servers([refusing.url, healthy.url], RetryPolicy(concurrency=1))
    assert asked(servers, 12) == answers(12)
    assert servers.removed == {refusing.url: f"/echo: status {status}: no"} and len(refusing.calls) == 1
    with pytest.raises(NoServer, match=f"status {status}: no"):
        asked(Servers([refusing.url], QUICK), 1)
    assert list(Servers([refusing.url, healthy.url], QUICK).each(HEALTH, bool)) == [healthy.url]


@pytest.mark.parametrize(
    "error", [KeyError("no"), RecursionError("deep"), OverflowError("huge"), RuntimeError("no id")]
)
def test_whatever_reading_an_answer_raises_removes_its_server(loopback, error):
    odd, healthy = loopback(lambda *_: (200, b"odd")), loopback(echo)
    servers = Servers([odd.url, healthy.url], QUICK)

    def read(answer, item):
        if answer.text == "odd":
            raise error
        return answer.text

    assert asked(servers, 12, read) == answers(12)
    assert servers.bad_answers >= 1
    assert servers.removed == {odd.url: f"gave a bad answer ({type(error).__name__}: {error})"}


def test_a_reader_may_find_a_server_unfit(loopback):
    unfit = loopback(echo)

    def read(answer):
        raise ServerUnavailable("holds other weights")

    servers = Servers([unfit.url], QUICK)
    with pytest.raises(NoServer, match=f"{unfit.url}: holds other weights"):
        servers.each(HEALTH, read)
    assert servers.bad_answers == 0


def test_an_error_of_ours_is_raised_and_removes_nobody(loopback):
    servers = Servers([loopback(echo).url], QUICK)

    def request(url, item):
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError, match="a mistake of ours"):
        servers.map(request, [1, 2, 3], lambda answer, item: answer)
    assert not servers.removed


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


@pytest.fixture
def raw():
    made = []

    def make(write):
        made.append(Raw(write))
        return made[-1]

    yield make
    for each in made:
        each.server.shutdown()
        each.server.server_close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n"


def drip_body(send):
    send(HEAD + b"\r\n")
    while True:
        send(b"x")
        time.sleep(0.05)


def drip_headers(send):
    send(HEAD)
    while True:
        send(b"x-a: b\r\n")
        time.sleep(0.05)


def say_nothing(send):
    time.sleep(HANG_SECONDS)


@pytest.mark.parametrize("write", [drip_body, drip_headers, say_nothing])
def test_a_server_that_drips_or_hangs_is_late_by_the_clock(loopback, raw, monkeypatch, write):
    monkeypatch.setattr(servers_module, "HEALTH_SECONDS", 0.5)
    slow, healthy = raw(write), loopback(echo)
    servers = Servers([slow.url, healthy.url], IMPATIENT)
    begun = time.monotonic()
    assert asked(servers, 4) == answers(4)
    assert servers.removed == {slow.url: "no answer in 1 s"}
    time.sleep(1.0)
    assert servers.restore() == []
    assert time.monotonic() - begun < HANG_SECONDS


def test_a_late_server_is_left_alone_and_longer_each_time(loopback, monkeypatch):
    released = threading.Event()
    hung = loopback(
        lambda path, body: (200, body) if path == "/health" or released.wait(HANG_SECONDS) else None,
        parallel=True,
    )
    servers = Servers([hung.url], RetryPolicy(deadline_seconds=1.0, retries=0, concurrency=2))
    now = 1000.0
    monkeypatch.setattr(servers_module, "monotonic", lambda: now)
    for rest in (1.0, 2.0, 4.0):
        with pytest.raises(NoServer):
            asked(servers, 2)
        now += 0.9 * rest
        assert servers.restore() == []
        now += 0.2 * rest
        assert servers.restore() == [hung.url]
    released.set()


def test_an_answer_has_a_largest_size(loopback, raw, monkeypatch):
    for name in ("MAX_ANSWER_BYTES", "MAX_STATUS_BYTES"):
        monkeypatch.setattr(client_module, name, 1 << 20)
    sent = []

    def flood(send):
        send(HEAD + b"\r\n")
        while True:
            send(b"x" * (1 << 16))
            sent.append(1 << 16)

    large, healthy = raw(flood), loopback(echo)
    servers = Servers([large.url, healthy.url], QUICK)
    assert asked(servers, 4) == answers(4)
    assert servers.removed == {large.url: "gave a bad answer (more than 1048576 bytes)"}
    assert servers.restore() == []
    assert sum(sent) < 128 << 20


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/"]])
def test_urls_must_be_there_and_differ(urls):
    with pytest.raises(ValueError, match="urls"):
        Servers(urls)


def test_clients_of_several_threads_share_one_loop(loopback):
    """A connection belongs to the event loop that made it."""
    client_module._started_loop.cache_clear()
    servers = Servers([loopback(echo).url for _ in range(2)], QUICK)
    found = []
    threads = [threading.Thread(target=lambda: found.append(asked(servers, 8))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [answers(8)] * 4 and not servers.removed


def test_what_interrupts_the_waiting_thread_ends_the_requests(loopback):
    slow = loopback(lambda path, body: time.sleep(0.2) or (200, body))
    servers = Servers([slow.url], RetryPolicy(concurrency=1))
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1))
    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            asked(servers, 500)
    finally:
        signal.signal(signal.SIGUSR1, before)
    n_calls = len(slow.calls)
    time.sleep(0.6)
    assert len(slow.calls) <= n_calls + 1 < 100


def interrupted(number, frame):
    raise KeyboardInterrupt
