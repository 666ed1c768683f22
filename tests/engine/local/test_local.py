"""The local sampler: greedy equals transformers; draws depend only on seed, group, sample and position.

That draws follow the distribution is shown by tests/kernels/conformance/test_draw.py.
"""

import pytest
import torch

from smopd.engine.local import rollout as decode
from smopd.engine.local.rollout import LocalRollout, draw, uniform
from smopd.engine.types import Sampling
from tests.engine.tiny import END, VOCABULARY, assert_sampled_by, model_of, tiny_model

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (7,), (30, 31)]
GROUPS = [3, 8, 9, 11, 40]


def engine(**options) -> LocalRollout:
    return LocalRollout(tiny_model(), [END], **options)


def tokens(rollouts) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_sampled_is_a_full_forwards_also_with_new_weights(tied):
    """Up to an end token or the limit."""
    local = LocalRollout(tiny_model(seed=1, tied=tied), [END, 17])
    for version, seed in enumerate((1, 5)):
        model = tiny_model(seed=seed, tied=tied)
        if version:
            local.load_weights(model.state_dict().items(), version)
        made = local.generate(PROMPTS, GROUPS, Sampling(temperature=0.0, max_new_tokens=20))
        assert_sampled_by(model, made)
        made += local.generate(PROMPTS, GROUPS, Sampling(n=3, temperature=0.7, max_new_tokens=20, seed=4))
        assert_sampled_by(model, made[len(PROMPTS) :], 0.7, greedy=False)
        assert {rollout.policy_version for rollout in made} == {version}
        assert {rollout.finished for rollout in made} == {True, False}
        for rollout, ids in zip(made, tokens(made), strict=True):
            assert rollout.finished == (ids[-1] in (END, 17)) and not {END, 17} & {*ids[:-1]}
            assert rollout.finished or len(ids) == 20


def test_draws_depend_on_seed_group_and_sample_and_not_on_the_batch():
    sampling = Sampling(n=4, temperature=1.0, max_new_tokens=12, seed=7)
    together = tokens(engine().generate(PROMPTS, GROUPS, sampling))
    in_turns = tokens(engine(max_batch_tokens=150).generate(PROMPTS, GROUPS, sampling))
    backwards = engine().generate(PROMPTS[::-1], GROUPS[::-1], sampling)
    by_group = {group: tokens(backwards)[4 * i : 4 * i + 4] for i, group in enumerate(GROUPS[::-1])}
    assert together == in_turns == [ids for group in GROUPS for ids in by_group[group]]
    assert together[4:8] != together[12:16], "groups 8 and 11 have the same prompt but their own draws"
    assert len({tuple(ids) for ids in together[:4]}) > 1
    assert together != tokens(engine().generate(PROMPTS, GROUPS, Sampling(n=4, max_new_tokens=12, seed=8)))


def test_uniform_numbers_are_uncorrelated_over_each_argument():
    n = 4096
    keys, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    columns = [uniform(1, keys, zeros, 1), uniform(0, keys, zeros + 1, 1), uniform(0, zeros, keys, 1)]
    columns += [uniform(0, keys + 1, zeros, 1), uniform(0, keys, zeros, 2)]
    columns.append(uniform(0, zeros[:1], zeros[:1], n).T)
    numbers = torch.cat(columns, 1).T
    assert numbers.min() >= 0 and numbers.max() < 1
    assert ((numbers.mean(1) - 0.5).abs() < 5 * (1 / 12 / n) ** 0.5).all()
    correlation = torch.corrcoef(numbers) - torch.eye(len(numbers), dtype=torch.float64)
    assert correlation.abs().max() < 5 / n**0.5


def test_incomplete_or_foreign_weights_are_refused():
    local = engine()
    weights = dict(local.model.state_dict())
    weights.pop("lm_head.weight")
    with pytest.raises(ValueError, match=r"lacks 1 weights, first 'lm_head.weight'"):
        local.load_weights(weights.items(), version=1)
    with pytest.raises(ValueError, match=rf"lm_head.weight has shape \(3, 3\).*\({VOCABULARY}, 64\)"):
        local.load_weights([("lm_head.weight", torch.zeros(3, 3))], version=1)


SAMPLINGS = [
    Sampling(n=4, max_new_tokens=50, seed=7),
    Sampling(n=3, temperature=0.7, max_new_tokens=40, seed=2),
    Sampling(n=1, temperature=0.0, max_new_tokens=33),
    Sampling(n=2, max_new_tokens=1, seed=1),
]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "colder", "greedy", "one token"])
def test_decoding_in_place_equals_the_loop(sampling, device, monkeypatch):
    """By CUDA graphs on a GPU."""
    monkeypatch.setattr(decode, "BLOCK", 24)  # so that the buffers grow
    made = []
    for way in ("loop", "in_place"):
        local = LocalRollout(tiny_model().to(device), [END, 17], decoding=way)
        made.append(local.generate(PROMPTS, GROUPS, sampling))
        assert local.graphs == (way == "in_place" and device == "cuda")
    lengths = {len(rollout.response_ids) for rollout in made[0]}
    assert sampling.n == 1 or sampling.max_new_tokens == 1 or len(lengths) > 3, "some end early"
    for expected, found in zip(*made, strict=True):
        assert found.response_ids.equal(expected.response_ids)
        assert (found.finished, found.group) == (expected.finished, expected.group)
        atol = 1e-4 if device == "cuda" else 1e-5
        torch.testing.assert_close(found.logps, expected.logps, rtol=0, atol=atol)


def test_decoding_in_place_is_refused_where_attention_is_not_plain():
    model = model_of("mistral", sliding_window=8)
    assert not LocalRollout(model, [END]).in_place
    with pytest.raises(ValueError, match=r"decoding: 'in_place' cannot serve, .* the last 8 tokens"):
        LocalRollout(model, [END], decoding="in_place")


def test_where_graphs_cannot_be_made_the_same_is_sampled_with_a_warning(caplog, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refused)
    sampling = Sampling(n=2, max_new_tokens=20, seed=3)
    local = engine(decoding="in_place")
    local.graphs = True
    made = tokens(local.generate(PROMPTS, GROUPS, sampling))
    assert made == tokens(engine(decoding="loop").generate(PROMPTS, GROUPS, sampling))
    assert not local.graphs
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "without CUDA graphs" in caplog.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_draws_a_token_with_no_probability(temperature):
    logits = torch.full((2, 5), torch.nan)
    uniform_R = torch.tensor([0.0, 0.99], dtype=torch.float64)
    tokens, logps = draw(logits, Sampling(max_new_tokens=1, temperature=temperature), uniform_R)
    assert bool((tokens < 5).all()) and bool(logps.isnan().all())
