"""A pytest plugin for GPUs: a broken CUDA context or a hang fails one test, not all later tests.

    python -m pytest -m gpu -n 8 -p tests.gpu_plugin tests/kernels

After a CUDA error that sticks every later test of the process fails too; a process that waits for the device
never comes back. Such a process ends, and pytest-xdist starts another worker for the other tests.
"""

import faulthandler
import os
import sys
from collections.abc import Generator

import pytest

TEST_SECONDS = 75.0  # a test with many compilations takes a minute
BROKEN_STATUS = 70


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=sys.__stderr__)  # needs no GIL
    try:
        result = yield
    finally:
        faulthandler.cancel_dump_traceback_later()
    if context_is_broken():
        if hasattr(item.config, "workerinput"):  # of pytest-xdist
            os._exit(BROKEN_STATUS)
        pytest.exit(f"the CUDA context is broken since {item.nodeid}", BROKEN_STATUS)
    return result


def context_is_broken() -> bool:
    """Return whether every CUDA call fails, as after an illegal access."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
