"""Fuzz every parser of external input: `python -m tests.fuzz [TARGET ...] --minutes 60 --seed 1`.

Each target knows the mistakes that it may answer; any other exception is printed with its input, and the exit
status is 1. The targets, or all of them, share the time. `tests/test_fuzz.py` runs each for a moment.
"""

import argparse
import contextlib
import functools
import hashlib
import io
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from safetensors import SafetensorError

from smopd.config.cli import read_settings
from smopd.config.recipe import Mistakes, write_yaml
from smopd.data.chat import render
from smopd.data.sources import load_rows
from smopd.engine.errors import UnusableModel
from smopd.engine.files import DamagedFile, read_json
from smopd.engine.models.loading import describe, load_model, load_tokenizer
from smopd.engine.preference import _scores
from smopd.engine.remote.rollout import RemoteRollout
from smopd.engine.remote.teachers import _description
from smopd.engine.remote.wire import pack, pack_request, unpack_answer, unpack_request
from smopd.engine.student.checkpoint import UnusableCheckpoint, read_manifest, write_manifest
from smopd.engine.types import Rollout, Sampling
from smopd.engine.vllm.rollout import samples_of
from smopd.engine.weights.adapters import read_adapter
from smopd.evals.api_bank.judge import judgment
from smopd.evals.api_bank.suite import outcome
from smopd.evals.bfcl.rlla_form import read_calls
from smopd.record.files import JsonlLog
from smopd.report.summary import summarise
from smopd.rewards import rlla
from smopd.rewards.pool import CallFailed, _values
from smopd.run.folder import ConfigMismatch, changes
from tests.smopd.recipes import save_world

SLOW_SECONDS = 2.0
"""CPU time limit per input."""
PIECES = """
<think> </think> <tool_call> </tool_call> <response> { } [ ] ( ) : , " ' \\ \\n \\u0000 \\ud800 null true NaN
Infinity 1e999 -0 1_0 0x1 99999999999999999999 f(a=1) .put( HashMap<>() */ // Judgment: Yes No * ** & *a &a
!!python/object:os.system !!int - --- ? | > << ~ step files
""".split()  # noqa: SIM905
ODD = [
    *(None, True, -1, 0, 7, 0.5, 1e999, 2**70, "", "x", "\ud800"),
    *([], {}, [[]], [1], [None], {"a": 1}, {"": []}),
]


@dataclass(frozen=True)
class Target:
    seeds: tuple[bytes, ...]
    parse: Callable[[bytes], object]
    answers: tuple[type[BaseException], ...] = ()
    """Exceptions that are allowed."""


def text(content: bytes) -> str:
    return content.decode("utf-8", "replace")


CALL = {"name": "Find", "parameters": {"city": "Oslo", "days": "2"}}
GOOD = f"<think> t </think>\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
ROLLOUTS = [Rollout((1, 2), torch.tensor([3, 4, 5]), torch.zeros(3), 0, True)]
IDS = torch.tensor([[1, 2]] * 3, dtype=torch.int32)
LOGPS = torch.tensor([[0.5, 0.25]]).log().expand(3, 2)
REQUEST = pack_request(ROLLOUTS)
ANSWER = pack(ids_NS=IDS, logps_NS=LOGPS, token_logps_N=LOGPS[:, 0], dropped=torch.tensor(0))
SETTINGS = read_settings("quickstart")
RECIPE = (Path(__file__).parents[1] / "smopd/recipes/quickstart.yaml").read_bytes()


def rewards(content: bytes) -> None:
    """Check that every value is in its range."""
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


def api_bank(content: bytes) -> None:
    for parser in ("first", "last", "published"):
        outcome(text(content), [CALL], parser=parser)  # type: ignore[arg-type]


@functools.cache
def a_model() -> Path:
    """Return the folder of a tiny model."""
    folder = Path(tempfile.mkdtemp(prefix="smopd-fuzz-"))
    return Path(save_world(folder, hidden_size=32, heads=1, layers=1))


