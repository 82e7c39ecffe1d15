"""Bounds that a product of finite precision must keep, and what they are compared with: float64, not rounded.

The componentwise bound is that of a sum in any order, as Reference BLAS's tests have it (DMMCH): n additions in a
precision of unit u change a sum by at most n u / (1 - n u) of the sum of its terms' magnitudes.
"""

from __future__ import annotations

import torch
from torch import Tensor

UNITS = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half the distance of neighbours, relative, by dtype of the result."""


def worst(found: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, extra: int = 0) -> float:
    """Largest error of ``found`` over its bound, for ``a`` [M, K] times ``b`` [K, N] in float64: ``u |C| + (1 + u)
    gamma |A| |B|`` with gamma = n 2^-23 / (1 - n 2^-23), n = K - 1 additions and ``extra`` roundings on a path."""
    exact, magnitudes = a @ b, a.abs() @ b.abs()
    if bias is not None:
        exact, magnitudes = exact + bias.double(), magnitudes + bias.double().abs()
    unit, steps = UNITS[found.dtype], (a.shape[1] - 1 + extra) * 2.0**-23
    bound = unit * exact.abs() + (1 + unit) * steps / (1 - steps) * magnitudes + 2.0**-126
    return float(((found.double() - exact).abs() / bound).max()) if found.numel() else 0.0


def sqnr_db(found: Tensor, exact: Tensor) -> Tensor:
    """Signal over noise of each row, in dB."""
    noise = (found.double() - exact).square().sum(1)
    return 10 * torch.log10(exact.square().sum(1) / noise.clamp_min(1e-300))
