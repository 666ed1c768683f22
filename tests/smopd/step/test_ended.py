"""Servers that are lost in a step: every rank writes a checkpoint, and the resumed run ends the same.

As a module it runs the cases of TWO_RANKS, in which only the last rank loses its servers. Argument: a folder.
"""

import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from smopd.advantages import ESTIMATORS
from smopd.engine import distributed
from smopd.engine.errors import NonFinite, NoServer, UserCodeError
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import Packing, TrainSettings
from smopd.engine.student.student import Student
from tests.engine.tiny import VOCABULARY, tiny_model
from tests.ranks import on_ranks
from tests.smopd.recipes import metric_lines
from tests.smopd.run.invariance_worker import FixedRollouts, run_loop, settings_of

TWO_RANKS = ("generate", "score-lagged")
PACKING = Packing(micro_batch_tokens=100_000)
OPTIONS = TrainSettings(learning_rate=1e-2, compute_dtype="float32", **dict(PACKING))
# The call that fails -> which of its calls, async_level, and the steps done before. Weights are sent before
# the first step; with async_level 1 a batch is sampled before its step.
CASES = {
    "generate": (2, 0, 1),
    "score": (2, 0, 1),
    "load_weights": (3, 0, 2),
    "generate-lagged": (3, 1, 2),
    "score-lagged": (2, 1, 1),
}


tiny_model = partial(tiny_model, layers=1)


def two_teachers() -> LocalTeachers:
    return LocalTeachers([tiny_model(seed=1), tiny_model(seed=2)], PACKING, VOCABULARY)


def losing(engine: object, call: str, at: int) -> None:
    """Let the `at`th call of `engine.call` raise NoServer on the last rank; `load_weights` on every rank."""
    plain, calls = getattr(engine, call), []
    loses = call == "load_weights" or distributed.rank() == distributed.world_size() - 1

    def lost(*args, **options):
        calls.append(1)
        if len(calls) == at and loses:
            raise NoServer("no server is left")
        return plain(*args, **options)

    setattr(engine, call, lost)


def train(folder: Path, device: torch.device, lag: int, case: str = "") -> dict[str, torch.Tensor]:
    """Train with the failing call of the case, and return the final weights."""
    settings = settings_of("student", loop={"steps": 3, "async_level": lag}, loss={"importance_cap": 2.0})
    student, rollouts, teachers = Student(tiny_model(), OPTIONS, device), FixedRollouts(), two_teachers()
    rollouts.bad_answers = 2 + distributed.rank()
    if case:
        call = case.removesuffix("-lagged")
        losing(teachers if call == "score" else rollouts, call, CASES[case][0])
    run_loop(folder, settings, student, rollouts=rollouts, teachers=teachers)
    return dict(student.weights())


def check(folder: Path, device: torch.device, cases: tuple[str, ...]) -> None:
    whole = {lag: train(folder / f"whole-{lag}", device, lag) for lag in (0, 1)}
    for case in cases:
        _, lag, done = CASES[case]
        with pytest.raises(NoServer, match="no server is left"):
            train(folder / case, device, lag, case)
        distributed.barrier()
        assert [path.name for path in (folder / case / "checkpoints").iterdir()] == [f"step_{done:08d}"], case
        distributed.barrier()
        found = train(folder / case, device, lag)
        if case == "generate-lagged":  # the resumed run samples the next batch with a newer policy
            continue
        lines = metric_lines(folder / case)
        assert lines == metric_lines(folder / f"whole-{lag}"), case
        assert lines[-1]["servers/bad_answers"] == sum(2 + rank for rank in range(distributed.world_size()))
        assert found.keys() == whole[lag].keys()
        assert all(value.equal(whole[lag][name]) for name, value in found.items()), case


def test_a_run_without_servers_leaves_what_is_done(tmp_path):
    with distributed.process_group() as device:
        check(tmp_path, device, (*CASES,))


