"""Tokens of an environment are read and never trained on: a float64 twin has the same loss and gradient.

The twin reads one whole sequence at a time, without packing, shared prompts or the fused loss. kappa covers
the vocabulary, so that its target is the teachers' dense mixture.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from smopd.config.settings import Settings
from smopd.data.prompts import Prompt
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import Packing, TrainSettings
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from smopd.objective import Objective
from smopd.step.batch import Batch
from smopd.step.teachers import TeacherScores
from tests.engine.tiny import VOCABULARY, tiny_model
from tests.smopd.run.invariance_worker import SETTINGS

GROUPS, MOST_TURNS, TEMPERATURE, ENTROPY = 2, 5, 0.7, 0.01
SETTINGS = SETTINGS | {
    "opd": {"kappa": VOCABULARY, "target": "merged"},
    "loss": {"aggregation": "seq-mean-token-mean", "entropy_coef": ENTROPY},
    "loop": {"updates_per_step": 1},
}
ADV_R = torch.randn(GROUPS * MOST_TURNS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def conversations() -> list[Rollout]:
    """Return groups of conversations with one to five turns; those with one turn have no mask."""
    draw = partial(torch.randint, generator=torch.Generator().manual_seed(3))
    rollouts = []
    for group in range(GROUPS):
        prompt = tuple(draw(2, VOCABULARY, (3 + group,)).tolist())
        for turns in range(1, MOST_TURNS + 1):
            parts = [torch.full((int(draw(1, 5, ())),), i % 2 == 0) for i in range(2 * turns - 1)]
            mask = torch.cat(parts)
            ids = draw(2, VOCABULARY, (len(mask),))
            loss_mask = mask if turns > 1 else None
            rollouts.append(Rollout(prompt, ids, -1.0 * mask, group, True, loss_mask=loss_mask))
    return rollouts


def batch_of(rollouts: list[Rollout]) -> Batch:
    return Batch.of([Prompt(0, "", (), {})] * GROUPS, [range(GROUPS)], rollouts, MOST_TURNS)


def trained(device: torch.device, rollouts: list[Rollout], packing: Packing) -> dict[str, Tensor]:
    """Return loss terms and gradients of the trainer's update, with local teachers."""
    settings = Settings.model_validate(SETTINGS).resolved("student")
    batch = batch_of(rollouts)
    options = TrainSettings(**dict(packing), compute_dtype="float32", max_grad_norm=1e9)
    student = Student(tiny_model(), options, device)
    teachers = LocalTeachers([tiny_model(1), tiny_model(2)], packing, student.vocabulary)
    objective = Objective(settings, coef=1.0, device=device)
    topk = teachers.score(rollouts, VOCABULARY, settings.kl_temperature)
    signals = objective.signals(batch, torch.zeros(len(rollouts), 2), None, TeacherScores(topk, None, 0.0, 0))
    tokens = objective.loss_tokens(batch, batch.parts[0], ADV_R, signals)
    found: dict[str, Tensor] = {}

    def keep(*_: object) -> None:
        named = student.model.named_parameters()
        found.update({name: student.strategy.full(value.grad).clone() for name, value in named})

    student.optimizer.register_step_pre_hook(keep)
    stats = student.update(rollouts, tokens, objective.loss_settings).stats
    return found | {"pg": stats.pg_loss, "kl": stats.kl_loss, "entropy": stats.entropy}


def twin(rollouts: list[Rollout]) -> dict[str, Tensor]:
    """Return the same from the definitions, in float64."""
    model, *teachers = (tiny_model(seed).double().eval() for seed in range(3))
    pg, kl, entropy, surrogate = torch.zeros(4, dtype=torch.float64).unbind()
    for rollout, adv in zip(rollouts, ADV_R, strict=True):
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None]
        mask = [True] * len(rollout.response_ids) if rollout.loss_mask is None else rollout.loss_mask.tolist()
        spoken = [t for t, of_policy in enumerate(mask) if of_policy]
        before = [len(rollout.prompt_ids) + t - 1 for t in spoken]
        weight = 1 / (len(rollouts) * len(spoken))
        logits_TV = model(ids).logits[0, before]
        logp_TV = (logits_TV / TEMPERATURE).log_softmax(-1)
        with torch.no_grad():
            target_TV = torch.stack([each(ids).logits[0, before].softmax(-1) for each in teachers]).mean(0)
        pg = pg - weight * adv * len(spoken)
        kl = kl + weight * (target_TV * (target_TV.log() - logits_TV.log_softmax(-1))).sum()
        entropy = entropy - weight * (logp_TV.exp() * logp_TV).sum()
        logp_T = logp_TV.gather(-1, rollout.response_ids[spoken, None])
        surrogate = surrogate - weight * adv * logp_T.sum()
    (surrogate + kl - ENTROPY * entropy).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients | {"pg": pg, "kl": kl.detach(), "entropy": entropy.detach()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of a loss term or of an entry of the gradient."""
    assert found.keys() == expected.keys()
    return max(float((found[name].double() - expected[name]).abs().max()) for name in expected)


@pytest.mark.parametrize("packing", [Packing(), Packing(micro_batch_tokens=60)], ids=["one-batch", "many"])
def test_loss_and_gradient_equal_a_float64_twin(device, packing):
    rollouts = conversations()
    assert bool((batch_of(rollouts).rollout_logp_N == -1).all()), "those of the policy's tokens"
    found = trained(device, rollouts, packing)
    assert difference(found, twin(rollouts)) < 1e-6
    mask = rollouts[-1].loss_mask.clone()
    mask[(~mask).nonzero()[0]] = True
    one_more = [*rollouts[:-1], replace(rollouts[-1], loss_mask=mask)]
    assert difference(found, twin(one_more)) > 1e-4, "one token of the environment too many"


def test_a_mask_of_all_tokens_changes_nothing(device):
    rollouts = [replace(rollout, loss_mask=None) for rollout in conversations()]
    masked = [replace(each, loss_mask=torch.ones_like(each.response_ids, dtype=bool)) for each in rollouts]
    found, expected = (trained(device, given, Packing(micro_batch_tokens=60)) for given in (masked, rollouts))
    assert all(found[name].equal(value) for name, value in expected.items())
