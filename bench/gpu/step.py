"""A training step of about 0.5 B parameters from random weights: decoding, an update, whole steps.

python -m bench.gpu.step --output FILE [--tiny] [--device cpu]

Rows come as they are measured, the most wanted ones first. A part that fails has a row with its error, and
the next one begins; none is begun when the seconds are over.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from bench.harness import record
from smopd.engine import distributed
from smopd.engine.local import rollout as local
from smopd.engine.types import Rollout, Sampling

TOTAL_SECONDS = 150.0
AGAIN_SECONDS = 2.0  # a compiler may swallow the first TimeoutError
GROUP, END, KAPPA = 8, 2, 16


@dataclass(frozen=True)
class Sizes:
    """Of the model, and of what is measured with it."""

    model: dict[str, int]
    rows: tuple[int, ...]
    prompt: int
    new: int
    longer: int
    update: tuple[int, int]  # responses, tokens of each
    step_prompts: int
    step_new: int
    micro_batch: int


WHOLE = Sizes(
    model={
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
    },
    rows=(512, 128),
    prompt=64,
    new=64,
    longer=128,
    update=(32, 256),
    step_prompts=64,
    step_new=128,
    micro_batch=16_384,
)
TINY = Sizes(
    model={
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 640,
    },
    rows=(16,),
    prompt=8,
    new=20,
    longer=40,
    update=(16, 12),
    step_prompts=2,
    step_new=12,
    micro_batch=128,
)


@dataclass(frozen=True)
class Bench:
    """What every part is given."""

    sizes: Sizes
    device: torch.device
    tell: Callable[[dict], None]

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
        torch.manual_seed(seed)
        config = Qwen2Config(
            **self.sizes.model,
            tie_word_embeddings=True,
            max_position_embeddings=1024,
            attn_implementation="sdpa",
            dtype=dtype,
            bos_token_id=0,
            eos_token_id=END,
        )
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with self.device:
                return Qwen2ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, call: Callable[[], Any]) -> float:
        self.sync()
        began = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - began

    def peak_begins(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> dict[str, float]:
        return {"peak_mib": round(torch.cuda.max_memory_allocated() / 2**20, 1)} if self.cuda else {}

    def prompts(self, n: int) -> list[tuple[int, ...]]:
        """Of several lengths."""
        generator = torch.Generator().manual_seed(1)
        vocabulary, longest = self.sizes.model["vocab_size"], self.sizes.prompt
        lengths = [longest - i % (longest // 4) for i in range(n)]
        return [
            tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist()) for length in lengths
        ]


def engine(model: PreTrainedModel, way: str) -> local.LocalRollout:
    """way: "loop" or "in place"."""
    return local.LocalRollout(model, [END], decoding="in_place" if way == "in place" else "loop")


def decode(bench: Bench) -> None:
    """Seconds of `generate`, and of a token between a short and a longer one: without prompts and graphs."""
    sizes, model = bench.sizes, bench.model()
    for rows in sizes.rows:
        for way in ("in place", "loop"):
            with guarded(bench, "decode", f"{way}, {rows} rows", 25.0):
                made = engine(model, way)
                bench.tell(timed_decoding(bench, made, rows) | {"provider": way, "graphs": made.graphs})


def timed_decoding(bench: Bench, made: local.LocalRollout, rows: int) -> dict[str, Any]:
    sizes, prompts = bench.sizes, bench.prompts(rows // GROUP)

    def seconds(tokens: int) -> tuple[float, list[Rollout]]:
        bench.sync()
        began = time.perf_counter()
        sampled = made.generate(
            prompts, range(len(prompts)), Sampling(n=GROUP, max_new_tokens=tokens, seed=3)
        )
        bench.sync()
        return time.perf_counter() - began, sampled

    first, _ = seconds(4)
    bench.peak_begins()
    short, sampled = seconds(sizes.new)
    if made.graphs:
        short = min(short, seconds(sizes.new)[0])
    peak = bench.peak()
    longer, _ = seconds(sizes.longer)
    return {
        "benchmark": "decode",
        "case": f"R{rows}-P{sizes.prompt}-T{sizes.new}",
        "ms": round(1e3 * short, 2),
        "ms_a_token": round(1e3 * short / sizes.new, 3),
        "ms_a_further_token": round(1e3 * (longer - short) / (sizes.longer - sizes.new), 3),
        "tokens_per_second": round(rows * sizes.new / short),
        "warm_up_seconds": round(first, 2),
        "mismatch": mismatch(bench, made, sampled[: 2 * GROUP]),
    } | peak


def mismatch(bench: Bench, made: local.LocalRollout, rollouts: list[Rollout]) -> float:
    """Mean distance of the log-probabilities from those of a forward over whole sequences."""
    found = []
    for rollout in rollouts:
        ids = torch.cat([torch.tensor(rollout.prompt_ids), rollout.response_ids])[None].to(bench.device)
        with torch.no_grad():
            logits = made.model(ids).logits[0, len(rollout.prompt_ids) - 1 : -1].float()
        logps = logits.log_softmax(-1).cpu().gather(-1, rollout.response_ids[:, None])[:, 0]
        found.append((rollout.logps - logps).abs())
    return float(torch.cat(found).mean())


def whole_step(bench: Bench) -> None:
    """Steps of a merge by the library's own loop: two teachers beside the student; the first one warms up."""
    for way in ("loop", "in place"):
        with guarded(bench, "training step", way, 45.0), distributed.process_group():
            bench.peak_begins()
            lines = merge_steps(bench, way, steps=2)
            line = lines[-1]
            seconds = {name: round(value, 4) for name, value in line.items() if name.startswith("seconds/")}
            bench.tell(
                {
                    "benchmark": "training step",
                    "case": f"{bench.sizes.step_prompts}x{GROUP}x{bench.sizes.step_new}",
                    "provider": way,
                    "tokens": line["tokens"],
                    "tokens_per_second": round(line["tokens_per_second"], 1),
                    "grad_norm": line["grad_norm"],
                    "rollout_mismatch": line["rollout_mismatch"],
                    "micro_batches": line["micro_batches"],
                    **seconds,
                }
                | ({"peak_mib": round(1024 * line["memory/peak_gib"], 1)} if bench.cuda else {})
            )


