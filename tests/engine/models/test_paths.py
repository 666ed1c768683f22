"""Every family trains, samples and scores as transformers computes it."""

from copy import deepcopy

import pytest
import torch

from smopd.engine.errors import UnusableModel
from smopd.engine.local import rollout
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.models import attention, paths
from smopd.engine.models.paths import choose, native_attention, single_logps
from smopd.engine.settings import Packing
from smopd.engine.student.student import Student
from smopd.engine.types import Sampling
from tests.engine.models.families import DYNAMIC, WINDOW, family
from tests.engine.student.training import NLL, TOKENS, loss_tokens, settings_of
from tests.engine.tiny import END, VOCABULARY, model_of, ragged_rollouts, tiny_model

ROLLOUTS = ragged_rollouts(0, groups=4, longest=100)
"""Longer than windows, chunks and RoPE boundaries; some units are long enough for pieces on a CPU."""
PATHS = {
    "mistral, window": "mask",
    "gemma2": "mask",  # capped scores and capped logits
    "gemma3": "mask",  # a multimodal class: its outer config has no layer types
    "gpt_oss": "mask",  # sinks, eager
    "phi3, long RoPE": "pieces",
    "llama, dynamic RoPE": "pieces",
    "phimoe": "pieces",  # its router draws in train mode
    "seed_oss": "pieces",  # dropout by function
    "opt": "pieces",
    "doge": "mask",  # makes a mask inside its attention
    "cohere": "pieces",  # scaled logits
    "gpt2": "pieces",
    "gpt_bigcode": "pieces",
    "falcon": "mask",
    "ctrl": "pieces",
    "llama4_text": "plain",
    "lfm2": "plain",
    "qwen3_next": "plain",
}
CHECKPOINTED = ("opt", "gemma3", "lfm2")


@pytest.mark.parametrize("name", PATHS)
def test_training_computes_what_transformers_does(name, device):
    """The batch mixes short and long sequences."""
    model = family(name)
    options = {"max_grad_norm": 1e9, "gradient_checkpointing": name in CHECKPOINTED}
    student = Student(deepcopy(model), settings_of(**options, micro_batch_tokens=600), device)
    assert student.layout.attends == PATHS[name]
    update = student.update(ROLLOUTS, loss_tokens(ROLLOUTS), NLL)
    with native_attention(model):
        logp_N = single_logps(model, ROLLOUTS)
    (-logp_N.sum() / TOKENS).backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()
    torch.testing.assert_close(update.stats.logp_N, logp_N.detach(), rtol=1e-4, atol=1e-4)
    assert update.grad_norm == pytest.approx(float(norm), rel=1e-3)


WAYS = {"gemma3": "together", "gpt_oss": "together", "phi3, long RoPE": "together", "lfm2": "alone"}


@pytest.mark.parametrize("name", WAYS)
def test_sampling_gives_what_transformers_does(name):
    """Compared prefix by prefix: a long RoPE changes at the boundary, which one response crosses."""
    model = family(name)
    engine = LocalRollout(deepcopy(model), [END])
    assert engine.way == WAYS[name]
    prompts = [(5, 9, 11), (7,) * 26, (3,) * 12, (4,) * 40]
    for made in engine.generate(prompts, range(4), Sampling(temperature=0.0, max_new_tokens=10)):
        with native_attention(model), torch.no_grad():
            for n, token in enumerate(made.response_ids.tolist()):
                ids = torch.tensor([[*made.prompt_ids, *made.response_ids[:n].tolist()]])
                logps = model(ids).logits[0, -1].log_softmax(-1)
                assert int(logps.argmax()) == token
                assert float(made.logps[n]) == pytest.approx(float(logps[token]), abs=1e-4)


def test_sampling_needs_no_cache(monkeypatch):
    def absent(*_, **__):
        raise ValueError("no such cache")

    asked = [(5, 9), (7,)], [0, 1], Sampling(n=2, max_new_tokens=9, seed=3)
    expected = LocalRollout(tiny_model(layers=3), [END]).generate(*asked)
    for cache in ("Cache", "DynamicCache"):
        monkeypatch.setattr(rollout, cache, absent)
    monkeypatch.setattr(rollout, "_WAYS", {})
    engine = LocalRollout(tiny_model(layers=3), [END])
    assert engine.way == "uncached"
    for found, each in zip(engine.generate(*asked), expected, strict=True):
        assert found.response_ids.equal(each.response_ids) and found.finished == each.finished


