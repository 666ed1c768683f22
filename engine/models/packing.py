"""Token-budget packing: ragged rollouts -> micro-batches whose rows hold several sequences.

A unit is a prompt with one or more of its responses. Under a mask, whose cost is the square of the row, rows
are as long as the longest unit they must hold, shorter units share rows, and a micro-batch
holds as many rows as its token budget allows. Where pieces attend one at a time, a micro-batch is one row
without padding, told by its pieces. A response's last token is predicted but never read, so it takes
no position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import torch
from torch import Tensor

from smopd.engine.settings import Packing
from smopd.engine.types import Piece, Rollout, TokenBatch


def flat_offsets(rollouts: Sequence[Rollout]) -> list[int]:
    """Where each response begins in the flat token order; one more entry than there are rollouts."""
    offsets = [0]
    for rollout in rollouts:
        offsets.append(offsets[-1] + len(rollout.response_ids))
    return offsets


def pack(
    rollouts: Sequence[Rollout], packing: Packing, *, one_row_from: int | None = None
) -> list[TokenBatch]:
    """Micro-batches that hold every response token exactly once.

    Args:
        rollouts: responses; those of one group must stand together to share their prompt.
        packing: the token budget, and whether prompts are shared.
        one_row_from: a micro-batch whose longest unit has so many positions is one row, as long as what it
            holds. None: none is.
    """
    offsets = flat_offsets(rollouts)
    units = sorted(_units(rollouts, packing), key=lambda unit: _length(rollouts, unit), reverse=True)
    batches = []
    while units:
        longest = _length(rollouts, units[0])
        one_row = one_row_from is not None and longest >= one_row_from
        row_length = max(packing.micro_batch_tokens if one_row else 0, longest, 1)
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
        if one_row:
            row_length = max(row_length - space[0], 1)
        batches.append(_lay_out(rollouts, offsets, rows, row_length, one_row))
        units = later
    return batches


def empty_batch() -> TokenBatch:
    """One position and no response token: for a rank that has run out of micro-batches."""
    one = torch.zeros(1, 1, dtype=torch.int64)
    none = torch.zeros(0, dtype=torch.int64)
    return TokenBatch(one, one, one, one - 1, none, none, none, (Piece(0, 1),))


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
    rollouts: Sequence[Rollout],
    offsets: list[int],
    rows: list[list[list[int]]],
    row_length: int,
    one_row: bool,
) -> TokenBatch:
    grid = _Grid(len(rows), row_length)
    n_units = 0
    for row, units in enumerate(rows):
        at = row * row_length
        for unit in units:
            prompt_ids = rollouts[unit[0]].prompt_ids
            begin, end_of_prompt = at, at + len(prompt_ids)
            grid.put(at, prompt_ids, range(len(prompt_ids)), n_units, -1)
            at = end_of_prompt
            ends = []
            for i in unit:
                response_ids = rollouts[i].response_ids.tolist()
                if not response_ids:
                    continue
                read = response_ids[:-1]
                grid.put(at, read, range(len(prompt_ids), len(prompt_ids) + len(read)), n_units, i)
                grid.predict((end_of_prompt - 1, *range(at, at + len(read))), response_ids, offsets[i])
                at += len(read)
                ends += [at] if read else []
            if one_row:
                grid.pieces += _pieces(begin, end_of_prompt, ends)
            n_units += 1
    return grid.batch()


def _pieces(begin: int, end_of_prompt: int, ends: list[int]) -> Iterator[Piece]:
    """Of a unit whose responses end at `ends`: the prompt with the first one, then each of the others."""
    yield Piece(begin, ends[0] if ends else end_of_prompt)
    for start, end in pairwise(ends):
        yield Piece(start, end, begin, end_of_prompt)


class _Grid:
    """The positions of a micro-batch, row after row, while they are filled."""

    def __init__(self, n_rows: int, row_length: int):
        self.shape = (n_rows, row_length)
        size = n_rows * row_length
        self.input_ids, self.position_ids = [0] * size, [0] * size
        self.unit_ids, self.sample_ids = [-1] * size, [-1] * size
        self.predictor_N: list[int] = []
        self.token_ids_N: list[int] = []
        self.flat_N: list[int] = []
        self.pieces: list[Piece] = []

    def put(self, at: int, ids: Sequence[int], positions: range, unit: int, sample: int) -> None:
        span = slice(at, at + len(ids))
        self.input_ids[span], self.position_ids[span] = ids, positions
        self.unit_ids[span], self.sample_ids[span] = [unit] * len(ids), [sample] * len(ids)

    def predict(self, places: Sequence[int], token_ids: list[int], offset: int) -> None:
        self.predictor_N += places
        self.token_ids_N += token_ids
        self.flat_N += range(offset, offset + len(token_ids))

    def batch(self) -> TokenBatch:
        return TokenBatch(
            input_ids=self._grid(self.input_ids),
            position_ids=self._grid(self.position_ids),
            unit_ids=self._grid(self.unit_ids),
            sample_ids=self._grid(self.sample_ids),
            predictor_N=torch.tensor(self.predictor_N, dtype=torch.int64),
            token_ids_N=torch.tensor(self.token_ids_N, dtype=torch.int64),
            flat_N=torch.tensor(self.flat_N, dtype=torch.int64),
            pieces=tuple(self.pieces),
        )

    def _grid(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).view(self.shape)
