"""Run `smopd.loop.optimise` on fixed responses, in one process or under torchrun, and record each update.

As a script it saves the records of each variant. Arguments: a folder, then names of variants.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from smopd.config.settings import Settings, merged
from smopd.data.prompts import Prompt, PromptSet
from smopd.engine import distributed
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.settings import Lora, Packing, TrainSettings
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from smopd.loop import Run, optimise
from smopd.record.recorder import Recorder
from smopd.rewards.pool import FAILURE_KINDS, RewardBatch
from tests.engine.tiny import VOCABULARY, tiny_model
from tests.ranks import on_ranks

PROMPTS, GROUP_SIZE, STEPS = 7, 3, 2

SETTINGS = {
    "name": "invariance",
    "model": {"path": "unused"},
    "data": {"train": {"source": "unused:unused"}},
    "rewards": [
        {"name": "dense", "function": "unused:unused", "range": "batch"},
        {"name": "sparse", "function": "unused:unused", "range": [0, 1]},
    ],
    "loop": {"steps": STEPS, "prompts_per_step": PROMPTS, "updates_per_step": 2},
    "rollout": {"group_size": GROUP_SIZE, "temperature": 0.7},
    "loss": {"entropy_coef": 0.01, "dual_clip": 3.0},
    "merge": {"method": "published"},
    "opd": {"kappa": 6, "target": "merged", "tail": True, "schedule": "linear", "final_coef": 0.5},
    "teachers": {"models": [{"model": "a/b", "reward": "dense"}, {"model": "a/c", "reward": "sparse"}]},
    "checkpoint": {"every": 0},
    "runs": {"student": {"stage": "merge"}},
}

PACKED, MANY = Packing(micro_batch_tokens=100_000), Packing(micro_batch_tokens=60)
GATED = {"opd": {"gate": {"kind": "token"}}}
REVERSE = {"opd": {"divergence": "reverse_kl_sampled", "gate": {"kind": "token"}}}
WEIGHED = {"loss": {"aggregation": "seq-mean-token-mean", "importance_cap": 1.5}}
CLIPPED = {"max_grad_norm": 0.5}
ONE_PROMPT = {"loop": {"prompts_per_step": 1, "updates_per_step": 1}}  # a second rank has no prompt
RESAMPLED = {"rollout": {"resample": 2}}
LORA = {"lora": Lora(rank=4, alpha=8.0)}
ZERO_2 = {"strategy": "deepspeed", "zero_stage": 2}
# without the threshold DeepSpeed would not shard parameters this small
SHARDED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
ZERO_3 = {"strategy": "deepspeed", "zero_stage": 3, "deepspeed_config": SHARDED}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}  # student.offload_optimizer sets it only on a GPU
# name: packing, changed settings, changed TrainSettings (and `tied`)
VARIANTS = {
    "plain-packed": (PACKED, {}, {}),
    "plain-many": (MANY, {}, {}),
    "plain-single": (Packing(micro_batch_tokens=1, share_prompts=False), {}, {}),
    "tied-packed": (PACKED, {}, {"tied": True}),
    "tied-many": (MANY, {}, {"tied": True, "gradient_checkpointing": True}),
    "weighed-packed": (PACKED, WEIGHED, CLIPPED),
    "weighed-many": (MANY, WEIGHED, CLIPPED),
    "reverse-packed": (PACKED, REVERSE, {}),
    "reverse-many": (MANY, REVERSE, {}),
    "gated-packed": (PACKED, GATED, {}),
    "gated-many": (MANY, GATED, {}),
    "one-prompt-packed": (PACKED, ONE_PROMPT, {}),
    "one-prompt-many": (MANY, ONE_PROMPT, {}),
    "resampled-packed": (PACKED, RESAMPLED, {}),
    "resampled-many": (MANY, RESAMPLED, {}),
    "lora-packed": (PACKED, {}, LORA),
    "lora-many": (MANY, {}, LORA),
}
ZERO_VARIANTS = {
    "zero2": (MANY, {}, ZERO_2),
    "zero2-lora": (MANY, {}, {**ZERO_2, **LORA}),
    "zero2-offload": (MANY, {}, {**ZERO_2, "deepspeed_config": {"zero_optimization": OFFLOAD}}),
    "zero3": (MANY, {}, ZERO_3),
    "zero3-tied": (MANY, {}, {**ZERO_3, "tied": True, "gradient_checkpointing": True}),
    "zero3-lora": (MANY, {}, {**ZERO_3, **LORA}),
}
HYBRID_VARIANTS = {"hybrid-tied": (MANY, {}, {"shard_size": 2, "tied": True})}
ALL = VARIANTS | ZERO_VARIANTS | HYBRID_VARIANTS
RELATIVE = 1e-4


def settings_of(run: str | None = None, **changes: object) -> Settings:
    """Return the settings with changes, resolved for a run if one is named."""
    made = Settings.model_validate(merged(SETTINGS, changes))
    return made if run is None else made.resolved(run)


class FixedRollouts:
    """Returns the same ragged responses for every policy, with higher log-probabilities for later ones.

    The first of each group has tokens of an environment.
    """

    policy_version = 0

    def load_weights(self, weights, version):
        for _ in weights:
            pass
        self.policy_version = version

    def generate(self, prompts, groups, sampling):
        rollouts = []
        for prompt, group in zip(prompts, groups, strict=True):
            for sample in range(sampling.n):
                rng = np.random.default_rng([group, sample])
                length = int(rng.integers(1, 14))
                response = torch.from_numpy(rng.integers(2, VOCABULARY, length))
                logps = torch.from_numpy(-rng.uniform(3, 5, length)).float() + self.policy_version / 8
                mask = torch.from_numpy(rng.random(length) < 0.6) if sample == 0 else None
                if mask is not None:
                    mask[0] = True
                made = Rollout(tuple(prompt), response, logps, group, True, self.policy_version, mask)
                rollouts.append(made)
        return rollouts


@dataclass
class FixedRewarder:
    """Computes a dense and a sparse reward from the response's tokens; some responses have no score.

    flat: every third group earns the same.
    """

    flat: bool = False

    def score(self, prompts, rollouts, step, *, check=True):
        ids = [rollout.response_ids for rollout in rollouts]
        values = [(float(each.sum() % 13) / 2 - 3, float(each[0] % 4 == 0)) for each in ids]
        rewards_RK = torch.tensor(values, dtype=torch.float64).reshape(len(rollouts), 2)
        rewards_RK[rewards_RK[:, 0] == 1.5, 0] = torch.nan
        if self.flat:
            rewards_RK[[rollout.group % 3 == 0 for rollout in rollouts]] = 0.5
        names, none = ("dense", "sparse"), dict.fromkeys(FAILURE_KINDS, 0)
        return RewardBatch(names, rewards_RK, [""] * len(rollouts), dict.fromkeys(names, none), {}, {})


class Numbers:
    """A tokenizer that decodes to numbers."""

    def decode(self, ids):
        return " ".join(map(str, ids))


def gradient(student: Student, parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the full gradient of an update before the optimizer step."""
    if student.settings.strategy == "fsdp2":
        return parameter.grad.full_tensor().clone()
    from deepspeed.utils import safe_get_full_grad

    return safe_get_full_grad(parameter).clone()


