"""SMOPD's objective as a NeMo-RL loss function, with a demo of two teachers and a tiny student on a CPU.

    answers = [teacher.get_topk_logits(train_data, k=64) for teacher in teachers]
    train_data.update(stack_teachers(answers))
    student_policy.train(train_data, SmopdLossFn([0.5, 0.5]))

    python examples/nemo_rl_loss.py [--steps 20]

The demo follows a NeMo-RL worker without its Ray cluster. The teachers return their top logits, which are
stacked, and the loss is called with the logits of a micro-batch. Needs NeMo-RL, installed from source.

Shapes: B sequences, T their padded length, V vocabulary, M teachers, S entries of a teacher.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from smopd.integrations.shared import log_weights, require_host
from smopd.kernels.checks import require_ids
from smopd.ops import CLIP_HIGH, CLIP_LOW, LossSettings, LossTokens, smopd_loss

FIRST, BEFORE = "0.6", "0.9"  # versions with a known loss protocol
LOGITS, IDS, LOGPS = "teacher_topk_logits", "teacher_topk_indices", "teacher_topk_logprobs"


def stack_teachers(answers: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack the teachers' `get_topk_logits` answers (B, T, S) into SmopdLossFn's columns (B, T, M, S)."""
    shapes = [tuple(answer["topk_indices"].shape) for answer in answers]
    if len(set(shapes)) != 1:
        raise ValueError(f"stack_teachers: the teachers' answers have shapes {shapes}, expected one for all")
    return {
        LOGITS: torch.stack([answer["topk_logits"] for answer in answers], dim=2),
        IDS: torch.stack([answer["topk_indices"] for answer in answers], dim=2),
    }


class SmopdLossFn:
    """Eq. 9 in NeMo-RL's loss protocol: `loss_type` TOKEN_LEVEL, `input_type` LOGIT.

    The micro-batch has input_ids, token_mask, sample_mask and teacher_topk_indices, (B, T, S) or
    (B, T, M, S). It also has teacher_topk_logprobs, normalised over the vocabulary, or teacher_topk_logits.
    As in NeMo-RL, logits are normalised over their S entries, so the teachers' tail is then empty. If there
    are advantages, the loss includes the clipped policy gradient. Its ratio is 1 without prev_logprobs. Loss
    and metrics are divided by global_valid_toks, so that NeMo-RL can sum them over micro-batches.

    Args:
        weights: alpha of each teacher, summing to 1.
        settings: its temperatures must be 1, because NeMo-RL divides the logits itself.
        inplace: overwrite the logits with their gradient. Do not use it with sequence packing.
    Raises:
        ImportError: NeMo-RL is missing or has an unsupported version.
        ValueError: weights or settings are invalid.
    """

    def __init__(
        self, weights: Sequence[float], settings: LossSettings | None = None, *, inplace: bool = False
    ) -> None:
        require_host("nemo-rl", FIRST, BEFORE)
        host = import_module("nemo_rl.algorithms.loss.interfaces")
        self.settings = settings or LossSettings()
        if (self.settings.temperature, self.settings.kl_temperature) != (1.0, 1.0):
            raise ValueError(
                f"SmopdLossFn: temperature is {self.settings.temperature} and kl_temperature "
                f"{self.settings.kl_temperature}, expected 1: NeMo-RL divides the logits before the loss"
            )
        self.log_alpha = log_weights(weights)
        self.inplace = inplace
        self.loss_type = host.LossType.TOKEN_LEVEL
        self.input_type = host.LossInputType.LOGIT

    def __call__(
        self,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor | None,
        global_valid_toks: Tensor | None,
        *,
        logits: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return loss and metrics of a micro-batch.

        Args:
            global_valid_toks: the divisor. None means the number of trained tokens in this micro-batch.
            logits: (B, T, V). Positions beyond the data's T are ignored.
        """
        ids_BT = data["input_ids"]
        n_rows, length = ids_BT.shape
        if hasattr(logits, "to_local") or logits.shape[0] != n_rows or logits.shape[1] < length:
            raise ValueError(
                f"SmopdLossFn: logits are a {type(logits).__name__} of shape {tuple(logits.shape)}, expected "
                f"an unsharded tensor ({n_rows}, {length}, V) without tensor or context parallelism"
            )
        logits = logits[:, :length]
        teacher_ids, teacher_logps = self._teachers(data, logits)
        require_ids("SmopdLossFn", IDS, teacher_ids, logits.shape[2])

        def following(column_BT: Tensor) -> Tensor:
            return column_BT.to(logits.device).roll(-1, dims=1).flatten()

        mask_BT = (data["token_mask"] * data["sample_mask"][:, None]).to(logits.device).float()
        mask_N = torch.cat([mask_BT[:, 1:], torch.zeros_like(mask_BT[:, :1])], dim=1).flatten()
        weight_N = mask_N / (mask_N.sum().clamp(min=1.0) if global_valid_toks is None else global_valid_toks)
        anchored = "advantages" in data
        tokens = LossTokens(
            token_ids_N=following(ids_BT),
            adv_N=following(data["advantages"].float()) if anchored else torch.zeros_like(weight_N),
            pg_weight_N=weight_N if anchored else torch.zeros_like(weight_N),
            old_logp_N=following(data["prev_logprobs"].float()) if "prev_logprobs" in data else None,
            kl_weight_N=weight_N,
            ent_weight_N=weight_N,
            teacher_ids_NMS=teacher_ids,
            teacher_logps_NMS=teacher_logps,
            log_alpha=self.log_alpha.to(logits.device),
        )
        loss, stats = smopd_loss(logits.flatten(0, 1), tokens, self.settings, inplace=self.inplace)
        columns = {
            "teacher_mass": stats.teacher_mass_N,
            "student_mass": stats.student_mass_N,
            "negative_kl_share": stats.kl_N < 0,
            "clipped_share": (stats.clipped_N & (CLIP_LOW | CLIP_HIGH)) != 0,
        }
        sums = {"loss": loss.detach(), "kl_loss": stats.kl_loss, "pg_loss": stats.pg_loss}
        sums |= {name: (column_N * weight_N).sum() for name, column_N in columns.items()}
        values = torch.stack([value.float() for value in sums.values()]).tolist()
        metrics = dict(zip(sums, values, strict=True))
        return loss, {**metrics, "num_valid_samples": n_rows}

    def _teachers(self, data: Mapping[str, Any], logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids and log-probabilities (B*T, M, S) on the logits' device."""
        ids = data[IDS].to(logits.device)
        given = LOGPS if LOGPS in data else LOGITS
        logps = data[given].to(logits.device).float()
        logps = logps if given == LOGPS else logps.log_softmax(-1)
        if ids.dim() == 3:
            ids, logps = ids[:, :, None], logps[:, :, None]
        expected = (*logits.shape[:2], len(self.log_alpha))
        if ids.shape != logps.shape or ids.shape[:3] != expected:
            raise ValueError(
                f"SmopdLossFn: {IDS} has shape {tuple(data[IDS].shape)} and {given} "
                f"{tuple(data[given].shape)}, expected {(*expected, 'S')} for {len(self.log_alpha)} teachers"
            )
        return ids.flatten(0, 1), logps.flatten(0, 1)


VOCABULARY, HIDDEN, KAPPA = 64, 16, 8


def language_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(VOCABULARY, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, VOCABULARY))


def topk_logits(teacher: nn.Module, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a NeMo-RL policy's `get_topk_logits` returns."""
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
