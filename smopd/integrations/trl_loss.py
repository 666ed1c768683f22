"""The fused loss of a TRL trainer's completions, with what its teachers say of them.

Shapes: B sequences, T completion tokens, N completion tokens that count, M teachers, S = kappa,
V vocabulary, D hidden.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from trl.models.utils import _ForwardRedirection
from trl.trainer.utils import maybe_gather_lm_head_ctx

from smopd.engine.models.loading import logit_scale
from smopd.integrations.teacher_mixing import log_weights
from smopd.integrations.trl_teachers import load_teachers, n_ids, require_readable, tokenizer_of
from smopd.ops import LossSettings, LossStats, LossTokens, linear_smopd_loss, linear_topk_logprobs


class Head(NamedTuple):
    weight_VD: Tensor
    bias_V: Tensor | None
    scale: float
    """What the model multiplies its logits with; a softmax at temperature T of them is one at T / scale."""


def base_of(model: Any) -> Any:
    """The transformers model under peft's wrapper, if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def completion_hidden(model: Any, input_ids: Tensor, attention_mask: Tensor, n_completion: int) -> Tensor:
    """(B, T, D) final hidden states that predict the last `n_completion` = T tokens."""
    decoder = base_of(model).get_decoder()
    states = decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    return states[:, -n_completion - 1 : -1]


def head_of(model: Any, dtype: torch.dtype | None) -> Head:
    """The output embedding in `dtype` (None: its own), whole: FSDP2's shards are gathered."""
    model = base_of(model)
    output = model.get_output_embeddings()
    weight_VD, bias_V = (_whole(x, dtype) for x in (output.weight, getattr(output, "bias", None)))
    assert weight_VD is not None
    return Head(weight_VD, bias_V, logit_scale(model.config.get_text_config()))


