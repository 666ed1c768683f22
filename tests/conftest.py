"""Fixtures, markers and order of the tests."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# The slowest files run first, so that no worker is idle at the end.
FIRST = """
test_packaging.py test_launch.py test_resume.py test_loss.py test_invariance.py test_merged_start.py
test_tutorial.py test_rlla_scratch.py test_hostile.py test_cpp_clones.py test_offline.py test_train.py
test_topk.py test_ended.py test_fuzz.py test_extending.py test_vllm_remote.py test_vllm_sync.py
test_vllm_rollout.py test_engines.py test_deepspeed.py
""".split()  # noqa: SIM905
MAX_THREADS = 2  # tensors in tests are small: more threads are slower


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device, or uses the one that is there")
    config.addinivalue_line("markers", "huge: takes tens of gigabytes of a GPU; make gpu runs it by itself")
    config.addinivalue_line("markers", "slow: takes more than about five seconds; make check leaves it out")
    config.addinivalue_line("markers", "xdist_group(name): pytest-xdist runs a group's tests in one process")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with suppress(ImportError):  # a GPU machine may have only pytest
        from hypothesis import HealthCheck, settings

        any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("search", any_machine)  # --hypothesis-profile search: random examples
        settings.register_profile("same examples", any_machine, derandomize=True)
        settings.load_profile("same examples")
    os.environ.setdefault("OMP_NUM_THREADS", str(min(MAX_THREADS, os.cpu_count() or 1)))
    if not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"  # triton reads it on import


@cache
def has_gpu() -> bool:
    """Return whether there is a GPU; does not import torch, which takes seconds, without a driver."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


def of_triton(item: pytest.Item) -> bool:
    """Return whether a test is for Triton, by its file or its `backend` parameter."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return item.path.name.startswith("test_triton_") or str(parameters.get("backend")).startswith("triton")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    for item in items:
        if has_gpu():
            if of_triton(item):
                item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()  # a collection, of which a run has several, takes a quarter second less without the imported


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get("SMOPD_TEST_UNTIL", "inf")):
        pytest.skip("the time was up (SMOPD_TEST_UNTIL)")


@pytest.fixture(scope="module")
def device() -> Iterator[Any]:
    """The torch.device of a process group of this process alone."""
    from smopd.engine import distributed

    with distributed.process_group() as device:
        yield device


@pytest.fixture(scope="session")
def data_set() -> Callable[[str], Path]:
    """Return a function that finds real data by short name (`snips`, `rlla/test`) or path in the data folder.

    Where a file of it is absent the test is skipped, or fails if SMOPD_REQUIRE_DATA=1. Of a whole data set
    the files that `python -m smopd.data fetch` downloads have to be there.
    """

    def find(name: str) -> Path:
        from smopd.data.places import catalogue, data_folder, short_names

        inside = short_names().get(name, name)
        whole = catalogue()[name.partition("/")[0]]
        listed = [file.path for file in whole.files if file.upstream]
        asked = listed if inside == whole.name else [inside]
        absent = next((path for path in asked if not (data_folder() / path).is_file()), None)
        if absent is None:
            return data_folder() / inside
        reason = (
            f"real data is absent: no {data_folder() / absent} "
            f"(python -m smopd.data fetch {whole.name}, or SMOPD_DATA)"
        )
        if os.environ.get("SMOPD_REQUIRE_DATA") == "1":
            pytest.fail(f"SMOPD_REQUIRE_DATA=1: {reason}")
        pytest.skip(reason)

    return find
