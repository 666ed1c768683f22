"""SMOPD's mixture in verl's distillation: two teachers and one tiny student on a CPU.

    python examples/verl_distillation.py [--steps 20]
    PYTHONPATH=. python examples/verl_distillation.py --measure [--tokens 512 --vocabulary 151936 --topk 32]

Follows verl's trainer without its Ray cluster. The teacher manager queries both teachers for each response
and mixes their top-k. The logits processor computes each token's forward KL, and the loss is the mean KL.
--measure compares the time and memory of verl's top-k loss and SMOPD's.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.trainer.distillation.fsdp.losses import compute_forward_kl_topk
from verl.utils import tensordict_utils as tu

from smopd.integrations import verl as smopd_verl

VOCABULARY, HIDDEN, PROMPT, RESPONSE = 64, 16, 3, 8
LOGGED = ("student_mass", "teacher_mass", "negative_share")


def language_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY))


class Teacher:
    """A teacher server that returns the top log-probabilities at every position of a sequence."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        with torch.no_grad():
            logps = self.model(torch.tensor(prompt_ids)).log_softmax(-1)
        values, ids = logps.topk(sampling_params["prompt_logprobs"])
        return SimpleNamespace(extra_fields={"prompt_ids": ids.tolist(), "prompt_logprobs": values.tolist()})


def teacher_manager(loss_config: Any, teachers: dict[str, Teacher]) -> Any:
    """Make verl's manager with the teachers in this process."""
    manager = object.__new__(smopd_verl.teacher_manager.AsyncTeacherLLMServerManager)
    manager.distillation_loss_config = loss_config
    inference = SimpleNamespace(temperature=1.0, max_model_len=None)
    manager.teacher_model_configs = {key: SimpleNamespace(inference=inference) for key in teachers}
    manager.teacher_client = teachers
    return manager


def micro_batch(ids_BT: Tensor, answers: list[tuple[Tensor, Tensor]]) -> TensorDict:
    """Make the batch that verl's engine passes to its loss: whole sequences with nested teacher columns."""
    n_rows, length = ids_BT.shape
    offsets = torch.arange(n_rows + 1) * length
    teacher_ids, teacher_logps = (torch.cat(column) for column in zip(*answers, strict=True))
    columns = {
        "prompts": ids_BT[:, :PROMPT],
        "responses": ids_BT[:, PROMPT:],
        "attention_mask": torch.ones_like(ids_BT),
        "response_mask": torch.ones(n_rows, length - PROMPT, dtype=torch.bool),
        "teacher_ids": torch.nested.nested_tensor_from_jagged(teacher_ids.long(), offsets=offsets),
        "teacher_logprobs": torch.nested.nested_tensor_from_jagged(teacher_logps, offsets=offsets),
    }
    data = TensorDict(columns, batch_size=[])
    n_trained = n_rows * (length - PROMPT)
    tu.assign_non_tensor(
        data, temperature=1.0, dp_size=1, batch_num_tokens=n_trained, global_batch_size=n_rows
    )
    return data


def train(steps: int) -> None:
    loss_config = smopd_verl.SmopdLossConfig(
        topk=8, use_task_rewards=False, teacher_weights={"helpful": 0.6, "harmless": 0.4}
    )
    distillation = SimpleNamespace(distillation_loss=loss_config)
    actor = SimpleNamespace(
        strategy="fsdp", loss_agg_mode="token-mean", global_batch_info={}, loss_scale_factor=None
    )
    teachers = {"helpful": Teacher(language_model(1)), "harmless": Teacher(language_model(2))}
    manager = teacher_manager(loss_config, teachers)
    ids_BT = torch.randint(VOCABULARY, (4, PROMPT + RESPONSE), generator=torch.Generator().manual_seed(3))
    answers = [asyncio.run(manager.compute_teacher_logprobs_single(row)) for row in ids_BT.tolist()]
    data = micro_batch(ids_BT, answers)
    student = language_model(0)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.05)
    for step in range(steps):
        logits = student(ids_BT).flatten(0, 1)[None]
        loss_function = smopd_verl.losses.distillation_ppo_loss
        columns = loss_function(actor, distillation, data=data, student_logits=logits)
        output = {name: column[0] for name, column in columns.items()}
        loss, metrics = loss_function(actor, distillation, model_output=output, data=data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            logged = ", ".join(f"{name} {metrics[f'distillation/{name}']:.4f}" for name in LOGGED)
            print(f"step {step}: loss {loss.item():.4f}, {logged}")


def losses_of(n_tokens: int, vocabulary: int, topk: int) -> tuple[Tensor, dict[str, Callable[[], Tensor]]]:
    """Return logits (1, n_tokens, vocabulary), and verl's and our loss on one target, (1, n_tokens) each."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, n_tokens, vocabulary, generator=generator).requires_grad_()
    first = torch.randint(vocabulary, (n_tokens, 1), generator=generator)
    teacher_ids = (first + 7 * torch.arange(topk)) % vocabulary
    mass = torch.randn(n_tokens, topk + 1, generator=generator).log_softmax(-1)
    offsets = torch.tensor([0, n_tokens])
    ids = torch.nested.nested_tensor_from_jagged(teacher_ids, offsets=offsets)
    logps = torch.nested.nested_tensor_from_jagged(mass[:, :topk].contiguous(), offsets=offsets)
    data = TensorDict({"teacher_ids": ids, "teacher_logprobs": logps}, batch_size=[])
    tu.assign_non_tensor(data, temperature=1.0)
    actor = SimpleNamespace(strategy="fsdp")
    ours = SimpleNamespace(distillation_loss=smopd_verl.SmopdLossConfig(topk=topk))
    theirs = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))

    return logits, {
        "verl forward_kl_topk": lambda: compute_forward_kl_topk(logits, logps, ids, theirs, "thd")[
            "distillation_losses"
        ],
        "smopd_forward_kl": lambda: smopd_verl.compute_topk_loss(actor, ours, data, logits, "thd")[
            "distillation_losses"
        ],
    }


def measure(n_tokens: int, vocabulary: int, topk: int, repeats: int) -> None:
    """Print each loss's median milliseconds (forward and backward) and peak memory in MiB.

    The losses alternate in one process. The first round is not counted.
    """
    from bench.harness.memory import peak_bytes

    logits, losses = losses_of(n_tokens, vocabulary, topk)
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(repeats + 1):
        for name, loss in losses.items():
            logits.grad = None
            start = time.perf_counter()
            loss().mean().backward()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    print(f"{n_tokens} tokens, V = {vocabulary}, top {topk}, fp32, {torch.get_num_threads()} threads")
    for name, loss in losses.items():
        logits.grad = None
        peak = peak_bytes(lambda loss=loss: loss().mean().backward(), "cpu")
        added = "not measured" if peak is None else f"{peak / 2**20:.0f} MiB added"
        print(f"{name}: {1e3 * statistics.median(seconds[name]):.1f} ms, {added}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--topk", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.measure:
        measure(chosen.tokens, chosen.vocabulary, chosen.topk, chosen.repeats)
    else:
        train(chosen.steps)


if __name__ == "__main__":
    main()
