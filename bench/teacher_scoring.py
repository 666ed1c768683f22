"""Scoring responses by a teacher in vLLM: dicts with detokenising (what users have), flat lists, our pooler.

    python -m bench.teacher_scoring [--tokens 512 2048] [--prompt 8] [--dtype bfloat16]

A JSON line a row: microseconds a response position (median), and peak memory above what was there before the
call. All give the log-probabilities of one model at temperature 1, and are compared before they are timed.
Our pooler alone leaves the prompt's positions out: short prompts are better for the others. `world` has
the quickstart's 265 tokens, `qwen` 151,936. With --model FOLDER it is that one, and our local engine
(transformers) is a fourth, which computes a prompt once for its --group of responses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoConfig

from bench.harness import record
from bench.harness.memory import peak_bytes
from smopd.engine.distributed import process_group
from smopd.engine.models.loading import load_model
from smopd.engine.settings import Packing, VllmSettings
from smopd.engine.types import Rollout
from smopd.worlds.models import qwen_vocab_model, world_model

BOUNDS = {"float32": 1e-3, "bfloat16": 8e-3}  # in 16 bit two roundings of a logit near 1
HIDDEN = 64

Score = Callable[[list[Rollout], int], Tensor]
"""Responses and kappa -> their positions' log-probabilities, (N, kappa)."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a folder, in place of world and qwen")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="of one response")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before each response")
    parser.add_argument("--responses", type=int, default=2)
    parser.add_argument("--group", type=int, default=1, help="responses of a prompt")
    parser.add_argument("--kappa", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dtype", choices=BOUNDS, default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", default="tokenizer/qwen", help="Qwen's ranks: a file or a short name")
    parser.add_argument("--output", type=Path, help="rows go to this file as well")
    chosen = parser.parse_args()
    output = chosen.output.open("a") if chosen.output else nullcontext()
    with TemporaryDirectory() as folder, process_group(), output as file:
        tell = record.teller(record.DEVICE, file)
        for name in [chosen.model] if chosen.model else ("world", "qwen"):
            path = chosen.model or save_model(name, f"{folder}/{name}", chosen)
            config = AutoConfig.from_pretrained(path)
            scores = scorers(name, path, config.vocab_size, chosen.dtype)
            if chosen.model:
                scores["local"] = local(path, config.vocab_size, chosen.dtype)
            for row in rows(scores, chosen, config.vocab_size):
                tell(row | {"benchmark": "teacher_scoring", "hidden": config.hidden_size})


def save_model(name: str, path: str, chosen: argparse.Namespace) -> str:
    """Saves a model of one layer with its tokenizer."""
    sizes = {
        "hidden_size": HIDDEN,
        "heads": 1,
        "layers": 1,
        "max_positions": max(chosen.tokens) + chosen.prompt + 1,
    }
    made = qwen_vocab_model(0, chosen.tokenizer, **sizes) if name == "qwen" else world_model(0, **sizes)
    for part in made:
        part.save_pretrained(path)
    return path


def scorers(name: str, folder: str, vocabulary: int, dtype: str) -> dict[str, Score]:
    from smopd.engine.vllm.engines import engine
    from smopd.engine.vllm.teachers import VllmTeachers

    settings = VllmSettings(kv_cache_bytes=256 << 20, dtype=dtype)
    options = {"skip_tokenizer_init": False, "tokenizer": folder, "max_logprobs": -1}
    users = engine(f"users of {name}", folder, settings, **options, enable_prefix_caching=False)
    found: dict[str, Score] = {"dicts, detokenised": partial(as_dicts, users)}
    for label, route in (("flat lists", "prompt_logprobs"), ("pooler", "pooler")):
        teachers = VllmTeachers([folder], settings, vocabulary, route, role=f"{route} of {name}")
        found[label] = partial(scored, teachers)
    return found


def local(path: str, vocabulary: int, dtype: str) -> Score:
    from smopd.engine.local.teachers import LocalTeachers

    model = load_model(path, getattr(torch, dtype))
    return partial(scored, LocalTeachers([model], Packing(micro_batch_tokens=4096), vocabulary))


def as_dicts(llm, rollouts: list[Rollout], kappa: int) -> Tensor:
    """What users do: a dict a position, read entry by entry."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids.tolist()]} for r in rollouts]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=kappa)
    logps = []
    for rollout, answer in zip(rollouts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        for position in answer.prompt_logprobs[len(rollout.prompt_ids) :]:
            ranked = sorted(position.items(), key=lambda entry: entry[1].rank)[:kappa]
            logps.append([entry.logprob for _, entry in ranked])
    return torch.tensor(logps)


def scored(teachers, rollouts: list[Rollout], kappa: int) -> Tensor:
    return teachers.score(rollouts, kappa, 1.0).logps_NMS[:, 0]


def rows(scores: dict[str, Score], chosen: argparse.Namespace, vocabulary: int) -> Iterator[dict]:
    generator = torch.Generator().manual_seed(0)
    for kappa in chosen.kappa:
        for length in chosen.tokens:
            rollouts: list[Rollout] = []
            for number in range(chosen.responses):
                ids = torch.randint(0, vocabulary, (chosen.prompt + length,), generator=generator)
                group, of_it = divmod(number, chosen.group)
                prompt = rollouts[-1].prompt_ids if of_it else tuple(ids[: chosen.prompt].tolist())
                rollouts.append(Rollout(prompt, ids[chosen.prompt :], torch.zeros(length), group, True))
            users, *ours = [score(rollouts, kappa) for score in scores.values()]
            for values in ours:
                torch.testing.assert_close(values, users, rtol=0, atol=BOUNDS[chosen.dtype])
            times: dict[str, list[float]] = {name: [] for name in scores}
            for _ in range(chosen.repeats):
                for name, score in scores.items():
                    start = time.perf_counter()
                    score(rollouts, kappa)
                    times[name].append((time.perf_counter() - start) / (length * chosen.responses))
            for name, score in scores.items():
                peak = peak_bytes(partial(score, rollouts, kappa), record.DEVICE)
                yield {
                    "case": f"P{chosen.prompt}-T{length}-R{chosen.responses}-V{vocabulary}-kappa{kappa}",
                    "dtype": chosen.dtype,
                    "provider": name,
                    "us_per_position": round(1e6 * statistics.median(times[name]), 2),
                    "peak_mib": None if peak is None else round(peak / 2**20, 1),
                }


if __name__ == "__main__":
    main()
