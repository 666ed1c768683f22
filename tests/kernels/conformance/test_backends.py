"""Which backend has which operation: the suite leaves out nothing that exists."""

from __future__ import annotations

from smopd.kernels import dispatch
from tests.kernels import backends


def test_what_the_suite_does_not_ask_for_does_not_exist() -> None:
    named = {
        (backend, "advantages" if operation in dispatch.ADVANTAGE_OPS else operation)
        for backend in dispatch.BACKENDS
        for operation in dispatch.MODULES[backend]
    }
    every = {(backend, operation) for backend in backends.ALL for operation in backends.OPERATIONS}
    every -= {("triton split", "loss_rows")}  # a form of triton's
    assert named == every - backends.ABSENT
    for backend, operation in sorted(named):
        if backend != "triton":  # its import may not be possible here
            assert callable(backends.function(backend, operation))
