"""The calls of our Triton launchers that stand for all that ships (see offline.py)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from smopd.kernels.triton import advantages as triton_advantages
from smopd.kernels.triton import draw as triton_draw
from smopd.kernels.triton import loss as triton_loss
from smopd.kernels.triton import mixture as triton_mixture
from smopd.kernels.triton import product as triton_product
from smopd.kernels.triton import scale as triton_scale
from smopd.kernels.triton import topk as triton_topk
from smopd.kernels.triton import totals as triton_totals
from smopd.kernels.types import (
    AdvantageOptions,
    Candidates,
    KlOptions,
    LossSettings,
    LossTokens,
    SparseTarget,
    TokenTerms,
)
from tests.kernels.pairwise import pairwise

MODULES = sorted(
    f"smopd.kernels.triton.{path.stem}" for path in Path(triton_topk.__file__).parent.glob("*.py")
)
N = 512
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KAPPAS = (16, 64, 128)

Case = tuple[str, Callable[[], Any]]  # label, call


def cases() -> Iterator[Case]:
    """The calls, on tensors without memory."""
    rows = (
        _topk(),
        _mixture(),
        _product(),
        _loss(),
        _totals(),
        _forward_kl(),
        _advantages(),
        _scale(),
        _draw(),
    )
    return itertools.chain(*rows)


def _name(row: dict[str, Any]) -> str:
    """A case's label: values by themselves where they speak, flags by their name, what is off left out."""
    words = []
    for name, value in row.items():
        if isinstance(value, torch.dtype):
            words.append(SHORT.get(value, str(value).removeprefix("torch.")))
        elif isinstance(value, bool) or value is None:
            words += [name] if value else []
        else:
            words.append(value if isinstance(value, str) else f"{name}{value}")
    return "-".join(words)


def _logits(row: dict[str, Any]) -> torch.Tensor:
    return torch.empty(N, row["V"], dtype=row["dtype"], device="meta")


