"""Token by token, what a response was and what its teachers and the student would have said.

One record a token: its text, the share of the target's mass that each teacher gave (of a product by how much
each changed the token instead), and the most likely tokens of each teacher and of the student. `smopd.report`
shows them.

Letters: N response tokens, T of one response, M teachers, S entries of each, C = M * S candidates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smopd.config.settings import Opd
from smopd.objective import Target
from smopd.ops import TopK

SHOWN = 5  # most likely tokens of each model


def target_shares(logps_NMS: Tensor, ids_NMS: Tensor, log_alpha: Tensor, kappa: int, merge: bool) -> Tensor:
    """(N, M) share of the target's mass that came from each teacher; 0 where the target is empty.

    Args:
        logps_NMS, ids_NMS: what the teachers said.
        log_alpha: (M,) or (N, M).
        merge: as `LossSettings.merge`: whether equal ids of two teachers are one entry.
    """
    shape = logps_NMS.shape
    shifted_NC = (logps_NMS.double() + log_alpha.double().expand(shape[:2])[..., None]).flatten(1)
    ids_NC = ids_NMS.flatten(1)
    worth_NC = shifted_NC
    if merge:
        same_NCC = ids_NC[:, :, None] == ids_NC[:, None, :]
        together_NC = shifted_NC[:, None, :].masked_fill(~same_NCC, -torch.inf).logsumexp(-1)
        first_NC = same_NCC.int().argmax(-1) == torch.arange(ids_NC.shape[1], device=ids_NC.device)
        worth_NC = together_NC.masked_fill(~first_NC, -torch.inf)
    kept_NK = worth_NC.argsort(dim=-1, descending=True, stable=True)[:, :kappa]
    if merge:
        chosen_NC = (ids_NC[:, :, None] == ids_NC.gather(-1, kept_NK)[:, None, :]).any(-1)
    else:
        chosen_NC = torch.zeros_like(ids_NC, dtype=torch.bool).scatter_(-1, kept_NK, True)
    mass_NM = (shifted_NC.exp() * chosen_NC).view(shape).sum(-1)
    return mass_NM / mass_NM.sum(-1, keepdim=True).clamp(min=torch.finfo(mass_NM.dtype).tiny)


def token_records(
    tokenizer: PreTrainedTokenizerBase,
    token_ids_T: Tensor,
    target: Target,
    opd: Opd,
    student: TopK,
    tokens: slice,
) -> list[dict[str, Any]]:
    """One a token: `text`, `shares` by teacher, `teachers` and `student`: their [text, probability] pairs.

    Of a product `changes` stand for `shares`, by how many nats each teacher raised the token over the
    reference, and `reference` has pairs too.

    Args:
        token_ids_T: the response.
        target, student: of all responses, in whose flat order this one's tokens are `tokens`.
    """
    ids_TMS, logps_TMS = target.topk.ids_NMS[tokens].cpu(), target.topk.logps_NMS[tokens].cpu()
    log_alpha = target.log_alpha.cpu()
    if log_alpha.dim() == 2:
        log_alpha = log_alpha[tokens]
    if target.product is None:
        told = "shares"
        told_TM = target_shares(logps_TMS, ids_TMS, log_alpha, opd.kappa, opd.target == "merged")
    else:
        told, told_TM = "changes", target.changes_NM[tokens].cpu()
    ids_TS, logps_TS = student.ids_NS[tokens].cpu(), student.logps_NS[tokens].cpu()
    records = []
    for t, token in enumerate(token_ids_T.tolist()):
        said = [_likely(tokenizer, *entries) for entries in zip(ids_TMS[t], logps_TMS[t], strict=True)]
        record: dict[str, Any] = {"text": tokenizer.decode([token])}
        record[told] = [round(value, 3) for value in told_TM[t].tolist()]
        if target.product is not None:
            record["reference"] = said.pop()
        student_said = _likely(tokenizer, ids_TS[t], logps_TS[t])
        records.append(record | {"teachers": said, "student": student_said})
    return records


def _likely(tokenizer: PreTrainedTokenizerBase, ids_S: Tensor, logps_S: Tensor) -> list[list[Any]]:
    """The first entries, which are the most likely ones, as [text, probability]; empty slots left out."""
    entries = zip(ids_S[:SHOWN].tolist(), logps_S[:SHOWN].exp().tolist(), strict=True)
    return [[tokenizer.decode([token]), round(value, 4)] for token, value in entries if value > 0]
