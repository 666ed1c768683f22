"""What the operations' torch.library operators smopd::… share.

An operation's file has the public function, which checks its arguments and calls the operator, and then the
operator: schema, fake kernel, autograd formula. torch.compile and torch.export see one node each. Every
implementation asks dispatch which backend serves the call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from smopd.kernels.types import Candidates, SparseTarget, compute_dtype


def operator(name: str, schema: str) -> Callable[[Callable], Any]:
    return torch.library.custom_op(f"smopd::{name}", mutates_args=(), schema=schema)


def empty_column(like: Tensor, *shape: Any, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor on like's device, of the dtype that rows like these are computed in."""
    return like.new_empty(shape, dtype=dtype or compute_dtype(like.dtype))


def target_facts(target: SparseTarget | Candidates) -> dict[str, int]:
    """dispatch.serving's facts of a target."""
    if isinstance(target, SparseTarget):
        return {"n_support": target.ids_NS.shape[1]}
    return {"n_support": target.kappa, "n_pooled": target.ids_NMS.shape[1] * target.ids_NMS.shape[2]}
