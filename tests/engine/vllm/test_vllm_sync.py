"""New weights in vLLM: it then samples what transformers computes with them.

Tied and untied heads, one rank and two, in this process and in another.
"""

import os
import queue
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from smopd.engine.errors import NoServer
from smopd.engine.protocols import RolloutEngine
from smopd.engine.settings import TrainSettings, Vllm
from smopd.engine.student.student import Student
from smopd.engine.types import Sampling
from smopd.engine.vllm.engines import LostWeights
from smopd.engine.vllm.rollout import VllmRollout
from smopd.engine.weights import transport
from smopd.engine.weights.transport import publish_weights
from tests.engine.local.teacher_truth import check, whole_logprobs
from tests.engine.models.families import family
from tests.engine.tiny import END, assert_sampled_by, differ, tiny_model
from tests.engine.vllm.served import fork_engines
from tests.engine.vllm.vllm_worker import (
    KAPPA,
    PROMPTS,
    TEACHERS,
    TIED,
    assert_followed,
    on_two_ranks,
    own_responses,
    save_models,
)
from tests.patience import HANG_SECONDS

SETTINGS = Vllm(engine_kwargs={"kv_cache_memory_bytes": 32 << 20, "max_model_len": 256})
ALONE = SETTINGS.model_copy(update={"placement": "process"})
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
LONG = tuple(2 + i % 50 for i in range(200))  # longer than a block of the prefix cache


@pytest.fixture
def engine_of(tmp_path):
    """Return a rollout engine with a tiny model's weights; equal architecture and settings share one."""

    def make(settings: Vllm = SETTINGS, **options) -> VllmRollout:
        tiny_model(**options).save_pretrained(tmp_path / "model")
        return VllmRollout(tmp_path / "model", [END], settings)

    return make


def greedy(rollouts: VllmRollout):
    return rollouts.generate([*PROMPTS, LONG], range(len(PROMPTS) + 1), GREEDY)


@pytest.mark.parametrize(("tied", "family"), [(False, "qwen2"), (True, "llama"), (False, "olmo2")])
def test_greedy_follows_the_weights(engine_of, tied, family):
    models = [tiny_model(seed=seed, tied=tied, family=family) for seed in (0, 5, 6)]
    rollouts = engine_of(seed=0, tied=tied, family=family)
    made = [greedy(rollouts)]
    for version, model in enumerate(models[1:], start=1):
        greedy(rollouts)  # its long prompt is cached now
        rollouts.load_weights(model.state_dict().items(), version)
        made.append(greedy(rollouts))
        assert {rollout.policy_version for rollout in made[-1]} == {version}
        assert differ(made[-1], made[-2])
    for model, responses in zip(models, made, strict=True):
        assert_sampled_by(model, responses)


def test_experts_on_a_cpu_are_refused(tmp_path):
    family("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not replace the weights of experts on a CPU"):
        VllmRollout(tmp_path, [END], SETTINGS)


def test_wrong_weights_are_refused_and_never_served(engine_of):
    rollouts = engine_of(seed=0)
    weights = dict(tiny_model(seed=5).state_dict())

    def failing():
        yield from list(weights.items())[:9]
        raise ConnectionError("gone")

    lacking = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    wrong = weights | {"model.layers.0.self_attn.v_proj.weight": torch.zeros(3, 3)}
    extra = {"model.extra": torch.zeros(2), **weights}
    for stream, error, message in [
        (lacking.items(), ValueError, r"lacks 3 weights, first 'model\.layers\.1\.mlp\.down_proj\.weight'"),
        (wrong.items(), ValueError, r"v_proj\.weight has shape \(3, 3\), the engine has \(32, 64\)"),
        (extra.items(), ValueError, r"model\.extra has shape \(2,\), .* no such weight"),
        (failing(), ConnectionError, "gone"),
    ]:
        with pytest.raises(error, match=message):
            rollouts.load_weights(stream, version=7)
        assert rollouts.policy_version == 0
        with pytest.raises(LostWeights, match=message):
            greedy(rollouts)
    rollouts.load_weights(weights.items(), version=8)
    made = greedy(rollouts)
    assert {rollout.policy_version for rollout in made} == {8}
    assert_sampled_by(tiny_model(seed=5), made)


def test_versions_increase(engine_of, device):
    settings = TrainSettings(learning_rate=1e-2, compute_dtype="float32")
    student = Student(tiny_model(seed=5), settings, device)
    rollouts: RolloutEngine = engine_of(seed=0)
    for version in (0, 0, 1, 4):
        publish_weights(student, rollouts, version)
        assert rollouts.policy_version == version
    assert_sampled_by(tiny_model(seed=5), greedy(rollouts))
    for version in (4, 3, 0):
        with pytest.raises(ValueError, match=rf"version {version}, expected one above 4"):
            publish_weights(student, rollouts, version)


@pytest.mark.slow
def test_an_engine_in_its_own_process_takes_weights_and_its_end_is_an_error(engine_of, monkeypatch):
    monkeypatch.setattr(transport, "PART_BYTES", 20_000)  # several parts
    fork_engines()
    rollouts = engine_of(ALONE, seed=0, tied=True)
    assert_sampled_by(tiny_model(seed=0, tied=True), greedy(rollouts))
    model = tiny_model(seed=5, tied=True)
    lacking = dict(model.state_dict())
    lacking.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"lacks 1 weights, first 'model\.norm\.weight'"):
        rollouts.load_weights(lacking.items(), version=6)
    with pytest.raises(LostWeights):
        greedy(rollouts)
    rollouts.load_weights(model.state_dict().items(), version=7)
    assert_sampled_by(model, greedy(rollouts))

    # The process is killed during a request.
    core = rollouts.engine.llm.llm_engine
    (process,) = core.engine_core.resources.engine_manager.processes
    os.kill(process.pid, signal.SIGSTOP)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            greedy(rollouts)
        except NoServer as error:
            told.put(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while asking.is_alive() and not core.has_unfinished_requests():
        time.sleep(0.1)
    process.kill()
    assert told.get(timeout=HANG_SECONDS).startswith("vLLM: the engine's own process has ended")
    with pytest.raises(NoServer):
        rollouts.load_weights(model.state_dict().items(), version=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "untied"),
        ({"placement": "process"}, "tied"),
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, "tied"),
    ],
    ids=["in each rank", "in a process of each", "together"],
)
def test_two_ranks_sample_and_score_with_the_weights_of_a_sharded_student(tmp_path, settings, name):
    for left in Path("/dev/shm").glob("*tp:0-*-cpushm_*"):  # of killed ranks; vLLM reuses the name
        left.unlink()
    save_models(tmp_path)
    ranks = on_two_ranks(tmp_path, settings)
    before, after = (tiny_model(seed=0, tied=TIED[name]) for _ in range(2))
    assert_followed([rank[name] for rank in ranks], before, after)
    for i, rank in enumerate(ranks):
        assert (TEACHERS in rank) is ("placement" not in settings)
        if TEACHERS in rank:
            responses = own_responses(i)
            served = TIED.values() if rank[TEACHERS].ids_NMS.shape[1] > 1 else [False]
            truth = [whole_logprobs(tiny_model(seed=0, tied=tied), responses) for tied in served]
            check(rank[TEACHERS], truth, KAPPA, 1e-3, rollouts=responses)
