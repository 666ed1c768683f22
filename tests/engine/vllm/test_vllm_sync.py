"""New weights in vLLM: what it samples afterwards is what transformers computes with them.

Tied and untied heads, one rank and two, in this process and in another, as full tensors and as adapters.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from smopd.engine.errors import NoServer
from smopd.engine.process import below, runs
from smopd.engine.protocols import RolloutEngine
from smopd.engine.settings import TrainSettings, VllmSettings
from smopd.engine.student.student import Student
from smopd.engine.types import Sampling
from smopd.engine.vllm.engines import LostWeights
from smopd.engine.vllm.rollout import VllmRollout
from smopd.engine.weights import transport
from smopd.engine.weights.sync import publish_weights
from tests.engine.local.teacher_truth import check, whole_logprobs
from tests.engine.tiny import END, assert_sampled_by, differ, tiny_model
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

ROOT = Path(__file__).parents[3]
SETTINGS = VllmSettings(kv_cache_bytes=32 << 20, max_model_len=256)
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
GROUPS = list(range(len(PROMPTS)))


@pytest.fixture(scope="module", autouse=True)
def device(lasting_group):
    return lasting_group


@pytest.fixture
def saved(tmp_path):
    def save(**options) -> Path:
        tiny_model(**options).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_follows_the_weights(saved, tied, family):
    models = [tiny_model(seed=seed, tied=tied, family=family) for seed in (0, 5, 6)]
    rollouts = VllmRollout(saved(seed=0, tied=tied, family=family), [END], SETTINGS)
    made = [rollouts.generate(PROMPTS, GROUPS, GREEDY)]
    for version, model in enumerate(models[1:], start=1):
        rollouts.load_weights(model.state_dict().items(), version)
        made.append(rollouts.generate(PROMPTS, GROUPS, GREEDY))
        assert {rollout.policy_version for rollout in made[-1]} == {version}
        assert differ(made[-1], made[-2])
    for model, responses in zip(models, made, strict=True):
        assert_sampled_by(model, responses)


def test_a_cached_prompt_is_computed_again(saved):
    prompt = tuple(2 + i % 50 for i in range(200))  # longer than a block of the cache
    rollouts = VllmRollout(saved(seed=0), [END], SETTINGS)
    for seed in (0, 5):
        model = tiny_model(seed=seed)
        rollouts.load_weights(model.state_dict().items(), version=seed)
        for _ in range(2):
            assert_sampled_by(model, rollouts.generate([prompt], [0], GREEDY))


def test_wrong_weights_are_refused_and_never_served(saved):
    rollouts = VllmRollout(saved(seed=0), [END], SETTINGS)
    weights = dict(tiny_model(seed=5).state_dict())
    lacking = {name: value for name, value in weights.items() if "layers.1.mlp" not in name}
    wrong = weights | {"model.layers.0.self_attn.v_proj.weight": torch.zeros(3, 3)}
    cases = [
        (lacking, r"lacks 3 weights, first 'model\.layers\.1\.mlp\.down_proj\.weight'"),
        (wrong, r"v_proj\.weight has shape \(3, 3\), the engine has \(32, 64\)"),
        ({"model.extra": torch.zeros(2), **weights}, r"model\.extra has shape \(2,\), .* no such weight"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=message):
            rollouts.load_weights(bad.items(), version=7)
        assert rollouts.policy_version == 0
        with pytest.raises(LostWeights, match=message):
            rollouts.generate(PROMPTS, GROUPS, GREEDY)
    rollouts.load_weights(weights.items(), version=8)
    made = rollouts.generate(PROMPTS, GROUPS, GREEDY)
    assert {rollout.policy_version for rollout in made} == {8}
    assert_sampled_by(tiny_model(seed=5), made)


def test_a_stream_that_fails_is_never_served(saved):
    rollouts = VllmRollout(saved(seed=0), [END], SETTINGS)
    weights = tiny_model(seed=5).state_dict()

    def failing():
        yield from list(weights.items())[:9]
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        rollouts.load_weights(failing(), version=1)
    with pytest.raises(LostWeights, match="gone"):
        rollouts.generate(PROMPTS, GROUPS, GREEDY)
    rollouts.load_weights(weights.items(), version=1)
    assert_sampled_by(tiny_model(seed=5), rollouts.generate(PROMPTS, GROUPS, GREEDY))


def test_versions_increase(saved, device):
    settings = TrainSettings(learning_rate=1e-2, compute_dtype="float32")
    student = Student(tiny_model(seed=5), settings, device)
    rollouts: RolloutEngine = VllmRollout(saved(seed=0), [END], SETTINGS)
    for version in (0, 0, 1, 4):
        publish_weights(student, rollouts, version)
        assert rollouts.policy_version == version
    assert_sampled_by(tiny_model(seed=5), rollouts.generate(PROMPTS, GROUPS, GREEDY))
    for version in (4, 3, 0):
        with pytest.raises(ValueError, match=rf"version {version}, expected one above 4"):
            publish_weights(student, rollouts, version)


def adapter(folder: Path, seed: int, rank: int = 4):
    """Writes a random adapter of the model of seed 0; returns that model with it."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=rank, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False
    )
    base = tiny_model(seed=0)
    torch.manual_seed(seed)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(folder)
    return model


