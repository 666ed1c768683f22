"""The embedded sampler.

Greedy as transformers, draws that depend only on seed, group, sample and position.
"""

import pytest
import torch

from smopd.engine.local import decode
from smopd.engine.local.rollout import LocalRollout, draw, nucleus, uniform
from smopd.engine.types import Sampling
from tests.engine.tiny import END, VOCABULARY, tiny_model

PROMPTS = [(5, 9, 11), (7,), (20, 21, 22, 23, 24, 25), (7,), (30, 31)]
GROUPS = [3, 8, 9, 11, 40]


def engine(**options) -> LocalRollout:
    return LocalRollout(tiny_model(), [END], **options)


def tokens(rollouts) -> list[list[int]]:
    return [rollout.response_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_equals_transformers(tied):
    model = tiny_model(seed=1, tied=tied).eval()
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
        )[0, len(prompt) :]
        expected.append(made.tolist())
    sampling = Sampling(n=1, temperature=0.0, max_new_tokens=20)
    made = LocalRollout(model, [END]).generate(PROMPTS, GROUPS, sampling)
    assert tokens(made) == expected
    assert [rollout.finished for rollout in made] == [ids[-1] == END for ids in expected]


def test_log_probabilities_are_those_of_a_full_forward():
    local = engine()
    sampling = Sampling(n=3, temperature=0.7, max_new_tokens=15, seed=4)
    for rollout in local.generate(PROMPTS, GROUPS, sampling):
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
        logits = local.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
        expected = (logits / 0.7).log_softmax(-1).gather(-1, rollout.response_ids[:, None])[:, 0]
        torch.testing.assert_close(rollout.logps, expected, rtol=1e-4, atol=1e-5)


def test_draws_do_not_depend_on_the_batch():
    sampling = Sampling(n=4, temperature=1.0, max_new_tokens=12, seed=7)
    together = tokens(engine().generate(PROMPTS, GROUPS, sampling))
    in_turns = tokens(engine(max_batch_tokens=1).generate(PROMPTS, GROUPS, sampling))
    backwards = engine().generate(PROMPTS[::-1], GROUPS[::-1], sampling)
    by_group = {group: tokens(backwards)[4 * i : 4 * i + 4] for i, group in enumerate(GROUPS[::-1])}
    assert together == in_turns == [ids for group in GROUPS for ids in by_group[group]]


def test_equal_prompts_and_samples_differ_and_seeds_change_them():
    made = tokens(engine().generate(PROMPTS, GROUPS, Sampling(n=4, max_new_tokens=12, seed=7)))
    assert made[4:8] != made[12:16], "groups 8 and 11 have the same prompt but their own draws"
    assert len({tuple(ids) for ids in made[:4]}) > 1
    assert made != tokens(engine().generate(PROMPTS, GROUPS, Sampling(n=4, max_new_tokens=12, seed=8)))


def test_draws_follow_the_distribution():
    logits_V = torch.tensor([2.0, 0.0, -1.0, float("-inf"), 1.0])
    n = 40_000
    u = uniform(3, torch.arange(n), torch.zeros(n, dtype=torch.int64), 5)
    assert u.min() >= 0 and u.max() < 1
    sampling = Sampling(temperature=0.5)
    token_R, logp_R = draw(logits_V.expand(n, -1), sampling, u)
    expected = (logits_V / 0.5).softmax(-1)
    found = token_R.bincount(minlength=5) / n
    spread = (expected * (1 - expected) / n).sqrt()
    assert ((found - expected).abs() <= 4.5 * spread).all()
    assert found[3] == 0
    torch.testing.assert_close(logp_R, expected.log()[token_R])


def test_uniform_is_uncorrelated_over_each_argument():
    n = 4096
    keys, zeros = torch.arange(n), torch.zeros(n, dtype=torch.int64)
    columns = [uniform(0, keys, zeros, 0), uniform(0, keys, zeros, 1), uniform(1, keys, zeros, 0)]
    columns += [uniform(0, keys, zeros + 1, 0), uniform(0, zeros, keys, 0), uniform(0, keys + 1, zeros, 0)]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(len(columns), dtype=torch.float64)
    assert correlation.abs().max() < 5 / n**0.5


