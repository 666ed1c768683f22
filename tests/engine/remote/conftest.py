from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.engine.remote.loopback import Loopback


@pytest.fixture
def loopback() -> Iterator[Callable[..., Loopback]]:
    made: list[Loopback] = []

    def make(answer, **options) -> Loopback:
        made.append(Loopback(answer, **options))
        return made[-1]

    yield make
    for server in made:
        server.stop()
