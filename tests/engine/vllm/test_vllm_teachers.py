"""Both routes through real vLLM against whole forward passes of transformers and peft."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("vllm")

from bench.harness.memory import peak_bytes
from smopd.engine.models.loading import UnusableModel
from smopd.engine.settings import VllmSettings
from smopd.engine.types import Rollout
from smopd.engine.vllm.pooler import Question, TeacherPooler, unsupported_head
from smopd.engine.vllm.teachers import VllmTeachers
from smopd.kernels.head.chunks import CHUNK_BYTES_CPU
from smopd.worlds import toy_world
from smopd.worlds.models import world_tokenizer
from tests.engine.local.teacher_truth import (
    ROLLOUTS,
    at,
    by_peft,
    check,
    check_union,
    save_adapters,
    whole_logprobs,
    widened,
)
from tests.engine.tiny import VOCABULARY, tiny_model

BOUND = 1e-3
SETTINGS = VllmSettings(kv_cache_bytes=32 << 20, enforce_eager=True)
ROUTES = ("pooler", "prompt_logprobs")


@pytest.fixture(scope="module", autouse=True)
def group(lasting_group):
    return lasting_group


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models by name: untied, tied, other (untied, of the same shape), padded; base and adapters 0 and 1."""
    pytest.importorskip("peft")
    folder = tmp_path_factory.mktemp("teachers")
    tiny_model(1).save_pretrained(folder / "untied")
    tiny_model(2, tied=True).save_pretrained(folder / "tied")
    tiny_model(3).save_pretrained(folder / "other")
    widened(tiny_model(5), 70).save_pretrained(folder / "padded")
    save_adapters(folder, tiny_model(4))
    for name in ("untied", "tied", "other", "padded", "base"):
        world_tokenizer(toy_world.vocabulary()).save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Tensor]:
    """(N, V) log-probabilities by name."""
    models = {
        "untied": tiny_model(1),
        "tied": tiny_model(2, tied=True),
        "other": tiny_model(3),
        "padded": widened(tiny_model(5), 70),
        "base": tiny_model(4),
        "adapter0": by_peft(folder / "base", folder / "adapter0"),
        "adapter1": by_peft(folder / "base", folder / "adapter1"),
    }
    return {name: whole_logprobs(model.eval(), ROLLOUTS) for name, model in models.items()}


@pytest.fixture(scope="module")
def serve(folder: Path) -> Callable[..., VllmTeachers]:
    def made(*names: str, vocabulary: int = VOCABULARY, **options) -> VllmTeachers:
        return VllmTeachers([folder / name for name in names], SETTINGS, vocabulary, **options)

    return made


@pytest.mark.parametrize("kappa", [0, 4, 16])
@pytest.mark.parametrize("route", ROUTES)
def test_equals_transformers(route: str, kappa: int, serve, expected) -> None:
    topk = serve("untied", "tied", route=route).score(ROLLOUTS, kappa, 1.0)
    check(topk, [expected["untied"], expected["tied"]], kappa, BOUND)


def test_the_pooler_serves_any_temperature(serve, expected) -> None:
    teachers = serve("untied", "tied")
    assert teachers.pooled
    for temperature in (0.7, 1.6):
        wanted = [at(expected[name], temperature) for name in ("untied", "tied")]
        check(teachers.score(ROLLOUTS, 4, temperature), wanted, 4, BOUND)


def test_what_prompt_logprobs_cannot_serve(serve) -> None:
    teachers = serve("untied", route="prompt_logprobs")
    with pytest.raises(ValueError, match=r"temperature is 0\.7, expected 1"):
        teachers.score(ROLLOUTS, 4, 0.7)
    with pytest.raises(ValueError, match="union is True, expected False on the route prompt_logprobs"):
        teachers.score(ROLLOUTS, 4, 1.0, union=True)


@pytest.mark.parametrize("route", ROUTES)
def test_models_take_turns_in_one_engine(route: str, serve, expected, monkeypatch) -> None:
    loads = []
    from smopd.engine.vllm import teachers as vllm_teachers

    actual = vllm_teachers.engine
    teachers = serve("untied", "other", route=route, engines=1, role="turns")
    monkeypatch.setattr(
        vllm_teachers,
        "engine",
        lambda role, path, *rest, **options: loads.append(path) or actual(role, path, *rest, **options),
    )
    for _ in range(2):
        topk = teachers.score(ROLLOUTS, 4, 1.0)
        check(topk, [expected["untied"], expected["other"]], 4, BOUND)
    names = [Path(path).name for path in loads]
    assert names == ["untied", "other", "other", "untied"], "the one that is loaded comes first"
    assert {base.role for base in teachers.bases} == {"turns/0"}


