"""Mutated inputs for every parser of what others write: `python -m tests.fuzz TARGET SECONDS SEED`.

Each target knows the mistakes that it may answer; any other exception is printed with its input, and the exit
status is 1. `tests/test_fuzz.py` runs each for a moment. TARGET may be `all`.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from smopd.config.cli import read_settings
from smopd.config.recipe import Mistakes
from smopd.engine.remote.wire import pack_answer, pack_request, unpack_answer, unpack_request
from smopd.engine.student.checkpoint import UnusableCheckpoint, read_manifest, write_manifest
from smopd.engine.types import Rollout
from smopd.evals.api_bank.judge import judgment
from smopd.evals.api_bank.suite import outcome
from smopd.evals.bfcl.rlla_form import read_calls
from smopd.record.files import DamagedLog, JsonlLog
from smopd.rewards import rlla

SLOW_SECONDS = 2.0
"""Of one input, in CPU time: what takes longer is a finding too."""
PIECES = """
<think> </think> <tool_call> </tool_call> <response> { } [ ] ( ) : , " ' \\ \\n \\u0000 \\ud800 null true NaN
Infinity 1e999 -0 1_0 0x1 99999999999999999999 f(a=1) .put( HashMap<>() */ // Judgment: Yes No * ** & *a &a
!!python/object:os.system !!int - --- ? | > << ~ step files
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class Target:
    seeds: tuple[bytes, ...]
    parse: Callable[[bytes], object]
    answers: tuple[type[BaseException], ...] = ()
    """What it may raise."""


def text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


CALL = {"name": "Find", "parameters": {"city": "Oslo", "days": "2"}}
GOOD = f"<think> t </think>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
ROLLOUTS = [Rollout((1, 2), torch.tensor([3, 4, 5]), torch.zeros(3), 0, True)]
LOGPS = torch.tensor([[0.5, 0.25]]).log().expand(3, 2)
ANSWER = pack_answer(torch.tensor([[1, 2]] * 3), LOGPS, LOGPS[:, 0], torch.float32)
RECIPE = (Path(__file__).parents[1] / "smopd/recipes/quickstart.yaml").read_bytes()


def rewards(content: bytes) -> None:
    """Every value is a number in its range, whatever the model wrote."""
    columns = {"ground_truth": [GOOD]}
    (value,) = rlla.accuracy_reward([""], [text(content)], **columns)
    assert -3 <= value <= 3, value
    assert rlla.format_reward([""], [text(content)], **columns)[0] in (0, 1)


def in_a_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def parse(content: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="smopd-fuzz-") as folder:
            path = Path(folder) / name
            path.write_bytes(content)
            return read(path)

    return parse


def manifest(path: Path) -> None:
    import hashlib

    sums = path.with_suffix(".sha256")
    sums.write_text(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
    read_manifest(path.parent)


def log(path: Path) -> None:
    lines = JsonlLog(path)
    lines.read()
    lines.cut(3)


def a_manifest() -> bytes:
    with tempfile.TemporaryDirectory(prefix="smopd-fuzz-") as folder:
        (Path(folder) / "a").write_bytes(b"a")
        write_manifest(Path(folder), {"step": 4, "world_size": 1, "strategy": "fsdp2"})
        return (Path(folder) / "manifest.json").read_bytes()


def bfcl(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_calls(text(content))


def judge(content: bytes) -> None:
    judgment(text(content))


def api_bank(content: bytes) -> None:
    for parser in ("first", "last", "published"):
        outcome(text(content), [CALL], parser=parser)  # type: ignore[arg-type]


LINES = b'{"step": 1, "kl": 0.5}\n{"step": 4, "kl": null}\n'
NOT_A_REQUEST = (LookupError, SafetensorError, TypeError, ValueError)  # teacher_server.py answers 400
TARGETS = {
    "rlla": Target((GOOD.encode(),), rewards),
    "api_bank": Target((GOOD.encode(),), api_bank),
    "bfcl": Target((GOOD.encode(),), bfcl),
    "judge": Target((b"Reasoning: so\nJudgment: Yes",), judge),
    "recipe": Target((RECIPE,), in_a_file("r.yaml", lambda path: read_settings(str(path))), (Mistakes,)),
    "manifest": Target((a_manifest(),), in_a_file("manifest.json", manifest), (UnusableCheckpoint,)),
    "metrics": Target((LINES,), in_a_file("m.jsonl", log), (DamagedLog,)),
    "request": Target((pack_request(ROLLOUTS),), lambda given: unpack_request(given, 8), NOT_A_REQUEST),
    "answer": Target((ANSWER,), lambda given: unpack_answer(given, 3, 2), NOT_A_REQUEST),
}


def mutated(content: bytes, draw: random.Random) -> bytes:
    """A few cuts, repeats, flips and pieces of grammar."""
    for _ in range(draw.randint(1, 6)):
        at = draw.randint(0, len(content))
        to = min(len(content), at + draw.choice([0, 1, 2, 8, 64, 1024]))
        kind = draw.randrange(6)
        if kind == 0:
            content = content[:at] + content[to:]
        elif kind == 1:
            content = content[:at] + content[at:to] * draw.choice([2, 3, 50]) + content[to:]
        elif kind == 2 and content:
            flipped = content[at - 1] ^ (1 << draw.randrange(8))
            content = content[: at - 1] + bytes([flipped]) + content[at:] if at else content
        elif kind == 3:
            content = content[:at] + draw.choice(PIECES).encode("utf-8", "replace") + content[at:]
        elif kind == 4:
            content = content[:at] + draw.choice(PIECES).encode() * draw.choice([2, 30, 2000]) + content[to:]
        else:
            content = content[:at] + draw.randbytes(draw.choice([1, 4, 32])) + content[to:]
    return content[:1_000_000]


def fuzz(name: str, seconds: float, seed: int) -> tuple[int, list[str]]:
    """How many inputs were tried in so many seconds, and what was found."""
    target, draw, found, tried = TARGETS[name], random.Random(seed), [], 0
    kept = list(target.seeds)
    end = time.monotonic() + seconds
    while time.monotonic() < end and len(found) < 10:
        content = mutated(draw.choice(kept), draw)
        tried += 1
        begin = time.process_time()
        try:
            target.parse(content)
            kept = [*target.seeds, *kept[-30:], content][: len(target.seeds) + 31]
        except target.answers:
            pass
        except Exception as error:
            found.append(f"{name}: {type(error).__name__}: {str(error)[:200]} by {content[:500]!r}")
        if (spent := time.process_time() - begin) > SLOW_SECONDS:
            found.append(f"{name}: {spent:.1f} s of CPU for {len(content)} bytes: {content[:500]!r}")
    return tried, found


def main(argv: list[str]) -> int:
    if len(argv) != 3 or argv[0] not in (*TARGETS, "all"):
        print(f"python -m tests.fuzz TARGET SECONDS SEED; TARGET is all or one of {', '.join(TARGETS)}")
        return 2
    wrong = False
    for name in TARGETS if argv[0] == "all" else [argv[0]]:
        tried, found = fuzz(name, float(argv[1]), int(argv[2]))
        print(f"{name}: {tried:,} inputs, {len(found)} findings", *found, sep="\n", flush=True)
        wrong |= bool(found)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