def prompt_set() -> PromptSet:
    rng = np.random.default_rng(5)
    ids = [tuple(rng.integers(2, VOCABULARY, rng.integers(1, 9)).tolist()) for _ in range(PROMPTS)]
    prompts = tuple(Prompt(i, "", each, {}) for i, each in enumerate(ids))
    return PromptSet(len(prompts), prompts.__getitem__, PROMPTS)


def train(folder: Path, device: torch.device, packing=PACKED, changes=None, options=None) -> list[dict]:
    """Run the loop on fixed responses, and return a record of each update."""
    options = options or {}
    settings = settings_of("student", runs={"student": {"set": changes or {}}})
    fixed = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "compute_dtype": "float32", **dict(packing)}
    fixed["adam_eps"] = 1e-2  # so that updates depend on the scale of the gradient
    given = {key: value for key, value in options.items() if key != "tied"}
    if "deepspeed_config" in given:
        file = folder.with_name(f"{folder.name}_{distributed.rank()}.json")
        file.write_text(json.dumps(given["deepspeed_config"]))
        given["deepspeed_config"] = str(file)
    student = Student(tiny_model(tied="tied" in options), TrainSettings(**fixed | given), device)
    updates: list[dict] = []
    strategy = student.strategy
    plain_step, plain_update = strategy.step, student.update
    named = {name: value for name, value in student.policy.named_parameters() if value.requires_grad}
    weights = {name: strategy.full(value).clone() for name, value in named.items()}

    def step():
        gradients = {name: gradient(student, value) for name, value in named.items()}
        norm = plain_step()
        before = dict(weights)
        weights.update({name: strategy.full(value).clone() for name, value in named.items()})
        changes = {name: weights[name] - before[name] for name in named}
        updates.append({"gradients": gradients, "changes": changes})
        return norm

    def update(*args):
        result = plain_update(*args)
        names = ("pg_loss", "kl_loss", "entropy", "reverse_loss")
        terms = torch.stack([getattr(result.stats, name) for name in names])
        updates[-1] |= {"terms": distributed.all_reduce(terms), "grad_norm": result.grad_norm}
        return result

    strategy.step, student.update = step, update
    teachers = LocalTeachers([tiny_model(seed=1), tiny_model(seed=2)], packing, student.vocabulary)
    run_loop(folder, settings, student, teachers=teachers)
    return updates


def run_loop(folder: Path, settings: Settings, student: Student, **own) -> None:
    """Train on fixed responses; `own` replaces components of the Run."""
    fixed = {"rollouts": FixedRollouts(), "prompts": prompt_set()}
    fixed["rewarder"] = FixedRewarder(flat=settings.rollout.resample > 0)
    fixed |= {"checkpoints": Checkpoints(folder / "checkpoints", 1), "weights": [0.5, 0.5], "held_out": None}
    with Recorder(folder, folder.name, settings, Numbers()) as recorder:
        optimise(Run(settings=settings, student=student, recorder=recorder, **fixed | own))


def run(folder: Path, ranks: int, names) -> dict[str, list[dict]]:
    """Return the result of `train` for each variant."""
    done = on_ranks(ranks, __file__, str(folder), *names)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(folder / "results.pt")


def assert_same(found: list[dict], expected: list[dict]) -> None:
    assert len(found) == len(expected) > 1
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(a["terms"], b["terms"], rtol=RELATIVE, atol=1e-6)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=RELATIVE)
        for kind in ("gradients", "changes"):
            assert a[kind].keys() == b[kind].keys()
            for name, value in b[kind].items():  # an adapter's A has no gradient if its B is 0
                error = (a[kind][name] - value).norm() / value.norm().clamp(min=1e-30)
                assert error < RELATIVE, f"update {i}: {kind} of {name} differ by {error:.1e}"


def whole(variant: str) -> str:
    """Return the FSDP2 variant on one rank that must be equal."""
    kind = next((kind for kind in ("lora", "tied") if kind in variant), "plain")
    return f"{kind}-packed"


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with distributed.process_group() as device:
        results = {}
        for name in sys.argv[2:]:
            torch.manual_seed(0)
            results[name] = train(folder / name, device, *ALL[name])
        if distributed.rank() == 0:
            torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
