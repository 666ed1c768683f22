"""SMOPD's loss in NeMo-RL's protocol: two teachers, one tiny student, a few updates on a CPU.

    python examples/nemo_rl_loss.py [--steps 20]

Follows a NeMo-RL worker without its Ray cluster: the teachers return their top logits, the columns are
stacked, and the loss is called with the logits of a micro-batch. Needs NeMo-RL, installed from source.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn

from smopd.integrations.nemo_rl import SmopdLossFn, stack_teachers

VOCABULARY, HIDDEN, KAPPA = 64, 16, 8


def language_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY))


def topk_logits(teacher: nn.Module, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the same as a NeMo-RL policy's get_topk_logits."""
    with torch.no_grad():
        values, indices = teacher(data["input_ids"]).topk(KAPPA, dim=-1)
    return {"topk_logits": values, "topk_indices": indices}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    student, teachers = language_model(0), [language_model(1), language_model(2)]
    generator = torch.Generator().manual_seed(3)
    data = {
        "input_ids": torch.randint(VOCABULARY, (4, 12), generator=generator),
        "token_mask": (torch.arange(12) >= 4).float().expand(4, 12),
        "sample_mask": torch.ones(4),
    }
    data.update(stack_teachers([topk_logits(teacher, data) for teacher in teachers]))
    loss_fn = SmopdLossFn([0.5, 0.5])
    trained_tokens = data["token_mask"][:, 1:].sum()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.05)
    for step in range(steps):
        loss, metrics = loss_fn(
            data=data,
            global_valid_seqs=data["sample_mask"].sum(),
            global_valid_toks=trained_tokens,
            logits=student(data["input_ids"]),
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            print(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


if __name__ == "__main__":
    main()
