"""Teachers behind URLs, each server started by its own command: a plain `vllm serve`, and ours."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("starlette")

from smopd.engine.local.teachers import load_teachers
from smopd.engine.models.loading import UnusableModel
from smopd.engine.remote.servers import RetryPolicy
from smopd.engine.remote.teachers import Probe, RemoteTeachers
from smopd.engine.settings import Packing
from smopd.worlds.models import world_model
from tests.engine.tiny import ragged_rollouts
from tests.engine.vllm.served import Process, serve, serving

PACKING = Packing(micro_batch_tokens=200)
KAPPA = 6
QUICK = RetryPolicy(deadline_seconds=120.0, retries=3, backoff_seconds=0.01, concurrency=4)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of a model, its vocabulary, a probe, and the URLs of vLLM's server and of ours."""
    folder = tmp_path_factory.mktemp("teacher")
    model, tokenizer = world_model(3)
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    vocabulary, text = model.config.vocab_size, "call the"
    plain = serve(folder / "model", folder / "plain.log", "--max-logprobs", str(KAPPA))
    arguments = [str(folder / "model"), "--vocabulary", str(vocabulary), "--max-model-len", "64"]
    ours = Process("smopd.engine.teacher_server", folder / "ours.log", arguments)
    with serving(plain, ours):
        probe = Probe(text, tuple(tokenizer.encode(text, add_special_tokens=False)))
        yield folder / "model", vocabulary, probe, (plain.url, ours.url)


def test_both_say_what_the_model_says(served):
    path, vocabulary, probe, urls = served
    rollouts = ragged_rollouts(1)
    remote = RemoteTeachers([[url] for url in urls], vocabulary, probe, KAPPA, 1.0, retry=QUICK)
    assert remote.ours == [False, True]
    found = remote.score(rollouts, KAPPA, 1.0)
    expected = load_teachers([path], PACKING, vocabulary, torch.float32).score(rollouts, KAPPA, 1.0)
    for m in range(2):
        assert found.ids_NMS[:, m].equal(expected.ids_NMS[:, 0])
        torch.testing.assert_close(found.logps_NMS[:, m], expected.logps_NMS[:, 0], rtol=0, atol=1e-4)
        torch.testing.assert_close(
            found.token_logps_NM[:, m], expected.token_logps_NM[:, 0], rtol=0, atol=1e-4
        )


def test_ours_serves_other_temperatures(served):
    path, vocabulary, probe, (_, ours) = served
    rollouts = ragged_rollouts(2)
    found = RemoteTeachers([[ours]], vocabulary, probe, KAPPA, 0.7, retry=QUICK).score(rollouts, KAPPA, 0.7)
    expected = load_teachers([path], PACKING, vocabulary, torch.float32).score(rollouts, KAPPA, 0.7)
    torch.testing.assert_close(found.logps_NMS, expected.logps_NMS, rtol=0, atol=1e-4)


def test_ours_gives_its_part_of_a_union(served):
    path, vocabulary, probe, (plain, ours) = served
    rollouts = ragged_rollouts(3)
    two = [[ours], [ours]]
    remote = RemoteTeachers(two, vocabulary, probe, KAPPA, 0.7, union=True, retry=QUICK)
    found = remote.score(rollouts, KAPPA, 0.7, union=True)
    expected = load_teachers([path, path], PACKING, vocabulary, torch.float32)
    expected = expected.score(rollouts, KAPPA, 0.7, union=True)
    assert found.ids_NMS.equal(expected.ids_NMS)
    torch.testing.assert_close(found.logps_NMS, expected.logps_NMS, rtol=0, atol=1e-4)
    ids_NU, known_N = (expected.ids_NMS[:, 0, :5] + 1) % vocabulary, expected.token_logps_NM[:, 0]
    values = remote._given(remote.teachers[0], rollouts, ids_NU, known_N, 0.7)
    local = load_teachers([path], PACKING, vocabulary, torch.float32)
    wanted = local.given(rollouts, ids_NU[:, None], known_N[:, None], 0.7)[:, 0]
    torch.testing.assert_close(values, wanted, rtol=0, atol=1e-4)
    with pytest.raises(UnusableModel, match="is a vLLM server, which cannot be asked about"):
        RemoteTeachers([[ours], [plain]], vocabulary, probe, KAPPA, 1.0, union=True, retry=QUICK)


def test_what_vllms_cannot_serve_is_refused_at_the_start(served):
    _, vocabulary, probe, (plain, ours) = served
    with pytest.raises(UnusableModel, match=rf"gives no {KAPPA + 1} log-probabilities .*--max-logprobs"):
        RemoteTeachers([[plain]], vocabulary, probe, KAPPA + 1, 1.0, retry=QUICK)
    with pytest.raises(UnusableModel, match=r"temperature 1, asked for 0\.7"):
        RemoteTeachers([[plain]], vocabulary, probe, KAPPA, 0.7, retry=QUICK)
    with pytest.raises(UnusableModel, match="is of another kind"):
        RemoteTeachers([[ours, plain]], vocabulary, probe, KAPPA, 1.0, retry=QUICK)
