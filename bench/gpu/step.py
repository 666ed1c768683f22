"""Time merge steps of a model of 0.5B random parameters in the library's own loop.

    python -m bench.gpu.step --output FILE [--tiny] [--device cpu]

A row each for decoding in place (CUDA graphs), by the plain loop, and in place with compiled layers: seconds
per phase of the last step, after warm-up. If a variant fails, its row has the error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bench.harness import record
from smopd.config.settings import Settings
from smopd.data.prompts import Prompt, PromptSet
from smopd.engine import distributed
from smopd.engine.local.rollout import LocalRollout
from smopd.engine.local.teachers import LocalTeachers
from smopd.engine.student.checkpoint import Checkpoints
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from smopd.loop import Run, optimise
from smopd.record.recorder import Recorder
from smopd.rewards.pool import FAILURE_KINDS, RewardBatch
from smopd.step.rewards import Rewards

GROUP, END, STEPS = 8, 2, 2
WAYS = {"in place": ("in_place", False), "loop": ("loop", False), "in place, compile": ("in_place", True)}
"""Provider -> decoding and whether layers are compiled."""


@dataclass(frozen=True)
class Sizes:
    model: dict[str, int]  # arguments of Qwen2Config
    prompts: int  # per step
    prompt: int  # tokens
    new: int  # tokens
    micro_batch: int


QWEN_05B = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
}
FEW = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
WHOLE = Sizes(QWEN_05B, prompts=64, prompt=64, new=128, micro_batch=16_384)
TINY = Sizes(
    FEW | {"num_key_value_heads": 2, "vocab_size": 640}, prompts=2, prompt=8, new=12, micro_batch=128
)


def new_model(sizes: Sizes, seed: int, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        **sizes.model,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        attn_implementation="sdpa",
        dtype=dtype,
        bos_token_id=0,
        eos_token_id=END,
    )
    with device:
        return Qwen2ForCausalLM(config).to(dtype)


def new_prompts(sizes: Sizes, n: int) -> PromptSet:
    """Return random prompts of several lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = [sizes.prompt - i % (sizes.prompt // 4) for i in range(n)]
    ids = [
        torch.randint(3, sizes.model["vocab_size"], (length,), generator=generator).tolist()
        for length in lengths
    ]
    prompts = tuple(Prompt(i, "", tuple(each), {}) for i, each in enumerate(ids))
    return PromptSet(prompts, n)


def merge_settings(sizes: Sizes, compiled: bool) -> Settings:
    return Settings.model_validate(
        {
            "name": "step",
            "model": {"path": "unused"},
            "data": {"train": {"source": "unused:unused"}},
            "rewards": [
                {"name": "even", "function": "unused:unused", "range": [0, 1]},
                {"name": "thirds", "function": "unused:unused", "range": [0, 1]},
            ],
            "loop": {"steps": STEPS, "prompts_per_step": sizes.prompts},
            "rollout": {"group_size": GROUP, "max_new_tokens": sizes.new, "dtype": "bfloat16"},
            "student": {"micro_batch_tokens": sizes.micro_batch, "learning_rate": 1e-5, "compile": compiled},
            "teachers": {
                "models": [{"model": "a/b", "reward": "even"}, {"model": "a/c", "reward": "thirds"}]
            },
            "checkpoint": {"every": 0},
            "log": {"token_views": 0},
            "merge": {"method": "published"},
            "opd": {"target": "merged", "tail": True},
            "runs": {"student": {"stage": "merge"}},
        }
    ).resolved("student")


class Numbers:
    """A tokenizer that decodes ids as numbers."""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


class IdRewards:
    """Rewards: the share of even ids, and whether the first id is a multiple of three."""

    def score(self, prompts: Any, rollouts: list[Rollout], step: int) -> Rewards:
        values = [[(r.response_ids % 2 == 0).double().mean(), r.response_ids[0] % 3 == 0] for r in rollouts]
        values_RK = torch.tensor(values, dtype=torch.float64)
        failures = {name: dict.fromkeys(FAILURE_KINDS, 0) for name in ("even", "thirds")}
        batch = RewardBatch(("even", "thirds"), values_RK.numpy(), failures, {}, {}, {})
        return Rewards(values_RK, [""] * len(rollouts), batch)


def last_step(sizes: Sizes, device: torch.device, decoding: str, compiled: bool) -> dict[str, Any]:
    """Run a merge with two teachers and return its last line of metrics."""
    settings, half = merge_settings(sizes, compiled), torch.bfloat16
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = Student(new_model(sizes, 0, torch.float32, device), settings.student, device)
        teachers = [new_model(sizes, seed, half, device) for seed in (1, 2)]
        with Recorder(folder, "student", settings, Numbers()) as recorder:  # type: ignore[arg-type]
            optimise(
                Run(
                    settings=settings,
                    weights=[0.5, 0.5],
                    prompts=new_prompts(sizes, STEPS * sizes.prompts),
                    held_out=None,
                    student=student,
                    rollouts=LocalRollout(new_model(sizes, 0, half, device), [END], decoding=decoding),
                    teachers=LocalTeachers(teachers, settings.student, student.vocabulary),
                    rewarder=IdRewards(),  # type: ignore[arg-type]
                    checkpoints=Checkpoints(folder / "checkpoints", 1),
                    recorder=recorder,
                )
            )
        return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def row_of(line: dict[str, Any]) -> dict[str, Any]:
    names = ("tokens", "tokens_per_second", "grad_norm", "rollout_mismatch", "micro_batches")
    row = {name: line[name] for name in (*names, *line) if name in names or name.startswith("seconds/")}
    if "memory/peak_gib" in line:
        row["peak_mib"] = round(1024 * line["memory/peak_gib"], 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.step", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="rows go to this file")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0, help="start no variant after this time")
    given = parser.parse_args()
    sizes, ends = TINY if given.tiny else WHOLE, time.monotonic() + given.seconds
    with given.output.open("a") as file:
        tell = record.teller(given.device, file)
        for way, (decoding, compiled) in WAYS.items():
            head = {
                "benchmark": "training step",
                "case": f"{sizes.prompts}x{GROUP}x{sizes.new}",
                "provider": way,
            }
            if time.monotonic() > ends:
                tell(head | {"left_out": "out of time"})
                continue
            try:
                if given.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                with distributed.process_group():
                    tell(head | row_of(last_step(sizes, torch.device(given.device), decoding, compiled)))
            except Exception as error:
                traceback.print_exc()
                tell(head | {"error": f"{type(error).__name__}: {error}"[:600]})


if __name__ == "__main__":
    main()
