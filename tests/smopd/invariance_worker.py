"""Runs `smopd.loop.optimise` on fixed responses, in one process or under torchrun.

Saves what each update did.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from smopd.config import Settings
from smopd.data import Prompt, PromptSet
from smopd.engine import distributed
from smopd.engine.checkpoint import Checkpoints
from smopd.engine.student import Student
from smopd.engine.teachers import LocalTeachers
from smopd.engine.types import Packing, Rollout, TrainSettings
from smopd.loop import Run, optimise
from smopd.recorder import Recorder
from smopd.rewards.batch import FAILURE_KINDS, RewardBatch
from smopd.scoring import Scores
from tests.engine.tiny import VOCABULARY, tiny_model

PROMPTS, GROUP_SIZE, STEPS = 7, 3, 3

SETTINGS = {
    "name": "invariance",
    "model": {"path": "unused"},
    "data": {"train": {"source": "unused:unused"}},
    "rewards": [
        {"name": "dense", "function": "unused:unused", "range": [-3, 3]},
        {"name": "sparse", "function": "unused:unused", "range": [0, 1]},
    ],
    "loop": {"steps": STEPS, "prompts_per_step": PROMPTS, "updates_per_step": 2},
    "rollout": {"group_size": GROUP_SIZE, "temperature": 0.7},
    "loss": {"entropy_coef": 0.01, "dual_clip": 3.0},
    "opd": {"kappa": 6, "schedule": "linear", "final_coef": 0.5},
    "teachers": {"models": [{"model": "a/b", "reward": "dense"}, {"model": "a/c", "reward": "sparse"}]},
    "checkpoint": {"every": 0},
    "log": {"plain": True},
    "runs": {"student": {"stage": "merge"}},
}

# name: how the batch is laid out, then what differs in the settings and in the model
PACKED = Packing(100_000, 0, True)
VARIANTS = {
    "packed": (PACKED, {}, {}),
    "single": (Packing(1, 0, False), {}, {}),
    "many-micro-batches": (Packing(60, 0, True), {}, {}),
    "one-row": (Packing(100_000, 2_000, False), {}, {}),
    "checkpointed": (PACKED, {}, {"gradient_checkpointing": True}),
    "tied-packed": (PACKED, {}, {"tied": True}),
    "tied-many": (Packing(60, 0, False), {}, {"tied": True}),
    "seq-mean-packed": (PACKED, {"loss": {"aggregation": "seq-mean-token-mean"}}, {}),
    "seq-mean-many": (Packing(60, 0, True), {"loss": {"aggregation": "seq-mean-token-mean"}}, {}),
    "reverse-packed": (PACKED, {"opd": {"divergence": "reverse_kl_sampled", "gate": {"kind": "token"}}}, {}),
    "reverse-many": (
        Packing(60, 0, True),
        {"opd": {"divergence": "reverse_kl_sampled", "gate": {"kind": "token"}}},
        {},
    ),
}


class FixedRollouts:
    """Answers group g with the same ragged responses whatever the weights are."""

    policy_version = 0

    def load_weights(self, weights, version):
        for _ in weights:
            pass

    def generate(self, prompts, groups, sampling):
        rollouts = []
        for prompt, group in zip(prompts, groups, strict=True):
            for sample in range(sampling.n):
                rng = np.random.default_rng([group, sample])
                length = int(rng.integers(1, 14))
                response = torch.from_numpy(rng.integers(2, VOCABULARY, length))
                logps = torch.from_numpy(-rng.uniform(3, 5, length)).float()
                rollouts.append(Rollout(tuple(prompt), response, logps, group, finished=True))
        return rollouts


class FixedScorer:
    """A dense reward, a sparse one, and now and then none at all, all from the response's tokens."""

    def score(self, prompts, rollouts):
        values = [
            (float(rollout.response_ids.sum() % 13) / 2 - 3, float(rollout.response_ids[0] % 4 == 0))
            for rollout in rollouts
        ]
        rewards_RK = torch.tensor(values, dtype=torch.float64).reshape(len(rollouts), 2)
        rewards_RK[rewards_RK[:, 0] == 1.5, 0] = torch.nan
        none = dict.fromkeys(FAILURE_KINDS, 0)
        batch = RewardBatch(
            ("dense", "sparse"), rewards_RK.numpy(), {"dense": none, "sparse": none}, {}, {}, {}
        )
        return Scores(rewards_RK, [""] * len(rollouts), batch)


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def prompt_set() -> PromptSet:
    rng = np.random.default_rng(5)
    prompts = tuple(
        Prompt(i, "", tuple(rng.integers(2, VOCABULARY, rng.integers(1, 9)).tolist()), {})
        for i in range(PROMPTS)
    )
    return PromptSet(prompts, "fixed", PROMPTS, 0, 0, 0)


def run_variant(name: str, folder: Path, device: torch.device) -> list[dict]:
    packing, changes, model_options = VARIANTS[name]
    base = Settings.model_validate(SETTINGS)
    run_settings = base.runs["student"].model_copy(update={"set": changes})
    settings = base.model_copy(update={"runs": {"student": run_settings}}).resolved("student")
    train = TrainSettings(
        learning_rate=1e-2,
        max_grad_norm=1e9,
        adam_eps=1e-2,  # its updates then show the gradient's scale, and not the sign of rounding errors
        compute_dtype="float32",
        packing=packing,
        gradient_checkpointing=model_options.get("gradient_checkpointing", False),
        head_chunk_bytes=VOCABULARY * 4 * (1000 if packing is PACKED else 5),
    )
    student = Student(tiny_model(tied=model_options.get("tied", False)), train, device)
    updates: list[dict] = []

    def before_step(optimizer, args, kwargs):
        named = dict(student.policy.named_parameters())
        updates.append({"gradients": {name: full(value.grad) for name, value in named.items()}})
        updates[-1]["before"] = {name: full(value) for name, value in named.items()}

    def after_step(optimizer, args, kwargs):
        before = updates[-1].pop("before")
        named = student.policy.named_parameters()
        updates[-1]["changes"] = {name: full(value) - before[name] for name, value in named}

    student.optimizer.register_step_pre_hook(before_step)
    student.optimizer.register_step_post_hook(after_step)
    plain_update = student.update

    def update(*args):
        result = plain_update(*args)
        terms = torch.stack(
            [getattr(result.stats, term) for term in ("pg_loss", "kl_loss", "entropy", "reverse_loss")]
        )
        updates[-1] |= {"terms": distributed.all_reduce(terms), "grad_norm": result.grad_norm}
        return result

    student.update = update
    teachers = LocalTeachers([tiny_model(seed=1), tiny_model(seed=2)], packing, student.vocabulary)
    with Recorder(folder, name, settings) as recorder:
        optimise(
            Run(
                settings=settings,
                weights=[0.5, 0.5],
                prompts=prompt_set(),
                held_out=None,
                student=student,
                rollouts=FixedRollouts(),
                teachers=teachers,
                scorer=FixedScorer(),
                checkpoints=Checkpoints(folder / "checkpoints", 1),
                recorder=recorder,
            )
        )
    return updates


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    with distributed.process_group() as device:
        results = {name: run_variant(name, folder / name, device) for name in VARIANTS}
        if distributed.rank() == 0:
            torch.save(results, folder / "results.pt")


if __name__ == "__main__":
    main()
