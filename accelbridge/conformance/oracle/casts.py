"""Binary floating-point formats of IEEE 754's kind, in integer arithmetic: nothing here rounds, flushes or asks torch
for a conversion, so that a host which flushes subnormal numbers makes no difference.

A format has ``exponent_bits`` and a precision ``p`` (significand bits with the hidden one); its largest exponent is
infinity and NaN, its lowest one subnormal numbers. Values of all formats here are exact in float64, where they are
normal numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS: dict[torch.dtype, tuple[int, int]] = {
    torch.float32: (8, 24),
    torch.bfloat16: (8, 8),
    torch.float16: (5, 11),
}
"""(exponent_bits, p)."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """int64 bit patterns as a tensor of ``dtype``."""
    size = dtype.itemsize
    wrapped = torch.where(bits >= 1 << (8 * size - 1), bits - (1 << (8 * size)), bits)
    return wrapped.to(_INTEGERS[size]).view(dtype)


def to_bits(x: Tensor) -> Tensor:
    """int64 bit patterns of a host tensor."""
    size = x.dtype.itemsize
    return x.contiguous().view(_INTEGERS[size]).long() & ((1 << (8 * size)) - 1)


def decode(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 values of bit patterns."""
    exponent_bits, p = FORMATS[dtype]
    largest, bias = (1 << exponent_bits) - 1, (1 << (exponent_bits - 1)) - 1
    sign = 1.0 - 2.0 * (bits >> (exponent_bits + p - 1)).double()
    exponent, fraction = (bits >> (p - 1)) & largest, bits & ((1 << (p - 1)) - 1)
    significand = fraction + torch.where(exponent > 0, 1 << (p - 1), 0)
    scale = torch.exp2((exponent.clamp(min=1) - bias - (p - 1)).double())
    special = torch.where(fraction > 0, torch.nan, torch.inf).double()
    return sign * torch.where(exponent == largest, special, significand.double() * scale)


def encode(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Bit patterns of float64 ``values`` rounded to nearest, ties to even; too large ones become infinite, NaN one
    NaN.

    With q the magnitude in units of the last place, rounded to an integer, the pattern is q + (biased exponent - 1) *
    2^(p-1), for normal and subnormal numbers alike: a q that rounds up to 2^p carries into the exponent.
    """
    exponent_bits, p = FORMATS[dtype]
    bias = (1 << (exponent_bits - 1)) - 1
    infinity = ((1 << exponent_bits) - 1) << (p - 1)
    magnitude = values.abs()
    finite = magnitude.isfinite()
    plain = magnitude.where(finite, torch.ones_like(magnitude)).clamp(max=2.0 ** (bias + 1))
    biased = (torch.frexp(plain).exponent.long() - 1 + bias).clamp(min=1)
    biased = torch.where(plain == 0, 1, biased)
    units = plain * torch.exp2((bias + p - 1 - biased).double())
    bits = (units.round().long() + ((biased - 1) << (p - 1))).clamp(max=infinity)  # torch.round: ties to even
    bits = torch.where(finite, bits, torch.where(values.isnan(), infinity | 1 << (p - 2), infinity))
    return bits | (values.signbit().long() << (exponent_bits + p - 1))


def cast(x: Tensor, to: torch.dtype) -> Tensor:
    """Host tensor ``x`` in another format, rounded once."""
    return from_bits(encode(decode(to_bits(x), x.dtype), to), to)


def is_subnormal(x: Tensor) -> Tensor:
    """Which elements are subnormal numbers of their format."""
    exponent_bits, p = FORMATS[x.dtype]
    bits = to_bits(x) & ((1 << (exponent_bits + p - 1)) - 1)
    return (bits > 0) & (bits < 1 << (p - 1))


def signed_zero(x: Tensor) -> Tensor:
    """0 with the sign of each element."""
    exponent_bits, p = FORMATS[x.dtype]
    return from_bits(to_bits(x) & (1 << (exponent_bits + p - 1)), x.dtype)


def subnormals(dtype: torch.dtype) -> Tensor:
    """The smallest, some between, and the largest subnormal number, with both signs."""
    _, p = FORMATS[dtype]
    top = (1 << (p - 1)) - 1
    bits = torch.tensor(sorted({1, 2, 3, top // 3, top // 2 + 1, top - 1, top}))
    exponent_bits, p = FORMATS[dtype]
    return from_bits(torch.cat([bits, bits | 1 << (exponent_bits + p - 1)]), dtype)


def float32_patterns() -> Tensor:
    """All 65,536 upper halves of a float32 with 8 lower ones, ties and their neighbours among them."""
    low = torch.tensor([0, 1, 0x4000, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF])
    return from_bits(((torch.arange(1 << 16) << 16).unsqueeze(1) | low).reshape(-1), torch.float32)
