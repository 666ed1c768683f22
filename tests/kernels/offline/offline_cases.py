"""The launcher calls that represent all shipped variants of the Triton kernels."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from smopd.kernels.triton import advantages as triton_advantages
from smopd.kernels.triton import draw as triton_draw
from smopd.kernels.triton import loss as triton_loss
from smopd.kernels.triton import mixture as triton_mixture
from smopd.kernels.triton import scale as triton_scale
from smopd.kernels.triton import topk as triton_topk
from smopd.kernels.triton import totals as triton_totals
from smopd.kernels.types import AdvantageOptions, LossSettings, LossTokens, TokenTerms
from tests.kernels.pairwise import pairwise

MODULES = sorted(
    f"smopd.kernels.triton.{path.stem}" for path in Path(triton_topk.__file__).parent.glob("*.py")
)
N = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KAPPAS = (16, 64, 128)
N_ARCHITECTURES = 3  # of offline_launches.CAPABILITIES

Case = tuple[str, Callable[[], Any]]  # label, call


def cases(architecture: int) -> Iterator[Case]:
    """Yield the calls for the first, second or third architecture, on tensors without memory.

    The main cases go to all architectures; the combinations of all pairs of values are divided among them.
    """
    groups = (_topk, _mixture, _loss, _totals, _advantages, _scale, _draw)
    return itertools.chain.from_iterable(group(architecture) for group in groups)


def _name(row: dict[str, Any]) -> str:
    """Return the label of a case."""
    words = []
    for name, value in row.items():
        if isinstance(value, torch.dtype):
            words.append(SHORT.get(value, str(value).removeprefix("torch.")))
        elif isinstance(value, bool) or value is None:
            words += [name] if value else []
        else:
            words.append(value if isinstance(value, str) else f"{name}{value}")
    return "-".join(words)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _rows(main: list[dict], rest: list[dict], architecture: int) -> Iterator[dict]:
    yield from main
    yield from (row for row in rest[architecture::N_ARCHITECTURES] if row not in main)


def _topk(architecture: int) -> Iterator[Case]:
    """Yield only a few cases with large kappa, which take long to compile."""
    bf16, fp16, fp32 = DTYPES
    names = ("V", "dtype", "kappa", "tokens")
    main = [(151_936, bf16, 16, True), (151_936, fp16, 16, True), (151_936, fp32, 16, False)]
    rest = [
        (151_936, bf16, 128, True),
        (32_000, bf16, 32, True),
        (265, bf16, 16, True),
        (265, fp16, 64, False),
        (265, fp32, 16, True),
        (151_936, bf16, 0, True),
        (265, fp32, 0, True),
        (151_936, fp16, 128, True),
        (151_936, fp32, 128, True),
        (500_000, fp32, 128, True),  # the most keys to select from
    ]
    named = ([dict(zip(names, row, strict=True)) for row in rows] for rows in (main, rest))
    for row in _rows(*named, architecture):
        tokens = _meta(N, dtype=torch.int64) if row["tokens"] else None
        logits = _meta(N, row["V"], dtype=row["dtype"])
        yield _name(row), partial(triton_topk.topk_logprobs, logits, row["kappa"], token_ids_N=tokens)


def _mixture(architecture: int) -> Iterator[Case]:
    factors = {
        "M": (1, 2, 4, 8),
        "kappa": KAPPAS,
        "merge": (False, True),
        "ids": (torch.int32, torch.int64),
        "by_token": (False, True),
    }
    two = {"M": 2, "kappa": 16, "merge": False, "ids": torch.int32, "by_token": False}
    main = [two, two | {"merge": True}]
    for row in _rows(main, pairwise(factors), architecture):
        n_teachers, kappa = row["M"], row["kappa"]
        if n_teachers * kappa > triton_mixture.MAX_CANDIDATES:
            continue
        shape = (N, n_teachers, kappa)
        log_alpha = _meta(N, n_teachers) if row["by_token"] else _meta(n_teachers)
        arguments = (_meta(*shape, dtype=row["ids"]), _meta(*shape), log_alpha, kappa)
        yield _name(row), partial(triton_mixture.teacher_mixture, *arguments, merge=row["merge"])


def _loss(architecture: int) -> Iterator[Case]:
    """Yield the main cases, all pairs of values, and extreme sizes."""
    bf16, fp16, fp32 = DTYPES
    plain = dict.fromkeys(("merge", "tail", "entropy", "twoT", "extras"), False)
    qwen = {"V": 151_936, "dtype": bf16, "target": "M2", "kappa": 16, **plain, "gradient": "in-place"}
    main = [qwen, qwen | {"entropy": True}, qwen | {"merge": True, "tail": True}]
    others = [
        qwen | {"V": 152_064, "target": "sparse", "kappa": 64, "tail": True},
        qwen | {"V": 500_000, "target": "sparse", "tail": True},
        qwen | {"dtype": fp32, "merge": True, "tail": True},
        qwen | {"V": 5_000, "dtype": fp32, "tail": True},
        qwen | {"V": 32_000, "target": "none"},
        qwen | {"merge": True, "tail": True, "entropy": True, "twoT": True},
    ]
    factors = {
        "V": (151_936, 32_000, 265, 50_257),
        "dtype": DTYPES,
        "target": ("none", "sparse", "M2"),
        "kappa": KAPPAS,
        "merge": (False, True),
        "tail": (False, True),
        "entropy": (False, True),
        "twoT": (False, True),
        "gradient": ("no-grad", "own", "in-place"),
        "extras": (False, True),
    }
    hard = qwen | {"target": "sparse", "tail": True, "entropy": True}
    longest, most = triton_loss.MAX_VOCAB - 1, triton_loss.MAX_SUPPORT
    ends = [
        hard | {"V": 265, "dtype": fp32, "kappa": 265, "twoT": True},
        hard | {"kappa": most, "twoT": True},
        *(hard | {"V": longest, "dtype": dtype} for dtype in DTYPES),
        hard | {"V": longest, "dtype": fp32, "twoT": True},
        hard | {"V": longest, "dtype": fp16, "entropy": False},
    ]
    for row in _rows(main, others + pairwise(factors) + ends, architecture):
        logits = _meta(N, row["V"], dtype=row["dtype"])
        grad = {"no-grad": None, "own": torch.empty_like(logits), "in-place": logits}[row["gradient"]]
        arguments = (logits, _loss_tokens(row), _loss_settings(row), grad)
        yield _name(row), partial(triton_loss.loss_rows, *arguments)


def _loss_settings(row: dict[str, Any]) -> LossSettings:
    return LossSettings(
        kappa=row["kappa"],
        merge=row["merge"],
        tail=row["tail"],
        entropy_coef=0.01 if row["entropy"] else 0.0,
        temperature=0.7 if row["twoT"] else 1.0,
        dual_clip=3.0 if row["extras"] else None,
        reverse_kl_surrogate="ppo" if row["extras"] else "paper",
    )


def _loss_tokens(row: dict[str, Any]) -> LossTokens:
    """Build tokens; extras: with the sampled reverse KL and the dual clip, without old log-probabilities."""
    shape: tuple[int, ...] = (N, row["kappa"])
    columns: dict[str, Any] = {"ent_weight_N": _meta(N) if row["entropy"] else None}
    if row["extras"]:
        columns |= {"reverse_adv_N": _meta(N), "reverse_weight_N": _meta(N)}
    else:
        columns["old_logp_N"] = _meta(N)
    if row["target"] == "sparse":
        columns |= {"target_ids_NS": _meta(*shape, dtype=torch.int32), "target_logps_NS": _meta(*shape)}
    elif row["target"] != "none":
        shape = (N, int(row["target"][1:]), row["kappa"])
        columns |= {"teacher_ids_NMS": _meta(*shape, dtype=torch.int32), "teacher_logps_NMS": _meta(*shape)}
        columns["log_alpha"] = _meta(shape[1])
    if row["target"] != "none":
        columns["kl_weight_N"] = _meta(N)
    return LossTokens(
        token_ids_N=_meta(N, dtype=torch.int64), adv_N=_meta(N), pg_weight_N=_meta(N), **columns
    )


def _totals(_: int) -> Iterator[Case]:
    columns = _meta(7, N).unbind(0)
    terms = TokenTerms(*columns[:5], _meta(N, dtype=torch.int8), *columns[5:])
    for name in ("all", "anchor"):
        weights = {f"{weight}_weight_N": _meta(N) for weight in ("kl", "ent", "reverse") if name == "all"}
        tokens = LossTokens(token_ids_N=_meta(N), adv_N=_meta(N), pg_weight_N=_meta(N), **weights)
        settings = LossSettings(entropy_coef=0.01)
        yield f"totals-{name}", partial(triton_totals.total_loss, terms, tokens, settings)


def _advantages(architecture: int) -> Iterator[Case]:
    factors = {
        "op": ("grpo", "gdpo", "gd2po"),
        "K": (1, 2, 4, 8, 32),
        "weighted": (False, True),
        "whiten": ("responses", "tokens", "unwhitened"),
        "snr": (False, True),
        "ranks": (False, True),
    }
    for row in _rows([], pairwise(factors), architecture):
        whiten = None if row["whiten"] == "unwhitened" or row["op"] == "grpo" else row["whiten"]
        options = AdvantageOptions(
            row["op"],
            weights_K=_meta(row["K"]) if row["weighted"] else None,
            lengths_R=_meta(N, dtype=torch.int64) if whiten == "tokens" else None,
            whiten=whiten,
            snr_threshold=0.2 if row["snr"] and row["op"] == "gd2po" else None,
        )
        arguments = (_meta(N, row["K"]), _meta(N, dtype=torch.int64), options)
        several = "four ranks" if row["ranks"] and whiten else None
        yield _name(row), partial(_on_four_ranks, *arguments, several)


def _on_four_ranks(*arguments: Any) -> None:
    with (
        mock.patch.object(torch.distributed, "get_world_size", lambda _: 4),
        mock.patch.object(torch.distributed, "get_rank", lambda _: 1),
        mock.patch.object(torch.distributed, "all_reduce", lambda _, group: None),
    ):
        triton_advantages.advantages(*arguments)


def _scale(_: int) -> Iterator[Case]:
    for dtype in DTYPES:
        grad = _meta(N, 151_936, dtype=dtype)
        yield f"scale-{SHORT[dtype]}", partial(triton_scale.scale_, grad, _meta())
    sums = _meta(151_936, 2048)
    rounded = torch.empty_like(sums, dtype=torch.bfloat16)
    yield "scale-fp32-to-bf16", partial(triton_scale.scale_, sums, _meta(), rounded)


def _draw(_: int) -> Iterator[Case]:
    for dtype in DTYPES:
        arguments = (_meta(N, 151_936, dtype=dtype), 0.7, _meta(N, dtype=torch.float64))
        yield f"draw-{SHORT[dtype]}", partial(triton_draw.draw, *arguments)
