"""What goes between a teacher's server and its clients: safetensors, no Python object a token.

Shapes: R responses, N response tokens in flat order, S = kappa entries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from smopd.engine.types import Rollout

BINARY = "application/octet-stream"


def pack_request(rollouts: Sequence[Rollout]) -> bytes:
    pieces = [
        piece for r in rollouts for piece in (torch.tensor(r.prompt_ids, dtype=torch.int64), r.response_ids)
    ]
    lengths = [[len(r.prompt_ids), len(r.response_ids)] for r in rollouts]
    return save(
        {"tokens": torch.cat(pieces).int(), "lengths": torch.tensor(lengths, dtype=torch.int32).view(-1, 2)}
    )


def unpack_request(content: bytes) -> list[Rollout]:
    tensors = load(content)
    rollouts: list[Rollout] = []
    pieces = iter(tensors["tokens"].long().split(tensors["lengths"].flatten().tolist()))
    for prompt in pieces:
        response = next(pieces)
        rollouts.append(
            Rollout(tuple(prompt.tolist()), response, torch.zeros(len(response)), len(rollouts), True)
        )
    return rollouts


def pack_answer(
    ids_NS: Tensor, logps_NS: Tensor, token_logps_N: Tensor, dtype: torch.dtype, dropped: int = 0
) -> bytes:
    tensors = {
        "ids_NS": ids_NS.int(),
        "logps_NS": logps_NS.to(dtype),
        "token_logps_N": token_logps_N.float(),
        "dropped": torch.tensor(dropped),
    }
    return save({name: value.cpu().contiguous() for name, value in tensors.items()})


def unpack_answer(content: bytes) -> tuple[Tensor, Tensor, Tensor, int]:
    """ids (N, S) int32, log-probabilities (N, S) and the tokens' own (N,), fp32; ids dropped."""
    tensors = load(content)
    dropped = int(tensors["dropped"])
    return tensors["ids_NS"], tensors["logps_NS"].float(), tensors["token_logps_N"], dropped