def merge_steps(bench: Bench, way: str, steps: int) -> list[dict[str, Any]]:
    """The lines of metrics of a merge run, with rewards that are computed from ids alone."""
    from smopd.config.settings import Settings
    from smopd.data.prompts import Prompt, PromptSet
    from smopd.engine.local.teachers import LocalTeachers
    from smopd.engine.student.checkpoint import Checkpoints
    from smopd.engine.student.student import Student
    from smopd.loop import Run, optimise
    from smopd.record.recorder import Recorder

    sizes = bench.sizes
    settings = Settings.model_validate(
        {
            "name": "step",
            "model": {"path": "unused"},
            "data": {"train": {"source": "unused:unused"}},
            "rewards": [
                {"name": "even", "function": "unused:unused", "range": [0, 1]},
                {"name": "low", "function": "unused:unused", "range": [0, 1]},
            ],
            "loop": {"steps": steps, "prompts_per_step": sizes.step_prompts},
            "rollout": {"group_size": GROUP, "max_new_tokens": sizes.step_new, "dtype": "bfloat16"},
            "student": {"micro_batch_tokens": sizes.micro_batch, "learning_rate": 1e-5},
            "teachers": {"models": [{"model": "a/b", "reward": "even"}, {"model": "a/c", "reward": "low"}]},
            "checkpoint": {"every": 0},
            "log": {"token_views": 0},
            "merge": {"method": "published"},
            "opd": {"target": "merged", "tail": True},
            "runs": {"student": {"stage": "merge"}},
        }
    ).resolved("student")
    n_prompts = steps * sizes.step_prompts
    prompts = tuple(Prompt(i, "", ids, {}) for i, ids in enumerate(bench.prompts(n_prompts)))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        student = Student(bench.model(dtype=torch.float32), settings.student, bench.device)
        teachers = [bench.model(seed) for seed in (1, 2)]
        with Recorder(folder, "student", settings, Numbers()) as recorder:  # type: ignore[arg-type]
            optimise(
                Run(
                    settings=settings,
                    weights=[0.5, 0.5],
                    prompts=PromptSet(prompts, "random", n_prompts, 0, 0, 0),
                    held_out=None,
                    student=student,
                    rollouts=engine(bench.model(), way),
                    teachers=LocalTeachers(teachers, settings.student, student.vocabulary),
                    rewarder=IdRewards(),  # type: ignore[arg-type]
                    checkpoints=Checkpoints(folder / "checkpoints", 1),
                    recorder=recorder,
                )
            )
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


class Numbers:
    """A tokenizer that spells ids."""

    def decode(self, ids: Any) -> str:
        return " ".join(map(str, ids))


class IdRewards:
    """The shares of even ids and of ids below 100."""

    def score(self, prompts: Any, rollouts: list[Rollout], step: int) -> Any:
        from smopd.rewards.pool import FAILURE_KINDS, RewardBatch
        from smopd.step.rewards import Rewards

        values = [[(r.response_ids % 2 == 0).double().mean(), r.response_ids[0] % 3 == 0] for r in rollouts]
        values_RK = torch.tensor(values, dtype=torch.float64)
        none = dict.fromkeys(FAILURE_KINDS, 0)
        failures = {"even": none, "low": none}
        batch = RewardBatch(("even", "low"), values_RK.numpy(), failures, {}, {}, {})
        return Rewards(values_RK, [""] * len(rollouts), batch)


