"""Fixtures and reporting shared by all tests."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# What takes longest comes first: at the end of a run a file of minutes would leave the other workers idle.
FIRST = (
    "kernels/offline/test_offline.py",
    "smopd/run/test_launch.py",
    "smopd/run/test_resume.py",
    "kernels/cpp/test_cpp_clones.py",
    "kernels/conformance/test_loss.py",
    "kernels/conformance/test_forward_kl.py",
    "test_packaging.py",
    "smopd/run/test_invariance.py",
    "integrations/test_trl_ranks.py",
    "engine/student/test_student.py",
    "smopd/config/test_recipes.py",
    "smopd/run/test_rlla_scratch.py",
    "smopd/run/test_train.py",
    "integrations/test_trl_example.py",
    "kernels/conformance/test_loss_hostile.py",
    "kernels/conformance/test_topk.py",
    "kernels/conformance/test_mixture.py",
    "kernels/conformance/test_advantages.py",
    "kernels/triton/test_triton_large.py",
    "bench/test_bench.py",
    # the engines'
    "smopd/run/test_invariance_deepspeed.py",
    "engine/vllm/test_vllm_sync.py",
    "engine/vllm/test_vllm_remote.py",
    "integrations/test_trl_deepspeed.py",
    "smopd/run/test_engines.py",
    "engine/student/test_deepspeed.py",
    "engine/vllm/test_vllm_teachers.py",
)
MAX_THREADS = 2  # a test's tensors are small; more threads only slow it down and its neighbours


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device, or uses the one that is there")
    config.addinivalue_line("markers", "huge: takes tens of gigabytes of a GPU; make gpu runs it by itself")
    config.addinivalue_line("markers", "slow: takes more than about five seconds; make check leaves it out")
    config.addinivalue_line("markers", "unproven: not seen to pass yet; SMOPD_UNPROVEN=1 runs it")
    config.addinivalue_line("markers", "xdist_group(name): pytest-xdist runs a group's tests in one process")
    if "SMOPD_TEST_UNTIL" in os.environ:
        limit_time(float(os.environ["SMOPD_TEST_UNTIL"]))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with suppress(ImportError):  # a GPU machine may have pytest alone
        from hypothesis import HealthCheck, settings

        any_machine = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.register_profile("search", any_machine)  # --hypothesis-profile search: others each time
        settings.register_profile("same examples", any_machine, derandomize=True)
        settings.load_profile("same examples")
    os.environ.setdefault("OMP_NUM_THREADS", str(min(MAX_THREADS, os.cpu_count() or 1)))
    if not has_gpu():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, which decides then


@cache
def has_gpu() -> bool:
    """Without importing torch where no driver is there: many tests need none, and it takes seconds."""
    if not any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        return False
    import torch

    return torch.cuda.is_available()


def place(item: pytest.Item) -> int:
    """The item's place in FIRST, or behind it."""
    file = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
    return FIRST.index(file) if file in FIRST else len(FIRST)


def of_triton(item: pytest.Item) -> bool:
    """A file of Triton's own, or a test of all backends with Triton's name among its parameters."""
    parameters = (
        item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    )
    return item.path.name.startswith("test_triton_") or parameters.get("backend") == "triton"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=place)
    if os.environ.get("SMOPD_UNPROVEN") != "1":
        for item in items:
            if item.get_closest_marker("unproven"):
                item.add_marker(pytest.mark.skip(reason="unproven yet (SMOPD_UNPROVEN=1 runs it)"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    native = [item for item in items if of_triton(item) and item not in marked]
    if not (marked or native):
        return
    if has_gpu():
        for item in native:
            item.add_marker(pytest.mark.gpu)
        if "SMOPD_TEST_UNTIL" in os.environ:  # first what runs nowhere else
            first = set(marked)
            items.sort(key=lambda item: item not in first)
    else:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


TIME_IS_UP = "the time was up (SMOPD_TEST_UNTIL)"
may_be_cut = 0  # how many fixtures and tests are under way: nothing of pytest's own is ever cut


def limit_time(until: float) -> None:
    """What is not finished at SMOPD_TEST_UNTIL, in seconds since 1970, is skipped, and counted."""

    def cut(*_: object) -> None:
        if may_be_cut:
            pytest.skip(TIME_IS_UP)

    signal.signal(signal.SIGALRM, cut)
    signal.setitimer(signal.ITIMER_REAL, max(until - time.time(), 1e-3), 5.0)


def pytest_unconfigure() -> None:
    if "SMOPD_TEST_UNTIL" in os.environ:  # an alarm kills a Python that has given up its handlers
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


@contextmanager
def cut_when_time_is_up() -> Iterator[None]:
    global may_be_cut
    may_be_cut += 1
    try:
        yield
    finally:
        may_be_cut -= 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    until = os.environ.get("SMOPD_TEST_UNTIL")
    if until is not None and time.time() > float(until):
        pytest.skip(TIME_IS_UP)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup() -> Generator[None, object, object]:
    with cut_when_time_is_up():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    with cut_when_time_is_up():
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped, one line for each reason."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reasons[reason.removeprefix("Skipped: ")] += 1
    if not reasons:
        return
    terminalreporter.section("skipped, by reason")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        terminalreporter.write_line(f"{count:4d}  {reason}")


@pytest.fixture(scope="session")
def repository_root() -> Path:
    """The root of the checkout that holds these tests."""
    return ROOT


@pytest.fixture(scope="session")
def data_set() -> Callable[[str], Path]:
    """Path of real data by its short name (`snips`, `rlla/test`) or its path in the folder of all data.

    Where a file of it is absent the test is skipped, or fails if SMOPD_REQUIRE_DATA=1. Of a whole data set
    the files that `python -m smopd.data fetch` downloads have to be there.
    """

    def find(name: str) -> Path:
        from smopd.data.catalogue import data_set, short_names
        from smopd.data.places import data_folder

        inside = short_names().get(name, name)
        whole = data_set(name.partition("/")[0])
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


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN or the largest integer, those too that C++ makes: what is not written shows."""
    import torch

    torch.set_deterministic_debug_mode("warn")  # the one mode in which torch fills new memory
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert bool(torch.empty(1000).isnan().all())
    yield
    torch.set_deterministic_debug_mode("default")