def test_adapters_are_served_by_version(saved, tmp_path):
    settings = VllmSettings(kv_cache_bytes=32 << 20, max_model_len=64, max_lora_rank=4)
    rollouts = VllmRollout(saved(seed=0), [END], settings)
    base = rollouts.generate(PROMPTS, GROUPS, GREEDY)
    assert_sampled_by(tiny_model(seed=0), base)
    before = base
    for version in (1, 2, 3):
        folder = tmp_path / f"adapter{version}"
        model = adapter(folder, seed=version)
        rollouts.load_adapter(folder, version)
        made = rollouts.generate(PROMPTS, GROUPS, GREEDY)
        assert {rollout.policy_version for rollout in made} == {version}
        assert differ(made, base) and differ(made, before)
        assert_sampled_by(model, made)
        before = made
    with pytest.raises(ValueError, match=r"load_adapter: .*rank"):
        adapter(tmp_path / "large", seed=4, rank=64)
        rollouts.load_adapter(tmp_path / "large", 4)
    assert_sampled_by(model, rollouts.generate(PROMPTS, GROUPS, GREEDY))
    rollouts.load_weights(tiny_model(seed=5).state_dict().items(), version=5)
    assert_sampled_by(tiny_model(seed=5), rollouts.generate(PROMPTS, GROUPS, GREEDY))


def test_an_engine_without_adapters_refuses_them(saved, tmp_path):
    rollouts = VllmRollout(saved(seed=0), [END], SETTINGS)
    with pytest.raises(ValueError, match="max_lora_rank is 0"):
        rollouts.load_adapter(tmp_path, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "transfer"), [(False, "files"), (True, "inline")])
