"""Rewards in worker processes: what a function may do wrong, what that costs, and that no process is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from smopd.rewards.pool import RewardError, RewardPool, RewardSpec, check_share
from tests.patience import HANG_SECONDS, MISSED_SECONDS

FUNCTIONS = """
import asyncio, os, subprocess, sys, time

def length(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]

def narrow(prompts, completions, bonus):
    return [len(completion) + b for completion, b in zip(completions, bonus)]

def scaled(prompts, completions, *, scale, **columns):
    return [scale * len(completion) for completion in completions]

async def later(prompts, completions, **columns):
    await asyncio.sleep(0.01)
    return [2.0] * len(completions)

loops = []

async def loop_count(prompts, completions, **columns):
    loops.append(asyncio.get_running_loop())
    return [float(len(set(loops)))] * len(completions)

def raises(prompts, completions, **columns):
    raise KeyError("no such city")

def leaves(prompts, completions, **columns):
    sys.exit(3)

def dies(prompts, completions, **columns):
    os._exit(7)

def crashes(prompts, completions, **columns):
    os.kill(os.getpid(), 11)

def short(prompts, completions, **columns):
    return [1.0]

def generator(prompts, completions, **columns):
    return (1.0 for _ in completions)

def mixed(prompts, completions, **columns):
    return [1, None, float("nan"), float("inf"), "2.0", True, 10**400, object()][: len(completions)]

def nothing(prompts, completions, **columns):
    return None

def array(prompts, completions, **columns):
    import numpy
    return numpy.arange(len(completions), dtype=numpy.float32)

def chatters(prompts, completions, **columns):
    print("x" * 5_000_000)
    os.write(1, b"raw" * 1000)
    print(sys.stdin.read(), file=sys.stderr)
    return [1.0] * len(completions)

