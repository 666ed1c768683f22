"""Teachers in vLLM compared with forward passes of transformers and peft."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")
pytest.importorskip("peft")

from bench.harness.memory import peak_bytes
from smopd.engine.models.loading import UnusableModel
from smopd.engine.settings import Vllm
from smopd.engine.types import Rollout
from smopd.engine.vllm import engines
from smopd.engine.vllm.pooler import TeacherPooler
from smopd.engine.vllm.teachers import VllmTeachers
from smopd.kernels.head import CHUNK_BYTES_CPU
from smopd.worlds import toy_world
from smopd.worlds.models import world_tokenizer
from tests.engine.local.teacher_truth import (
    ROLLOUTS,
    at,
    by_peft,
    check,
    save_adapters,
    whole_logprobs,
    widened,
)
from tests.engine.tiny import VOCABULARY, tiny_model, with_turns
from tests.engine.vllm.served import fork_engines

BOUND = 1e-3
KWARGS = {"kv_cache_memory_bytes": 32 << 20, "enforce_eager": True}
SETTINGS = Vllm(engine_kwargs=KWARGS)
SCALE = 0.5


def models() -> dict[str, torch.nn.Module]:
    """Teachers by name: other is untied and of the same shape, scaled has scaled logits."""
    made = {
        "untied": tiny_model(1),
        "tied": tiny_model(2, tied=True),
        "other": tiny_model(3),
        "padded": widened(tiny_model(5), 70),
        "scaled": tiny_model(1),
    }
    made["scaled"].config.logit_scale = SCALE
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Folder of the models by name, base, and adapters 0 and 1 of base."""
    folder = tmp_path_factory.mktemp("teachers")
    for name, model in models().items():
        model.save_pretrained(folder / name)
    save_adapters(folder, tiny_model(4))
    for name in (*models(), "base"):
        world_tokenizer(toy_world.vocabulary()).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    """Return (N, V) log-probabilities by name."""
    adapted = {name: by_peft(folder / "base", folder / name) for name in ("adapter0", "adapter1")}
    whole = models() | {"base": tiny_model(4)} | adapted
    found = {name: whole_logprobs(model.eval(), ROLLOUTS) for name, model in whole.items()}
    return found | {"scaled": at(found["untied"], 1 / SCALE)}


@pytest.fixture(scope="module")
def serve(folder: Path) -> Callable[..., VllmTeachers]:
    def made(*names: str, vocabulary: int = VOCABULARY, settings: Vllm = SETTINGS, **options):
        return VllmTeachers([folder / name for name in names], settings, vocabulary, **options)

    return made


@pytest.mark.parametrize(
    ("names", "kappa", "temperature"),
    [
        (["untied", "tied", "scaled"], 0, 1.0),
        (["untied", "tied", "scaled"], 16, 1.6),
        (["untied", "tied", "padded"], 8, 0.7),
        (["adapter1", "base", "adapter0"], 8, 1.0),
    ],
)
def test_equals_transformers(names: list[str], kappa: int, temperature: float, serve, expected) -> None:
    """Also with padded vocabularies, and with a base and its adapters, which share an engine."""
    teachers, wanted = serve(*names), [at(expected[name], temperature) for name in names]
    assert len(teachers.bases) == (1 if "base" in names else 3)
    check(teachers.score(ROLLOUTS, kappa, temperature), wanted, kappa, BOUND)
    if "padded" in names:
        assert teachers.dropped == int((expected["padded"].topk(8).indices >= VOCABULARY).sum()) > 0


def test_the_base_of_adapters_is_scored_without_them(serve, folder: Path, expected) -> None:
    teachers = serve("adapter0", "adapter1")
    before, base = len(engines._engines), teachers.base(folder / "base")
    for _ in range(2):
        check(teachers.score(ROLLOUTS, 4, 1.0), [expected["adapter0"], expected["adapter1"]], 4, BOUND)
        check(base.score(ROLLOUTS, 4, 1.0), [expected["base"]], 4, BOUND)
    assert len(engines._engines) == before and teachers.base(folder / "other") is None


