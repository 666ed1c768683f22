"""Headless Chromium for tests: one command that ends, or a page that is asked and pointed at.

The page is driven by Chromium's DevTools protocol over a pipe: JSON messages, each ended by a zero byte.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import HANG_SECONDS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH, HEIGHT = 1280, 900


def arguments(profile: Path) -> list[str]:
    return [
        str(BROWSER),
        *("--headless", "--disable-gpu", "--no-first-run"),
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        f"--user-data-dir={profile}",
        f"--window-size={WIDTH},{HEIGHT}",
    ]


def browse(page: Path, *options: str) -> str:
    command = [*arguments(page.parent / "profile"), "--virtual-time-budget=3000", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class Page:
    """A tab of a browser at the other end of two pipes."""

    def __init__(self, write: int, read: int):
        self._write, self._read = write, read
        self._begun, self._id, self._session = b"", 0, ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1,
                  mobile=False)  # fmt: skip

    def open(self, page: Path) -> None:
        self._ask("Page.enable")
        self._ask("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page, as JSON."""
        answer = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def point(self, x: float, y: float) -> None:
        """Moves the mouse."""
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._id += 1
        message = {"id": self._id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._id:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._begun:
            data = os.read(self._read, 1 << 16)
            assert data, "the browser has ended"
            self._begun += data
        message, _, self._begun = self._begun.partition(b"\0")
        return json.loads(message)


@contextmanager
def opened(page: Path, profile: Path) -> Iterator[Page]:
    """The page in a browser of its own."""
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Chromium reads commands from descriptor 3 and answers on 4: ends above both are not overwritten.
    above = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 5) for end in (theirs_in, theirs_out)]
    nothing = os.open(os.devnull, os.O_RDWR)
    process = os.posix_spawn(
        str(BROWSER),
        [*arguments(profile), "--remote-debugging-pipe"],
        os.environ,
        file_actions=[
            *((os.POSIX_SPAWN_DUP2, nothing, standard) for standard in (0, 1, 2)),
            *((os.POSIX_SPAWN_DUP2, end, number) for number, end in enumerate(above, start=3)),
        ],
        setsid=True,
    )
    for end in (theirs_in, theirs_out, nothing, *above):
        os.close(end)
    try:
        tab = Page(ours_out, ours_in)
        tab.open(page)
        yield tab
    finally:
        os.close(ours_out)
        os.close(ours_in)
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