@pytest.mark.parametrize("edge", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval_draw_possible_tokens(edge):
    logits_RV = torch.tensor([[float("-inf"), 0.0, -3.0, float("-inf")]])
    token_R, logp_R = draw(logits_RV, Sampling(), torch.tensor([edge], dtype=torch.float64))
    assert token_R.item() in (1, 2)
    assert logp_R.isfinite().all()


def test_nucleus_keeps_the_smallest_set_and_renormalises():
    logps_RV = torch.tensor([[0.5, 0.1, 0.3, 0.1]]).log()
    torch.testing.assert_close(nucleus(logps_RV, 0.6).exp(), torch.tensor([[0.625, 0.0, 0.375, 0.0]]))
    torch.testing.assert_close(nucleus(logps_RV, 0.45).exp(), torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(nucleus(logps_RV, 1.0).exp(), logps_RV.exp())


def test_the_limit_truncates_and_says_so():
    made = engine().generate(PROMPTS, GROUPS, Sampling(n=2, max_new_tokens=2, seed=1))
    for rollout in made:
        assert len(rollout.response_ids) <= 2
        assert rollout.finished == (int(rollout.response_ids[-1]) == END)
    assert any(not rollout.finished for rollout in made)


def test_weights_change_what_is_sampled_and_carry_a_version():
    local, other = engine(), tiny_model(seed=5)
    local.load_weights(other.state_dict().items(), version=9)
    sampling = Sampling(n=1, temperature=0.0, max_new_tokens=10)
    made = local.generate(PROMPTS, GROUPS, sampling)
    assert tokens(made) == tokens(LocalRollout(other, [END]).generate(PROMPTS, GROUPS, sampling))
    assert {rollout.policy_version for rollout in made} == {9}


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
    Sampling(n=3, temperature=0.7, top_p=0.8, max_new_tokens=40, seed=2),
    Sampling(n=1, temperature=0.0, max_new_tokens=33),
    Sampling(n=2, max_new_tokens=1, seed=1),
]


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "nucleus", "greedy", "one token"])
def test_decoding_in_place_equals_the_loop(sampling, family, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK", 24)  # so that the buffers grow
    made = [
        LocalRollout(tiny_model(family=family), [END, 17], decoding=way).generate(PROMPTS, GROUPS, sampling)
        for way in ("loop", "in_place")
    ]
    lengths = {len(rollout.response_ids) for rollout in made[0]}
    assert sampling.n == 1 or sampling.max_new_tokens == 1 or len(lengths) > 3, "some end early"
    for expected, found in zip(*made, strict=True):
        assert found.response_ids.equal(expected.response_ids)
        assert (found.finished, found.group) == (expected.finished, expected.group)
        torch.testing.assert_close(found.logps, expected.logps, rtol=0, atol=1e-5)


def test_decoding_in_place_is_refused_where_attention_is_not_plain():
    model = tiny_model()
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert not LocalRollout(model, [END]).in_place
    with pytest.raises(ValueError, match=r"decoding: 'in_place' cannot serve.*sliding_attention"):
        LocalRollout(model, [END], decoding="in_place")


def test_all_positions_at_once_have_the_same_uniform_numbers():
    keys, samples = torch.tensor([3, 3, 9]), torch.tensor([0, 1, 0])
    together = uniform(5, keys[:, None], samples[:, None], torch.arange(4))
    assert together.equal(torch.stack([uniform(5, keys, samples, t) for t in range(4)], 1))


def test_where_graphs_cannot_be_made_sampling_goes_on_and_says_so(caplog, monkeypatch):
    def refused(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", refused)
    sampling = Sampling(n=2, max_new_tokens=20, seed=3)
    local = engine(decoding="in_place")
    local.graphs = True
    assert tokens(local.generate(PROMPTS, GROUPS, sampling)) == tokens(
        engine(decoding="loop").generate(PROMPTS, GROUPS, sampling)
    )
    assert not local.graphs
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "without CUDA graphs" in caplog.text


def test_a_captured_token_is_replayed_until_shapes_change(monkeypatch):
    """A graph that on replay does what was captured, and nothing while it is captured."""
    captured, replays = [], []

    class Graph:
        def replay(self):
            replays.append(self)
            self.step()

    class Capture:
        def __init__(self, graph, **_):
            self.graph = graph

        def __enter__(self):
            captured.append(self.graph)
            self.graph.step, decode.Decoder._step = decode.Decoder._step, lambda decoder: None

        def __exit__(self, *_):
            step, decode.Decoder._step = self.graph.step, self.graph.step
            self.graph.step = lambda: step(decoders[-1])

    decoders = []
    begin = decode.Decoder.__init__
    monkeypatch.setattr(
        decode.Decoder, "__init__", lambda self, *args: (begin(self, *args), decoders.append(self))[0]
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(decode, "BLOCK", 24)
    sampling = Sampling(n=4, max_new_tokens=50, seed=7)
    local = engine(decoding="in_place")
    local.graphs = True
    made = tokens(local.generate(PROMPTS, GROUPS, sampling))
    assert made == tokens(engine(decoding="loop").generate(PROMPTS, GROUPS, sampling))
    assert len(captured) >= 2 and len(replays) > 2 * len(captured) and local.graphs


@pytest.mark.gpu
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "nucleus", "greedy", "one token"])
def test_graphs_on_a_gpu_give_what_the_loop_gives(sampling, monkeypatch):
    monkeypatch.setattr(decode, "BLOCK", 24)
    made = []
    for way in ("loop", "in_place"):
        local = LocalRollout(tiny_model().cuda(), [END, 17], decoding=way)
        made.append(local.generate(PROMPTS, GROUPS, sampling))
        assert local.graphs == (way == "in_place")
    for expected, found in zip(*made, strict=True):
        assert found.response_ids.equal(expected.response_ids)
        torch.testing.assert_close(found.logps, expected.logps, rtol=0, atol=1e-4)