def test_equal_and_long_sequences_in_small_chunks(serve) -> None:
    ids = torch.randint(2, VOCABULARY, (250,), generator=torch.Generator().manual_seed(0))
    ends = [(130, 240), (130, 240), (130, 150), (130, 130), (5, 250), (200, 201)]
    rollouts = [_rollout(ids[:prompt], ids[prompt:end]) for prompt, end in ends]
    rollouts += with_turns([each for each in rollouts if len(each.response_ids)])
    more = {"max_num_batched_tokens": 48, "max_num_seqs": 48, "enable_chunked_prefill": True}
    exact = Vllm(engine_kwargs={**KWARGS, **more, "max_model_len": 250})  # the longest sequence
    teachers = serve("untied", settings=exact)
    wanted = whole_logprobs(tiny_model(1).eval(), rollouts)
    for _ in range(2):
        check(teachers.score(rollouts, 4, 1.0), [wanted], 4, BOUND, rollouts=rollouts)


def _rollout(prompt: Tensor, response: Tensor) -> Rollout:
    return Rollout(tuple(prompt.tolist()), response, torch.zeros(len(response)), 0, True)


def test_nothing_to_score_and_too_long_a_response(serve) -> None:
    ids, teachers = torch.arange(300) % VOCABULARY, serve("untied", "tied")
    for rollouts in ([], [_rollout(ids[:4], ids[:0])]):
        topk = teachers.score(rollouts, 4, 1.0)
        assert topk.ids_NMS.shape == (0, 2, 4) and topk.token_logps_NM.shape == (0, 2)
    with pytest.raises(ValueError, match=r"a prompt and its response are 300 tokens, expected at most 256"):
        teachers.score([_rollout(ids[:5], ids[5:])], 4, 1.0)
    with pytest.raises(ValueError, match=f"kappa is 54, expected at most V = {VOCABULARY}"):
        teachers.score(ROLLOUTS, 54, 1.0)


def test_what_cannot_be_served_is_refused(serve, folder: Path, tmp_path: Path) -> None:
    capped = tiny_model(1)
    capped.config.final_logit_softcapping = 30.0
    capped.save_pretrained(tmp_path / "capped")
    config = json.loads((folder / "adapter0" / "adapter_config.json").read_text())
    (tmp_path / "dora").mkdir()
    (tmp_path / "dora" / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    for name, options, error, message in (
        ("absent", {}, FileNotFoundError, "no such folder"),
        ("", {}, FileNotFoundError, r"has no config\.json"),
        ("capped", {}, UnusableModel, r"final_logit_softcapping=30"),
        ("dora", {}, UnusableModel, r"vLLM does not serve it .*DoRA"),
        (folder / "untied", {"vocabulary": 60}, UnusableModel, rf"{VOCABULARY} tokens, the student has 60"),
    ):
        with pytest.raises(error, match=message):
            serve(str(tmp_path / name), **options)


@pytest.mark.slow
def test_teachers_in_a_process_of_their_own(serve, expected) -> None:
    """They take turns in one engine, so that it takes new weights too."""
    settings = SETTINGS.model_copy(update={"placement": "process"})
    fork_engines()
    teachers = serve("untied", "other", settings=settings, engines=1)
    assert {base.role for base in teachers.bases} == {"teachers/0"}
    for _ in range(2):
        check(teachers.score(ROLLOUTS, 4, 0.7), [at(expected[n], 0.7) for n in ("untied", "other")], 4, BOUND)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc/self/clear_refs")
def test_the_pooler_never_holds_tokens_times_vocabulary() -> None:
    n_tokens, n_vocab, n_hidden, kappa = 768, 151_936, 8, 16
    logits_bytes = 4 * n_tokens * n_vocab
    weight_VD, hidden_ND = torch.randn(n_vocab, n_hidden), torch.randn(n_tokens, n_hidden)
    pooler = TeacherPooler("test", None, n_vocab, weight_VD)
    ids_N = torch.randint(n_vocab, (n_tokens,), dtype=torch.int32)

    def answer() -> Tensor:
        return pooler.answer(hidden_ND, kappa, 0.7, ids_N)

    assert answer().shape == (n_tokens, 2 * kappa + 1)
    assert peak_bytes(lambda: hidden_ND @ weight_VD.T, "cpu") > 0.9 * logits_bytes  # checks the measurement
    assert peak_bytes(answer, "cpu") < CHUNK_BYTES_CPU + (16 << 20) < logits_bytes / 2
