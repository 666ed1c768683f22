"""Token views: each teacher's and the student's probabilities for every token of a response.

Shapes: T tokens of one response, M teachers, S entries of each model.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from smopd.engine.types import Rollout, TeacherTopK
from smopd.ops import TopK
from smopd.record.files import JsonlLog

SHOWN = 5  # number of top tokens of each model
CUT = "\N{REPLACEMENT CHARACTER}"  # the text to which a tokenizer decodes an incomplete character
Tops = TypeVar("Tops", TopK, TeacherTopK)
Record = dict[str, Any]
"""A token's `text`. A sampled token also has `p` and `student`. `add_teachers` adds more fields."""


def token_records(tokenizer: PreTrainedTokenizerBase, rollout: Rollout, student: TopK) -> list[Record]:
    """Return one record per response token, with the student's probability of the token and top tokens.

    `student` has rows for the tokens that the policy sampled: all, or those in the rollout's `loss_mask`.
    """
    records: list[Record] = [{"text": text} for text in texts(tokenizer, rollout.response_ids.tolist())]
    assert student.token_logp_N is not None
    for n, t in enumerate(rollout.of_policy(torch.arange(len(records))).tolist()):
        top = _likely(tokenizer, student.ids_NS[n], student.logps_NS[n])
        records[t] |= {"p": round(float(student.token_logp_N[n].exp()), 4), "student": top}
    return records


def texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the response. A character is added by its last token.

    A token is decoded together with the one before it, because some tokenizers drop the first token's space.
    """
    found, context, begin = [], 0, 0
    for end in range(1, len(ids) + 1):
        before, now = tokenizer.decode(ids[context:begin]), tokenizer.decode(ids[context:end])
        complete = not now.endswith(CUT) or end == len(ids)
        found.append(now[len(before) :] if complete else "")
        if complete:
            context, begin = begin, end
    return found


def add_teachers(records: list[Record], tokenizer: PreTrainedTokenizerBase, topk: TeacherTopK) -> None:
    """Add to each sampled token the teachers' top tokens and log-ratios.

    A teacher's log-ratio is log(p / q), where p is its probability of the token, and q is the mean of p over
    all teachers.
    """
    logp_TM = topk.token_logps_NM.double().cpu()
    ratio_TM = logp_TM - logp_TM.logsumexp(-1, keepdim=True) + math.log(logp_TM.shape[1])
    sampled = [record for record in records if "student" in record]
    for t, record in enumerate(sampled):
        each = zip(topk.ids_NMS[t], topk.logps_NMS[t], strict=True)
        record["log_ratios"] = [round(value, 3) for value in ratio_TM[t].tolist()]
        record["teachers"] = [_likely(tokenizer, *entries) for entries in each]


def add_merged(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    models: Sequence[str],
    score: Callable[[str, list[Rollout]], TeacherTopK],
) -> None:
    """Add the merged models as teachers to lines of tokens.jsonl. A weight merge trains without teachers.

    `score(model, rollouts)` returns the model's scores. Lines that have teachers are not changed.
    """
    log = JsonlLog(path)
    lines = log.read()
    due = [line for line in lines if not line["teachers"]]
    if not due:
        return
    rollouts = []
    for i, line in enumerate(due):
        ids, prompt_ids = torch.tensor(line["response_ids"]), tuple(line["prompt_ids"])
        mask = torch.tensor(["student" in record for record in line["tokens"]])
        rollouts.append(Rollout(prompt_ids, ids, torch.zeros(len(ids)), i, finished=True, loss_mask=mask))
    scores = [score(model, rollouts) for model in models]
    joined = {name: torch.cat([getattr(each, name) for each in scores], 1) for name in vars(scores[0])}
    begin = 0
    for line, rollout in zip(due, rollouts, strict=True):
        own = slice(begin, begin := begin + rollout.n_tokens)
        add_teachers(line["tokens"], tokenizer, part(TeacherTopK(**joined), own))
        line["teachers"] = list(models)
    log.replace(lines)


def part(top: Tops, tokens: slice) -> Tops:
    return type(top)(**{name: value[tokens] for name, value in vars(top).items()})


def _likely(tokenizer: PreTrainedTokenizerBase, ids_S: Tensor, logps_S: Tensor) -> list[list[Any]]:
    """Return the first SHOWN entries as [text, probability], without empty slots."""
    entries = zip(ids_S[:SHOWN].tolist(), logps_S[:SHOWN].exp().tolist(), strict=True)
    return [[tokenizer.decode([token]), round(value, 4)] for token, value in entries if value > 0]
