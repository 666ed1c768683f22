"""The C++ backend, smopd._C (csrc/cpu). Log-probabilities and weights are passed as fp32."""

import functools
import importlib
import logging
import math

import torch
from torch import Tensor

from smopd.kernels.types import LossSettings, LossTokens, Mixture, TokenTerms, TopK, loss_target

log = logging.getLogger(__name__)

LOSS_ARGUMENTS = 25  # of loss_rows_cpu in csrc/module.cpp


@functools.cache
def unavailable() -> str | None:
    """Return why smopd._C cannot be loaded, or None if it can be. If it was built, also log a warning."""
    try:
        importlib.import_module("smopd._C")
        schema = torch.ops.smopd.loss_rows_cpu.default._schema
        if len(schema.arguments) != LOSS_ARGUMENTS:
            raise ImportError("it is from other sources; reinstall smopd")
    except ModuleNotFoundError:
        return "smopd._C was not built"
    except (ImportError, OSError, AttributeError) as error:
        log.warning("smopd._C cannot be loaded: %s; the slower reference backend is used", error)
        return f"smopd._C cannot be loaded ({error})"
    return None


def topk_logprobs(
    logits_NV: Tensor, kappa: int, *, token_ids_N: Tensor | None = None, temperature: float = 1.0
) -> TopK:
    ids_NS, logps_NS, token_logp_N = torch.ops.smopd.topk_logprobs_cpu(
        logits_NV.detach(), kappa, token_ids_N, temperature
    )
    return TopK(ids_NS, logps_NS, None if token_ids_N is None else token_logp_N)


class RunningTopK:
    """Computes topk_logprobs from consecutive vocabulary pieces, with the same bits as a single call."""

    step = 2048  # kBlockLength. The width of each piece except the last is a multiple of it

    def __init__(self, like: Tensor, n_rows: int, kappa: int, token_ids_N: Tensor | None, temperature: float):
        self.kappa, self.token_ids_N, self.temperature = kappa, token_ids_N, temperature
        self.known = torch.ops.smopd.topk_begin_cpu(like, n_rows, kappa)

    def add(self, logits_NP: Tensor, first: int) -> None:
        options = (first, self.kappa, self.token_ids_N, self.temperature)
        torch.ops.smopd.topk_piece_cpu(logits_NP.detach(), *options, *self.known)

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return ids, logps, token_logp and valid, (N,) bool. Without tokens, token_logp has shape (0,).

        If kappa is above 0, a row with a NaN or with fewer than kappa logits above -inf is not valid.
        """
        options = (self.kappa, self.token_ids_N is not None, self.temperature)
        return torch.ops.smopd.topk_end_cpu(*self.known, *options)


def teacher_mixture(
    ids_NMS: Tensor, logps_NMS: Tensor, log_alpha: Tensor, kappa: int, *, merge: bool = False
) -> Mixture:
    log_alpha_NM = _float(log_alpha).expand(ids_NMS.shape[:2])
    return Mixture(
        *torch.ops.smopd.teacher_mixture_cpu(ids_NMS, _float(logps_NMS), log_alpha_NM, kappa, merge)
    )


def loss_rows(
    logits_NV: Tensor,
    tokens: LossTokens,
    settings: LossSettings,
    grad_NV: Tensor | None,
    *,
    entropy: bool = True,
) -> TokenTerms:
    columns = [tokens.adv_N, tokens.pg_weight_N, tokens.old_logp_N, tokens.kl_weight_N, tokens.ent_weight_N]
    columns += [tokens.reverse_adv_N, tokens.reverse_weight_N]  # in the order of the operator's schema
    target = loss_target(tokens, settings)
    given: tuple = (None, None, None, 0, False)
    if target is not None:
        log_alpha = target.log_alpha
        log_alpha_NM = None if log_alpha is None else _float(log_alpha).expand(target.ids.shape[:2])
        given = (target.ids, _float(target.logps), log_alpha_NM, target.kappa, target.merge)
    terms = torch.ops.smopd.loss_rows_cpu(
        logits_NV.detach(),
        tokens.token_ids_N,
        *(None if column is None else _float(column) for column in columns),
        *given,
        settings.tail,
        settings.clip_low,
        settings.clip_high,
        math.inf if settings.dual_clip is None else settings.dual_clip,
        settings.opd_coef,
        settings.entropy_coef,
        settings.temperature,
        settings.kl_temperature,
        settings.reverse_kl_surrogate == "ppo",
        entropy or settings.entropy_coef != 0.0,
        None if grad_NV is None else grad_NV.detach(),
    )
    return TokenTerms(*terms)


def _float(value: Tensor) -> Tensor:
    return value.detach().float()
