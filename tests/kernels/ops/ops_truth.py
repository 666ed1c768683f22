"""The operations written again for the tests, slowly: dense log-softmax, autograd, rows in a loop.

Nothing here is shared with smopd.kernels. A target is a list of (id, log-probability) pairs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from smopd.ops import LossSettings, LossTokens

# gradcheck's options beside a comparison with the dense gradient, number by number: one random projection of
# the whole Jacobian, held ten times closer, instead of two calls for each number.
ALL_AT_ONCE = {"fast_mode": True, "atol": 1e-8, "rtol": 1e-4}


def random_topk(
    n_rows: int, n_vocab: int, n_support: int, seed: int, dtype=torch.float64
) -> tuple[Tensor, Tensor]:
    """Distinct ids (N, S) and the log-probabilities of a random softmax."""
    logits = 2.0 * torch.randn(n_rows, n_vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    logps, ids = logits.log_softmax(-1).topk(n_support, dim=-1)
    return ids, logps


def random_teachers(
    n_rows: int, n_teachers: int, n_vocab: int, n_support: int, seed: int, dtype=torch.float64
):
    parts = [random_topk(n_rows, n_vocab, n_support, seed + 100 * m, dtype) for m in range(n_teachers)]
    return torch.stack([ids for ids, _ in parts], 1), torch.stack([logps for _, logps in parts], 1)


def mixture_row(candidates: list[tuple[int, float]], kappa: int, merge: bool) -> list[tuple[int, float]]:
    """candidates: (id, log alpha + log p) in the teachers' order."""
    live = [(token, logp) for token, logp in candidates if logp > -math.inf]
    if merge:
        sums: dict[int, float] = {}
        for token, logp in live:
            sums[token] = sums.get(token, 0.0) + math.exp(logp)
        live = sorted((token, math.log(mass)) for token, mass in sums.items())
    return sorted(live, key=lambda pair: -pair[1])[:kappa]


def mixture(
    ids: Tensor, logps: Tensor, log_alpha: Tensor, kappa: int, merge: bool
) -> list[list[tuple[int, float]]]:
    n_rows, n_teachers, n_support = ids.shape
    shifts = log_alpha.expand(n_rows, n_teachers)
    rows = []
    for n in range(n_rows):
        pool = [
            (int(ids[n, m, s]), float(logps[n, m, s]) + float(shifts[n, m]))
            for m in range(n_teachers)
            for s in range(n_support)
        ]
        rows.append(mixture_row(pool, kappa, merge))
    return rows


def as_rows(ids: Tensor, logps: Tensor) -> list[list[tuple[int, float]]]:
    return [
        [(int(token), float(logp)) for token, logp in zip(i, p, strict=True) if logp > -math.inf]
        for i, p in zip(ids, logps, strict=True)
    ]


def forward_kl_row(logq: Tensor, target: list[tuple[int, float]], tail: bool) -> Tensor:
    """logq: (V,) the student's log-softmax, float64."""
    if not tail:
        terms = [math.exp(logp) * (logp - logq[token]) for token, logp in target]
        return torch.stack(terms).sum() if terms else logq.new_zeros(())
    masses: dict[int, float] = {}
    for token, logp in target:
        masses[token] = masses.get(token, 0.0) + math.exp(logp)
    total = logq.new_zeros(())
    for token, mass in masses.items():
        if mass > 0:
            total = total + mass * (math.log(mass) - logq[token])
    rest = max(0.0, 1.0 - sum(masses.values()))
    if rest >= 2.0**-20:
        outside = [token for token in range(logq.shape[0]) if token not in masses]
        off = torch.logsumexp(logq[outside], 0) if outside else logq.new_tensor(-math.inf)
        total = total + rest * (math.log(rest) - off)
    return total