def test_an_engine_in_its_own_process_takes_weights(saved, tied, transfer, monkeypatch):
    monkeypatch.setattr(transport, "PART_BYTES", 20_000)  # several parts
    settings = VllmSettings(placement="process", transfer=transfer, kv_cache_bytes=32 << 20, max_model_len=64)
    rollouts = VllmRollout(saved(seed=0, tied=tied), [END], settings)
    assert_sampled_by(tiny_model(seed=0, tied=tied), rollouts.generate(PROMPTS, GROUPS, GREEDY))
    model = tiny_model(seed=5, tied=tied)
    rollouts.load_weights(model.state_dict().items(), version=1)
    assert_sampled_by(model, rollouts.generate(PROMPTS, GROUPS, GREEDY))
    weights = dict(model.state_dict())
    weights.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"lacks 1 weights, first 'model\.norm\.weight'"):
        rollouts.load_weights(weights.items(), version=2)
    with pytest.raises(LostWeights):
        rollouts.generate(PROMPTS, GROUPS, GREEDY)
    again = tiny_model(seed=6, tied=tied)
    rollouts.load_weights(again.state_dict().items(), version=2)
    assert_sampled_by(again, rollouts.generate(PROMPTS, GROUPS, GREEDY))

    # A request that is under way when the process is killed.
    (engine,) = rollouts.llm.llm_engine.engine_core.resources.engine_manager.processes
    os.kill(engine.pid, signal.SIGSTOP)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            rollouts.generate(PROMPTS, GROUPS, GREEDY)
        except NoServer as error:
            told.put(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    while asking.is_alive() and not rollouts.llm.llm_engine.has_unfinished_requests():
        time.sleep(0.1)
    engine.kill()
    assert told.get(timeout=HANG_SECONDS).startswith("vLLM: the engine's own process has ended")
    with pytest.raises(NoServer):
        rollouts.load_weights(again.state_dict().items(), version=3)


ALONE = """
import signal, sys, time
from smopd.engine.settings import VllmSettings
from smopd.engine.types import Sampling
from smopd.engine.vllm.rollout import VllmRollout
from tests.engine.tiny import END
if __name__ == "__main__":
    settings = VllmSettings(placement="process", kv_cache_bytes=32 << 20, max_model_len=64)
    rollouts = VllmRollout(sys.argv[1], [END], settings)
    signal.signal(signal.SIGINT, lambda *_: print("asked to end", flush=True))
    print("made", flush=True)
    for line in sys.stdin:
        made = rollouts.generate([(5, 9, 11)], [0], Sampling(temperature=0.0, max_new_tokens=4))
        print(len(made), "sampled", flush=True)
"""


@pytest.mark.slow
def test_an_engine_outlives_a_terminals_interrupt_and_ends_with_a_caller_that_is_killed(saved, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text(ALONE)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), str(saved(seed=0))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=env, start_new_session=True, **pipes) as caller:
        try:
            assert caller.stdout.readline() == "made\n"
            engines = below(caller.pid)
            assert engines
            os.killpg(caller.pid, signal.SIGINT)
            assert caller.stdout.readline() == "asked to end\n"
            caller.stdin.write("go on\n")
            caller.stdin.flush()
            assert caller.stdout.readline() == "1 sampled\n"
        finally:
            caller.kill()
    deadline = time.monotonic() + HANG_SECONDS
    while any(runs(process) for process in engines):
        assert time.monotonic() < deadline, engines
        time.sleep(0.2)


def test_cuda_handles_are_what_vllms_engine_reads(monkeypatch):
    """Up to the handle itself, which takes a GPU."""
    from vllm import envs
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from smopd.engine.vllm.transfer import IpcEngine

    envs.disable_envs_cache()  # an engine of another test turned it on
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(transport.reductions, "reduce_tensor", lambda value: (None, (value.shape,)))
    held = {"a": torch.zeros(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    found = IpcEngine.update_info_cls(**transport.handles(held, "GPU-0"))
    assert found.names == ["a", "b"] and found.shapes == [[2, 3], [4]]
    assert found.dtype_names == ["float32", "bfloat16"]
    assert found.ipc_handles == [{"GPU-0": (torch.Size([2, 3]),)}, {"GPU-0": (torch.Size([4]),)}]
    assert "smopd_ipc" in WeightTransferEngineFactory._registry


def test_cuda_handles_need_cuda(saved, monkeypatch):
    settings = VllmSettings(placement="process", transfer="ipc")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="transfer: ipc needs CUDA"):
        VllmRollout(saved(seed=0), [END], settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"tensor_parallel_size": 2}, {"placement": "process"}],
    ids=["each", "together", "processes"],
)
def test_two_ranks_sample_and_score_with_the_weights_of_a_sharded_student(tmp_path, settings):
    save_models(tmp_path)
    ranks = on_two_ranks(tmp_path, settings)
    for name in ranks[0].keys() - {TEACHERS}:
        assert_followed([rank[name] for rank in ranks], tied=TIED.get(name, False))
    for i, rank in enumerate(ranks):
        truth = [whole_logprobs(tiny_model(seed=0, tied=tied), own_responses(i)) for tied in TIED.values()]
        for found in rank.get(TEACHERS, {}).values():
            check(found, truth, KAPPA, 1e-3, rollouts=own_responses(i))
