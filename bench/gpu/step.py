"""Time training steps of a model with 0.5B random parameters in our own loop and in TRL's trainers.

    python -m bench.gpu.step --output FILE [--tiny] [--device cpu]

Each variant has one row, with the seconds of the last step after warm-up, and of its phases where known. Four
variants use our loop: merges that decode in place (CUDA graphs), in place with compiled layers, or by the
plain loop, and a step without teachers. Two use TRL: its GRPOTrainer without teachers, and our trainer based
on it with two teachers. If a variant fails, its row has the error.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from bench.harness import record
from bench.harness.rewards import even, thirds
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

GROUP, END, STEPS = 8, 2, 2
WAYS = {
    "in place": ("in_place", False, True),
    "in place, compile": ("in_place", True, True),
    "loop": ("loop", False, True),
    "no teachers": ("in_place", False, False),
}
"""Provider -> decoding, whether layers are compiled, and whether there are teachers."""
TRL_ROWS = 32  # per micro-batch


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


def random_prompts(sizes: Sizes, n: int) -> list[list[int]]:
    """Return the token ids of n prompts of several lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = [sizes.prompt - i % (sizes.prompt // 4) for i in range(n)]
    return [
        torch.randint(3, sizes.model["vocab_size"], (length,), generator=generator).tolist()
        for length in lengths
    ]


def step_settings(sizes: Sizes, compiled: bool, taught: bool) -> Settings:
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
            "runs": {"student": {"stage": "merge" if taught else "train"}},
        }
    ).resolved("student")


class Numbers:
    """A tokenizer that decodes ids to numbers."""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


class IdRewards:
    def score(self, prompts: Any, rollouts: list[Rollout], step: int) -> RewardBatch:
        ids = [rollout.response_ids.tolist() for rollout in rollouts]
        values_RK = torch.tensor([even(ids), thirds(ids)], dtype=torch.float64).T
        failures = {name: dict.fromkeys(FAILURE_KINDS, 0) for name in ("even", "thirds")}
        return RewardBatch(("even", "thirds"), values_RK, [""] * len(rollouts), failures, {}, {})


def last_step(
    sizes: Sizes, device: torch.device, decoding: str, compiled: bool, taught: bool
) -> dict[str, Any]:
    """Run a merge with two teachers, or a run without teachers. Return the last line of its metrics."""
    settings, half = step_settings(sizes, compiled, taught), torch.bfloat16
    ids = random_prompts(sizes, STEPS * sizes.prompts)
    prompts = tuple(Prompt(i, "", tuple(each), {}) for i, each in enumerate(ids))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = Student(new_model(sizes, 0, torch.float32, device), settings.student, device)
        teachers = [new_model(sizes, seed, half, device) for seed in (1, 2)] if taught else []
        with Recorder(folder, "student", settings, Numbers()) as recorder:  # type: ignore[arg-type]
            optimise(
                Run(
                    settings=settings,
                    weights=[0.5, 0.5],
                    prompts=PromptSet(len(prompts), prompts.__getitem__, len(prompts)),
                    held_out=None,
                    student=student,
                    rollouts=LocalRollout(new_model(sizes, 0, half, device), [END], decoding=decoding),
                    teachers=LocalTeachers(teachers, settings.student, student.vocabulary)
                    if taught
                    else None,
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


def words(sizes: Sizes) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are numbers."""
    vocabulary = {str(i): i for i in range(sizes.model["vocab_size"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="1"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=str(END), pad_token=str(END), unk_token="1"
    )


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def trl_step(sizes: Sizes, device: torch.device, taught: bool) -> dict[str, Any]:
    """Run TRL's GRPOTrainer, or if `taught`, SMOPDGRPOTrainer. Return the last step's seconds and memory."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from smopd.integrations.trl import SMOPDGRPOConfig, SMOPDGRPOTrainer

    class Clock(TrainerCallback):
        started = seconds = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = now(device)

        def on_step_end(self, *_: object, **__: object) -> None:
            self.seconds = now(device) - self.started

    clock, tokenizer, student = Clock(), words(sizes), new_model(sizes, 0, torch.float32, device)
    prompts = [tokenizer.decode(each) for each in random_prompts(sizes, STEPS * sizes.prompts)]
    rows = min(TRL_ROWS, sizes.prompts * GROUP)
    with tempfile.TemporaryDirectory() as folder:
        args = (SMOPDGRPOConfig if taught else GRPOConfig)(
            output_dir=folder,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=sizes.prompts * GROUP // rows,
            num_generations=GROUP,
            max_completion_length=sizes.new,
            max_steps=STEPS,
            learning_rate=1e-5,
            beta=0.0,
            bf16=device.type == "cuda",
            use_cpu=device.type == "cpu",
            gradient_checkpointing=False,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        given = {"train_dataset": Dataset.from_dict({"prompt": prompts}), "processing_class": tokenizer}
        given["callbacks"] = [clock]
        if taught:
            teachers = [new_model(sizes, seed, torch.bfloat16, device) for seed in (1, 2)]
            trainer = SMOPDGRPOTrainer(student, [even, thirds], teachers, args, **given)
        else:
            trainer = GRPOTrainer(student, [even, thirds], args, **given)
        trainer.train()
    line = trainer.state.log_history[-2]  # the last entry is for the whole training
    row = {"seconds/step": clock.seconds, "grad_norm": line["grad_norm"]}
    row["tokens"] = line["completions/mean_length"] * sizes.prompts * GROUP
    if device.type == "cuda":
        row["peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.step", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="rows go to this file")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=150.0, help="start no variant after this time")
    parser.add_argument("--only", nargs="*", help="these rows")
    given = parser.parse_args()
    sizes, ends = TINY if given.tiny else WHOLE, time.monotonic() + given.seconds
    with given.output.open("a") as file:
        tell = record.teller(given.device, file)
        steps: dict[str, Callable[[torch.device], dict[str, Any]]] = {
            way: lambda device, how=how: row_of(last_step(sizes, device, *how)) for way, how in WAYS.items()
        }
        steps["trl, no teachers"] = lambda device: trl_step(sizes, device, taught=False)
        steps["trl, smopd"] = lambda device: trl_step(sizes, device, taught=True)
        for way, step in steps.items():
            head = {
                "benchmark": "training step",
                "case": f"{sizes.prompts}x{GROUP}x{sizes.new}",
                "provider": way,
            }
            if given.only and way not in given.only:
                continue
            if time.monotonic() > ends:
                tell(head | {"left_out": "out of time"})
                continue
            try:
                gc.collect()
                if given.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
                with distributed.process_group() as device:
                    tell(head | step(device))
            except Exception as error:
                traceback.print_exc()
                tell(head | {"error": f"{type(error).__name__}: {error}"[:600]})


if __name__ == "__main__":
    main()