def _whole(parameter: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    if isinstance(parameter, DTensor):
        parameter = parameter.full_tensor()
    return parameter if parameter is None or dtype is None else parameter.to(dtype)


class Completions(NamedTuple):
    """The completions of a micro-batch, and which of their tokens count."""

    input_ids: Tensor
    attention_mask: Tensor
    n_completion: int
    counted_BT: Tensor
    token_ids_N: Tensor


def completions_of(inputs: dict[str, Any]) -> Completions:
    if unserved := [name for name in ("pixel_values", "image_sizes") if inputs.get(name) is not None]:
        raise ValueError(f"the batch has {unserved[0]}; expected text alone")
    ids_BT, mask_BT = inputs["completion_ids"], inputs["completion_mask"]
    counted_BT = (mask_BT * inputs["tool_mask"] if "tool_mask" in inputs else mask_BT).bool()
    input_ids = torch.cat([inputs["prompt_ids"], ids_BT], 1)
    attention_mask = torch.cat([inputs["prompt_mask"], mask_BT], 1)
    return Completions(input_ids, attention_mask, ids_BT.shape[1], counted_BT, ids_BT[counted_BT])


class SeveralTeachers:
    """What both trainers share: M frozen teachers, and the fused loss of the student's completions."""

    def take_teachers(self: Any, teachers: list[Any]) -> None:
        if not teachers:
            raise ValueError("teacher_models is empty, expected at least one model or path")
        require_readable(self.model, "the student")
        weights = self.args.teacher_weights or [1 / len(teachers)] * len(teachers)
        if len(weights) != len(teachers):
            raise ValueError(f"teacher_weights is {weights}, expected {len(teachers)} numbers")
        self._log_alpha_M = log_weights(weights)
        self.teacher_models = load_teachers(self, teachers)
        n_rows = self.model.config.get_text_config().vocab_size
        self._n_vocabulary = min(n_rows, n_ids(tokenizer_of(self)))
        self.redirect = _ForwardRedirection()

    def teachers_topk(
        self: Any, inputs: dict[str, Any], seen: Completions, temperature: float
    ) -> dict[str, Tensor]:
        """LossTokens' teacher fields, asked once a batch however often it is trained on."""
        if "teachers_topk" not in inputs:
            said = [self._topk(model, seen, temperature) for model in self.teacher_models]
            ids_NMS, logps_NMS = (torch.stack(list(column), 1) for column in zip(*said, strict=True))
            inputs["teachers_topk"] = {
                "teacher_ids_NMS": ids_NMS,
                "teacher_logps_NMS": logps_NMS,
                "log_alpha": self._log_alpha_M.to(ids_NMS.device),
            }
        return inputs["teachers_topk"]

    def _hidden(self: Any, model: Any, seen: Completions, fp32_head: bool = False) -> Tensor:
        """(N, D) in the dtype that the head is to run in: under autocast to bf16 that, as in TRL.

        Not to fp16: the loss makes its gradients in forward, before anything scales them.
        """
        with self.accelerator.autocast():
            hidden_BTD = completion_hidden(model, seen.input_ids, seen.attention_mask, seen.n_completion)
            device = hidden_BTD.device.type
            bf16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16
        dtype = torch.float32 if fp32_head else torch.bfloat16 if bf16 else hidden_BTD.dtype
        return hidden_BTD[seen.counted_BT].to(dtype)

    @torch.no_grad()
    def _topk(self: Any, model: Any, seen: Completions, temperature: float) -> Any:
        bare = self.accelerator.unwrap_model(model)

        def inside() -> Any:
            hidden_ND = self._hidden(bare, seen)
            output = base_of(bare).get_output_embeddings()
            with maybe_gather_lm_head_ctx(output.weight, getattr(output, "bias", None)):
                head = head_of(bare, hidden_ND.dtype)
                kappa = min(self.args.kappa, len(head.weight_VD))
                T = temperature / head.scale
                return linear_topk_logprobs(
                    hidden_ND, head.weight_VD, kappa, bias_V=head.bias_V, temperature=T
                )

        said = self.redirect(model, bare, inside)
        padding = said.ids_NS >= self._n_vocabulary
        return said.ids_NS.masked_fill(padding, 0), said.logps_NS.masked_fill(padding, -torch.inf)

    def fused(
        self: Any, student: Any, seen: Completions, tokens: LossTokens, **settings: Any
    ) -> tuple[Tensor, LossStats]:
        """linear_smopd_loss of the student; inside its wrapper's forward, where its weights are whole."""
        output = base_of(student).get_output_embeddings()
        hidden_ND = self._hidden(student, seen, getattr(self.args, "cast_lm_head_to_fp32", False))
        with maybe_gather_lm_head_ctx(output.weight, getattr(output, "bias", None)):
            head = head_of(student, hidden_ND.dtype)
            for name in ("temperature", "kl_temperature"):
                settings[name] /= head.scale
            args = self.args
            objective = LossSettings(kappa=args.kappa, merge=args.merge, tail=args.tail, **settings)
            options = {"bias_V": head.bias_V, "chunk_bytes": args.chunk_bytes}
            return linear_smopd_loss(hidden_ND, head.weight_VD, tokens, objective, **options)

    def log_means(self: Any, stats: LossStats, **columns: Tensor) -> None:
        """Means over all ranks' tokens of the mixture's columns and these; outside the wrapped forward."""
        mixture = {
            "opd/kl": stats.kl_N,
            "opd/teacher_mass": stats.teacher_mass_N,
            "opd/student_mass": stats.student_mass_N,
        }
        columns = mixture | columns
        sums = torch.stack([torch.ones_like(stats.kl_N).sum(), *(x.float().sum() for x in columns.values())])
        count, *totals = self.accelerator.reduce(sums, reduction="sum").tolist()
        self.log_values({name: total / max(count, 1.0) for name, total in zip(columns, totals, strict=True)})

    def log_values(self: Any, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._metrics["train" if self.model.training else "eval"][name].append(value)
