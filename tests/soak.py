"""A run that everything happens to: `python -m tests.soak --minutes 45 --seed 1`.

Two ranks train with the local engine against two servers of one teacher (the application of
smopd.engine.teacher_server around the local engine), with rewards that raise, hang and die at random. Ranks,
launchers, servers and rewards' workers are killed in turn, ranks are stopped, signals are sent, and the
command is given again until it is done. Its weights, samples and metrics must be those of the run that
nothing happened to. A line a kill, a summary; exit status 1 where a round ends with anything else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx
import yaml

from smopd.engine.process import below, die_with_parent, runs
from tests.patience import HANG_SECONDS
from tests.smopd.recipes import ROOT, TINY, command, environment, metric_lines

RUN = "student"
FAILS = 0.03
"""How likely a call of a reward fails when it is first made; the same call, made again, does not."""
KINDS = ["rank", "stopped rank", "launcher", "SIGTERM", "SIGINT", "servers", *2 * ["worker", "server"]]
VARIES = ("/worker_restarts", "/failed/", "servers/")
REWARDS = """
import hashlib, os, random, signal, time
from pathlib import Path
from smopd.rewards import rlla

def failing(name, function):
    def reward(prompts, completions, **columns):
        call = repr((name, completions, columns.get("training_step"))).encode()
        seen = Path(os.environ["SOAK_CALLS"]) / hashlib.sha256(call).hexdigest()
        if not seen.exists() and random.SystemRandom().random() < float(os.environ["SOAK_FAILS"]):
            seen.touch()
            how = random.SystemRandom().choice(["raise", "exit", "kill", "hang"])
            if how == "raise":
                raise RuntimeError("by chance")
            if how == "exit":
                os._exit(3)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1e6)
        return function(prompts, completions, **columns)
    return reward

