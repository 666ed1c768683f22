"""What goes between a teacher's server and its clients: safetensors, no Python object a token.

Shapes: R responses, N response tokens in flat order, S = kappa entries, U ids that are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor

from smopd.engine.types import Rollout

BINARY = "application/octet-stream"
SLACK = 1e-2  # ours, nats and mass: rounding of fp16 on the way and of a server's bf16 logits


def pack_request(rollouts: Sequence[Rollout]) -> bytes:
    pieces = [
        piece for r in rollouts for piece in (torch.tensor(r.prompt_ids, dtype=torch.int64), r.response_ids)
    ]
    lengths = [[len(r.prompt_ids), len(r.response_ids)] for r in rollouts]
    return save(
        {"tokens": torch.cat(pieces).int(), "lengths": torch.tensor(lengths, dtype=torch.int32).view(-1, 2)}
    )


def pack_given(rollouts: Sequence[Rollout], ids_NU: Tensor, token_logps_N: Tensor) -> bytes:
    """A request for the log-probabilities of ids, beside the sampled tokens' own as they are known."""
    more = {"ids_NU": ids_NU.int().contiguous(), "token_logps_N": token_logps_N.float().contiguous()}
    return save(load(pack_request(rollouts)) | more)


def unpack_given(content: bytes, vocabulary: int, rows: int) -> tuple[list[Rollout], Tensor, Tensor]:
    """rows: of the teacher, which the ids are below. Raises as unpack_request."""
    rollouts, tensors = unpack_request(content, vocabulary), load(content)
    n_tokens = sum(len(rollout.response_ids) for rollout in rollouts)
    ids_NU, token_logps_N = tensors["ids_NU"], tensors["token_logps_N"]
    if ids_NU.dtype != torch.int32 or ids_NU.dim() != 2 or len(ids_NU) != n_tokens:
        raise ValueError(
            f"ids_NU is {ids_NU.dtype} {tuple(ids_NU.shape)}, expected torch.int32 ({n_tokens}, U)"
        )
    if bool(((ids_NU < 0) | (ids_NU >= rows)).any()):
        raise ValueError(f"ids_NU holds ids outside [0, {rows})")
    _require("token_logps_N", token_logps_N, (n_tokens,), (torch.float32,))
    check_logprobs("token_logps_N", token_logps_N)
    return rollouts, ids_NU, token_logps_N


def unpack_request(content: bytes, vocabulary: int) -> list[Rollout]:
    """Raises ValueError, KeyError or SafetensorError: it is no request over this vocabulary."""
    tensors = load(content)
    tokens, lengths = tensors["tokens"], tensors["lengths"]
    for name, found, dims in (("tokens", tokens, 1), ("lengths", lengths, 2)):
        if found.dtype != torch.int32 or found.dim() != dims:
            raise ValueError(
                f"{name} is {found.dtype} {tuple(found.shape)}, expected int32 of {dims} dimensions"
            )
    if lengths.shape[1] != 2 or bool((lengths < 0).any()) or int(lengths.sum()) != len(tokens):
        raise ValueError(f"lengths are not (R, 2) that sum to {len(tokens)} tokens")
    if bool((lengths[:, 0] == 0).any()):
        raise ValueError("lengths has an empty prompt, expected at least one token")
    if bool(((tokens < 0) | (tokens >= vocabulary)).any()):
        raise ValueError(f"tokens holds ids outside [0, {vocabulary})")
    rollouts: list[Rollout] = []
    pieces = iter(tokens.long().split(lengths.flatten().tolist()))
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


def unpack_answer(content: bytes, n_tokens: int, kappa: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """ids (N, S) int32, log-probabilities (N, S) and the tokens' own (N,), fp32; ids dropped.

    Raises:
        ValueError: it is no answer for `n_tokens` tokens and `kappa`; says why.
        KeyError, SafetensorError: the same.
    """
    tensors = load(content)
    for name, shape, dtypes in (
        ("ids_NS", (n_tokens, kappa), (torch.int32,)),
        ("logps_NS", (n_tokens, kappa), (torch.float16, torch.float32)),
        ("token_logps_N", (n_tokens,), (torch.float32,)),
        ("dropped", (), (torch.int64,)),
    ):
        _require(name, tensors[name], shape, dtypes)
    answer = tensors["ids_NS"], tensors["logps_NS"].float(), tensors["token_logps_N"]
    dropped = int(tensors["dropped"])
    most = n_tokens * (kappa + 1)
    if not 0 <= dropped <= most:
        raise ValueError(f"dropped is {dropped}, expected 0 to {most}")
    check_values(*answer, may_be_empty=dropped > 0)
    return *answer, dropped


def pack_values(logps_NU: Tensor, dtype: torch.dtype) -> bytes:
    return save({"logps_NU": logps_NU.to(dtype).cpu().contiguous()})


def unpack_values(content: bytes, n_tokens: int, n_given: int) -> Tensor:
    """(N, U) fp32. Raises as unpack_answer."""
    logps_NU = load(content)["logps_NU"]
    _require("logps_NU", logps_NU, (n_tokens, n_given), (torch.float16, torch.float32))
    check_logprobs("logps_NU", logps_NU)
    return logps_NU.float()


def _require(name: str, found: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    if found.shape != shape or found.dtype not in dtypes:
        raise ValueError(f"{name} is {found.dtype} {tuple(found.shape)}, expected {dtypes[0]} {shape}")


def check_values(
    ids_NS: Tensor, logps_NS: Tensor, token_logps_N: Tensor, *, may_be_empty: bool = False
) -> None:
    """Raises ValueError: these are no log-probabilities of a row's largest tokens and of its own.

    may_be_empty: a row may hold no entry at all.
    """
    check_logprobs("logps_NS", logps_NS)
    check_logprobs("token_logps_N", token_logps_N)
    if not ids_NS.numel():
        return
    mass = float(logps_NS.double().exp().sum(-1).max())
    if mass > 1.0 + SLACK:
        raise ValueError(f"logps_NS has a row of mass {mass:.6g}, expected at most 1")
    held_NS = logps_NS > -torch.inf
    if bool((ids_NS < 0).any()):
        raise ValueError(f"ids_NS holds {int(ids_NS.min())}, expected ids of at least 0")
    if not may_be_empty and not bool(held_NS.any(-1).all()):
        raise ValueError("logps_NS has a row without an entry, expected the largest tokens")
    slots_S = torch.arange(ids_NS.shape[1], dtype=torch.int64)
    distinct_NS = torch.where(held_NS, ids_NS.long(), -1 - slots_S).sort(-1).values
    if bool((distinct_NS[:, 1:] == distinct_NS[:, :-1]).any()):
        raise ValueError("ids_NS names an id twice in a row, expected different ones")


def check_logprobs(name: str, logps: Tensor) -> None:
    """Raises ValueError: one is neither -inf nor finite and at most 0, up to rounding."""
    bad = ~(logps <= SLACK)  # NaN among them
    if bool(bad.any()):
        raise ValueError(f"{name} holds {float(logps[bad][0]):g}, expected log-probabilities of at most 0")
