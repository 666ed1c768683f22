"""Measures what one real update holds at its peak on the CPU, for the planner's arithmetic.

    [torchrun] python -m tests.smopd.plan.plan_worker CASE...

Each CASE is a JSON object (fields of `Case`); rank 0 prints a JSON line for each. Every allocation and
release of torch's allocator during an update is added up, but for what a thread of gloo's releases last: so
each wait for a collective also waits for that thread, and of several updates the least is taken.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from smopd.engine import distributed
from smopd.engine.settings import TrainSettings
from smopd.engine.student.student import Student
from smopd.engine.types import Rollout
from smopd.ops import LossSettings, LossTokens

TEACHERS, KAPPA = 2, 8
MEASURED = 3, 2  # updates after a first one, on several ranks and on one, which sends little
GLOO_SECONDS = 0.005  # a thread of gloo's has let go of what it sent


@dataclass(frozen=True)
class Case:
    layers: int = 4
    hidden: int = 64
    intermediate: int = 176
    heads: int = 4
    kv_heads: int = 2
    vocabulary: int = 512
    tied: bool = False
    family: str = "qwen2"
    dtype: str = "float32"
    checkpointing: bool = False
    attention: str = "auto"
    chunk_bytes: int = 16 << 20
    rows: int = 6
    prompt: int = 16
    answer: int = 13
    group: int = 4

    @property
    def row_length(self) -> int:
        return self.prompt + self.group * (self.answer - 1)

    @property
    def responses(self) -> int:
        return self.rows * self.group * self.answer


def make_model(case: Case) -> PreTrainedModel:
    shared: dict[str, Any] = {
        "vocab_size": case.vocabulary,
        "hidden_size": case.hidden,
        "intermediate_size": case.intermediate,
        "num_hidden_layers": case.layers,
        "num_attention_heads": case.heads,
        "num_key_value_heads": case.kv_heads,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": case.tied,
        "attn_implementation": "sdpa",
    }
    if case.family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shared))
    return Qwen2ForCausalLM(Qwen2Config(**shared))


def make_rollouts(case: Case, ranks: int) -> list[Rollout]:
    """Two micro-batches of full rows a rank."""
    rollouts = []
    for group in range(2 * case.rows):
        prompt = tuple((torch.arange(case.prompt) % case.vocabulary).tolist())
        for _ in range(case.group):
            response = torch.randint(0, case.vocabulary, (case.answer,))
            rollouts.append(Rollout(prompt, response, -torch.ones(case.answer), group, finished=True))
    return rollouts


def loss_tokens(case: Case, rollouts: list[Rollout]) -> LossTokens:
    token_ids_N = torch.cat([rollout.response_ids for rollout in rollouts])
    n_tokens = len(token_ids_N)
    weight_N = torch.full((n_tokens,), 1 / n_tokens)
    ids = torch.arange(KAPPA, dtype=torch.int32).expand(n_tokens, TEACHERS, KAPPA)
    return LossTokens(
        token_ids_N=token_ids_N,
        adv_N=torch.randn(n_tokens),
        pg_weight_N=weight_N,
        kl_weight_N=weight_N,
        teacher_ids_NMS=ids.contiguous(),
        teacher_logps_NMS=torch.full((n_tokens, TEACHERS, KAPPA), -3.0),
        log_alpha=torch.full((TEACHERS,), 0.5).log(),
    )


def measure(case: Case, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    settings = TrainSettings(
        learning_rate=1e-6,
        compute_dtype=case.dtype,
        micro_batch_tokens=case.rows * case.row_length,
        gradient_checkpointing=case.checkpointing,
        attention=case.attention,
        head_chunk_bytes=case.chunk_bytes,
    )
    student = Student(make_model(case), settings, device)
    rollouts = make_rollouts(case, distributed.world_size())
    tokens = loss_tokens(case, rollouts)
    gradients = []

    def note_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        gradients.append(sum(held(p.grad) for p in parameters(optimizer) if p.grad is not None))

    student.optimizer.register_step_pre_hook(note_gradients)
    student.update(rollouts, tokens, LossSettings(kappa=KAPPA))
    peaks = []
    for _ in range(MEASURED[distributed.world_size() == 1]):
        gc.collect()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as prof:
            update = student.update(rollouts, tokens, LossSettings(kappa=KAPPA))
        peaks.append(peak(prof))
    states = student.optimizer.state.values()
    return {
        "peak": min(peaks),
        "masters": sum(held(p) for p in parameters(student.optimizer)),
        "gradients": gradients[-1],
        "optimizer": sum(held(state[name]) for state in states for name in ("exp_avg", "exp_avg_sq")),
        "micro_batches": update.micro_batches,
    }


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def held(value: Tensor) -> int:
    """Bytes on this rank."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.numel() * local.element_size()


def peak(prof: torch.profiler.profile) -> int:
    """The most that was held at once above the beginning."""
    kind = torch._C._profiler._EventType.Allocation
    waiting = list(prof.profiler.kineto_results.experimental_event_tree())
    changes = []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == kind:
            changes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = most = 0
    for _, change in sorted(changes, key=lambda one: one[0]):
        now += change
        most = max(most, now)
    return most


def release_before_going_on() -> None:
    wait = dist.Work.wait

    def patient(work: dist.Work, *timeout: Any) -> bool:
        done = wait(work, *timeout)
        time.sleep(GLOO_SECONDS)
        return done

    dist.Work.wait = patient  # type: ignore[method-assign]


def main() -> None:
    torch.set_num_threads(1)
    release_before_going_on()
    gc.freeze()  # else every collection goes through all that torch and transformers have defined
    with distributed.process_group() as device:
        for text in sys.argv[1:]:
            case = Case(**json.loads(text))
            result = measure(case, device)
            gc.collect()
            if distributed.rank() == 0:
                print(json.dumps({**asdict(case), **result}), flush=True)


if __name__ == "__main__":
    main()