@pytest.mark.parametrize("route", ROUTES)
def test_padding_is_dropped_and_counted(route: str, serve, expected) -> None:
    names = ["untied", "tied", "padded"]
    teachers = serve(*names, route=route)
    check(teachers.score(ROLLOUTS, 8, 1.0), [expected[name] for name in names], 8, BOUND)
    assert teachers.dropped == int((expected["padded"].topk(8).indices >= VOCABULARY).sum()) > 0


@pytest.mark.parametrize("route", ROUTES)
def test_a_base_and_its_adapters_share_an_engine(route: str, serve, expected) -> None:
    names = ["adapter1", "base", "adapter0"]
    teachers = serve(*names, route=route)
    assert len(teachers.bases) == 1
    for _ in range(2):
        check(teachers.score(ROLLOUTS, 4, 1.0), [expected[name] for name in names], 4, BOUND)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_union_holds_every_value(temperature: float, serve, expected) -> None:
    names = ["untied", "tied", "padded"]
    topk = serve(*names).score(ROLLOUTS, 5, temperature, union=True)
    check_union(topk, [at(expected[name], temperature) for name in names], 5, BOUND)


def test_the_union_of_adapters(serve, expected) -> None:
    names = ["adapter1", "base", "adapter0"]
    topk = serve(*names).score(ROLLOUTS, 3, 1.0, union=True)
    check_union(topk, [expected[name] for name in names], 3, BOUND)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_given_ids_have_every_value(temperature: float, serve, expected) -> None:
    names = ["untied", "padded", "adapter1", "base"]
    teachers = serve(*names)
    known_NM = teachers.score(ROLLOUTS, 0, temperature).token_logps_NM
    ids_NMU = torch.randint(0, VOCABULARY, (len(known_NM), len(names), 9), dtype=torch.int32)
    found_NMU = teachers.given(ROLLOUTS, ids_NMU, known_NM, temperature)
    for m, name in enumerate(names):
        wanted_NU = at(expected[name], temperature).gather(1, ids_NMU[:, m].long())
        torch.testing.assert_close(found_NMU[:, m], wanted_NU, rtol=0, atol=BOUND)
    with pytest.raises(ValueError, match="union is True, expected False on the route prompt_logprobs"):
        serve("untied", route="prompt_logprobs").given(ROLLOUTS, ids_NMU[:, :1], known_NM[:, :1], 1.0)


@pytest.mark.parametrize("route", ROUTES)
def test_equal_and_long_sequences_in_small_chunks(route: str, serve) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, VOCABULARY, (250,), generator=generator)
    rollouts = [
        _rollout(ids[:130], ids[130:240]),
        _rollout(ids[:130], ids[130:240]),
        _rollout(ids[:130], ids[130:150]),
        _rollout(ids[:130], ids[:0]),
        _rollout(ids[:5], ids[5:250]),
        _rollout(ids[:200], ids[200:201]),
    ]
    teachers = serve("untied", route=route, batch_tokens=48, role="chunks")
    wanted = whole_logprobs(tiny_model(1).eval(), rollouts)
    for _ in range(2):
        check(teachers.score(rollouts, 4, 1.0), [wanted], 4, BOUND, rollouts=rollouts)


def _rollout(prompt: Tensor, response: Tensor) -> Rollout:
    return Rollout(tuple(prompt.tolist()), response, torch.zeros(len(response)), 0, True)


def test_nothing_to_score(serve) -> None:
    ids = torch.arange(2, 6)
    teachers = serve("untied", "tied")
    for rollouts in ([], [_rollout(ids, ids[:0])]):
        topk = teachers.score(rollouts, 4, 1.0)
        assert topk.ids_NMS.shape == (0, 2, 4) and topk.token_logps_NM.shape == (0, 2)


def test_too_long_a_response_is_refused(serve) -> None:
    ids = torch.arange(300) % VOCABULARY
    with pytest.raises(ValueError, match=r"a prompt and its response are 300 tokens, expected at most 256"):
        serve("untied").score([_rollout(ids[:5], ids[5:])], 4, 1.0)
    with pytest.raises(ValueError, match=f"kappa is 54, expected at most V = {VOCABULARY}"):
        serve("untied").score(ROLLOUTS, 54, 1.0)


@pytest.mark.parametrize("route", ROUTES)
def test_the_longest_sequence_has_room(route: str, folder: Path, expected) -> None:
    longest = max(len(r.prompt_ids) + len(r.response_ids) for r in ROLLOUTS)
    exact = SETTINGS.model_copy(update={"max_model_len": longest})
    teachers = VllmTeachers([folder / "untied"], exact, VOCABULARY, route, role=f"exact {route}")
    check(teachers.score(ROLLOUTS, 4, 1.0), [expected["untied"]], 4, BOUND)


