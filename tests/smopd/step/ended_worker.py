"""Runs `smopd.loop.optimise` to its end, and again with servers that go and come back.

In one process, or under torchrun, where the last rank alone loses them. Argument: a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from smopd.config.settings import Settings, merged
from smopd.engine import distributed
from smopd.engine.errors import NoServer
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import Packing, TrainSettings
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.loop import Run, optimise
from smopd.record.recorder import Recorder
from tests.engine.tiny import tiny_model
from tests.smopd.recipes import metric_lines
from tests.smopd.run.invariance_worker import SETTINGS, FixedRewarder, FixedRollouts, Numbers, prompt_set

PACKING = Packing(micro_batch_tokens=100_000)
CASES = {"generate": 2, "score": 2, "load_weights": 3}
"""What finds no server in the third step, and how many steps are done then."""
LAGGED = {"generate-lagged": 3, "score-lagged": 2}


def losing(engine: object, call: str, at: int) -> None:
    """`engine.call` finds no server when it is called for the `at`th time; `load_weights` on every rank."""
    plain, calls = getattr(engine, call), []

    def lost(*args, **options):
        calls.append(1)
        if len(calls) == at and (
            call == "load_weights" or distributed.rank() == distributed.world_size() - 1
        ):
            raise NoServer("no server is left")
        return plain(*args, **options)

    setattr(engine, call, lost)


def train(folder: Path, device: torch.device, case: str = "") -> str:
    """What ended it, or the metrics; the weights are in `folder`."""
    lag = 1 if case.endswith("lagged") or folder.name.startswith("whole-1") else 0
    changes = {"loop": {"steps": 4, "async_level": lag}, "loss": {"importance_cap": 2.0}}
    settings = Settings.model_validate(merged(SETTINGS, changes)).resolved("student")
    options = TrainSettings(learning_rate=1e-2, compute_dtype="float32", **dict(PACKING))
    student = Student(tiny_model(), options, device)
    rollouts = FixedRollouts()
    rollouts.bad_answers = 2 + distributed.rank()
    teachers = LocalTeachers([tiny_model(seed=1), tiny_model(seed=2)], PACKING, student.vocabulary)
    call = case.removesuffix("-lagged")
    if call:  # weights are sent before the first step, and with a lag a batch is sampled before its step
        at = 4 if call == "load_weights" or case == "generate-lagged" else 3
        losing(teachers if call == "score" else rollouts, call, at)
    with Recorder(folder, "run", settings, Numbers()) as recorder:
        checkpoints = Checkpoints(folder / "checkpoints", 1)
        common = {"settings": settings, "weights": [0.5, 0.5], "prompts": prompt_set(), "held_out": None}
        engines = {"student": student, "rollouts": rollouts, "teachers": teachers}
        try:
            optimise(
                Run(**common, **engines, rewarder=FixedRewarder(), checkpoints=checkpoints, recorder=recorder)
            )
        except NoServer as error:
            return str(error)
    torch.save(dict(student.weights()), folder / f"weights_{distributed.rank()}.pt")
    return ""


def check(folder: Path, device: torch.device, case: str, done: int) -> None:
    whole, own = folder / f"whole-{int(case.endswith('lagged'))}", folder / case
    if not whole.exists():
        assert not train(whole, device)
    assert train(own, device, case) == "no server is left"
    distributed.barrier()
    assert [path.name for path in (own / "checkpoints").iterdir()] == [f"step_{done:08d}"]
    distributed.barrier()
    assert not train(own, device)
    if case != "generate-lagged":  # what was to be sampled ahead is sampled by a newer policy
        assert metric_lines(own) == metric_lines(whole)
        assert metric_lines(own)[-1]["servers/bad_answers"] == (5 if distributed.world_size() == 2 else 2)
    weights = [torch.load(each / f"weights_{distributed.rank()}.pt") for each in (own, whole)]
    assert weights[0].keys() == weights[1].keys()
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0]) or case == "generate-lagged"


def main(folder: Path, cases: dict[str, int]) -> None:
    with distributed.process_group() as device:
        for case, done in cases.items():
            check(folder, device, case, done)


if __name__ == "__main__":
    main(Path(sys.argv[1]), CASES | LAGGED)
