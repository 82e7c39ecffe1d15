"""Dense products in float64, and how far from them a good product may be.

The operands are taken as they are stored, so that only accumulation and the last rounding count. The bound is
componentwise: with u the unit roundoff of the output, v that of the accumulator and gamma(n, v) = n v / (1 - n v),

    |C' - C| <= u |C| + (1 + u) gamma(n, v) |A| |B| + eta

where n is K - 1 for 16-bit operands, whose products are exact in float32, and K for float32 ones. No order of the
additions is assumed: in any tree of sums a term meets at most K - 1 of them (Higham, "Accuracy and Stability of
Numerical Algorithms", 2nd ed., section 4.2). The gauge |A| |B| is that of the Reference BLAS testers (DMMCH).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDOFF: Mapping[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
"""Unit roundoff of rounding to nearest: 2^-p for p significand bits."""
TF32 = 2.0**-11
SQNR_DB: Mapping[torch.dtype, float] = {torch.bfloat16: 52.0, torch.float16: 68.0, torch.float32: 110.0}
"""Floors for products of normal data with K up to 1024. One rounding to p bits leaves 6.02 p + 7.4 dB (55.6 in
bfloat16, 73.6 in float16), cutting instead of rounding 6 dB less; of float32 the accumulation counts most, which leaves
125 dB and more, where operands in TF32 leave 70."""


@dataclass(frozen=True)
class Arithmetic:
    """How a chip says that it multiplies and adds."""

    accumulator: float = 2.0**-24
    """Unit roundoff of each addition: 2^-24 to nearest, 2^-23 toward zero."""
    operand: float = 0.0
    """Unit roundoff of the rounding of float32 operands."""

    @classmethod
    def declared(cls, facts: Mapping[str, str | int]) -> Arithmetic:
        """From ``Capabilities.facts``; an unknown value is none."""
        toward_zero = facts.get("matmul.accumulator", "float32") == "float32_toward_zero"
        tf32 = facts.get("matmul.float32", "float32") == "tf32"
        return cls(2.0**-23 if toward_zero else 2.0**-24, TF32 if tf32 else 0.0)


def gamma(n: int, unit: float) -> float:
    """n u / (1 - n u)."""
    return n * unit / (1.0 - n * unit)


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` in float64."""
    out = a.double() @ b.double()
    return out if bias is None else out + bias.double()


def bound(a: Tensor, b: Tensor, dtype: torch.dtype, arithmetic: Arithmetic, bias: Tensor | None = None) -> Tensor:
    """How far a product rounded to ``dtype`` may be from :func:`product`. A bias is one term more, and the product may
    have been rounded before it is added."""
    unit, terms = ROUNDOFF[dtype], a.shape[-1]
    size, exact = a.double().abs() @ b.double().abs(), product(a, b)
    relative = gamma(max(0, terms if a.dtype == torch.float32 else terms - 1), arithmetic.accumulator)
    if a.dtype == torch.float32:
        relative += 2.0 * arithmetic.operand + arithmetic.operand**2
    last = exact.abs()
    if bias is not None:
        last = 2.0 * last + bias.double().abs()
        size = size + bias.double().abs()
        relative += arithmetic.accumulator
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    return unit * last + (1.0 + unit) * relative * size + smallest


def tiles(x: Tensor, side: int) -> Tensor:
    """``x [M, N]`` as rows of one tile of ``side`` x ``side`` each; both lengths are multiples of it."""
    m, n = x.shape
    return x.reshape(m // side, side, n // side, side).permute(0, 2, 1, 3).reshape(-1, side * side)