def loss(logits: Tensor, tokens: LossTokens, settings: LossSettings) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of smopd_loss and its per-token statistics, in the logits' dtype, by autograd."""
    dtype = logits.dtype
    n_rows = logits.shape[0]
    zeros = torch.zeros(n_rows, dtype=dtype)

    def column(name: str) -> Tensor:
        value = getattr(tokens, name)
        return zeros if value is None else value.to(dtype)

    logq = (logits / settings.temperature).log_softmax(-1)
    kl_logq = (logits / settings.kl_temperature).log_softmax(-1)
    logp = logq[torch.arange(n_rows), tokens.token_ids_N.long()]
    old = logp.detach() if tokens.old_logp_N is None else tokens.old_logp_N.to(dtype)
    ratio = (logp - old).clamp(-20.0, 20.0).exp()
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    adv = column("adv_N")
    surrogate = -torch.minimum(ratio * adv, clipped * adv)
    if settings.dual_clip is not None:
        surrogate = torch.where(adv < 0, torch.minimum(surrogate, -settings.dual_clip * adv), surrogate)
    reverse_adv = column("reverse_adv_N")
    reverse = -clipped * reverse_adv
    if settings.reverse_kl_surrogate == "ppo":
        reverse = -torch.minimum(ratio * reverse_adv, clipped * reverse_adv)
    if tokens.teacher_ids_NMS is not None:
        targets = mixture(
            tokens.teacher_ids_NMS, tokens.teacher_logps_NMS, tokens.log_alpha, settings.kappa, settings.merge
        )
    elif tokens.target_ids_NS is not None:
        targets = as_rows(tokens.target_ids_NS, tokens.target_logps_NS)
    else:
        targets = [[] for _ in range(n_rows)]
    has_target = tokens.teacher_ids_NMS is not None or tokens.target_ids_NS is not None
    kl = zeros
    if has_target and n_rows:
        pairs = zip(kl_logq, targets, strict=True)
        kl = torch.stack([forward_kl_row(row, target, settings.tail) for row, target in pairs])
    entropy = -(logq.exp() * logq).sum(-1)
    reverse_weight = tokens.kl_weight_N if tokens.reverse_weight_N is None else tokens.reverse_weight_N
    reverse_weight = zeros if reverse_weight is None else reverse_weight.to(dtype)
    total = (
        (column("pg_weight_N") * surrogate).sum()
        + settings.opd_coef * ((column("kl_weight_N") * kl).sum() + (reverse_weight * reverse).sum())
        - settings.entropy_coef * (column("ent_weight_N") * entropy).sum()
    )
    teacher_mass = [sum(math.exp(logp) for _, logp in target) for target in targets]
    student_mass = [
        sum(float(row[token].exp()) for token in {token for token, _ in target})
        for row, target in zip(kl_logq.detach(), targets, strict=True)
    ]
    stats = {
        "logp_N": logp,
        "entropy_N": entropy,
        "kl_N": kl,
        "teacher_mass_N": torch.tensor(teacher_mass, dtype=dtype),
        "student_mass_N": torch.tensor(student_mass, dtype=dtype),
        "pg_loss": (column("pg_weight_N") * surrogate).sum(),
        "kl_loss": (column("kl_weight_N") * kl).sum(),
        "entropy": (column("ent_weight_N") * entropy).sum(),
        "reverse_loss": (reverse_weight * reverse).sum(),
    }
    return total, {name: value.detach() for name, value in stats.items()}


def random_tokens(
    n_rows: int, n_vocab: int, logits: Tensor, temperature: float, seed: int, **more
) -> LossTokens:
    """Tokens with every column, ratios on both sides of the clip, some weights 0; more replaces columns."""
    gen = torch.Generator().manual_seed(seed)

    def rand() -> Tensor:
        return torch.rand(n_rows, generator=gen, dtype=torch.float64)

    def randn() -> Tensor:
        return torch.randn(n_rows, generator=gen, dtype=torch.float64)

    token_ids = torch.randint(0, n_vocab, (n_rows,), generator=gen)
    logq = (logits.detach().double() / temperature).log_softmax(-1)
    columns = {
        "token_ids_N": token_ids,
        "adv_N": randn(),
        "pg_weight_N": rand() * (rand() > 0.2),
        "old_logp_N": logq[torch.arange(n_rows), token_ids] + 0.5 * randn(),
        "kl_weight_N": rand() * (rand() > 0.2),
        "ent_weight_N": rand(),
        "reverse_adv_N": randn(),
    }
    return LossTokens(**{**columns, **more})
