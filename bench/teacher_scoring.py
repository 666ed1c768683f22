"""Scoring responses by a teacher in vLLM: dicts with detokenising (what users have), flat lists, our pooler.

python -m bench.teacher_scoring [--models world qwen] [--tokens 512 2048] [--prompt 8] [--dtype bfloat16]

A JSON line a row: microseconds a response position (median), and peak memory above what was there before
the call, for each length of response. Only our pooler leaves the prompt's positions out: the shorter the
prompts, the better for the others. All three give the log-probabilities of one model at temperature 1, and
are compared before any is timed. Models: the quickstart's vocabulary of 265, where a position costs what
the route adds; and Qwen's of 151,936, where on a CPU it costs the head's product as well. With --model
FOLDER it is that one, and our local engine (transformers) is a fourth, which computes a prompt once for
its --group of responses.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import AutoConfig

from bench.harness import record
from bench.harness.memory import peak_bytes
from smopd.data.places import model_place
from smopd.engine.distributed import process_group
from smopd.engine.models.loading import load_model
from smopd.engine.settings import Packing, VllmSettings
from smopd.engine.types import Rollout
from smopd.worlds.models import qwen_vocab_model, world_model

BOUNDS = {"float32": 1e-3, "bfloat16": 8e-3}  # in 16 bit two roundings of a logit near 1

Score = Callable[[list[Rollout], int], tuple[Tensor, Tensor]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=("world", "qwen"), default=["world", "qwen"])
    parser.add_argument("--model", help="a folder, or the short name of a model, in place of --models")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="of one response")
    parser.add_argument("--prompt", type=int, default=512, help="tokens before each response")
    parser.add_argument("--responses", type=int, default=2)
    parser.add_argument("--group", type=int, default=1, help="responses of a prompt")
    parser.add_argument("--kappa", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--dtype", choices=BOUNDS, default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", default="tokenizer/qwen", help="Qwen's ranks: a file or a short name")
    parser.add_argument("--output", type=Path, help="rows go to this file as well")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (
        TemporaryDirectory() as folder,
        process_group(),
        chosen.output.open("a") if chosen.output else nullcontext() as file,
    ):
        tell = record.teller(device, file)
        if chosen.model:
            path = model_place(chosen.model)
            config = AutoConfig.from_pretrained(path)
            chosen.hidden = config.hidden_size
            scores = scorers("the model", path, config.vocab_size, chosen.dtype)
            scores["local"] = local(path, config.vocab_size, chosen.dtype)
            measure(scores, chosen, config.vocab_size, device, tell)
            return
        for name in chosen.models:
            path = f"{folder}/{name}"
            vocabulary = save_model(name, path, chosen)
            measure(scorers(name, path, vocabulary, chosen.dtype), chosen, vocabulary, device, tell)


def save_model(name: str, path: str, chosen: argparse.Namespace) -> int:
    """Saves a model of one layer, with its tokenizer, and returns its vocabulary."""
    sizes = {
        "hidden_size": chosen.hidden,
        "heads": max(1, chosen.hidden // 64),
        "layers": 1,
        "max_positions": max(chosen.tokens) + chosen.prompt + 1,
    }
    made = qwen_vocab_model(0, chosen.tokenizer, **sizes) if name == "qwen" else world_model(0, **sizes)
    for part in made:
        part.save_pretrained(path)
    return made[0].config.vocab_size


def scorers(name: str, folder: str, vocabulary: int, dtype: str) -> dict[str, Score]:
    from smopd.engine.vllm.engines import engine
    from smopd.engine.vllm.teachers import VllmTeachers

    settings = VllmSettings(kv_cache_bytes=256 << 20, dtype=dtype)
    users = engine(
        f"users of {name}",
        folder,
        settings,
        skip_tokenizer_init=False,
        tokenizer=folder,
        max_logprobs=-1,
        enable_prefix_caching=False,
    )
    flat, pooler = (
        VllmTeachers([folder], settings, vocabulary, route, role=f"{route} of {name}")
        for route in ("prompt_logprobs", "pooler")
    )
    return {
        "dicts, detokenised": lambda rollouts, kappa: as_dicts(users, rollouts, kappa),
        "flat lists": lambda rollouts, kappa: scored(flat, rollouts, kappa),
        "pooler": lambda rollouts, kappa: scored(pooler, rollouts, kappa),
    }


def local(path: str, vocabulary: int, dtype: str) -> Score:
    from smopd.engine.local.teachers import LocalTeachers

    teachers = LocalTeachers(
        [load_model(path, getattr(torch, dtype))], Packing(micro_batch_tokens=4096), vocabulary
    )
    return lambda rollouts, kappa: scored(teachers, rollouts, kappa)


def as_dicts(llm, rollouts: list[Rollout], kappa: int) -> tuple[Tensor, Tensor]:
    """What users do: a dict a position, read entry by entry."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids.tolist()]} for r in rollouts]
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=kappa)
    ids, logps = [], []
    for rollout, answer in zip(rollouts, llm.generate(prompts, params, use_tqdm=False), strict=True):
        for position in answer.prompt_logprobs[len(rollout.prompt_ids) :]:
            ranked = sorted(position.items(), key=lambda entry: entry[1].rank)[:kappa]
            ids.append([token for token, _ in ranked])
            logps.append([entry.logprob for _, entry in ranked])
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(logps)


def scored(teachers, rollouts: list[Rollout], kappa: int) -> tuple[Tensor, Tensor]:
    topk = teachers.score(rollouts, kappa, 1.0)
    return topk.ids_NMS[:, 0], topk.logps_NMS[:, 0]


def measure(scores: dict[str, Score], chosen: argparse.Namespace, vocabulary: int, device: str, tell) -> None:
    generator = torch.Generator().manual_seed(0)
    for kappa in chosen.kappa:
        for length in chosen.tokens:
            rollouts = []
            for number in range(chosen.responses):
                ids = torch.randint(0, vocabulary, (chosen.prompt + length,), generator=generator)
                group, of_it = divmod(number, chosen.group)
                prompt = rollouts[-1].prompt_ids if of_it else tuple(ids[: chosen.prompt].tolist())
                rollouts.append(Rollout(prompt, ids[chosen.prompt :], torch.zeros(length), group, True))
            found = {name: score(rollouts, kappa)[1] for name, score in scores.items()}
            users, *ours = found.values()
            for values in ours:
                torch.testing.assert_close(values, users, rtol=0, atol=BOUNDS[chosen.dtype])
            times: dict[str, list[float]] = {name: [] for name in scores}
            for _ in range(chosen.repeats):
                for name, score in scores.items():
                    start = time.perf_counter()
                    score(rollouts, kappa)
                    times[name].append((time.perf_counter() - start) / (length * chosen.responses))
            medians = {name: statistics.median(values) for name, values in times.items()}
            slowest = next(iter(medians.values()))
            sizes = f"P{chosen.prompt}-T{length}-R{chosen.responses}-V{vocabulary}-D{chosen.hidden}"
            for name, score in scores.items():
                peak = peak_bytes(partial(score, rollouts, kappa), device)
                tell(
                    {
                        "benchmark": "teacher_scoring",
                        "case": f"{sizes}-kappa{kappa}",
                        "dtype": chosen.dtype,
                        "provider": name,
                        "us_per_position": round(1e6 * medians[name], 2),
                        "times_dicts": round(slowest / medians[name], 2),
                        "peak_mib": None if peak is None else round(peak / 2**20, 1),
                    }
                )


if __name__ == "__main__":
    main()
