"""Messages between a teacher server and its clients. They are safetensors, which the receiver validates.

    request   tokens int32 (each prompt followed by its response, concatenated), lengths (R, 2) int32 and,
              if some tokens are an environment's, loss_mask (a bool for each response token)
    answer    ids_NS int32, logps_NS and token_logps_N fp32, dropped (the number of dropped ids)

Shapes: R responses, N response tokens in flat order, S = kappa entries.
"""

from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from smopd.engine.types import Rollout

SLACK = 1e-2  # ours: tolerance in nats and in mass, for rounding of a server's bf16 logits
PROBE_NATS = 0.1  # ours: largest distance of a server from the median; bf16 logits near 16 have steps of 1/8

HEADER_BYTES = 1 << 16  # ours: room for the header of safetensors, or for an error's message


def pack(**tensors: Tensor) -> bytes:
    return save({name: value.cpu().contiguous() for name, value in tensors.items()})


def unpack(content: bytes, **fields: tuple[torch.dtype, tuple[int | None, ...]]) -> list[Tensor]:
    """Return the tensors named in `fields` after checking dtype and shape. None matches any size.

    Malformed content raises ValueError, KeyError or SafetensorError.
    """
    tensors = load(content)
    for name, (dtype, shape) in fields.items():
        found = tensors[name]
        sizes = zip(found.shape, shape, strict=False)
        if found.dtype != dtype or found.dim() != len(shape) or any(n not in (m, None) for m, n in sizes):
            raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)}, expected {dtype} {shape}")
    return [tensors[name] for name in fields]


def pack_request(rollouts: Sequence[Rollout]) -> bytes:
    pieces = [piece for r in rollouts for piece in (torch.tensor(r.prompt_ids), r.response_ids)]
    lengths = [[len(r.prompt_ids), len(r.response_ids)] for r in rollouts]
    masks = {}
    if any(r.loss_mask is not None for r in rollouts):
        given = [(r.loss_mask, torch.ones_like(r.response_ids, dtype=torch.bool)) for r in rollouts]
        masks["loss_mask"] = torch.cat([every if mask is None else mask for mask, every in given])
    return pack(tokens=torch.cat(pieces).int(), lengths=torch.tensor(lengths, dtype=torch.int32), **masks)


def unpack_request(content: bytes, vocabulary: int) -> list[Rollout]:
    """Return a request's rollouts. Raise as `unpack` does, or ValueError for ids outside the vocabulary."""
    int32 = torch.int32
    tokens, lengths = unpack(content, tokens=(int32, (None,)), lengths=(int32, (None, 2)))
    if bool((lengths < 0).any()) or int(lengths.sum()) != len(tokens):
        raise ValueError(f"lengths are not (R, 2) that sum to {len(tokens)} tokens")
    if bool((lengths[:, 0] == 0).any()):
        raise ValueError("lengths has an empty prompt, expected at least one token")
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise ValueError(f"tokens holds ids outside [0, {vocabulary})")
    pieces = tokens.long().split(lengths.flatten().tolist())
    responses = lengths[:, 1].tolist()
    masks: Sequence[Tensor | None] = [None] * len(responses)
    if "loss_mask" in load(content):
        masks = unpack(content, loss_mask=(torch.bool, (sum(responses),)))[0].split(responses)
    return [
        Rollout(tuple(prompt.tolist()), response, torch.zeros(len(response)), i, True, loss_mask=mask)
        for i, (prompt, response, mask) in enumerate(zip(pieces[::2], pieces[1::2], masks, strict=True))
    ]


def answer_bytes(n_tokens: int, kappa: int) -> int:
    """Return the maximum size of an answer in bytes."""
    return HEADER_BYTES + 4 * n_tokens * (2 * kappa + 1) + 8


def unpack_answer(content: bytes, n_tokens: int, kappa: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Validate an answer. Return ids_NS, logps_NS, token_logps_N and the number of dropped ids."""
    ids_NS, logps_NS, token_logps_N, dropped = unpack(
        content,
        ids_NS=(torch.int32, (n_tokens, kappa)),
        logps_NS=(torch.float32, (n_tokens, kappa)),
        token_logps_N=(torch.float32, (n_tokens,)),
        dropped=(torch.int64, ()),
    )
    most = n_tokens * (kappa + 1)
    if not 0 <= int(dropped) <= most:
        raise ValueError(f"dropped is {int(dropped)}, expected 0 to {most}")
    require_logprobs("logps_NS", logps_NS)
    require_logprobs("token_logps_N", token_logps_N)
    if not ids_NS.numel():
        return ids_NS, logps_NS, token_logps_N, int(dropped)
    mass = float(logps_NS.double().exp().sum(-1).max())
    if mass > 1.0 + SLACK:
        raise ValueError(f"logps_NS has a row of mass {mass:.6g}, expected at most 1")
    held_NS = logps_NS > -torch.inf
    if bool((ids_NS < 0).any()):
        raise ValueError(f"ids_NS holds {int(ids_NS.min())}, expected ids of at least 0")
    if not dropped and not bool(held_NS.any(-1).all()):
        raise ValueError("logps_NS has a row without an entry, expected the most likely tokens")
    empty_S = -1 - torch.arange(ids_NS.shape[1])
    sorted_NS = torch.where(held_NS, ids_NS.long(), empty_S).sort(-1).values
    if bool((sorted_NS[:, 1:] == sorted_NS[:, :-1]).any()):
        raise ValueError("ids_NS has a row with a repeated id, expected distinct ids")
    return ids_NS, logps_NS, token_logps_N, int(dropped)


def require_logprobs(name: str, logps: Tensor) -> None:
    """Raise ValueError if a value is NaN or is above 0 by more than rounding (SLACK)."""
    bad = ~(logps <= SLACK)
    if bool(bad.any()):
        raise ValueError(f"{name} holds {float(logps[bad][0]):g}, expected log-probabilities of at most 0")
