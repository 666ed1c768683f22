"""Token view: the top tokens of teachers and student at each position of a response.

Shapes: N response tokens, T tokens of one response, M teachers, S entries per teacher, C = M * S candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Opd
from smopd.objective import Target
from smopd.ops import TopK, teacher_mixture

SHOWN = 5
"""Top tokens shown of each model."""


def target_shares(logps_NMS: Tensor, ids_NMS: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> Tensor:
    """Return each teacher's share (N, M) of the target's mass; log_alpha is (M,) or (N, M)."""
    shifted_NMS = logps_NMS.double() + log_alpha.double().expand(logps_NMS.shape[:2])[..., None]
    shifted_NC, ids_NC = shifted_NMS.flatten(1), ids_NMS.flatten(1)
    if merge:
        target_NS = teacher_mixture(ids_NMS, logps_NMS, log_alpha, kappa, merge=True).ids_NS
        kept_NC = (ids_NC[:, :, None] == target_NS[:, None, :]).any(-1)
    else:
        best_NS = shifted_NC.argsort(dim=-1, descending=True, stable=True)[:, :kappa]
        kept_NC = torch.zeros_like(ids_NC, dtype=torch.bool).scatter_(-1, best_NS, True)
    mass_NM = (shifted_NC.exp() * kept_NC).view_as(logps_NMS).sum(-1)
    return mass_NM / mass_NM.sum(-1, keepdim=True).clamp(min=torch.finfo(mass_NM.dtype).tiny)


def token_records(
    tokenizer: PreTrainedTokenizerBase,
    token_ids_T: Tensor,
    target: Target,
    opd: Opd,
    student: TopK,
    tokens: slice,
) -> list[dict[str, Any]]:
    """Return one record per token: `text`, `shares` by teacher, and pairs [text, probability] per model.

    For a product, `changes` replaces `shares`: by how many nats each teacher raises the token.
    `tokens` is the position of the response in the flat order of `target` and `student`.
    """
    ids_TMS, logps_TMS = target.topk.ids_NMS[tokens].cpu(), target.topk.logps_NMS[tokens].cpu()
    if target.product is None:
        log_alpha = target.log_alpha.cpu()
        log_alpha_T = log_alpha[tokens] if log_alpha.dim() == 2 else log_alpha
        name = "shares"
        by_teacher_TM = target_shares(logps_TMS, ids_TMS, log_alpha_T, opd.kappa, opd.target == "merged")
    else:
        name, by_teacher_TM = "changes", target.changes_NM[tokens].cpu()
    ids_TS, logps_TS = student.ids_NS[tokens].cpu(), student.logps_NS[tokens].cpu()
    records = []
    for t, token in enumerate(token_ids_T.tolist()):
        models = [_likely(tokenizer, *entries) for entries in zip(ids_TMS[t], logps_TMS[t], strict=True)]
        record = {
            "text": tokenizer.decode([token]),
            name: [round(value, 3) for value in by_teacher_TM[t].tolist()],
            "student": _likely(tokenizer, ids_TS[t], logps_TS[t]),
        }
        if target.product is not None:
            record["reference"] = models.pop()
        records.append(record | {"teachers": models})
    return records


def _likely(tokenizer: PreTrainedTokenizerBase, ids_S: Tensor, logps_S: Tensor) -> list[list[Any]]:
    """Return the first entries as [text, probability], without empty slots."""
    entries = zip(ids_S[:SHOWN].tolist(), logps_S[:SHOWN].exp().tolist(), strict=True)
    return [[tokenizer.decode([token]), round(value, 4)] for token, value in entries if value > 0]
