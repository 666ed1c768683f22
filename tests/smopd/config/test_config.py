"""Settings: invalid values and combinations, and the resolved settings of a run."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from smopd.config.cli import Selection, read_options, read_settings
from smopd.config.recipe import Mistakes
from smopd.config.settings import Settings

VALUES: dict[str, Any] = {
    "name": "tiny",
    "model": {"factory": "m:model"},
    "data": {"train": {"source": "m:prompts"}},
    "rewards": [{"name": "a", "function": "m:f"}, {"name": "b", "function": "m:g", "weight": 2}],
    "teachers": {"models": [{"model": "one", "reward": "a"}, {"model": "two", "reward": "b"}]},
    "runs": {"one": {"stage": "specialize", "reward_weights": [0.9, 0.1]}, "two": {"stage": "train"}},
}


def settings(**changes: Any) -> Settings:
    return Settings.model_validate(VALUES | changes)


def mistakes(folder: Path, words: str) -> list[str]:
    """Return the mistakes of the recipe with command-line words over it, without their places."""
    (folder / "r.yaml").write_text(yaml.safe_dump(VALUES))
    try:
        read_settings(str(folder / "r.yaml"), read_options(Selection, words.split(), "train")[1])
    except Mistakes as wrong:
        return [line.partition(": ")[2] for line in wrong.lines]
    return []


def test_a_run_takes_its_own_settings_and_leaves_the_others_alone() -> None:
    own = {"opd": {"kappa": 4, "gate": {"floor": 0.1}}}
    runs = {"one": {"stage": "train", "set": own}, "two": {"stage": "train"}}
    whole = settings(runs=runs, opd={"kappa": 8, "tail": True})
    one, two = whole.resolved("one"), whole.resolved("two")
    assert (one.opd.kappa, one.opd.gate.floor, one.opd.tail) == (4, 0.1, True)
    assert (two.opd.kappa, two.opd.gate.floor, whole.opd.kappa) == (8, 0.2, 8)
    assert settings().weights("one") == [0.9, 0.1] and settings().weights("two") == [1.0, 2.0]


def test_a_run_without_teachers_is_balanced_over_the_batch_unless_an_estimator_is_named() -> None:
    runs = VALUES["runs"] | {"three": {"stage": "merge"}}
    by_stage = {"one": "gdpo", "two": "batch_balanced", "three": "gdpo"}
    for name, estimator in by_stage.items():
        assert settings(runs=runs).resolved(name).advantage.estimator == estimator
        named = settings(runs=runs, advantage={"estimator": "saw"}).resolved(name)
        assert named.advantage.estimator == "saw"


GATE, LONG = "--opd.gate.kind token", "x" * 5000
LAGGED = "--loop.async_level 1 --loss.old_logps rollout"
TWICE = "--runs.three.stage merge --teachers.models.1.model one"
VLLM = "--rollout.engine vllm --rollout.vllm.engine_kwargs"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--model.factory null", "model: give exactly one of path and factory"),
        ("--runs.a/b.stage train", "runs.a/b: expected a name of letters, digits, '_' and '-'"),
        ("--runs.base.stage train", "runs.base: expected a name of letters"),
        ("--output runs/{nam}", "output: got 'runs/{nam}', expected a folder with no braces but {name}"),
        (f"--data.train.source ./{LONG}", f"data.train.source: './{LONG[:78]}': [Errno 36] File name too"),
        ("--runs.one.set.name x", "runs.one.set: name cannot differ between runs"),
        ("--runs.one.init two", "runs.one.init: 'two' is not an earlier run, expected one of ['base']"),
        ("--runs.one.reward_weights [1]", "runs.one.reward_weights: got 1 weights, expected one for each"),
        ("--runs.one.reward_weights null --rewards.1.weight 1", "runs.one.reward_weights: missing; a teac"),
        ("--rewards.1.name a", "rewards: got the names ['a', 'a'], expected different ones"),
        ("--rewards.1.name truncated", "rewards.1.name: got 'truncated', expected a name without '/', and"),
        ("--loop.steps 99999999999999999999", "loop.steps: got 99999999999999999999, expected integer"),
        ("--processes 1000", "processes: got 1000, expected integer >= 1, <= 256"),
        ("--rewards.0.range 3 -3", "rewards.0.range: got [3.0, -3.0], expected [lo, hi] with lo < hi"),
        ("--rewards.0.kwargs.training_step 1", "rewards.0.kwargs: training_step: reserved"),
        ("--loop.prompts_per_step 4 --loop.updates_per_step 5", "loop.updates_per_step: got 5, expected at"),
        ("--advantage.snr_threshold 0.2", "advantage.snr_threshold: needs advantage.estimator gd2po, got"),
        ("--student.strategy deepspeed --student.shard_size 2", "student.shard_size: needs student.strategy"),
        ("--student.strategy deepspeed --student.optimizer m:f", "student.optimizer: got m:f, expected ad"),
        ("--student.deepspeed_config z.json", "student.deepspeed_config: needs student.strategy deepspeed"),
        ("--loss.old_logps rollout --loss.importance_cap 2", "loss.importance_cap: cannot be combined with"),
        ("--loop.async_level 1", "loop.async_level: 1 samples off-policy: needs loss.old_logps rollout"),
        (f"{LAGGED} {VLLM}.tensor_parallel_size 2", "loop.async_level: 1 with tensor parallelism needs roll"),
        (f"{LAGGED} --rollout.resample 2", "rollout.resample: got 2, expected 0 with loop.async_level 1"),
        ("--rollout.urls http://a:1", "rollout.urls: needs rollout.engine vllm, got local"),
        (f"--rollout.urls http://a:1 {VLLM}.max_model_len 9", "rollout.vllm: has no effect on the servers"),
        ("--rollout.transfer inline", "rollout.transfer: inline needs servers"),
        ("--teachers.models.1.reward c", "teachers.models.1.reward: no reward 'c', expected one of"),
        ("--teachers.models.1.model http://b:1", "teachers.models: got both URLs and models"),
        (f"{TWICE} --merge.method weights", "teachers.models: got ['one', 'one'], expected different models"),
        (f"{GATE} --opd.gate.floor 0.6", "opd.gate.floor: got 0.6, expected at most 1 / 2 teachers"),
        (f"{GATE} --rewards.0.range 0 1", "rewards.1.range: the gate needs [lo, hi] or batch for 'b'"),
        ("--opd.divergence reverse_kl_sampled --opd.target m:f", "opd.target: got m:f, which opd.divergence"),
        ("--student.schedule cosin", 'student.schedule: got "cosin", expected constant|linear|cosine|pack'),
        ("--merge.method product", "merge.method: product was removed; use merge.method weights"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_runs(tmp_path: Path, words: str, line: str):
    assert mistakes(tmp_path, words)[0].startswith(line)


def test_what_goes_together_is_not_refused(tmp_path: Path) -> None:
    gate = f"{GATE} --opd.gate.floor 0.5 --rewards.0.range 0 1 --rewards.1.range batch"
    for words in ("", gate, "--loop.async_level 1 --loss.importance_cap 2 --kl_ref.coef 0.1"):
        assert mistakes(tmp_path, words) == []
