"""How likely it is that draws are what they say: tests of goodness of fit, in float64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def chi_square_p(counts: Tensor, expected: Tensor) -> float:
    """P-value of Pearson's test of ``counts`` against ``expected`` (no parameter was fitted): the regularised upper
    incomplete gamma function Q((bins - 1) / 2, chi^2 / 2)."""
    statistic = ((counts.double() - expected) ** 2 / expected).sum()
    half = torch.tensor((len(counts) - 1) / 2.0, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2.0))


def kolmogorov_p(cdf_values: Tensor) -> float:
    """P-value of Kolmogorov's test that ``cdf_values``, the distribution function at each draw, are uniform: the
    limiting series 2 sum (-1)^(k-1) exp(-2 k^2 x^2) with Stephens' x = D (sqrt(n) + 0.12 + 0.11 / sqrt(n))."""
    u, n = cdf_values.double().sort().values, cdf_values.numel()
    steps = torch.arange(n, dtype=torch.float64)
    distance = float(torch.maximum((steps + 1) / n - u, u - steps / n).max())
    x = distance * (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n))
    return min(1.0, max(0.0, 2.0 * sum((-1) ** (k - 1) * math.exp(-2.0 * (k * x) ** 2) for k in range(1, 101))))


def normal_cdf(x: Tensor) -> Tensor:
    """Of the standard normal distribution."""
    return 0.5 * torch.special.erfc(-x.double() / math.sqrt(2.0))


def binomial_p(hits: int, n: int, p: float) -> float:
    """Two-sided p-value of ``hits`` of ``n``, by the normal approximation: n p (1 - p) is in the thousands here."""
    sigma = math.sqrt(n * p * (1.0 - p))
    return math.erfc(abs(hits - n * p) / sigma / math.sqrt(2.0))