def hangs(prompts, completions, **columns):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(columns["pid_file"][0], "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
        file.flush()
        time.sleep(600)

def hangs_in_c(prompts, completions, **columns):
    with open(columns["pid_file"][0], "w") as file:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        file.write(f"{os.getpid()} {child.pid}")
    import re
    re.fullmatch("(a|aa)+b", "a" * 200)  # never gives the interpreter up

def hangs_once(prompts, completions, **columns):
    if os.path.exists(columns["pid_file"][0]):
        return [1.0] * len(completions)
    open(columns["pid_file"][0], "w").close()
    time.sleep(600)

def pid(prompts, completions, **columns):
    return [float(os.getpid())] * len(completions)

def has_torch(prompts, completions, **columns):
    return [float("torch" in sys.modules), float("transformers" in sys.modules)]

def leaves_a_session(prompts, completions, pid_file, **columns):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    with open(pid_file[0], "w") as file:
        file.write(str(child.pid))
    return [1.0] * len(completions)

def answers_later(prompts, completions, **columns):
    if os.fork() == 0:
        time.sleep(0.3)
        import json, struct
        data = struct.pack("<Q", int(prompts[0])) + json.dumps({"values": [9.0] * len(completions)}).encode()
        os.write(int(sys.argv[2]), struct.pack("!i", len(data)) + data)
        os._exit(0)
    time.sleep(0.1)
    return [float(prompts[0])] * len(completions)

def writes(prompts, completions, frame, **columns):
    import struct
    data = frame[0].encode()
    for number in range(20):
        os.write(int(sys.argv[2]), struct.pack("!i", 8 + len(data)) + struct.pack("<Q", number) + data)
    return [1.0] * len(completions)

def wants_more(prompts, completions, needed):
    return [0.0] * len(completions)

def no_completions(prompts):
    return []

number = 3
"""


@pytest.fixture
def functions(tmp_path, monkeypatch):
    (tmp_path / "reward_functions.py").write_text(FUNCTIONS)
    (tmp_path / "broken_module.py").write_text("import json\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def pool_of(*names, **settings) -> RewardPool:
    return RewardPool([RewardSpec(name, f"reward_functions:{name}") for name in names], **settings)


def score(pool, completions=("a", "bb"), **columns):
    return pool.score(["q"] * len(completions), completions, columns)


def unscorable(batch, name):
    return {kind: count for kind, count in batch.failures[name].items() if count}


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


def test_all_rewards_are_called_and_kept_in_order(functions):
    with pool_of("length", "later", "array") as pool:
        batch = score(pool, bonus=[1, 2])
        assert batch.values_RK.dtype == np.float64
        np.testing.assert_array_equal(batch.values_RK, [[1.0, 2.0, 0.0], [2.0, 2.0, 1.0]])
        assert batch.names == ("length", "later", "array")
        assert batch.last_errors == {} and not any(unscorable(batch, name) for name in batch.names)
        batch.check_share(0.0)


def test_rewards_run_at_once(functions, tmp_path):
    (tmp_path / "meeting.py").write_text(
        "import os, time\n"
        "def meet(prompts, completions, *, me, other, folder, **columns):\n"
        "    open(os.path.join(folder, me), 'w').close()\n"
        "    while not os.path.exists(os.path.join(folder, other)):\n"
        "        time.sleep(0.01)\n"
        "    return [1.0] * len(completions)\n"
    )
    rewards = [
        RewardSpec(me, "meeting:meet", {"me": me, "other": other, "folder": str(tmp_path)})
        for me, other in (("one", "two"), ("two", "one"))
    ]
    with RewardPool(rewards, deadline_seconds=HANG_SECONDS) as pool:
        assert score(pool).values_RK.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_columns_and_kwargs(functions):
    rewards = [
        RewardSpec("narrow", "reward_functions:narrow"),
        RewardSpec("scaled", "reward_functions:scaled", {"scale": 0.5}),
    ]
    with RewardPool(rewards) as pool:
        batch = score(pool, bonus=[10, 20], other=[object, b"x"], scale=[9, 9])
        assert batch.values_RK.tolist() == [[11.0, 0.5], [22.0, 1.0]]


def test_an_async_reward_keeps_its_loop_between_calls(functions):
    with pool_of("loop_count") as pool:
        assert [score(pool).values_RK[0, 0] for _ in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "name, kind, message",
    [
        ("raises", "exception", r"in raises\n(.|\n)*KeyError: 'no such city'"),
        ("leaves", "exception", "SystemExit: 3"),
        ("dies", "worker_died", "exit code 7"),
        ("crashes", "worker_died", "signal 11"),
        ("short", "length", "returned 1 values, expected 2"),
        ("generator", "exception", "returned generator, expected a list of 2 float or None"),
        ("nothing", "exception", "returned NoneType, expected a list of 2 float or None"),
        ("wants_more", "exception", "missing 1 required positional argument: 'needed'"),
    ],
)
def test_a_failure_costs_its_own_dimension(functions, name, kind, message):
    with pool_of(name, "length") as pool:
        for _ in range(2):
            batch = score(pool)
            assert np.isnan(batch.values_RK[:, 0]).all()
            assert batch.values_RK[:, 1].tolist() == [1.0, 2.0]
            assert unscorable(batch, name) == {kind: 2} and not unscorable(batch, "length")
            with pytest.raises(RewardError, match=message):
                batch.check_share(0.5)
        assert batch.restarts == {name: 3 * (kind == "worker_died"), "length": 0}, "each call is made twice"


def test_values_that_are_no_finite_number(functions):
    with pool_of("mixed") as pool:
        batch = score(pool, completions=["x"] * 8)
        assert batch.values_RK[[0, 5], 0].tolist() == [1.0, 1.0]
        assert np.isnan(batch.values_RK[[1, 2, 3, 4, 6, 7], 0]).all()
        assert unscorable(batch, "mixed") == {"none": 1, "nonfinite": 5}
        assert "5 values that are no finite number" in batch.last_errors["mixed"]
        assert sum(batch.failures["mixed"].values()) == np.isnan(batch.values_RK).sum()


def test_check_share_names_reward_share_limit_and_error():
    check_share("tone", {"none": 2, "timeout": 2}, 8, 0.5)
    check_share("tone", {"none": 0}, 0, 0.0)
    with pytest.raises(
        RewardError, match=r"'tone' left 5 of 8 .*0\.625, limit 0\.5\): none 2, timeout 3.*slow"
    ):
        check_share("tone", {"none": 2, "length": 0, "timeout": 3}, 8, 0.5, "slow")


def test_output_goes_to_the_log_and_never_blocks(functions, tmp_path):
    log = tmp_path / "rewards.log"
    with pool_of("chatters", log_path=log) as pool:
        assert score(pool).values_RK.tolist() == [[1.0], [1.0]]
    assert log.stat().st_size > 5_000_000


def test_large_payloads_pass(functions):
    with pool_of("length") as pool:
        batch = score(pool, completions=["x" * 3_000_000] * 3 + ["y"] * 50_000)
        assert batch.values_RK[:3, 0].tolist() == [3e6] * 3 and len(batch.values_RK) == 50_003


@needs_proc
@pytest.mark.parametrize("name", ["hangs", "hangs_in_c"])
def test_a_hang_is_killed_with_its_children(functions, tmp_path, name):
    pid_file = tmp_path / "pids"
    with pool_of(name, "length", deadline_seconds=MISSED_SECONDS) as pool:
        pool.probe()
        batch = score(pool, pid_file=[str(pid_file)] * 2)
        assert unscorable(batch, name) == {"timeout": 2}
        assert f"did not return within {MISSED_SECONDS:g} s" in batch.last_errors[name]
        assert batch.values_RK[:, 1].tolist() == [1.0, 2.0]
        assert all(gone(int(pid)) for pid in pid_file.read_text().split())


def test_the_call_after_a_hang_has_a_new_worker(functions, tmp_path, caplog):
    columns = {"pid_file": [str(tmp_path / "seen")] * 2}
    with pool_of("hangs_once", deadline_seconds=MISSED_SECONDS) as pool:
        pool.probe()
        assert unscorable(score(pool, **columns), "hangs_once") == {}, "the second call of two is answered"
        assert "reward hangs_once is called again: reward_functions:hangs_once did not" in caplog.text
        batch = score(pool, **columns)
        assert batch.values_RK.tolist() == [[1.0], [1.0]] and batch.restarts == {"hangs_once": 1}


@needs_proc
def test_closing_leaves_no_process(functions):
    with pool_of("pid") as pool:
        pid = int(score(pool).values_RK[0, 0])
        os.kill(pid, 0)
    assert gone(pid)
    with pytest.raises(RuntimeError):
        score(pool)


@needs_proc
def test_a_worker_that_died_between_calls_is_replaced(functions):
    with pool_of("pid") as pool:
        first = int(score(pool).values_RK[0, 0])
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        batch = score(pool)
        assert (
            batch.values_RK[0, 0] != first and batch.restarts == {"pid": 1} and not unscorable(batch, "pid")
        )


@needs_proc
@pytest.mark.parametrize("name", ["hangs", "hangs_in_c"])
def test_workers_die_with_a_killed_parent(functions, tmp_path, name):
    pid_file = tmp_path / "pids"
    program = textwrap.dedent(f"""
        from smopd.rewards.pool import RewardPool, RewardSpec
        pool = RewardPool([RewardSpec("r", "reward_functions:{name}")])
        pool.score(["q"], ["a"], {{"pid_file": [{str(pid_file)!r}]}})
    """)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", program], env=environment)
    try:
        pids: list[str] = []
        while len(pids) < 2:
            assert parent.poll() is None, "the reward was not called"
            time.sleep(0.05)
            pids = pid_file.read_text().split() if pid_file.exists() else []
    finally:
        parent.kill()
        parent.wait()
    assert gone(int(pids[0])) and gone(int(pids[1]))


def test_the_current_folder_is_importable(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def one(prompts, completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    with RewardPool([RewardSpec("one", "mine:one")]) as pool:
        assert score(pool).values_RK.tolist() == [[1.0], [1.0]]


def test_a_worker_does_not_load_torch(functions):
    with pool_of("has_torch") as pool:
        assert score(pool).values_RK[:, 0].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "path, message",
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("reward_functions:no_such", "has no attribute 'no_such'"),
        ("reward_functions:number", "is int, expected a function"),
        ("reward_functions:no_completions", r"\(prompts\) does not take \(prompts, completions"),
        ("broken_module:f", "ZeroDivisionError"),
    ],
)
def test_probe_says_what_cannot_be_loaded(functions, path, message):
    rewards = [RewardSpec("good", "reward_functions:length"), RewardSpec("bad", path)]
    with RewardPool(rewards) as pool:
        with pytest.raises(RewardError, match=f"(?s)reward 'bad': cannot load {path!r}.*{message}") as caught:
            pool.probe()
        assert "'good'" not in str(caught.value)
        batch = score(pool)
        assert unscorable(batch, "bad") == {"exception": 2} and not unscorable(batch, "good")


def test_a_slow_import_is_reported(functions, tmp_path):
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(600)\n")
    pool = RewardPool([RewardSpec("slow", "slow_module:f")], startup_seconds=0.5)
    with pool, pytest.raises(RewardError, match=r"not loaded after 0\.5 s"):
        pool.probe()


@pytest.mark.parametrize("path", ["", "module.function", "a b:f", "a:f:g"])
def test_a_malformed_path_is_refused(path):
    with pytest.raises(ValueError, match=r"expected package\.module:function"):
        RewardPool([RewardSpec("bad", path)])


def test_bad_settings_are_refused(functions):
    with pytest.raises(ValueError, match="expected one or more different names"):
        pool_of("length", "length")
    with pytest.raises(ValueError, match="expected one or more different names"):
        RewardPool([])
    with pytest.raises(ValueError, match="deadline_seconds is 0"):
        pool_of("length", deadline_seconds=0)
    with pytest.raises(ValueError, match=r"kwargs may not hold \['prompts'\]"):
        RewardPool([RewardSpec("bad", "a:f", {"prompts": 1})])


def test_bad_columns_are_refused(functions):
    with pool_of("length") as pool:
        with pytest.raises(ValueError, match="bonus has 1 entries, expected 2"):
            score(pool, bonus=[1])
        with pytest.raises(ValueError, match=r"columns may not hold \['completions'\]"):
            pool.score(["q"], ["a"], {"completions": ["a"]})


@needs_proc
def test_what_leaves_the_workers_session_ends_with_it(functions, tmp_path):
    pid_file = tmp_path / "pid"
    with pool_of("leaves_a_session") as pool:
        assert score(pool, pid_file=[str(pid_file)] * 2).values_RK.tolist() == [[1.0], [1.0]]
    assert gone(int(pid_file.read_text()))


def test_a_late_answer_of_an_earlier_call_is_not_the_next_ones(functions):
    with pool_of("answers_later") as pool:
        pool.probe()  # the frame of number 1
        for number in (2, 3, 4, 5):
            batch = pool.score([str(number)] * 2, ["a", "b"], {})
            assert batch.values_RK.tolist() == [[number], [number]]
            time.sleep(0.5)


@pytest.mark.parametrize(
    "frame",
    [
        "5",
        "[" * 100_000,
        "{}",
        '{"values": ["1.0", "2.0"]}',
        '{"error": 3}',
        '{"values": [1, 1], "error": ""}',
    ],
)
def test_frames_of_another_form_are_a_failure_of_the_worker(functions, frame):
    with pool_of("writes", "length") as pool:
        batch = score(pool, frame=[frame] * 2)
        assert unscorable(batch, "writes") == {"worker_died": 2}
        assert batch.values_RK[:, 1].tolist() == [1.0, 2.0]


def test_the_log_begins_again_where_it_is_too_large(functions, tmp_path, monkeypatch):
    monkeypatch.setattr("smopd.rewards.pool.LOG_BYTES", 1_000_000)
    log = tmp_path / "rewards.log"
    with pool_of("chatters", log_path=log) as pool:
        for _ in range(3):
            score(pool)
            assert log.stat().st_size == 0