@distributed.process_group()
def update(bench: Bench, layers: str = "eager layers") -> None:
    """One update: forward, fused loss against two teachers' top-kappa, backward, AdamW."""
    from smopd.engine.settings import TrainSettings
    from smopd.engine.student.student import Student
    from smopd.ops import LossSettings, LossTokens

    responses, length = bench.sizes.update
    settings = TrainSettings(micro_batch_tokens=bench.sizes.micro_batch, compile=layers == "compile")
    student = Student(bench.model(dtype=torch.float32), settings, bench.device)
    vocabulary, n_tokens = bench.sizes.model["vocab_size"], responses * length
    generator = torch.Generator().manual_seed(2)
    prompts = bench.prompts(responses // GROUP)
    rollouts = [
        Rollout(
            prompts[i // GROUP],
            torch.randint(3, vocabulary, (length,), generator=generator),
            torch.full((length,), -12.0),
            i // GROUP,
            True,
        )
        for i in range(responses)
    ]
    weight_N = torch.full((n_tokens,), 1 / n_tokens, device=bench.device)
    logits_NMV = torch.randn(n_tokens, 2, 64, generator=generator)
    tokens = LossTokens(
        token_ids_N=torch.cat([r.response_ids for r in rollouts]).to(bench.device),
        adv_N=torch.randn(n_tokens, generator=generator).to(bench.device),
        pg_weight_N=weight_N,
        kl_weight_N=weight_N,
        teacher_ids_NMS=(torch.rand(n_tokens, 2, 512, generator=generator).argsort(-1)[..., :KAPPA])
        .int()
        .to(bench.device),
        teacher_logps_NMS=logits_NMV.log_softmax(-1).topk(KAPPA).values.to(bench.device),
        log_alpha=torch.full((2,), 0.5, device=bench.device).log(),
    )
    run = partial(student.update, rollouts, tokens, LossSettings(kappa=KAPPA))
    first = bench.seconds(run)
    run()
    bench.peak_begins()
    times = [bench.seconds(run) for _ in range(5 if bench.cuda else 2)]
    median = statistics.median(times)
    bench.tell(
        {
            "benchmark": "update",
            "case": f"N{n_tokens}",
            "provider": layers,
            "ms": round(1e3 * median, 2),
            "ms_all": [round(1e3 * t, 2) for t in times],
            "tokens_per_second": round(n_tokens / median),
            "first_seconds": round(first, 2),
            "micro_batches": run().micro_batches,
        }
        | bench.peak()
    )


@contextmanager
def guarded(bench: Bench, benchmark: str, case: str, limit: float) -> Iterator[None]:
    """A row with the error in place of a traceback; a TimeoutError after `limit` seconds."""

    def over(*_: object) -> None:
        raise TimeoutError(f"over {limit:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    left, _ = signal.getitimer(signal.ITIMER_REAL)
    signal.setitimer(signal.ITIMER_REAL, min(limit, left) if left else limit, AGAIN_SECONDS)
    began = time.monotonic()
    try:
        yield
    except Exception as error:
        signal.setitimer(signal.ITIMER_REAL, 0)
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(place.filename).name}:{place.lineno}"
        bench.tell(
            {
                "benchmark": benchmark,
                "case": case,
                "error": f"{type(error).__name__}: {error}"[:600],
                "where": where,
            }
        )
        traceback.print_exc()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1.0, left - (time.monotonic() - began)), AGAIN_SECONDS)
        if bench.cuda:
            torch.cuda.empty_cache()


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "decode": (decode, 60.0),
    "training step": (whole_step, 75.0),
    "update": (update, 30.0),
    "update, compile": (partial(update, layers="compile"), 50.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.step", description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="rows go to this file")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="no part begins after these")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    began = time.monotonic()
    with given.output.open("a") as file:
        device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
        bench = Bench(TINY if given.tiny else WHOLE, device, record.teller(given.device, file))
        for name in given.parts:
            part, limit = PARTS[name]
            left = given.seconds - (time.monotonic() - began)
            if left <= 0:
                bench.tell({"benchmark": name, "case": "", "state": "not begun: the seconds were over"})
                continue
            with guarded(bench, name, "", min(limit, left)):
                part(bench)
            at = round(time.monotonic() - began, 1)
            bench.tell({"benchmark": name, "case": "", "state": "ended", "at": at})


if __name__ == "__main__":
    main()
