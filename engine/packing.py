"""Token-budget packing: ragged rollouts -> micro-batches whose rows hold several sequences.

A unit is a prompt with one or more of its responses. Rows are as long as the longest unit they must hold (or
`row_tokens`), shorter units share rows, and a micro-batch holds as many rows as its token budget allows. A
response's last token is predicted but never read, so it takes no position.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from smopd.engine.types import Packing, Rollout, TokenBatch


def flat_offsets(rollouts: Sequence[Rollout]) -> list[int]:
    """Where each response begins in the flat token order; one more entry than there are rollouts."""
    offsets = [0]
    for rollout in rollouts:
        offsets.append(offsets[-1] + len(rollout.response_ids))
    return offsets


def pack(rollouts: Sequence[Rollout], packing: Packing) -> list[TokenBatch]:
    """Micro-batches that hold every response token exactly once.

    Args:
        rollouts: responses; those of one group must stand together to share their prompt.
        packing: the token budget, the row length and whether prompts are shared.
    """
    offsets = flat_offsets(rollouts)
    units = sorted(_units(rollouts, packing), key=lambda unit: _length(rollouts, unit), reverse=True)
    batches = []
    while units:
        row_length = max(packing.row_tokens, _length(rollouts, units[0]), 1)
        rows: list[list[list[int]]] = []
        space: list[int] = []
        later = []
        limit = max(1, packing.micro_batch_tokens // row_length)
        for unit in units:
            length = _length(rollouts, unit)
            row = next((i for i, free in enumerate(space) if free >= length), None)
            if row is None and len(rows) < limit:
                row = len(rows)
                rows.append([])
                space.append(row_length)
            if row is None:
                later.append(unit)
            else:
                rows[row].append(unit)
                space[row] -= length
        batches.append(_lay_out(rollouts, offsets, rows, row_length))
        units = later
    return batches


def empty_batch() -> TokenBatch:
    """One position and no response token: for a rank that has run out of micro-batches."""
    one = torch.zeros(1, 1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return TokenBatch(one, one, one, one - 1, none, none, none)


def _length(rollouts: Sequence[Rollout], unit: list[int]) -> int:
    return len(rollouts[unit[0]].prompt_ids) + sum(max(0, len(rollouts[i].response_ids) - 1) for i in unit)


def _units(rollouts: Sequence[Rollout], packing: Packing) -> list[list[int]]:
    """Indices of rollouts that share one copy of their prompt, cut so that a unit fits the budget."""
    if not packing.share_prompts:
        return [[i] for i in range(len(rollouts))]
    units: list[list[int]] = []
    for _, members in groupby(
        range(len(rollouts)), key=lambda i: (rollouts[i].group, rollouts[i].prompt_ids)
    ):
        unit: list[int] = []
        for i in members:
            if unit and _length(rollouts, [*unit, i]) > packing.micro_batch_tokens:
                units.append(unit)
                unit = []
            unit.append(i)
        units.append(unit)
    return units


def _lay_out(
    rollouts: Sequence[Rollout], offsets: list[int], rows: list[list[list[int]]], row_length: int
) -> TokenBatch:
    shape = (len(rows), row_length)
    input_ids = torch.zeros(shape, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    unit_ids = torch.full(shape, -1, dtype=torch.int64)
    sample_ids = torch.full(shape, -1, dtype=torch.int64)
    predictors, tokens, flat = [], [], []
    n_units = 0
    for row, units in enumerate(rows):
        at = 0
        for unit in units:
            prompt = torch.tensor(rollouts[unit[0]].prompt_ids, dtype=torch.int64)
            begin, n_prompt = at, len(prompt)
            input_ids[row, at : at + n_prompt] = prompt
            position_ids[row, at : at + n_prompt] = torch.arange(n_prompt)
            at += n_prompt
            for i in unit:
                response = rollouts[i].response_ids
                n_read = len(response) - 1
                if n_read < 0:
                    continue
                input_ids[row, at : at + n_read] = response[:-1]
                position_ids[row, at : at + n_read] = torch.arange(n_prompt, n_prompt + n_read)
                sample_ids[row, at : at + n_read] = i
                base = row * row_length
                predictors.append(torch.tensor([base + begin + n_prompt - 1]))
                predictors.append(torch.arange(base + at, base + at + n_read))
                tokens.append(response)
                flat.append(torch.arange(offsets[i], offsets[i + 1]))
                at += n_read
            unit_ids[row, begin:at] = n_units
            n_units += 1
    none = torch.zeros(0, dtype=torch.int64)
    return TokenBatch(
        input_ids,
        position_ids,
        unit_ids,
        sample_ids,
        torch.cat([none, *predictors]),
        torch.cat([none, *tokens]),
        torch.cat([none, *flat]),
    )
