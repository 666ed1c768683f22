"""M frozen teachers beside a TRL trainer's student, and the fused loss of its completions.

Shapes: B sequences, T completion tokens, N completion tokens that count, M teachers, S = kappa.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.models import prepare_deepspeed
from trl.models.utils import _ForwardRedirection
from trl.trainer.utils import maybe_gather_lm_head_ctx

from smopd.integrations.causal_lm import base_of, completion_hidden, head_of
from smopd.integrations.teacher_mixing import log_weights
from smopd.ops import (
    CLIP_HIGH,
    CLIP_LOW,
    LossSettings,
    LossStats,
    LossTokens,
    linear_smopd_loss,
    linear_topk_logprobs,
)


@dataclass
class MixtureConfig:
    """How the teachers are heard; beside TRL's own settings."""

    kappa: int = field(
        default=16, metadata={"help": "Entries of each teacher's distribution, and of their mixture."}
    )
    merge: bool = field(
        default=True, metadata={"help": "Merge equal ids of the teachers (Eq. 5); false pools them (Eq. 6)."}
    )
    tail: bool = field(
        default=True, metadata={"help": "One more bucket for all that is outside the support: a true KL."}
    )
    teacher_weights: list[float] | None = field(
        default=None, metadata={"help": "One a teacher, summing to 1; null: equal."}
    )
    chunk_bytes: int | None = field(
        default=None, metadata={"help": "Bound of the logits held at a time, bytes."}
    )
    recompute: bool = field(
        default=False,
        metadata={"help": "Make logits again in backward: chunk_bytes is then all that is held."},
    )


class Completions(NamedTuple):
    """The completions of a micro-batch, and which of their tokens count."""

    input_ids: Tensor
    attention_mask: Tensor
    n_completion: int
    counted_BT: Tensor
    token_ids_N: Tensor