def test_a_diverged_run_names_the_step_and_keeps_the_checkpoint_before(tmp_path):
    """The second step's updates are far too large: its weights are finite, and give no finite loss."""
    settings, teachers = settings_of("student", loop={"steps": 9}, checkpoint={"every": 1}), two_teachers()

    def too_large(student: Student, update: int) -> float:
        return 1.0 if update < 2 else 1e30

    def infinite(student: Student, update: int) -> float:
        if update >= 2:
            next(student.model.parameters()).data.fill_(torch.inf)
        return 1.0

    def ended(rate) -> str:
        with distributed.process_group() as device, pytest.raises(NonFinite) as error:
            student = Student(tiny_model(), OPTIONS, device, schedule=lambda update: rate(student, update))
            run_loop(tmp_path, settings, student, teachers=teachers)
        return str(error.value)

    for line in (ended(too_large), ended(too_large)):  # resumed, it ends alike
        assert re.match(r"\w+, after step 3: update 7: gradient norm nan; 4 updates were skipped", line), line
        assert "; checkpoints after step 1 may have diverged, remove them" in line, line
    for step in (2, 3):
        shutil.rmtree(tmp_path / f"checkpoints/step_{step:08d}")
    line = ended(infinite)
    assert re.match(r"\w+, after step 2: the weight [\w.]+ is not finite; .* is of step 1", line), line


def test_a_sampled_token_without_a_finite_probability_ends_the_run(tmp_path):
    class Diverged(FixedRollouts):
        def generate(self, prompts, groups, sampling):
            rollouts = super().generate(prompts, groups, sampling)
            rollouts[-1].logps[-1] = torch.nan
            return rollouts

    with distributed.process_group() as device, pytest.raises(NonFinite, match=r"after step 0: the log-prob"):
        student = Student(tiny_model(), TrainSettings(**dict(PACKING)), device)
        run_loop(tmp_path, settings_of("student"), student, rollouts=Diverged(), teachers=two_teachers())


CALLS: list[str] = []


class Broken:
    """A tracker without a network."""

    def __init__(self, *_):
        pass

    def log(self, step, values):
        CALLS.append("log")
        raise OSError("the network is gone")

    close = log


def estimator(rewards_RK, group_R, **options):
    CALLS.append("estimator")
    if CALLS.count("estimator") == 3:
        raise KeyError("gone")
    return ESTIMATORS["gdpo"](rewards_RK, group_R, **options)


@pytest.mark.parametrize("at", [1, 2])
def test_a_users_function_costs_no_step_and_a_tracker_no_run(tmp_path, caplog, at):
    """`at`: the update of the third step before which it fails; before the second, no step is whole."""
    here = "tests.smopd.step.test_ended"
    changes = {"loop": {"steps": 4}, "log": {"trackers": [f"{here}:Broken"]}}
    changes |= {"advantage": {"estimator": f"{here}:estimator"}} if at == 1 else {}
    settings, teachers = settings_of("student", **changes), two_teachers()

    def trained(folder: Path, fails: bool = False) -> dict[str, torch.Tensor]:
        with distributed.process_group() as device:
            student = Student(tiny_model(), OPTIONS, device)
            plain = student.update

            def update(*arguments):
                if fails and at == 2 and student.updates == 5:
                    raise KeyError("gone")
                return plain(*arguments)

            student.update = update
            run_loop(folder, settings, student, teachers=teachers)
            return dict(student.weights())

    CALLS.extend(3 * ["estimator"])
    expected = trained(tmp_path / "whole")
    CALLS.clear()
    with pytest.raises(UserCodeError if at == 1 else KeyError) as ended:
        trained(tmp_path / "run", fails=True)
    kept = [path.name for path in (tmp_path / "run/checkpoints").glob("*")]
    assert kept == (["step_00000002"] if at == 1 else [])
    if at == 1:
        text = rf"{here}:estimator raised KeyError: 'gone' \(.*test_ended\.py, line \d+\)"
        assert re.fullmatch(text, str(ended.value))
    assert CALLS.count("log") == 1
    assert caplog.text.count("Broken failed and gets no more values: OSError('the") == 2
    found = trained(tmp_path / "run")
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
def test_on_two_ranks_one_of_them_is_enough(tmp_path):
    ran = on_ranks(2, "-m", "tests.smopd.step.test_ended", str(tmp_path))
    assert ran.returncode == 0, ran.stderr[-4000:]


if __name__ == "__main__":
    with distributed.process_group() as device:
        check(Path(sys.argv[1]), device, TWO_RANKS)