def test_teachers_score_together_though_one_cannot_be_packed():
    models = [tiny_model(1), family("lfm2"), family("phi3, long RoPE"), family("gemma2")]
    models.append(model_of("llama", rope_parameters=DYNAMIC, max_position_embeddings=64))
    expected = []
    for model in models:
        with native_attention(model), torch.no_grad():
            expected.append(single_logps(model, ROLLOUTS))
    teachers = LocalTeachers([deepcopy(model) for model in models], Packing(), VOCABULARY)
    assert (teachers.layout.attends, teachers.layout.alone_above) == ("plain", 32)
    found = teachers.score(ROLLOUTS, 4, 1.0)
    torch.testing.assert_close(found.token_logps_NM, torch.stack(expected, 1), rtol=1e-4, atol=1e-4)
    colder = teachers.score(ROLLOUTS, 4, 0.5).logps_NMS.diff()
    torch.testing.assert_close(colder, 2 * found.logps_NMS.diff(), rtol=1e-3, atol=1e-3)


BY_LAYER = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(("kind", "options"), [("llama", {}), ("gemma3_text", WINDOW)])
def test_a_dynamic_rope_forgets_longer_sequences(kind, options):
    ropes = BY_LAYER if options else DYNAMIC
    model = model_of(kind, rope_parameters=ropes, max_position_embeddings=32, **options).eval()
    *_, long = ordered = sorted(ROLLOUTS, key=lambda each: len(each.prompt_ids) + len(each.response_ids))
    short = next(each for each in ordered if len(each.prompt_ids) + len(each.response_ids) > 36)
    with native_attention(model), torch.no_grad():
        first_N, _, again_N = (single_logps(model, [each]) for each in (short, long, short))
    assert first_N.equal(again_N)


@pytest.mark.slow
def test_an_fp32_residual_stream_meets_a_bf16_head(device):
    model = family("mamba2")
    with native_attention(model), torch.no_grad():
        expected_N = single_logps(model, ROLLOUTS)
    student = Student(deepcopy(model), settings_of(compute_dtype="bfloat16", max_grad_norm=1e9), device)
    update = student.update(ROLLOUTS, loss_tokens(ROLLOUTS), NLL)
    frozen = LocalTeachers([model.bfloat16()], Packing(), VOCABULARY).score(ROLLOUTS, 4, 1.0)
    assert update.grad_norm > 0 and not update.skipped
    for logp_N in (update.stats.logp_N, frozen.token_logps_NM[:, 0]):
        assert 0 < (logp_N - expected_N).abs().mean() < 0.05


@pytest.mark.parametrize("name", ["minimax", "xglm"])
def test_a_model_that_cannot_be_rounded_is_refused_before_the_first_step(name, device):
    """Buffers of both stay in fp32."""
    kind = type(family(name)).__name__
    with pytest.raises(UnusableModel, match=f"compute_dtype: got bfloat16, in which a {kind} fails.*float32"):
        Student(family(name), settings_of(compute_dtype="bfloat16"), device)


def test_the_self_check_takes_the_next_path_or_refuses(monkeypatch):
    monkeypatch.setattr(attention, "by_halves", lambda query, *_: query * 0)
    monkeypatch.setattr(paths, "_AGREED", set())
    layout = choose(tiny_model(), "auto", torch.float32)
    assert layout.attends == "mask" and "nats off transformers" in layout.description
    with pytest.raises(ValueError, match="attention: 'flash' cannot serve, one sequence at a time: log-prob"):
        choose(tiny_model(), "flash", torch.float32)
    monkeypatch.setattr(paths, "_AGREED", set())
    monkeypatch.setattr(paths, "response_hidden", lambda model, batch: torch.zeros(len(batch.flat_N), 64))
    with pytest.raises(UnusableModel, match="a Qwen2ForCausalLM cannot be computed here") as error:
        choose(tiny_model(), "auto", torch.float32)
    assert "\n" not in str(error.value)
