"""Rewards in worker processes: failures cost their own dimension, and no process is left behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from smopd.config.settings import Reward
from smopd.rewards.pool import RewardError, RewardPool
from tests.patience import HANG_SECONDS, MISSED_SECONDS

FUNCTIONS = """
import asyncio, os, subprocess, sys, time

CHILD = [sys.executable, "-c", "import time; time.sleep(600)"]

def length(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]

def narrow(prompts, completions, bonus):
    return [len(completion) + b for completion, b in zip(completions, bonus)]

def scaled(prompts, completions, *, scale, **columns):
    import numpy
    return scale * numpy.array([len(completion) for completion in completions], dtype=numpy.float32)

loops = []

async def loop_count(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    loops.append(asyncio.get_running_loop())
    return [float(len(set(loops)))] * len(completions)

def has_torch(prompts, completions, **columns):
    return ["torch" in sys.modules or "transformers" in sys.modules] * len(completions)

def meets(prompts, completions, *, me, other):
    open(me, "w").close()
    while not os.path.exists(other):
        time.sleep(0.01)
    return [1.0] * len(completions)

def runs(prompts, completions, *, code, **columns):
    names = {**globals(), **locals()}
    exec(code, names)
    return names["result"]

def hangs(prompts, completions, **columns):
    with open("pids", "w") as file:
        file.write(f"{os.getpid()} {subprocess.Popen(CHILD).pid}")
    import ctypes
    ctypes.PyDLL(None).sleep(600)  # never gives the interpreter up

def hangs_once(prompts, completions, **columns):
    if os.path.exists("seen"):
        return [1.0] * len(completions)
    open("seen", "w").close()
    time.sleep(600)

def pid(prompts, completions, **columns):
    with open("pids", "w") as file:
        file.write(f"{os.getpid()} {subprocess.Popen(CHILD, start_new_session=True).pid}")
    return [float(os.getpid())] * len(completions)

def answers_later(prompts, completions, **columns):
    if os.fork() == 0:
        time.sleep(0.3)
        import json, struct
        data = struct.pack("<Q", int(prompts[0])) + json.dumps({"values": [9.0] * len(completions)}).encode()
        os.write(int(sys.argv[2]), struct.pack("!i", len(data)) + data)
        os._exit(0)
    time.sleep(0.1)
    return [float(prompts[0])] * len(completions)

def makes(**kwargs):
    return length

async def makes_later(completions, **kwargs):
    return length

def makes_each(solution_str):
    return length

def no_completions(prompts):
    return []

number = 3
"""


@pytest.fixture(autouse=True)
def functions(tmp_path, monkeypatch):
    """Modules in the current folder."""
    (tmp_path / "reward_functions.py").write_text(FUNCTIONS)
    (tmp_path / "broken_module.py").write_text("import json\n1 / 0\n")
    monkeypatch.chdir(tmp_path)


def pool_of(*names, **settings) -> RewardPool:
    return RewardPool([Reward(name=name, function=f"reward_functions:{name}") for name in names], **settings)


def pool_running(codes, **settings) -> RewardPool:
    """Rewards that run a code, which assigns `result`, and a good one at the end."""
    runs = {"function": "reward_functions:runs"}
    bad = [Reward(name=name, **runs, kwargs={"code": code}) for name, code in codes.items()]
    return RewardPool([*bad, Reward(name="good", function="reward_functions:length")], **settings)


def score(pool, completions=("a", "bb"), **columns):
    return pool.score(["q"] * len(completions), completions, columns)


def unscorable(batch, name):
    return {kind: count for kind, count in batch.failures[name].items() if count}


def pids() -> list[int]:
    """The processes that a function has written down."""
    path = Path("pids")
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def gone(pid: int) -> bool:
    """Whether the process ends soon: it does not exist any more, or waits to be reaped by another parent."""
    for _ in range(1200):  # a minute: what is not killed sleeps for ten
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")


def test_rewards_get_their_columns_and_are_kept_in_order():
    names = ("narrow", "scaled", "loop_count", "has_torch")
    rewards = [Reward(name=name, function=f"reward_functions:{name}") for name in names]
    rewards[1] = Reward(name="scaled", function="reward_functions:scaled", kwargs={"scale": 0.5})
    with RewardPool(rewards) as pool:
        for _ in range(2):  # an async reward keeps its loop
            batch = score(pool, bonus=[10, 20], other=[object, b"x"], scale=[9, 9])
            np.testing.assert_array_equal(batch.rewards_RK, [[11, 0.5, 1, 0], [22, 1, 1, 0]])
        assert batch.rewards_RK.dtype == torch.float64 and batch.names == names
        assert batch.last_errors == {} and not any(unscorable(batch, name) for name in names)
        with pytest.raises(RewardError, match=r"'narrow': .*:narrow takes 'bonus', .* there are a, b"):
            pool.require_columns(["a", "b"])
        batch = score(pool, completions=["x" * 3_000_000] * 3 + ["y"] * 50_000, bonus=[0] * 50_003)
        assert batch.rewards_RK[:3, 0].tolist() == [3e6] * 3 and len(batch.rewards_RK) == 50_003


def test_responses_to_a_prompt_share_no_value():
    chat, facts = [1.0], [[2.0]]
    takes = "result = [prompt.pop() + row[0].pop() for prompt, row in zip(prompts, columns['facts'])]"
    with pool_running({"takes": takes}) as pool:
        batch = pool.score([chat] * 2, ["a", "bb"], {"facts": [facts] * 2})
        assert batch.rewards_RK[:, 0].tolist() == [3.0, 3.0]


def test_rewards_run_at_once():
    pairs = [{"me": "one", "other": "two"}, {"me": "two", "other": "one"}]
    rewards = [Reward(name=each["me"], function="reward_functions:meets", kwargs=each) for each in pairs]
    with RewardPool(rewards, deadline_seconds=HANG_SECONDS) as pool:
        assert score(pool).rewards_RK.tolist() == [[1.0, 1.0], [1.0, 1.0]]


FAILURES = {
    "raises": ("raise KeyError('no such city')", "exception", "KeyError: 'no such city'"),
    "exits": ("sys.exit(3)", "exception", "SystemExit: 3"),
    "quits": ("os._exit(7)", "worker_died", "exit code 7"),
    "crashes": ("os.kill(os.getpid(), 11)", "worker_died", "signal 11"),
    "short": ("result = [1.0]", "length", "returned 1 values, expected 2"),
    "iterator": ("result = iter([1.0])", "exception", "returned list_iterator, expected a list of"),
    "memory": ("bytearray(8 << 30)", "exception", "MemoryError"),
}


def test_a_failure_costs_its_own_dimension():
    codes = {name: code for name, (code, _, _) in FAILURES.items()}
    with pool_running(codes, memory_bytes=4 << 30) as pool:
        for _ in range(2):
            batch = score(pool)
            assert batch.rewards_RK[:, :-1].isnan().all()
            assert batch.rewards_RK[:, -1].tolist() == [1.0, 2.0] and not unscorable(batch, "good")
            for name, (_, kind, message) in FAILURES.items():
                assert unscorable(batch, name) == {kind: 2} and message in batch.last_errors[name]
        died = {name: 3 * (kind == "worker_died") for name, (_, kind, _) in FAILURES.items()}
        assert batch.restarts == {**died, "good": 0}, "each call is made twice"


@pytest.mark.parametrize("name", ["makes", "makes_later", "makes_each"])
def test_a_factory_that_looks_like_a_reward_ends_the_first_call(name):
    said = f"'{name}': .*:{name} returned a function.*is a factory, .* name"
    with pool_of(name) as pool, pytest.raises(RewardError, match=said):
        pool.probe()
        score(pool)


def test_values_that_are_no_finite_number():
    values = "[1, None, float('nan'), float('inf'), '2.0', True, 10**400, object()]"
    code = f"result = (each for each in {values})"
    with pool_running({"bad": code}) as pool:
        batch = score(pool, completions=["x"] * 8)
        np.testing.assert_array_equal(batch.rewards_RK[:, 0], [1.0, *[np.nan] * 4, 1.0, *[np.nan] * 2])
        assert unscorable(batch, "bad") == {"none": 1, "nonfinite": 5}
        assert "5 values are not finite numbers" in batch.last_errors["bad"]


def test_a_column_that_no_row_of_a_batch_has_is_none():
    with pool_running({"bad": "result = [float(note is None) for note in columns['note']]"}) as pool:
        pool.require_columns(["note"])
        assert score(pool).rewards_RK[:, 0].tolist() == [1.0, 1.0]
        with pytest.raises(RewardError, match="the columns of the data cannot be sent to rewards"):
            score(pool, note=[print, lambda: None])


SAYS = """
os.write(1, b'raw'); print(sys.stdin.read(), file=sys.stderr)
before = 0
while (now := os.fstat(1).st_size) >= before:  # until it is emptied
    before = now; print('x' * 100_000, flush=True); time.sleep(0.02)
result = [1.0] * 2
"""


def test_output_goes_to_a_log_and_without_end_fills_no_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("smopd.rewards.pool.LOG_BYTES", 1_000_000)
    log = tmp_path / "rewards.log"
    with pool_running({"says": SAYS}, log_path=log, deadline_seconds=60.0) as pool:
        assert score(pool).rewards_RK[:, 0].tolist() == [1.0, 1.0]
        assert log.stat().st_mode & 0o777 == 0o600


@needs_proc
def test_a_hang_is_killed_with_its_children(monkeypatch):
    monkeypatch.setattr("smopd.rewards.pool.ATTEMPTS", 1)
    with pool_of("hangs", "length", deadline_seconds=MISSED_SECONDS) as pool:
        pool.probe()
        batch = score(pool)
        assert unscorable(batch, "hangs") == {"timeout": 2}
        assert f"did not return within {MISSED_SECONDS:g} s" in batch.last_errors["hangs"]
        assert batch.rewards_RK[:, 1].tolist() == [1.0, 2.0]
        assert len(pids()) == 2 and all(map(gone, pids()))


def test_the_call_after_a_hang_has_a_new_worker(caplog):
    with pool_of("hangs_once", deadline_seconds=MISSED_SECONDS) as pool:
        pool.probe()
        batch = score(pool)
        assert unscorable(batch, "hangs_once") == batch.last_errors == {}, "the second call is answered"
        assert "reward 'hangs_once' is called again: reward_functions:hangs_once: did not" in caplog.text
        batch = score(pool)
        assert batch.rewards_RK.tolist() == [[1.0], [1.0]] and batch.restarts == {"hangs_once": 1}


@needs_proc
def test_a_dead_worker_is_replaced_and_closing_leaves_no_process():
    """Nor a child that left the worker's session."""
    with pool_of("pid") as pool:
        first = int(score(pool).rewards_RK[0, 0])
        os.kill(first, signal.SIGKILL)
        assert first == pids()[0] and all(map(gone, pids()))
        batch = score(pool)
        assert batch.rewards_RK[0, 0] == pids()[0] != first and batch.restarts == {"pid": 1}
        assert not unscorable(batch, "pid")
        os.kill(pids()[1], 0)
    assert all(map(gone, pids()))
    with pytest.raises(RuntimeError):
        score(pool)


CALLS = """
from smopd.config.settings import Reward
from smopd.rewards.pool import RewardPool
RewardPool([Reward(name="r", function="reward_functions:hangs")]).score(["q"], ["a"], {})
"""


@needs_proc
def test_workers_die_with_a_killed_parent():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", CALLS], env=environment)
    try:
        while len(pids()) < 2:
            assert parent.poll() is None, "the reward was not called"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    assert all(map(gone, pids()))


UNLOADABLE = {
    "no_such_module:f": "No module named 'no_such_module'",
    "reward_functions:number": "has no function 'number'",
    "reward_functions:no_completions": r"\(prompts\) takes none of completions",
    "broken_module:f": "ZeroDivisionError",
}


def test_probe_names_every_reward_that_cannot_be_loaded():
    rewards = [Reward(name=path, function=path) for path in UNLOADABLE]
    rewards.insert(0, Reward(name="good", function="reward_functions:length"))
    with RewardPool(rewards) as pool:
        with pytest.raises(RewardError) as caught:
            pool.probe()
        for path, message in UNLOADABLE.items():
            assert re.search(f"(?s)reward {path!r}: cannot load {path!r}.*{message}", str(caught.value))
        assert "'good'" not in str(caught.value)
        assert str(caught.value).count("Traceback") == 1, "of the module that fails"
        batch = score(pool)
        assert unscorable(batch, "broken_module:f") == {"exception": 2} and not unscorable(batch, "good")


def test_a_slow_import_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("smopd.rewards.pool.STARTUP_SECONDS", 0.5)
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(600)\n")
    slow = pytest.raises(RewardError, match=r"did not return within 0\.5 s")
    with RewardPool([Reward(name="slow", function="slow_module:f")]) as pool, slow:
        pool.probe()


def test_a_late_answer_of_an_earlier_call_is_not_the_next_ones():
    with pool_of("answers_later") as pool:
        pool.probe()  # the frame of number 1
        for number in (2, 3, 4):
            batch = pool.score([str(number)] * 2, ["a", "b"], {})
            assert batch.rewards_RK.tolist() == [[number], [number]]
            time.sleep(0.5)


FRAMES = {"deep": "[" * 100_000, "text": '{"values": ["x", 2.0]}'}  # tests/fuzz.py has more
WRITES = """
import struct
data = FRAME.encode()
for number in range(20):
    os.write(int(sys.argv[2]), struct.pack("!i", 8 + len(data)) + struct.pack("<Q", number) + data)
"""


def test_a_malformed_reply_and_a_worker_that_cannot_be_started_are_failures_of_the_worker(tmp_path):
    with pool_running({}, log_path=tmp_path / "absent" / "rewards.log") as pool:
        assert unscorable(score(pool), "good") == {"worker_died": 2}
    with pool_running({name: f"FRAME = {frame!r}{WRITES}" for name, frame in FRAMES.items()}) as pool:
        batch = score(pool)
        assert all(unscorable(batch, name) == {"worker_died": 2} for name in FRAMES)
        assert batch.rewards_RK[:, -1].tolist() == [1.0, 2.0]
