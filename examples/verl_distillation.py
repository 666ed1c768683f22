"""SMOPD's mixture inside verl's distillation, on a CPU: two teachers, one tiny student, a few updates.

    python examples/verl_distillation.py [--steps 20]
    python examples/verl_distillation.py --measure [--tokens 512 --vocabulary 32768 --topk 32]

Walks the path of verl's trainer without its Ray cluster: the teacher manager asks both teachers for each
response and merges them, the logits processor computes each token's forward KL, and the loss is added up.
--measure times verl's own top-k loss and SMOPD's two beside each other, with the memory each adds.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from smopd.integrations import verl as smopd_verl
from smopd.integrations import verl_host, verl_loss

VOCABULARY, HIDDEN, PROMPT, RESPONSE = 64, 16, 3, 8
LOGGED = ("student_mass", "teacher_mass", "negative_share")
PATHS = ("verl forward_kl_topk", "smopd forward_kl_topk", "smopd_forward_kl")


def language_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY))


class Teacher:
    """Answers as a teacher's server does: the top log-probabilities at every position of a sequence."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    async def generate(self, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any) -> Any:
        with torch.no_grad():
            logps = self.model(torch.tensor(prompt_ids)).log_softmax(-1)
        values, ids = logps.topk(sampling_params["prompt_logprobs"])
        return SimpleNamespace(extra_fields={"prompt_ids": ids.tolist(), "prompt_logprobs": values.tolist()})


def teacher_manager(loss_config: Any, teachers: dict[str, Teacher]) -> Any:
    """verl's manager, with the teachers in this process."""
    manager = object.__new__(verl_host.teacher_manager.AsyncTeacherLLMServerManager)
    manager.distillation_loss_config = loss_config
    inference = SimpleNamespace(temperature=1.0, max_model_len=None)
    manager.teacher_model_configs = {key: SimpleNamespace(inference=inference) for key in teachers}
    manager.teacher_client = teachers
    return manager


def micro_batch(ids_BT: Tensor, answers: list[tuple[Tensor, Tensor]]) -> TensorDict:
    """What verl's engine gives its loss: whole sequences, the teachers' columns nested over them."""
    n_rows, length = ids_BT.shape
    offsets = torch.arange(n_rows + 1) * length
    teacher_ids, teacher_logps = (torch.cat(column) for column in zip(*answers, strict=True))
    columns = {
        "prompts": ids_BT[:, :PROMPT],
        "responses": ids_BT[:, PROMPT:],
        "attention_mask": torch.ones_like(ids_BT),
        "response_mask": torch.ones(n_rows, length - PROMPT, dtype=torch.bool),
        "temperature": torch.ones(n_rows),
        "teacher_ids": torch.nested.nested_tensor_from_jagged(teacher_ids.long(), offsets=offsets),
        "teacher_logprobs": torch.nested.nested_tensor_from_jagged(teacher_logps, offsets=offsets),
        "dp_size": 1,
        "batch_num_tokens": n_rows * (length - PROMPT),
        "global_batch_size": n_rows,
    }
    return TensorDict(columns, batch_size=[])


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
        loss_function = verl_host.losses.distillation_ppo_loss
        columns = loss_function(actor, distillation, data=data, student_logits=logits)
        output = {name: column[0] for name, column in columns.items()}
        loss, metrics = loss_function(actor, distillation, model_output=output, data=data)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            logged = ", ".join(f"{name} {metrics[f'distillation/{name}']:.4f}" for name in LOGGED)
            print(f"step {step}: loss {loss.item():.4f}, {logged}")


def measure_one(path: str, n_tokens: int, vocabulary: int, topk: int, repeats: int) -> None:
    """Prints the median milliseconds of forward and backward, and the MiB that they add to the peak."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, n_tokens, vocabulary, generator=generator).requires_grad_()
    first = torch.randint(vocabulary, (n_tokens, 1), generator=generator)
    teacher_ids = (first + 7 * torch.arange(topk)) % vocabulary
    teacher_logps = (
        torch.randn(n_tokens, topk + 1, generator=generator).log_softmax(-1)[:, :topk].contiguous()
    )
    offsets = torch.tensor([0, n_tokens])
    ids = torch.nested.nested_tensor_from_jagged(teacher_ids, offsets=offsets)
    logps = torch.nested.nested_tensor_from_jagged(teacher_logps, offsets=offsets)
    if path == PATHS[2]:
        config = SimpleNamespace(distillation_loss=smopd_verl.SmopdLossConfig(topk=topk))
        data = TensorDict({"teacher_ids": ids, "teacher_logprobs": logps}, batch_size=[])
        arguments: tuple[Any, ...] = (SimpleNamespace(strategy="fsdp"), config, data, logits, "thd")
        function = verl_loss.compute_topk_loss
    else:
        config = SimpleNamespace(distillation_loss=SimpleNamespace(log_prob_min_clamp=None))
        arguments = (logits, logps, ids, config, "thd")
        originals = verl_host.ORIGINALS if path == PATHS[0] else vars(verl_loss)
        function = originals["compute_forward_kl_topk"]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        logits.grad = None
        start = time.perf_counter()
        function(*arguments)["distillation_losses"].mean().backward()
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{path}: {1e3 * statistics.median(seconds):.0f} ms, {(peak - before) / 1024:.0f} MiB added")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--path", choices=PATHS, help="measure this one alone, in this process")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--topk", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    if chosen.path:
        measure_one(chosen.path, chosen.tokens, chosen.vocabulary, chosen.topk, chosen.repeats)
    elif chosen.measure:
        for path in PATHS:
            command = [sys.executable, __file__, "--path", path, *sys.argv[1:]]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(done.stdout.splitlines()[-1], flush=True)
    else:
        train(chosen.steps)


if __name__ == "__main__":
    main()