def test_the_route_that_draws_a_token_needs_a_position_for_it(folder: Path) -> None:
    whole = SETTINGS.model_copy(update={"max_model_len": 256})
    with pytest.raises(UnusableModel, match=r"draws a token behind .* 256, expected fewer than its 256 pos"):
        VllmTeachers([folder / "untied"], whole, VOCABULARY, "prompt_logprobs", role="whole")


def test_paths_and_arguments_that_cannot_be_served(serve, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        serve(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        serve(str(tmp_path))
    with pytest.raises(
        UnusableModel, match=rf"models\.0: .*vocabulary of {VOCABULARY}, the student has 60 t"
    ):
        serve("untied", vocabulary=60)
    with pytest.raises(ValueError, match="teachers: got none"):
        serve()
    with pytest.raises(ValueError, match=r"teachers\.route: got 'fast', expected one of auto, pooler"):
        serve("untied", route="fast")
    with pytest.raises(ValueError, match=r"teachers\.engines: got 0, expected at least 1"):
        serve("untied", engines=0)


def test_an_adapter_that_vllm_does_not_serve_is_refused(serve, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "adapter0" / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": True}))
    with pytest.raises(UnusableModel, match=r"vLLM does not serve it .*DoRA"):
        serve(str(tmp_path))


def test_heads_that_the_pooler_cannot_apply(serve, folder: Path, tmp_path: Path, caplog) -> None:
    model = tiny_model(1)
    model.config.final_logit_softcapping = 30.0
    model.save_pretrained(tmp_path)
    assert "final_logit_softcapping=30.0" in (unsupported_head(str(tmp_path)) or "")
    assert unsupported_head(str(folder / "untied")) is unsupported_head(str(folder / "tied")) is None
    with pytest.raises(UnusableModel, match=r"pooler cannot serve .*final_logit_softcapping=30"):
        serve(str(tmp_path), route="pooler")
    with caplog.at_level(logging.INFO, logger="smopd"):
        teachers = serve(str(tmp_path), role="capped")
    assert not teachers.pooled
    assert "route prompt_logprobs (the pooler cannot serve" in caplog.text


@pytest.mark.parametrize("route", ROUTES)
def test_the_base_of_adapters_is_scored_without_them(route: str, serve, folder: Path, expected) -> None:
    from smopd.engine.vllm import engines as vllm

    before = len(vllm._engines)
    teachers = serve("adapter0", "adapter1", route=route, role=f"once with {route}")
    base = teachers.base(folder / "base")
    for _ in range(2):
        check(teachers.score(ROLLOUTS, 4, 1.0), [expected["adapter0"], expected["adapter1"]], 4, BOUND)
        check(base.score(ROLLOUTS, 4, 1.0), [expected["base"]], 4, BOUND)
    assert len(vllm._engines) == before + 1 and teachers.base(folder / "other") is None


@pytest.mark.slow
def test_teachers_in_a_process_of_their_own(folder: Path, expected) -> None:
    """They take turns in one engine there, so new weights reach it too."""
    settings = SETTINGS.model_copy(update={"placement": "process"})
    teachers = VllmTeachers([folder / "untied", folder / "other"], settings, VOCABULARY, engines=1)
    for _ in range(2):
        check(teachers.score(ROLLOUTS, 4, 0.7), [at(expected[n], 0.7) for n in ("untied", "other")], 4, BOUND)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs /proc/self/clear_refs")
@pytest.mark.parametrize(
    ("given", "kappa"), [(None, 16), (32, 0), (32, 16)], ids=["kappa16", "given32", "kappa16-given32"]
)
def test_the_pooler_never_holds_tokens_times_vocabulary(given: int | None, kappa: int) -> None:
    n_tokens, n_vocab, n_hidden = 768, 151_936, 8
    logits_bytes = 4 * n_tokens * n_vocab
    weight_VD, hidden_ND = torch.randn(n_vocab, n_hidden), torch.randn(n_tokens, n_hidden)
    pooler = TeacherPooler(("test",), None, n_vocab, weight_VD, None)
    ids_N = torch.randint(n_vocab, (n_tokens,), dtype=torch.int32)
    asked = Question(0, ids_N, kappa, 0.7)
    if given is not None:
        given_NU = torch.randint(n_vocab, (n_tokens, given), dtype=torch.int32)
        known_N = None if kappa else torch.zeros(n_tokens)
        asked = replace(asked, given_TU=given_NU, token_logps_T=known_N)

    def answer() -> Tensor:
        return pooler._answers([hidden_ND], [asked])[0]

    assert answer().shape == (n_tokens, (2 * kappa + 1 if kappa else 0) + (given or 0))
    assert peak_bytes(lambda: hidden_ND @ weight_VD.T, "cpu") > 0.9 * logits_bytes  # else it measures nothing
    assert peak_bytes(answer, "cpu") < CHUNK_BYTES_CPU + (16 << 20) < logits_bytes / 2