def chat(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    with contextlib.suppress(ValueError):
        render(tokenizer, ({"role": "user", "content": "call anna"},), (), {})


def in_a_model(name: str, read: Callable[[Path], object]) -> Target:
    def parse(content: bytes) -> object:
        with tempfile.TemporaryDirectory(prefix="smopd-fuzz-") as place:
            folder = Path(shutil.copytree(a_model(), place, dirs_exist_ok=True))
            (folder / name).write_bytes(content)
            return read(folder)

    return Target(((a_model() / name).read_bytes(),), parse, (UnusableModel, FileNotFoundError))


def of_a_server(read: Callable[[Any], object]) -> Callable[[bytes], object]:
    """Read an answer as `ask` does, for which any exception means that there is none."""

    def parse(content: bytes) -> None:
        with contextlib.suppress(Exception):
            read(httpx.Response(200, content=content))

    return parse


def generated(answer: httpx.Response) -> None:
    """What is not refused can be trained on."""
    engine = RemoteRollout.__new__(RemoteRollout)
    engine.vocabulary, engine.run = 8, "r"
    (sample,) = samples_of([(1, 2)], [0], Sampling(n=1, temperature=1.0, max_new_tokens=4, seed=0))
    rollout = engine._rollout(sample, answer.json()["choices"][0], 1, 4)
    ids, logps = rollout.response_ids, rollout.logps
    sound = ids.dtype == torch.int64 and 0 <= len(ids) == len(logps) <= 4 and bool((logps <= 0.02).all())
    if not sound or not set(ids.tolist()) <= set(range(8)) or not bool(logps.isfinite().all()):
        raise SystemExit(f"accepted {rollout}")


def classified(answer: httpx.Response) -> None:
    scores = _scores("", answer, [[1], [2]])
    if len(scores) != 2 or not all(map(math.isfinite, scores)):
        raise SystemExit(f"accepted {scores}")


def evaluation(path: Path) -> None:
    (path.parent / "base").mkdir()
    path.rename(path.parent / "base" / path.name)
    with contextlib.redirect_stdout(io.StringIO()):
        summarise(SETTINGS, path.parent)


def before(path: Path) -> None:
    (path.parent / "base").mkdir()
    changes(path.parent, SETTINGS)


def described(folder: Path) -> None:
    describe(folder, load_tokenizer(folder))


LINES = b'{"step": 1, "kl": 0.5}\n{"step": 4, "kl": null}\n'
LOGPROBS = '"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]}, "token_ids": [3, 4]'
CHOICE = f'{{"weight_versions": [{{"version": "r-1"}}], "finish_reason": "stop", {LOGPROBS}}}'
GENERATED = f'{{"choices": [{CHOICE}]}}'.encode()
CLASSIFIED = b'{"data": [{"index": 1, "probs": [0.5]}, {"index": 0, "probs": [-2.0]}]}'
DESCRIBED = b'{"vocabulary": 8, "rows": 8, "weights": "0a1b"}'
ADAPTER = b'{"peft_type": "LORA", "base_model_name_or_path": "b", "target_modules": ["q_proj"]}'
CONFIG = write_yaml(SETTINGS, public=True).encode()
AS_JSON = [json.dumps(yaml.safe_load(each)).encode() for each in (RECIPE, CONFIG)]  # which is YAML
NOT_A_REPLY = (CallFailed, OSError)
NOT_A_REQUEST = (LookupError, SafetensorError, TypeError, ValueError)  # teacher_server.py answers 400
TARGETS = {
    "rlla": Target((GOOD.encode(),), rewards),
    "api_bank": Target((GOOD.encode(),), api_bank),
    "bfcl": Target((GOOD.encode(),), lambda given: read_calls(text(given)), (ValueError,)),
    "judge": Target((b"Reasoning: so\nJudgment: Yes",), lambda given: judgment(text(given))),
    "recipe": Target((RECIPE, AS_JSON[0]), in_a_file("r.yaml", lambda p: read_settings(str(p))), (Mistakes,)),
    "manifest": Target((a_manifest(),), in_a_file("manifest.json", manifest), (UnusableCheckpoint,)),
    "metrics": Target((LINES,), in_a_file("m.jsonl", log), (DamagedFile,)),
    "request": Target((REQUEST,), lambda given: unpack_request(given, 8), NOT_A_REQUEST),
    "answer": Target((ANSWER,), lambda given: unpack_answer(given, 3, 2), NOT_A_REQUEST),
    "record": Target((b'{"data.train": {"rows": "0"}}',), in_a_file("i.json", read_json), (DamagedFile,)),
    "generated": Target((GENERATED,), of_a_server(generated)),
    "classified": Target((CLASSIFIED,), of_a_server(classified)),
    "described": Target((DESCRIBED,), of_a_server(_description)),
    "reply": Target((b'{"values": [1, null, 0.5]}',), lambda given: _values(given, float), NOT_A_REPLY),
    "rows": Target((b'{"prompt": "a"}\n',), in_a_file("r.jsonl", lambda p: load_rows(str(p))), (ValueError,)),
    "adapter": Target(
        (ADAPTER,), in_a_file("adapter_config.json", lambda path: read_adapter(path.parent)), (UnusableModel,)
    ),
    "evaluation": Target((b'{"greedy/sum": 1.5}',), in_a_file("evaluation.json", evaluation), (DamagedFile,)),
    "before": Target((CONFIG, AS_JSON[1]), in_a_file("config.yaml", before), (ConfigMismatch,)),
    "template": in_a_model("chat_template.jinja", chat),
    "tokens": in_a_model("tokenizer_config.json", chat),
    "generation": in_a_model("generation_config.json", described),
    "config": in_a_model("config.json", described),
    "tokenizer": in_a_model("tokenizer.json", load_tokenizer),
    "weights": in_a_model("model.safetensors", lambda folder: load_model(folder, torch.float32)),
}


def altered(value: Any, draw: random.Random) -> Any:
    """Replace one part of a JSON value."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return draw.choice(ODD)
    place = draw.choice([*value] if isinstance(value, dict) else range(len(value)))
    value[place] = altered(value[place], draw)
    return value


def mutated(content: bytes, draw: random.Random) -> bytes:
    """Alter a JSON value, or apply random cuts, repeats, bit flips and grammar pieces."""
    if draw.random() < 0.4:
        with contextlib.suppress(ValueError, RecursionError):
            return json.dumps(altered(json.loads(content), draw)).encode()
    for _ in range(draw.randint(1, 6)):
        at = draw.randint(0, len(content))
        to = min(len(content), at + draw.choice([0, 1, 2, 8, 64, 1024]))
        cut, piece = content[at:to], draw.choice(PIECES).encode()
        flipped = bytes([cut[0] ^ (1 << draw.randrange(8))]) + cut[1:] if cut else cut
        kinds = [b"", cut * draw.choice([2, 3, 50]), flipped, piece + cut, piece * draw.choice([2, 30, 2000])]
        kinds.append(draw.randbytes(draw.choice([1, 4, 32])))
        content = content[:at] + draw.choice(kinds) + content[to:]
    return content[:1_000_000]


def fuzz(name: str, seconds: float, seed: int) -> tuple[int, list[str]]:
    """Return the number of inputs and the findings of some seconds of CPU time."""
    target, draw, found, tried = TARGETS[name], random.Random(seed), [], 0
    kept = list(target.seeds)
    end = time.process_time() + seconds
    while time.process_time() < end and len(found) < 10:
        content = mutated(draw.choice(kept), draw)
        tried += 1
        begin = time.process_time()
        try:
            target.parse(content)
            kept = [*target.seeds, *kept[-30:], content][: len(target.seeds) + 31]
        except target.answers:
            pass
        except BaseException as error:  # a panic of Rust is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            found.append(f"{name}: {type(error).__name__}: {str(error)[:200]} by {content[:500]!r}")
        if (spent := time.process_time() - begin) > SLOW_SECONDS:
            found.append(f"{name}: {spent:.1f} s of CPU for {len(content)} bytes: {content[:500]!r}")
    return tried, found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    options.add_argument("--minutes", type=float, default=60.0)
    options.add_argument("--seed", type=int, default=1)
    given, wrong = options.parse_args(), False
    names = given.targets or list(TARGETS)
    for name in names:
        tried, found = fuzz(name, 60 * given.minutes / len(names), given.seed)
        print(f"{name}: {tried:,} inputs, {len(found)} findings", *found, sep="\n", flush=True)
        wrong |= bool(found)
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
