"""Packing of rollouts into micro-batches. A row contains units: prompts, each with some of its responses.

The last token of a response is predicted but is never an input, so it needs no position.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby

import torch

from smopd.engine.settings import Packing
from smopd.engine.types import Attends, Layout, Piece, Pieces, Rollout, TokenBatch

CACHED = 8  # results (ours): a step packs the same batch and mini-batches several times
MASKED = Layout()


def flat_offsets(rollouts: Sequence[Rollout]) -> list[int]:
    """Return the start of each response in the flat token order. The last entry is the total."""
    return list(accumulate((rollout.n_tokens for rollout in rollouts), initial=0))


def pack(rollouts: Sequence[Rollout], packing: Packing, layout: Layout = MASKED) -> tuple[TokenBatch, ...]:
    """Return CPU micro-batches that predict every token of the policy exactly once. Results are cached.

    By pieces, a micro-batch is one row. Otherwise its rows are as long as its longest unit and, under a mask,
    shorter units share rows. The responses of a group share their prompt only if they are adjacent.
    """
    return _pack(tuple(rollouts), packing.micro_batch_tokens, packing.share_prompts, layout)


@lru_cache(CACHED)
def _pack(
    rollouts: tuple[Rollout, ...], budget: int, share_prompts: bool, layout: Layout
) -> tuple[TokenBatch, ...]:
    offsets, plain = flat_offsets(rollouts), layout.attends == "plain"
    limit = layout.alone_above
    alone = [i for i in range(len(rollouts)) if limit is not None and _length(rollouts, [i]) > limit]
    batches = [_lay_out(rollouts, offsets, [[[i]]], _length(rollouts, [i]), layout.attends) for i in alone]
    others = [i for i in range(len(rollouts)) if i not in alone]
    units = _units(rollouts, others, budget if share_prompts and not plain else 0)
    units.sort(key=lambda unit: _length(rollouts, unit), reverse=True)
    while units:
        longest = _length(rollouts, units[0])
        one_row = layout.attends == "pieces" and longest >= layout.one_row_from
        row_length = max(budget if one_row else 0, longest, 1)
        rows: list[list[list[int]]] = []
        space: list[int] = []
        later = []
        most_rows = max(1, budget // row_length)
        for unit in units:
            length = _length(rollouts, unit)
            row = None if plain else next((i for i, free in enumerate(space) if free >= length), None)
            if row is None and len(rows) < most_rows:
                row = len(rows)
                rows.append([])
                space.append(row_length)
            if row is None:
                later.append(unit)
            else:
                rows[row].append(unit)
                space[row] -= length
        if one_row:
            row_length = max(row_length - space[0], 1)
        attends: Attends = "pieces" if one_row else "plain" if plain else "mask"
        batches.append(_lay_out(rollouts, offsets, rows, row_length, attends))
        units = later
    return tuple(batches)


def empty_batch() -> TokenBatch:
    """Return a batch of one position and no response tokens, for a rank that has run out of micro-batches."""
    one, none = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    return TokenBatch(one, one, none, none, none, Pieces([Piece(0, 1)]), "plain")


def _length(rollouts: Sequence[Rollout], unit: list[int]) -> int:
    return len(rollouts[unit[0]].prompt_ids) + sum(max(0, len(rollouts[i].response_ids) - 1) for i in unit)


def _units(rollouts: Sequence[Rollout], chosen: Sequence[int], budget: int) -> list[list[int]]:
    """Return lists of rollout indices that share a prompt and fit in `budget`. With budget 0, none share."""
    units: list[list[int]] = []
    for _, members in groupby(chosen, key=lambda i: (rollouts[i].group, rollouts[i].prompt_ids)):
        unit: list[int] = []
        for i in members:
            if unit and _length(rollouts, [*unit, i]) > budget:
                units.append(unit)
                unit = []
            unit.append(i)
        units.append(unit)
    return units


def _lay_out(
    rollouts: Sequence[Rollout],
    offsets: list[int],
    rows: list[list[list[int]]],
    row_length: int,
    attends: Attends,
) -> TokenBatch:
    shape = (len(rows), row_length)
    count = torch.arange(max(len(rows) * row_length, offsets[-1]))  # slicing it is cheaper than a new range
    none = count[:0]
    input_ids, position_ids = [none], [none]
    predictors, token_ids, places = [none], [none], [none]
    pieces = Pieces()
    for row, units in enumerate(rows):
        at, row_end = row * row_length, (row + 1) * row_length
        for unit in units:
            prompt_ids = rollouts[unit[0]].prompt_ids
            n_prompt, begin = len(prompt_ids), at
            at = prompt_end = begin + n_prompt
            input_ids.append(torch.tensor(prompt_ids, dtype=torch.int64))
            position_ids.append(count[:n_prompt])
            pieces.append(Piece(begin, prompt_end))
            for i in unit:
                response_ids = rollouts[i].response_ids
                if len(response_ids) == 0:
                    continue
                end = at + len(response_ids) - 1
                input_ids.append(response_ids[:-1])
                position_ids.append(count[n_prompt : n_prompt + end - at])
                predictor = torch.cat((count[prompt_end - 1 : prompt_end], count[at:end]))
                predictors.append(rollouts[i].of_policy(predictor))
                token_ids.append(rollouts[i].of_policy(response_ids))
                places.append(count[offsets[i] : offsets[i + 1]])
                if at == prompt_end:
                    pieces[-1] = Piece(begin, end)
                elif end > at:
                    pieces.append(Piece(at, end, begin, prompt_end))
                at = end
        if at < row_end:
            pieces.append(Piece(at, row_end))
            padding = torch.zeros(row_end - at, dtype=torch.int64)
            input_ids.append(padding)
            position_ids.append(padding)
    return TokenBatch(
        input_ids=torch.cat(input_ids).view(shape),
        position_ids=torch.cat(position_ids).view(shape),
        predictor_N=torch.cat(predictors),
        token_ids_N=torch.cat(token_ids),
        flat_N=torch.cat(places),
        pieces=pieces,
        attends=attends,
    )