def _column(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(N, dtype=dtype, device="meta")


def _ids(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _logps(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def _candidates(n_teachers: int, kappa: int, merge: bool) -> Candidates:
    shape = (N, n_teachers, kappa)
    return Candidates(_ids(*shape), _logps(*shape), _logps(n_teachers), kappa, merge)


def _rows(main: list[dict], factors: dict) -> Iterator[dict]:
    """What matters most, then what covers all pairs of values."""
    rows = main + pairwise(factors)
    for number, row in enumerate(rows):
        if row not in rows[:number]:
            yield row


def _topk() -> Iterator[Case]:
    """Few of large kappa: their selection takes long to compile."""
    bf16, fp16, fp32 = DTYPES
    rows = [
        (151_936, bf16, 16, True),
        (151_936, bf16, 64, False),
        (151_936, bf16, 128, True),
        (152_064, bf16, 16, False),
        (32_000, bf16, 32, True),
        (265, bf16, 16, True),
        (151_936, fp16, 16, True),
        (265, fp16, 64, False),
        (151_936, fp32, 16, False),
        (151_936, fp32, 64, True),
        (265, fp32, 16, True),
        (151_936, bf16, 0, True),
        (265, fp32, 0, True),
        (151_936, fp16, 128, True),
        (151_936, fp32, 128, True),
        (500_000, fp32, 128, True),  # the most keys to select from
    ]
    for n_vocab, dtype, kappa, has_tokens in rows:
        row = {"V": n_vocab, "dtype": dtype, "kappa": kappa, "tokens": has_tokens}
        tokens = _column(torch.int64) if has_tokens else None
        arguments = (_logits(row), kappa)
        yield (
            _name(row),
            lambda a=arguments, t=tokens: triton_topk.topk_logprobs(*a, token_ids_N=t),
        )


def _mixture() -> Iterator[Case]:
    factors = {
        "M": (1, 2, 4, 8),
        "kappa": KAPPAS,
        "merge": (False, True),
        "ids": (torch.int32, torch.int64),
        "by_token": (False, True),
    }
    main = [
        {"M": 2, "kappa": 16, "merge": merge, "ids": torch.int32, "by_token": False}
        for merge in (False, True)
    ]
    for row in _rows(main, factors):
        n_teachers, kappa = row["M"], row["kappa"]
        if n_teachers * kappa > triton_mixture.MAX_CANDIDATES:
            continue
        ids, logps = _ids(N, n_teachers, kappa, dtype=row["ids"]), _logps(N, n_teachers, kappa)
        log_alpha = _logps(N, n_teachers) if row["by_token"] else _logps(n_teachers)
        arguments = (ids, logps, log_alpha, kappa)
        yield (
            _name(row),
            lambda a=arguments, m=row["merge"]: triton_mixture.teacher_mixture(*a, merge=m),
        )


def _product() -> Iterator[Case]:
    """M models, the reference among them, each with the union of their kappa best."""
    factors = {
        "M": (2, 3, 5, 8),
        "kappa": KAPPAS,
        "ids": (torch.int32, torch.int64),
        "by_token": (False, True),
        "limits": (False, True),
    }
    main = [{"M": 3, "kappa": 16, "ids": torch.int32, "by_token": False, "limits": False}]
    for row in _rows(main, factors):
        n_models, kappa = row["M"], row["kappa"]
        shape = (N, n_models, min(n_models * kappa, triton_product.MAX_SUPPORT))
        weights = _logps(N, n_models - 1) if row["by_token"] else _logps(n_models - 1)
        arguments = (_ids(*shape, dtype=row["ids"]), _logps(*shape), weights, kappa)
        limits = (4.0, 0.5) if row["limits"] else (math.inf, math.inf)
        options = {"reference": n_models - 1, "clip": limits[0], "keep_raised": limits[1]}
        label = f"product-{_name(row)}"
        yield label, lambda a=arguments, o=options: triton_product.teacher_product(*a, **o)


TARGETS = ("none", "sparse", "M1", "M2", "M4")
GRADIENTS = ("no-grad", "own", "in-place")


def _loss() -> Iterator[Case]:
    factors = {
        "V": (151_936, 32_000, 265),
        "dtype": DTYPES,
        "target": TARGETS,
        "kappa": KAPPAS,
        "merge": (False, True),
        "tail": (False, True),
        "entropy": (False, True),
        "twoT": (False, True),
        "gradient": GRADIENTS,
        "extras": (False, True),
    }
    plain = dict.fromkeys(("merge", "tail", "entropy", "twoT", "extras"), False)
    qwen = {
        "V": 151_936,
        "dtype": torch.bfloat16,
        "target": "M2",
        "kappa": 16,
        **plain,
        "gradient": "in-place",
    }
    main = [
        qwen,
        qwen | {"entropy": True},
        qwen | {"merge": True, "tail": True},
        qwen | {"merge": True, "tail": True, "entropy": True, "twoT": True},
        qwen | {"V": 152_064, "target": "sparse", "kappa": 64, "tail": True},
        qwen | {"dtype": torch.float32, "merge": True, "tail": True},
    ]
    for row in itertools.chain(_rows(main, factors), _loss_sizes(qwen)):
        settings = _loss_settings(row)
        logits = _logits(row)
        grad = {"no-grad": None, "own": torch.empty_like(logits), "in-place": logits}[row["gradient"]]
        arguments = (logits, _loss_tokens(row), settings, grad)
        yield _name(row), lambda a=arguments: triton_loss.loss_rows(*a)


def _loss_sizes(plain: dict[str, Any]) -> Iterator[dict]:
    """Numbers of warps, rows that start anywhere (an odd V), and rows of large blocks."""
    factors = {
        "V": (5_000, 10_000, 50_257, 151_937, 500_000),
        "dtype": DTYPES,
        "target": ("sparse", "M2"),
        "kappa": (16, 64),
        "tail": (True, False),
        "entropy": (False, True),
        "gradient": ("in-place", "no-grad"),
    }
    main = [
        {"V": n_vocab, "dtype": dtype, "tail": tail}
        for n_vocab, dtype, tail in (
            (3_000, DTYPES[2], True),
            (3_001, DTYPES[0], True),
            (5_001, DTYPES[1], False),
        )
    ]
    longest = triton_loss.MAX_VOCAB - 1
    ends = [
        {"V": n_vocab, "dtype": dtype, "target": "sparse", "kappa": kappa}
        for n_vocab, dtype, kappa in (
            (265, DTYPES[0], 265),
            (265, DTYPES[2], 265),
            (151_936, DTYPES[0], triton_loss.MAX_SUPPORT),
            *((longest, dtype, 16) for dtype in DTYPES),
            (300_000, DTYPES[2], 128),
        )
    ]
    hard = {"tail": True, "entropy": True}
    for row in main + pairwise(factors):
        yield plain | row
    for row in ends:
        yield plain | hard | row
        yield plain | hard | row | {"twoT": True}
    yield plain | {"V": longest, "dtype": DTYPES[1], "target": "sparse", "kappa": 16, "tail": True}


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
    """extras: the sampled reverse KL and the dual clip, and no behaviour policy."""
    columns: dict[str, Any] = {"ent_weight_N": _column() if row["entropy"] else None}
    if row["extras"]:
        columns |= {"reverse_adv_N": _column(), "reverse_weight_N": _column()}
    else:
        columns["old_logp_N"] = _column()
    if row["target"] == "sparse":
        columns |= {"target_ids_NS": _ids(N, row["kappa"]), "target_logps_NS": _logps(N, row["kappa"])}
    elif row["target"] != "none":
        teachers = _candidates(int(row["target"][1:]), row["kappa"], row["merge"])
        columns |= {"teacher_ids_NMS": teachers.ids_NMS, "teacher_logps_NMS": teachers.logps_NMS}
        columns["log_alpha"] = teachers.log_alpha
    if row["target"] != "none":
        columns["kl_weight_N"] = _column()
    return LossTokens(token_ids_N=_column(torch.int64), adv_N=_column(), pg_weight_N=_column(), **columns)


def _totals() -> Iterator[Case]:
    columns = torch.empty(7, N, device="meta").unbind(0)
    terms = TokenTerms(*columns[:5], _column(torch.int8), *columns[5:])
    settings = LossSettings(entropy_coef=0.01)
    for name in ("all", "anchor"):
        weights = {f"{weight}_weight_N": _column() for weight in ("kl", "ent", "reverse") if name == "all"}
        tokens = LossTokens(
            token_ids_N=_column(torch.int64), adv_N=_column(), pg_weight_N=_column(), **weights
        )
        yield f"totals-{name}", lambda t=tokens: triton_totals.total_loss(terms, t, settings)


def _forward_kl() -> Iterator[Case]:
    factors = {
        "V": (151_936, 265),
        "dtype": DTYPES,
        "target": ("sparse", "M2"),
        "kappa": (16, 128),
        "tail": (False, True),
    }
    qwen = {"V": 151_936, "dtype": torch.bfloat16, "target": "sparse", "kappa": 16}
    main = [qwen | {"tail": tail, "upstream": upstream} for tail, upstream in ((False, "both"), (True, "kl"))]
    for row in _rows(main, factors):
        target: SparseTarget | Candidates = _candidates(2, row["kappa"], True)
        if row["target"] == "sparse":
            target = SparseTarget(_ids(N, row["kappa"]), _logps(N, row["kappa"]))
        options = KlOptions(tail=row["tail"], temperature=1.0)
        arguments = (_logits(row), _column(torch.int64), target, options)
        kl_alone = row.get("upstream") == "kl"
        both = (*arguments, None if kl_alone else _column(), _column(), _logps(4, N))
        label = f"kl-{_name(row)}"
        yield label, lambda a=arguments: triton_loss.forward_kl_rows(*a)
        yield label, lambda a=both: triton_loss.forward_kl_gradient(*a)


def _advantages() -> Iterator[Case]:
    factors = {
        "op": ("grpo", "gdpo", "gd2po"),
        "K": (1, 2, 4, 8, 32),
        "weighted": (False, True),
        "whiten": ("responses", "tokens", "unwhitened"),
        "snr": (False, True),
        "ranks": (False, True),
    }
    for row in _rows([], factors):
        rewards, group = _logps(N, row["K"]), _ids(N, dtype=torch.int64)
        whiten = None if row["whiten"] == "unwhitened" or row["op"] == "grpo" else row["whiten"]
        options = AdvantageOptions(
            row["op"],
            weights_K=_logps(row["K"]) if row["weighted"] else None,
            lengths_R=_column(torch.int64) if whiten == "tokens" else None,
            whiten=whiten,
            snr_threshold=0.2 if row["snr"] and row["op"] == "gd2po" else None,
        )
        ranks = "four ranks" if row["ranks"] and whiten else None
        yield _name(row), lambda r=rewards, g=group, o=options, n=ranks: _on_four_ranks(r, g, o, n)


def _on_four_ranks(
    rewards: torch.Tensor, group: torch.Tensor, options: AdvantageOptions, ranks: str | None
) -> None:
    with (
        mock.patch.object(torch.distributed, "get_world_size", lambda _: 4),
        mock.patch.object(torch.distributed, "get_rank", lambda _: 1),
        mock.patch.object(torch.distributed, "all_reduce", lambda _, group: None),
    ):
        triton_advantages.advantages(rewards, group, options, ranks)


def _scale() -> Iterator[Case]:
    for dtype in DTYPES:
        grad = torch.empty(N, 151_936, dtype=dtype, device="meta")
        yield (
            f"scale-{SHORT[dtype]}",
            lambda g=grad: triton_scale.scale_(g, torch.empty((), device="meta")),
        )
    sums = torch.empty(151_936, 2048, device="meta")
    rounded = torch.empty_like(sums, dtype=torch.bfloat16)
    yield "scale-fp32-to-bf16", lambda: triton_scale.scale_(sums, sums.new_empty(()), rounded)


def _draw() -> Iterator[Case]:
    uniform = torch.empty(N, dtype=torch.float64, device="meta")
    for dtype in DTYPES:
        logits = torch.empty(N, 151_936, dtype=dtype, device="meta")
        yield f"draw-{SHORT[dtype]}", lambda x=logits: triton_draw.draw(x, 0.7, uniform)
