"""The shapes, teachers, kappas and dtypes at which every backend's operations are held to float64.

    SMALL         for C++ and GPUs, in every dtype
    FULL          a whole vocabulary, 512 rows; for C++ and GPUs
    INTERPRETED   what Triton's interpreter has the time for; it pays by the row

Letters: N rows, V vocabulary, M teachers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    N: int
    V: int
    M: int
    kappa: int
    dtype: str

    def __str__(self) -> str:
        return f"N{self.N}-V{self.V}-M{self.M}-kappa{self.kappa}-{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


SHAPES = ((1, 7, 1, 3), (41, 1271, 2, 16), (5, 5000, 4, 33))
SMALL = tuple(Case(*shape, dtype) for dtype in DTYPES for shape in SHAPES)
FULL = (Case(512, 151_936, 2, 16, "fp32"), Case(512, 151_936, 2, 16, "bf16"))
INTERPRETED = (
    *(Case(1, 7, 1, 3, dtype) for dtype in DTYPES),
    Case(41, 1271, 2, 16, "bf16"),
    Case(2, 5000, 4, 32, "fp32"),
    Case(2, 5000, 4, 32, "fp16"),
    Case(4, 151_936, 2, 16, "bf16"),
)
