"""Servers that are busy, die, hang, flood, refuse or come back: no request is lost."""

import gc
import os
import signal
import threading
import time

import pytest

from smopd.engine.errors import NoServer
from smopd.engine.remote import servers as module
from smopd.engine.remote.servers import Request, Servers, ServerUnavailable
from tests.engine.remote.conftest import Loopback, Raw
from tests.patience import HANG_SECONDS


def echo(path, body):
    return 200, body


def asked(servers, n=40, read=lambda url, item, answer: answer.text):
    return servers.map(lambda url, item: Request("/echo", content=str(item).encode()), range(n), read)


def answers(n=40):
    return [str(i) for i in range(n)]


def test_answers_come_in_order_from_all_servers_to_several_threads(loopback, caplog):
    each, found = [loopback(echo) for _ in range(2)], []
    servers = Servers([server.url for server in each])
    threads = [threading.Thread(target=lambda: found.append(asked(servers))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [answers()] * 4 and not servers.removed
    assert all(server.calls for server in each)
    assert sum(len(server.calls) for server in each) == 4 * 40
    gc.collect()
    assert not caplog.records  # asyncio logs exceptions that nobody reads


def test_a_busy_server_is_asked_again(loopback):
    busy = loopback(lambda path, body: ((429, 503, 200)[min(len(busy.calls), 3) - 1], body))
    servers = Servers([busy.url])
    assert asked(servers, 8) == answers(8)
    assert len(busy.calls) == 10 and not servers.removed


def test_requests_of_a_dying_server_go_to_the_others_and_it_is_restored(loopback, caplog):
    healthy = loopback(echo)
    dying = loopback(lambda path, body: None if path == "/echo" and len(dying.calls) > 3 else (200, body))
    gone = loopback(echo)
    gone.server.server_close()
    servers = Servers([dying.url, gone.url, healthy.url])
    assert asked(servers, 60) == answers(60)
    assert set(servers.removed) == {dying.url, gone.url}
    assert f"{dying.url} is removed" in caplog.text
    assert servers.restore() == [dying.url]
    assert list(servers.removed) == [gone.url] and f"{dying.url} is restored" in caplog.text


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n"


def sending(head, piece, pause):
    """Return a writer that sends `head` and then `piece` forever."""

    def write(send):
        send(head)
        while True:
            send(piece)
            time.sleep(pause)

    return write


def says(status, content=b"no"):
    return lambda path, body: (200, b"") if path == "/health" else (status, content)


UNREADABLE = {"no key": KeyError("no"), "deep": RecursionError("deep")}
UNREADABLE["unfit"] = ServerUnavailable("holds other weights")


def read(url, item, answer):
    if answer.text in UNREADABLE:
        raise UNREADABLE[answer.text]
    return answer.text


FAULTS = {  # answer, reason of removal, whether /health answers
    "busy for ever": (says(503), "/echo: status 503: no", True),
    "refused": (says(400), "/echo: status 400: no", True),
    "unprintable": (says(401, b"\x1b[2Jno"), "/echo: status 401: \ufffd[2Jno", True),
    "hangs up": (lambda path, body: None, "", False),
    "no key": (says(200, b"no key"), "gave a bad answer (KeyError: 'no')", True),
    "deep": (says(200, b"deep"), "gave a bad answer (RecursionError: deep)", True),
    "unfit": (says(200, b"unfit"), "holds other weights", True),
    "drips a body": (sending(HEAD + b"\r\n", b"x", 0.05), "no answer in 2 s", False),
    "drips headers": (sending(HEAD, b"x-a: b\r\n", 0.05), "no answer in 2 s", False),
    "says nothing": (sending(b"", b"", HANG_SECONDS), "no answer in 2 s", False),
    "floods": (sending(HEAD + b"\r\n", b"x" * (1 << 16), 0), "gave a bad answer (more than 1048576 b", False),
}


@pytest.mark.parametrize(("answer", "reason", "healthy"), FAULTS.values(), ids=FAULTS)
def test_a_server_that_fails_is_removed_and_its_requests_go_elsewhere(
    loopback, monkeypatch, answer, reason, healthy
):
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 1 << 20)
    raw = answer.__name__ == "write"
    bad, good = loopback(answer, kind=Raw if raw else Loopback), loopback(echo)
    monkeypatch.setattr(module, "REQUEST_SECONDS", 2.0)
    monkeypatch.setattr(module, "CONCURRENCY", 1)
    servers = Servers([bad.url, good.url])
    assert asked(servers, 12, read) == answers(12)
    assert list(servers.removed) == [bad.url] and servers.removed[bad.url].startswith(reason)
    assert bool(servers.bad_answers) == reason.startswith("gave a bad answer")
    if "status 4" in reason:
        assert bad.calls == ["/echo"], "it is not asked again"
    assert servers.restore() == ([bad.url] if healthy else [])
    monkeypatch.setattr(module, "MAX_ANSWER_BYTES", 1 << 40)  # a GET has a limit of its own
    alone = Servers([bad.url])
    with pytest.raises(NoServer) as raised:
        alone.each(Request("/echo"), lambda answer: read(bad.url, None, answer))
    assert str(raised.value).startswith(f"no server is left: {bad.url}: {reason}")


@pytest.mark.parametrize("urls", [[], ["http://a:1", "http://a:1/"]])
def test_urls_must_be_there_and_differ(urls):
    with pytest.raises(ValueError, match="urls"):
        Servers(urls)


def test_an_error_of_ours_is_raised_and_removes_nobody(loopback):
    servers = Servers([loopback(echo).url])

    def request(url, item):
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError, match="a mistake of ours"):
        servers.map(request, [1, 2, 3], lambda url, item, answer: answer)
    assert not servers.removed


def test_a_late_server_is_left_alone_and_longer_each_time(loopback, monkeypatch):
    released = threading.Event()
    hung = loopback(
        lambda path, body: (200, body) if path == "/health" or released.wait(HANG_SECONDS) else None,
        parallel=True,
    )
    monkeypatch.setattr(module, "REQUEST_SECONDS", 1.0)
    servers = Servers([hung.url])
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    for rest in (1.0, 2.0, 4.0):
        with pytest.raises(NoServer):
            asked(servers, 2)
        now += 0.9 * rest
        assert servers.restore() == []
        now += 0.2 * rest
        assert servers.restore() == [hung.url]
    released.set()


def test_what_interrupts_the_waiting_thread_ends_the_requests(loopback, monkeypatch):
    def interrupted(number, frame):
        raise KeyboardInterrupt

    slow = loopback(lambda path, body: time.sleep(0.2) or (200, body))
    monkeypatch.setattr(module, "CONCURRENCY", 1)
    servers = Servers([slow.url])
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