accuracy = failing("accuracy", rlla.accuracy_reward)
format = failing("format", rlla.format_reward)
"""


def serve(path: str, port: int, vocabulary: int, parent: int) -> None:
    """One server of the teacher at `path`."""
    die_with_parent(parent)
    import torch
    import uvicorn

    from smopd.engine.local.teachers import load_teachers
    from smopd.engine.settings import Packing
    from smopd.engine.teacher_server import application

    teacher = load_teachers([path], Packing(), vocabulary, torch.float32)
    uvicorn.run(application(teacher, path, vocabulary), port=port, log_level="error")


class Server:
    """A process of `serve`; starts again on the same port."""

    def __init__(self, path: Path, vocabulary: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.arguments = [str(path), str(self.port), str(vocabulary), str(os.getpid())]
        self.start()

    def start(self) -> None:
        begin = [sys.executable, "-m", "tests.soak", "serve", *self.arguments]
        self.process = subprocess.Popen(begin, cwd=ROOT, env=environment())

    def wait(self) -> None:
        while True:
            with suppress(httpx.HTTPError):
                httpx.get(self.url + "/health", timeout=5.0)
                return
            assert self.process.poll() is None, "a teacher's server cannot start"
            time.sleep(0.1)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Soak:
    def __init__(self, folder: Path, steps: int, seed: int):
        from smopd.worlds.models import world_model

        self.folder, self.steps, self.random = folder, steps, random.Random(seed)
        self.begin = time.monotonic()
        self.kills: Counter[str] = Counter()
        model, tokenizer = world_model(1)
        model.save_pretrained(folder / "teacher")
        tokenizer.save_pretrained(folder / "teacher")
        self.servers = [Server(folder / "teacher", model.config.vocab_size) for _ in range(2)]
        urls = ",".join(server.url for server in self.servers)
        names = ("accuracy", "format")
        recipe = TINY | {
            "name": "soak",
            "teachers": {"models": [{"model": urls, "reward": name} for name in names]},
            "rewards": [
                reward | {"function": f"soak_rewards:{reward['name']}"} for reward in TINY["rewards"]
            ],
            "runs": {RUN: {"stage": "merge"}},
            "loop": {"steps": steps, "prompts_per_step": 4, "updates_per_step": 2, "timeout_seconds": 30.0},
            "scoring": {"startup_seconds": 60.0, "deadline_seconds": 15.0},
            "remote": {"retries": 2, "deadline_seconds": 15.0},
            "checkpoint": {"every": 5, "keep": 2},
            "processes": 2,
        }
        self.recipe = folder / "recipe.yaml"
        self.recipe.write_text(yaml.safe_dump(recipe, sort_keys=False))
        (folder / "soak_rewards.py").write_text(REWARDS)
        (folder / "calls").mkdir()

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin:7.1f} s  {text}", flush=True)

    def start(self, output: Path, launcher: str, fails: float) -> subprocess.Popen[bytes]:
        whole = command(self.recipe, "--output", str(output), ranks=2 if launcher == "torchrun" else 1)
        extra = {"SOAK_CALLS": str(self.folder / "calls"), "SOAK_FAILS": str(fails)}
        with output.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(whole, cwd=self.folder, env=environment() | extra, stdout=log, stderr=log)

    def finish(self, output: Path, process: subprocess.Popen[bytes]) -> int:
        """Waits for the command; then ends what it may have left, which would hold the directory."""
        status = process.wait(HANG_SECONDS)
        deadline = time.monotonic() + 60.0
        while (left := ranks_at(output)) and time.monotonic() < deadline:
            time.sleep(0.2)
        for rank in left:  # those of a killed torchrun go on alone
            with suppress(ProcessLookupError):
                os.kill(rank, signal.SIGKILL)
        while ranks_at(output):
            time.sleep(0.05)
        return status

    def step(self, output: Path) -> int:
        with suppress(OSError, ValueError, LookupError):
            return int(json.loads((output / RUN / "metrics.jsonl").read_text().splitlines()[-1])["step"])
        return 0

    def hit(self, output: Path, process: subprocess.Popen[bytes], kind: str) -> bool:
        """Does to the command, or to what it works with, what `kind` says; whether there was such a thing."""
        ranks = [rank for rank in ranks_at(output) if rank != process.pid]
        workers = [child for rank in ranks for child in below(rank) if is_worker(child)]
        targets: dict[str, Callable[[], object]] = {
            "rank": lambda: os.kill(self.random.choice(ranks), signal.SIGKILL),
            "stopped rank": lambda: os.kill(self.random.choice(ranks), signal.SIGSTOP),
            "launcher": process.kill,
            "SIGTERM": process.terminate,
            "SIGINT": lambda: process.send_signal(signal.SIGINT),
            "worker": lambda: os.kill(self.random.choice(workers), signal.SIGKILL),
            "server": lambda: self.random.choice(self.servers).kill(),
            "servers": lambda: [server.kill() for server in self.servers],
        }
        with suppress(ProcessLookupError, IndexError):
            targets[kind]()
            return True
        return False

    def round(self, number: int, expected: dict[str, str]) -> bool:
        """One run from its first command to its end; whether it ends as expected."""
        output, attempt = self.folder / f"round_{number}", 0
        shutil.rmtree(self.folder / "calls")
        (self.folder / "calls").mkdir()
        kinds: list[str] = []
        while True:
            attempt += 1
            for server in self.servers:
                if server.process.poll() is not None:
                    server.start()
            for server in self.servers:
                server.wait()
            launcher = self.random.choice(["processes", "torchrun"])
            begun, process = self.step(output), self.start(output, launcher, FAILS)
            ended = False
            while not ended:
                if not kinds:
                    kinds = self.random.sample(KINDS, len(KINDS))
                try:
                    process.wait(self.random.uniform(2.0, 30.0))
                    break
                except subprocess.TimeoutExpired:
                    pass
                kind, step = kinds.pop(), self.step(output)
                if kind == "stopped rank" and not begun < step < self.steps:  # else it is waited for longer
                    kind = "rank"
                if not self.hit(output, process, kind):
                    continue
                self.kills[kind] += 1
                ended = kind not in ("worker", "server")
                self.say(f"round {number}, command {attempt} ({launcher}), step {step}: {kind}")
                if kind == "server":
                    time.sleep(self.random.uniform(0.0, 10.0))
                    for server in self.servers:
                        if server.process.poll() is not None:
                            server.start()
            status = self.finish(output, process)
            self.say(f"round {number}, command {attempt} ended: {status}, step {self.step(output)}")
            if status == 0 and (output / "results.json").exists():
                break
        found = self.results(output)
        wrong = [name for name in expected if found[name] != expected[name]]
        traced = output.with_suffix(".log").read_text(errors="replace").count("in optimise\n")
        end = "the same" if not wrong else f"OTHER: {wrong}"
        self.say(f"round {number}: {attempt} commands, {end}, {traced} tracebacks of ours")
        if not wrong:
            shutil.rmtree(output)
        return not wrong

    def results(self, output: Path) -> dict[str, str]:
        """A digest of each thing that must not depend on what happened."""
        found = {
            name: hashlib.sha256((output / name).read_bytes()).hexdigest()
            for run in ("base", RUN)
            for name in (
                f"{run}/export/model.safetensors",
                f"{run}/evaluation.json",
                f"{run}/responses.jsonl",
            )
        }
        lines = [
            {key: value for key, value in line.items() if not any(part in key for part in VARIES)}
            for line in metric_lines(output / RUN)
        ]
        found["metrics"] = hashlib.sha256(repr(lines).encode()).hexdigest()
        found["samples"] = hashlib.sha256((output / RUN / "samples.jsonl").read_bytes()).hexdigest()
        return found


def ranks_at(output: Path) -> list[int]:
    """Processes of the command that work in `output`, launchers too."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and runs(int(entry.name)):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if str(output).encode() in words and b"torch.distributed.run" not in words:
                    found.append(int(entry.name))
    return found


def is_worker(process: int) -> bool:
    with suppress(OSError):
        return b"smopd.rewards.worker" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--minutes", type=float, default=45.0, help="no round begins after so many")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    parser.add_argument("--steps", type=int, default=40, help="of each round's run")
    parser.add_argument("--folder", type=Path, help="a new one; None is a temporary one")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="smopd-soak-") as own:
        folder = chosen.folder or Path(own)
        folder.mkdir(parents=True, exist_ok=True)
        soak = Soak(folder.resolve(), chosen.steps, chosen.seed)
        for server in soak.servers:
            server.wait()
        whole = soak.folder / "whole"
        status = soak.finish(whole, soak.start(whole, "processes", 0.0))
        assert status == 0, whole.with_suffix(".log").read_text()[-4000:]
        expected = soak.results(whole)
        soak.say("the run that nothing happened to is done")
        ends: list[bool] = []
        while time.monotonic() - soak.begin < 60 * chosen.minutes:
            ends.append(soak.round(len(ends) + 1, expected))
        kills = ", ".join(f"{kind} {count}" for kind, count in sorted(soak.kills.items()))
        soak.say(f"{len(ends)} rounds, {sum(ends)} the same; {sum(soak.kills.values())} hits: {kills}")
        for server in soak.servers:
            server.kill()
    return 0 if all(ends) and ends else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2], *map(int, sys.argv[3:6]))
    else:
        sys.exit(main(sys.argv[1:]))
