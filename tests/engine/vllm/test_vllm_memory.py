"""GPU memory of vLLM's engines, and memory of weights on their way to one. Needs no vLLM."""

import weakref

import pytest
import torch
from safetensors.torch import load_file

from smopd.engine.models.sizes import ModelNumbers
from smopd.engine.settings import Vllm
from smopd.engine.vllm.memory import GIB, WORK, EngineMemory, Gpu, engine_memory, vllm_arguments
from smopd.engine.weights.architecture import Checked, architecture_of
from tests.engine.models.families import family
from tests.engine.tiny import tiny_model

TOTAL, RESERVE = 80 * GIB, 3 * GIB


def settings(**engine_kwargs: object) -> Vllm:
    return Vllm(engine_kwargs={"dtype": "bfloat16", "max_model_len": 3328, **engine_kwargs})


SETTINGS = settings()
QWEN = {
    "1.5B": ModelNumbers(1_543_714_304, 28, 1536, 2, 128, 151_936, True, 32_768),
    "3B": ModelNumbers(3_085_938_688, 36, 2048, 2, 128, 151_936, True, 32_768),
    "7B": ModelNumbers(7_615_616_512, 28, 3584, 4, 128, 152_064, False, 32_768),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def test_an_argument_that_is_null_is_not_given():
    assert settings(tensor_parallel_size=None, seed=None) == SETTINGS


@pytest.mark.parametrize("place", ["behind", "last", "absent"])
def test_a_tied_head_goes_with_its_embedding_and_nothing_is_kept(tmp_path, place):
    model = tiny_model(tied=True)
    model.save_pretrained(tmp_path)
    names = [name for name in model.state_dict() if name != HEAD]
    if place != "absent":
        names.insert(1 if place == "behind" else len(names), HEAD)
    alive: list[weakref.ref] = []

    def stream():
        for name in names:
            value = model.state_dict()[name].clone()
            assert sum(reference() is not None for reference in alive) == 0, name
            alive.append(weakref.ref(value))
            yield name, value
            del value

    checked, taken = Checked(architecture_of(str(tmp_path)), stream()), []
    for name, value in checked:
        torch.testing.assert_close(value, model.state_dict()[name])
        taken.append(name)
        del value
    assert checked.error is None and sorted(taken) == sorted(model.state_dict())
    assert taken[taken.index(EMBEDDING) + 1] == HEAD


@pytest.mark.parametrize("name", ["mixtral", "gpt_neox", "granitemoe", "gemma2, tied"])
def test_weights_have_the_names_and_shapes_of_files(tmp_path, name):
    model = family(name)
    model.save_pretrained(tmp_path)
    checked = Checked(architecture_of(str(tmp_path)), model.state_dict().items())
    found, expected = dict(checked), load_file(tmp_path / "model.safetensors")
    assert checked.error is None and found.keys() == expected.keys()
    assert all(torch.equal(found[each], value) for each, value in expected.items())


def taken_by(model: ModelNumbers, gpu: Gpu, wanted: Vllm = SETTINGS, samples: bool = False) -> EngineMemory:
    return engine_memory(wanted, model, 2, 3328, gpu, samples=samples)


@pytest.mark.parametrize(
    ("name", "gpus", "teachers", "second"),
    [("1.5B", 8, 3, True), ("3B", 8, 3, True), ("7B", 8, 1, True), ("7B", 8, 2, False), ("3B", 1, 2, False)],
)
def test_all_that_is_awake_at_a_wake_is_on_the_gpu(name: str, gpus: int, teachers: int, second: bool) -> None:
    """A sleeping rollout engine, teachers, a second engine that cannot sleep, then AdamW's states."""
    model = QWEN[name]
    masters = -(-4 * model.parameters // gpus)
    free, awake = TOTAL - RESERVE - masters, 0
    sleeper = taken_by(model, Gpu(free, TOTAL), samples=True)
    assert vllm_arguments(SETTINGS, sleeper, Gpu(free, TOTAL), sleeps=True, samples=True) == {
        "gpu_memory_utilization": sleeper.total / TOTAL
    }
    assert sleeper.cache >= 32 * (sleeper.least - 16 * model.kv_bytes(2)), "it samples many at once"
    for samples in [False] * teachers + [True] * second:
        gpu = Gpu(free - awake, TOTAL, sleeper.total)
        taken = taken_by(model, gpu, samples=samples)
        given = vllm_arguments(SETTINGS, taken, gpu, sleeps=False, samples=samples)
        assert given["gpu_memory_utilization"] * TOTAL <= gpu.free, "else vLLM refuses to start"
        assert given.get("kv_cache_memory_bytes") == (None if samples else taken.cache)
        awake += taken.total
        assert RESERVE + masters + awake + sleeper.total <= TOTAL
    assert RESERVE + 3 * masters + awake + sleeper.total <= TOTAL


def test_what_is_set_is_taken_and_what_has_no_room_is_refused() -> None:
    gpu = Gpu(70 * GIB, TOTAL)
    for samples in (False, True):
        cache = settings(kv_cache_memory_bytes=GIB)
        taken = taken_by(QWEN["3B"], gpu, cache, samples)
        given = vllm_arguments(cache, taken, gpu, sleeps=False, samples=samples)
        assert taken.cache == given["kv_cache_memory_bytes"] == GIB
        share = settings(gpu_memory_utilization=0.5)
        taken = taken_by(QWEN["3B"], gpu, share, samples)
        assert taken.inside == TOTAL // 2
        given = vllm_arguments(share, taken, gpu, sleeps=False, samples=samples)
        assert given == {"gpu_memory_utilization": 0.5}
    gpu = Gpu(40 * GIB, TOTAL, asleep=30 * GIB)
    taken = taken_by(QWEN["7B"], gpu)
    with pytest.raises(ValueError, match=r"takes 15\.2 GiB of weights and cache, expected at most 10\.0"):
        vllm_arguments(SETTINGS, taken, gpu, sleeps=False, samples=False)
    assert vllm_arguments(SETTINGS, taken, gpu, sleeps=True, samples=False)


@pytest.mark.parametrize(
    ("name", "parallel", "copies"), [("7B", 1, 1), ("7B", 4, 1), ("3B", 1, 0), ("3B", 4, 1)]
)
def test_the_poolers_head_is_whole_on_every_gpu(name: str, parallel: int, copies: int) -> None:
    """On one GPU a tied head is the embedding."""
    model = QWEN[name]
    taken = taken_by(model, Gpu(70 * GIB, TOTAL), settings(tensor_parallel_size=parallel))
    assert taken.total == taken.weights + taken.head + taken.cache + WORK
    head = 2 * model.head_parameters
    assert taken.head == copies * head
    assert taken.weights == -(-(2 * model.parameters - (head if not model.tied else 0)) // parallel)
