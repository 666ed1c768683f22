"""M frozen teachers -> their top-kappa log-probabilities at every response token.

The local engine holds the teachers as transformers models and scores packed micro-batches through the fused
head, at response positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from smopd.engine.models import UnusableModel, head, response_hidden
from smopd.engine.packing import flat_offsets, pack
from smopd.engine.types import Packing, Rollout, TeacherTopK
from smopd.kernels.topk_logprobs import linear_topk_logprobs


class TeacherEngine(Protocol):
    def score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TeacherTopK:
        """Each teacher's `kappa` largest log-probabilities at `temperature`, and the sampled token's own."""
        ...


class LocalTeachers:
    """Serves `TeacherEngine` with transformers models.

    Args:
        models: one vocabulary for all; on their device, in the dtype to score with.
        packing: as for the student; changes no result.
    Raises:
        ValueError: none is given.
        UnusableModel: a teacher's vocabulary differs in size from the student's.
    """

    def __init__(self, models: Sequence[PreTrainedModel], packing: Packing, vocabulary: int):
        if not models:
            raise ValueError("teachers: got none, expected at least one")
        for i, model in enumerate(models):
            size = head(model)[0].shape[0]
            if size != vocabulary:
                raise UnusableModel(
                    f"teachers.models.{i}: {model.name_or_path} has a vocabulary of {size}, "
                    f"the student's is {vocabulary}"
                )
        self.models = [model.eval().requires_grad_(False) for model in models]
        self.packing = packing

    @torch.no_grad()
    def score(self, rollouts: Sequence[Rollout], kappa: int, temperature: float) -> TeacherTopK:
        device = self.models[0].device
        n_tokens = flat_offsets(rollouts)[-1]
        shape = (n_tokens, len(self.models))
        ids_NMS = torch.zeros(*shape, kappa, dtype=torch.int32, device=device)
        logps_NMS = torch.zeros(*shape, kappa, device=device)
        token_logps_NM = torch.zeros(shape, device=device)
        for batch in pack(rollouts, self.packing):
            batch = batch.to(device)
            for m, model in enumerate(self.models):
                weight_VD, bias_V = head(model)
                top = linear_topk_logprobs(
                    response_hidden(model, batch),
                    weight_VD,
                    kappa,
                    token_ids_N=batch.token_ids_N,
                    bias_V=bias_V,
                    temperature=temperature,
                )
                assert top.token_logp_N is not None  # ids were given
                ids_NMS[batch.flat_N, m] = top.ids_NS
                logps_NMS[batch.flat_N, m] = top.logps_NS
                token_logps_NM[batch.flat_N, m] = top.token_logp_N
        return TeacherTopK(ids_NMS, logps_NMS, token_logps_NM)