class SeveralTeachers:
    """What both trainers share: M frozen teachers, and the fused loss of the student's completions."""

    def take_teachers(self: Any, teachers: list[Any], args: MixtureConfig) -> None:
        if not teachers:
            raise ValueError("teacher_models is empty, expected at least one model or path")
        weights = args.teacher_weights or [1 / len(teachers)] * len(teachers)
        if len(weights) != len(teachers):
            raise ValueError(f"teacher_weights is {weights}, expected {len(teachers)} numbers")
        self._log_alpha_M = log_weights(weights)
        tokenizer = self.processing_class
        self.teacher_models = []
        for teacher in teachers:
            if isinstance(teacher, str):
                _require_same_tokens(tokenizer, teacher)
                teacher = AutoModelForCausalLM.from_pretrained(teacher, dtype=self.model.dtype)
            size = teacher.config.get_text_config().vocab_size
            if size < len(tokenizer):
                raise ValueError(
                    f"teacher {teacher.name_or_path or type(teacher).__name__} has a vocabulary of {size}, "
                    f"expected the student's, of {len(tokenizer)} tokens or padded above it"
                )
            prepared = (
                prepare_deepspeed(teacher, self.accelerator)
                if self.is_deepspeed_enabled
                else self.accelerator.prepare_model(teacher, evaluation_mode=True)
            )
            self.teacher_models.append(prepared.eval().requires_grad_(False))
        self.redirect = _ForwardRedirection()

    def completions(self: Any, inputs: dict[str, Any]) -> Completions:
        if unserved := [name for name in ("pixel_values", "image_sizes") if inputs.get(name) is not None]:
            raise ValueError(f"the batch has {unserved[0]}; expected text alone")
        ids_BT, mask_BT = inputs["completion_ids"], inputs["completion_mask"]
        counted_BT = (mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT).bool()
        input_ids = torch.cat([inputs["prompt_ids"], ids_BT], 1)
        attention_mask = torch.cat([inputs["prompt_mask"], mask_BT], 1)
        return Completions(input_ids, attention_mask, ids_BT.shape[1], counted_BT, ids_BT[counted_BT])

    def teachers_topk(self: Any, inputs: dict[str, Any], temperature: float) -> dict[str, Tensor]:
        """LossTokens' teacher fields, asked once a batch however often it is trained on."""
        if "teachers_topk" not in inputs:
            seen, n_vocabulary = self.completions(inputs), self.model.config.get_text_config().vocab_size
            said = [self._topk(model, seen, n_vocabulary, temperature) for model in self.teacher_models]
            ids_NMS, logps_NMS = (torch.stack(list(column), 1) for column in zip(*said, strict=True))
            inputs["teachers_topk"] = {
                "teacher_ids_NMS": ids_NMS,
                "teacher_logps_NMS": logps_NMS,
                "log_alpha": self._log_alpha_M.to(ids_NMS.device),
            }
        return inputs["teachers_topk"]

    def _hidden(self: Any, model: Any, seen: Completions) -> Tensor:
        with self.accelerator.autocast():
            hidden_BTD = completion_hidden(model, seen.input_ids, seen.attention_mask, seen.n_completion)
        return hidden_BTD[seen.counted_BT]

    @torch.no_grad()
    def _topk(self: Any, model: Any, seen: Completions, n_vocabulary: int, temperature: float) -> Any:
        bare = self.accelerator.unwrap_model(model)

        def inside() -> Any:
            hidden_ND = self._hidden(bare, seen)
            output = bare.get_output_embeddings()
            with maybe_gather_lm_head_ctx(output.weight, getattr(output, "bias", None)):
                head = head_of(bare, hidden_ND.dtype)
                kappa = min(self.args.kappa, len(head.weight_VD))
                return linear_topk_logprobs(
                    hidden_ND,
                    head.weight_VD,
                    kappa,
                    bias_V=head.bias_V,
                    temperature=temperature / head.scale,
                )

        said = self.redirect(model, bare, inside)
        padding = said.ids_NS >= n_vocabulary
        return said.ids_NS.masked_fill(padding, 0), said.logps_NS.masked_fill(padding, -torch.inf)

    def fused(
        self: Any, student: Any, seen: Completions, tokens: LossTokens, **settings: Any
    ) -> tuple[Tensor, LossStats]:
        """linear_smopd_loss of the student; inside its wrapper's forward, where its weights are whole."""
        output = base_of(student).get_output_embeddings()
        hidden_ND = self._hidden(student, seen).to(output.weight.device)
        if getattr(self.args, "cast_lm_head_to_fp32", False):
            hidden_ND = hidden_ND.float()
        with maybe_gather_lm_head_ctx(output.weight, getattr(output, "bias", None)):
            head = head_of(student, hidden_ND.dtype)
            for name in ("temperature", "kl_temperature"):
                settings[name] /= head.scale
            args = self.args
            objective = LossSettings(kappa=args.kappa, merge=args.merge, tail=args.tail, **settings)
            options = {"chunk_bytes": args.chunk_bytes, "recompute": args.recompute}
            return linear_smopd_loss(
                hidden_ND, head.weight_VD, tokens, objective, bias_V=head.bias_V, **options
            )

    def log_stats(self: Any, stats: LossStats, entropy: bool = False) -> None:
        """Means over all ranks' tokens, outside the wrapped forward."""
        clipped = (stats.clipped_N & (CLIP_LOW | CLIP_HIGH)) != 0
        columns = {
            "opd/kl": stats.kl_N,
            "opd/teacher_mass": stats.teacher_mass_N,
            "opd/student_mass": stats.student_mass_N,
            "clip_ratio/region_mean": clipped.float(),
        }
        if entropy:
            columns["entropy"] = stats.entropy_N
        sums = torch.stack([torch.ones_like(stats.kl_N).sum(), *(x.sum() for x in columns.values())])
        count, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        for name, total in zip(columns, totals, strict=True):
            self._metrics["train" if self.model.training else "eval"][name].append(total / max(count, 1.0))


def _require_same_tokens(tokenizer: Any, teacher: str) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(teacher).get_vocab(), tokenizer.get_vocab()
    differing = sorted(token for token in theirs.keys() | ours.keys() if theirs.get(token) != ours.get(token))
    if differing:
        token = differing[0]
        raise ValueError(
            f"teacher {teacher} has another tokenizer than the student: {token!r} is token "
            f"{theirs.get(token)} there and {ours.get(token)} here"
        )
