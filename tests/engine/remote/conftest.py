"""HTTP servers on the loopback with scripted answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import StreamRequestHandler, ThreadingTCPServer
from typing import Any

import pytest

from smopd.engine.remote import servers

Answer = tuple[int, Any] | None
"""Status and body (bytes or JSON); None closes the connection."""


class Loopback:
    """Calls `answer(path, body)` for each request, under a lock unless `parallel`; a GET has no body."""

    def __init__(self, answer: Callable[[str, bytes], Answer], *, parallel: bool = False):
        self.calls: list[str] = []
        lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                with nullcontext() if parallel else lock:
                    outer.calls.append(self.path)
                    found = answer(self.path, body)
                if found is None:
                    self.connection.close()
                    return
                status, content = found
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        outer = self
        self.serve(ThreadingHTTPServer(("127.0.0.1", 0), Handler))

    def serve(self, server: ThreadingTCPServer) -> None:
        self.server = server
        self.server.daemon_threads = True
        self.server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients may leave
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class Raw(Loopback):
    """Answers each connection with the raw bytes of `write(send)`."""

    def __init__(self, write: Callable[[Callable[[bytes], None]], None]):
        class Handler(StreamRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    self.request.recv(1 << 16)
                    write(self.request.sendall)

        self.serve(ThreadingTCPServer(("127.0.0.1", 0), Handler))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"REQUEST_SECONDS": 20.0, "RETRIES": 2, "BACKOFF_SECONDS": 0.01, "CONCURRENCY": 2}
    for name, value in limits.items():
        monkeypatch.setattr(servers, name, value)


@pytest.fixture
def loopback() -> Iterator[Callable[..., Loopback]]:
    made: list[Loopback] = []

    def make(answer: Callable, *, kind: type[Loopback] = Loopback, **options: Any) -> Loopback:
        made.append(kind(answer, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()
