"""Compare ways to score with a teacher: vLLM's prompt_logprobs, our pooler in vLLM, and the local engine.

    python -m bench.teacher_scoring --model FOLDER [--tokens 512 2048] [--prompt 8] [--dtype bfloat16]

Prints JSON lines with the median microseconds per response position and the peak memory of a call. Results
are compared before timing. Our pooler and the local engine skip the positions of the prompt, so short prompts
favor vLLM's prompt_logprobs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig

from bench.harness import record
from bench.harness.memory import peak_bytes
from smopd.engine.distributed import process_group
from smopd.engine.models.loading import load_model
from smopd.engine.settings import Packing, Vllm
from smopd.engine.types import Rollout

BOUNDS = {"float32": 1e-3, "bfloat16": 8e-3}  # bf16: two roundings of a logit near 1

Score = Callable[[list[Rollout], int], Tensor]
"""Maps responses and kappa to (N, kappa) log-probabilities."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a folder with a model and its tokenizer")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="of one response")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--responses", type=int, default=2)
    parser.add_argument("--group", type=int, default=1, help="responses per prompt")
    parser.add_argument("--kappa", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--dtype", choices=BOUNDS, default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="append rows to this file")
    chosen = parser.parse_args()
    vocabulary = AutoConfig.from_pretrained(chosen.model).vocab_size
    output = chosen.output.open("a") if chosen.output else nullcontext()
    with process_group(), output as file:
        tell = record.teller(record.DEVICE, file)
        for row in rows(scorers(chosen.model, vocabulary, chosen.dtype), chosen, vocabulary):
            tell(row | {"benchmark": "teacher_scoring"})


def scorers(folder: str, vocabulary: int, dtype: str) -> dict[str, Score]:
    from smopd.engine.local.teachers import LocalTeachers
    from smopd.engine.vllm.engines import engine
    from smopd.engine.vllm.teachers import VllmTeachers

    settings = Vllm(engine_kwargs={"kv_cache_memory_bytes": 256 << 20, "dtype": dtype})
    options = {"skip_tokenizer_init": False, "tokenizer": folder, "max_logprobs": -1}
    users = engine("users", folder, settings, **options, enable_prefix_caching=False)
    found: dict[str, Score] = {"dicts, detokenised": partial(as_dicts, users.llm)}
    found["pooler"] = partial(scored, VllmTeachers([folder], settings, vocabulary))
    model = load_model(folder, getattr(torch, dtype))
    found["local"] = partial(scored, LocalTeachers([model], Packing(micro_batch_tokens=4096), vocabulary))
    return found


def as_dicts(llm, rollouts: list[Rollout], kappa: int) -> Tensor:
    """Score as users of vLLM do, by reading one dict per position."""
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


def random_rollouts(chosen: argparse.Namespace, length: int, vocabulary: int) -> list[Rollout]:
    generator = torch.Generator().manual_seed(0)
    rollouts: list[Rollout] = []
    for number in range(chosen.responses):
        ids = torch.randint(0, vocabulary, (chosen.prompt + length,), generator=generator)
        group, of_it = divmod(number, chosen.group)
        prompt = rollouts[-1].prompt_ids if of_it else tuple(ids[: chosen.prompt].tolist())
        rollouts.append(Rollout(prompt, ids[chosen.prompt :], torch.zeros(length), group, True))
    return rollouts


def rows(scores: dict[str, Score], chosen: argparse.Namespace, vocabulary: int) -> Iterator[dict]:
    for kappa in chosen.kappa:
        for length in chosen.tokens:
            rollouts = random_rollouts(chosen, length, vocabulary)
            users, *ours = [score(rollouts, kappa) for score in scores.values()]
            for values in ours:
                torch.testing.assert_close(values, users, rtol=0, atol=BOUNDS[chosen.dtype])
            for name, score in scores.items():
                seconds = []
                for _ in range(chosen.repeats):
                    start = time.perf_counter()
                    score(rollouts, kappa)
                    seconds.append(time.perf_counter() - start)
                peak = peak_bytes(partial(score, rollouts, kappa), record.DEVICE)
                yield {
                    "case": f"P{chosen.prompt}-T{length}-R{chosen.responses}-V{vocabulary}-kappa{kappa}",
                    "dtype": chosen.dtype,
                    "provider": name,
                    "us_per_position": round(
                        1e6 * statistics.median(seconds) / (length * chosen.responses), 2
                    ),
                    "peak_mib": None if peak is None else round(peak / 2**20, 1),
                }


if __name__ == "__main__":
    main()
