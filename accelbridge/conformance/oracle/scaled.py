"""Products of quantized matrices in float64, and what a right product may be off.

Notation of docs/conformance.md: u(p) = 2^-p for p significand bits; gamma(n, u) = n u / (1 - n u), Higham, Accuracy and
Stability of Numerical Algorithms, section 3.1. Products of two fp8 numbers have at most 8 bits: adding them up is all
that rounds, whatever the order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SIGNIFICAND = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
TINY = {torch.float32: 2.0**-149, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}
"""The smallest subnormal numbers."""


@dataclass(frozen=True)
class Accumulator:
    """What sums are kept in, as the backend states it."""

    bits: int = 24
    promotion: int = 128

    @property
    def is_float32(self) -> bool:
        return self.bits >= 24

    def share(self, k: int) -> float:
        """Largest error of a sum of ``k`` products and its scaling, as a share of the sum of their magnitudes.

        float32: gamma(k + 8, 2^-23); 2^-23 since it may truncate, 8 for scales, the bias and sums over blocks.
        Fewer bits: before a promotion, each term and each sum is aligned with the largest and loses up to
        2^(1-bits) of it, which is at most the sum of magnitudes; float32 adds up the rest. That bound is loose, so
        F8-002 and the exact products have to see what hides under it."""
        n = k + 8
        wide = n * 2.0**-23 / (1.0 - n * 2.0**-23)
        return wide if self.is_float32 else wide + 2.0 * min(k, self.promotion) * 2.0 ** (1 - self.bits)


def spread(scale: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """``scale`` [blocks, blocks] for each element of ``shape``; a block size below 1 is the whole dimension."""
    for dim, size in enumerate(block):
        length = size if size > 0 else max(1, shape[dim])
        scale = scale.repeat_interleave(length, dim).narrow(dim, 0, shape[dim])
    return scale


def shared_exponents(x: Tensor, largest: float, size: int = 32) -> Tensor:
    """float32 scales [M, K / size] of ``x`` [M, K] by OCP Microscaling Formats 1.0, section 6.3: the largest power of
    two not above each block's largest magnitude, over that not above ``largest``, the format's own."""
    _, exponents = torch.frexp(x.double().reshape(x.shape[0], -1, size).abs().amax(2))
    return torch.exp2((exponents - math.frexp(largest)[1]).double()).float()


def product_bound(a: Tensor, b: Tensor, out_dtype: torch.dtype, accumulator: Accumulator) -> tuple[Tensor, Tensor]:
    """(reference, bound) of ``a @ b``, both float64 as dequantized:
    |error| <= u_out |C| + (1 + u_out) share(K) (|A| |B|) + half the smallest subnormal number."""
    want, gauge = a @ b, a.abs() @ b.abs()
    u = 2.0 ** -SIGNIFICAND[out_dtype]
    return want, u * want.abs() + (1.0 + u) * accumulator.share(a.shape[1]) * gauge + TINY[out_dtype] / 2.0
