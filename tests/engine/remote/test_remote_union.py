"""The union over servers at URLs, in two rounds: as the local engine has it, and what cannot serve it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load, save

from smopd.engine.local.teachers import LocalTeachers, load_teachers
from smopd.engine.models.loading import UnusableModel
from smopd.engine.remote.teachers import Probe, RemoteTeachers
from smopd.engine.remote.wire import pack_given
from smopd.engine.types import TeacherTopK
from smopd.worlds.models import world_model
from tests.engine.remote.test_remote_teachers import PACKING, QUICK, Serving, Vllm
from tests.engine.tiny import ragged_rollouts
from tests.smopd.recipes import merged, metric_lines, train_here, write_recipe

KAPPA = 4


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two teachers and what they started from, over the quickstart's vocabulary."""
    folder, made = tmp_path_factory.mktemp("models"), []
    for name in ("one", "two", "reference"):
        model, tokenizer = world_model(len(made))
        made.append(str(folder / name))
        for part in (model, tokenizer):
            part.save_pretrained(made[-1])
    return made


VOCABULARY = world_model(0)[0].config.vocab_size


def local(paths: list[str], vocabulary: int = VOCABULARY) -> LocalTeachers:
    return load_teachers(paths, PACKING, vocabulary, torch.float32)


@pytest.fixture(scope="module")
def serve(paths: list[str]) -> Iterator[Callable[..., Serving]]:
    made: list[Serving] = []

    def start(path: str, vocabulary: int = VOCABULARY) -> Serving:
        made.append(Serving(local([path], vocabulary), path, vocabulary))
        return made[-1]

    yield start
    for server in made:
        server.stop()


@pytest.fixture(scope="module")
def urls(serve, paths: list[str]) -> list[str]:
    return [serve(path).url for path in paths]


def probe() -> Probe:
    text = "call the"
    return Probe(text, tuple(world_model(0)[1].encode(text, add_special_tokens=False)))


def remote(*urls: str, vocabulary: int = VOCABULARY, temperature: float = 1.0, **options) -> RemoteTeachers:
    given = {"union": True, "retry": QUICK} | options
    servers = [url.split(",") for url in urls]
    return RemoteTeachers(servers, vocabulary, probe(), KAPPA, temperature, **given)


def assert_same(found: TeacherTopK, expected: TeacherTopK, atol: float = 1e-5, rtol: float = 0.0) -> None:
    assert found.ids_NMS.equal(expected.ids_NMS)
    torch.testing.assert_close(found.logps_NMS, expected.logps_NMS, rtol=rtol, atol=atol)
    torch.testing.assert_close(found.token_logps_NM, expected.token_logps_NM, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_union_over_servers_is_that_of_one_engine(paths, urls, temperature, monkeypatch) -> None:
    rollouts = ragged_rollouts(1)
    expected = local(paths).score(rollouts, KAPPA, temperature, union=True)
    assert expected.ids_NMS.shape[1:] == (3, 3 * KAPPA)
    teachers = remote(*urls, temperature=temperature)
    assert_same(teachers.score(rollouts, KAPPA, temperature, union=True), expected)
    monkeypatch.setattr("smopd.engine.remote.teachers.REQUEST_TOKENS", 20)
    assert_same(teachers.score(rollouts, KAPPA, temperature, union=True), expected)
    half = remote(*urls, temperature=temperature, dtype="float16")
    assert_same(half.score(rollouts, KAPPA, temperature, union=True), expected, rtol=2**-10)
    assert teachers.score([], KAPPA, temperature, union=True).ids_NMS.shape == (0, 3, 3 * KAPPA)
    alone = teachers.score(rollouts, 0, temperature, union=True)
    torch.testing.assert_close(alone.token_logps_NM, expected.token_logps_NM, rtol=0, atol=1e-5)


def test_padding_is_no_one_elses_id(paths, serve) -> None:
    smaller = VOCABULARY - 40
    rollouts = [r for r in ragged_rollouts(7) if max(r.response_ids.tolist()) < smaller]
    own = Probe("1 2", (144, 145))
    servers = [[serve(path, smaller).url] for path in paths[:2]]
    teachers = RemoteTeachers(servers, smaller, own, 8, 1.0, union=True, retry=QUICK)
    found = teachers.score(rollouts, 8, 1.0, union=True)
    assert teachers.dropped > 0 and int(found.ids_NMS.max()) < smaller
    assert_same(found, local(paths[:2], smaller).score(rollouts, 8, 1.0, union=True))


def test_what_cannot_serve_a_union_is_refused_at_the_start(urls, monkeypatch, loopback) -> None:
    vllm = Vllm(loopback, probe().token_ids)
    with pytest.raises(
        UnusableModel, match=r"models\.1: http.* is a vLLM server, which cannot be asked about"
    ):
        remote(urls[0], vllm.url)
    with pytest.raises(ValueError, match="union is True, expected False of teachers that were not made for"):
        remote(*urls, union=False).score(ragged_rollouts(1), KAPPA, 1.0, union=True)

    def given(*arguments):
        raise ValueError("score: union is True, expected False on the route prompt_logprobs")

    monkeypatch.setattr(LocalTeachers, "given", given)
    with pytest.raises(UnusableModel, match=r"cannot answer what will be asked .*/given: status 400.*route"):
        remote(*urls)


def test_requests_that_are_none_are_answered_400(urls) -> None:
    rollouts = ragged_rollouts(2)
    n_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    good = pack_given(rollouts, torch.zeros(n_tokens, 3, dtype=torch.int32), torch.zeros(n_tokens) - 1)

    def changed(**tensors: torch.Tensor) -> bytes:
        return save(load(good) | tensors)

    def answer(content: bytes, **options: object) -> httpx.Response:
        return httpx.post(f"{urls[0]}/given", params=options, content=content)

    assert answer(good).status_code == 200
    for content, message in (
        (changed(ids_NU=torch.zeros(n_tokens - 1, 3, dtype=torch.int32)), "ids_NU is torch.int32"),
        (changed(ids_NU=torch.zeros(n_tokens, 3)), "ids_NU is torch.float32"),
        (changed(ids_NU=torch.full((n_tokens, 3), VOCABULARY, dtype=torch.int32)), "ids outside"),
        (changed(ids_NU=torch.full((n_tokens, 3), -1, dtype=torch.int32)), "ids outside"),
        (changed(token_logps_N=torch.zeros(n_tokens, 1)), "token_logps_N is torch.float32"),
        (changed(token_logps_N=torch.full((n_tokens,), torch.nan)), "token_logps_N holds nan"),
        (good[:-5], "SafetensorError"),
    ):
        found = answer(content)
        assert found.status_code == 400 and message in found.text, message
    assert answer(good, temperature=0.0).status_code == 400
    assert answer(good, dtype="int8").status_code == 400


def test_a_run_with_the_product_of_teachers_at_urls(paths, urls, tmp_path: Path) -> None:
    """As with the same models by path."""

    def run(name: str, models: list[str]) -> dict[str, float]:
        taught = [{"model": m, "reward": r} for m, r in zip(models, ("accuracy", "format"), strict=False)]
        changes = {
            "model": {"factory": None, "path": paths[2]},
            "data": {"evaluation": None},
            "teachers": {"models": taught},
            "merge": {"method": "product"},
            "opd": {"kappa": 8, "product": {"reference": models[2]}},
            "loop": {"steps": 1},
        }
        recipe = write_recipe(tmp_path, merged(changes, {"name": name}), drop=("warm_start", "runs"))
        recipe.write_text(recipe.read_text() + "runs: {student: {stage: merge}}\n")
        done = train_here(recipe)
        assert done.returncode == 0, done.stderr[-4000:]
        (line,) = metric_lines(tmp_path / "runs" / name / "student")
        return line

    here, there = run("paths", paths), run("urls", urls)
    assert here["teacher_0/change"] != pytest.approx(here["teacher_1/change"])
    for name in ("kl", "teacher_mass", "teacher_0/change", "teacher_1/change", "grad_norm"):
        assert there[name] == pytest.approx(here[name], rel=1e-3, abs=1e-5), name
