"""Number formats as data, and exact conversion between float32 and their codes.

Sources: float16: IEEE 754-2019, binary16. bfloat16: the upper half of binary32. e4m3fn and e5m2: OCP 8-bit Floating
Point Specification (OFP8) 1.0. e4m3fnuz and e5m2fnuz: Noune et al., arXiv:2206.02915. e4m3: the IEEE reading of the
same 8 bits, infinities included, as ml_dtypes names it. e8m0 and e2m1: OCP Microscaling Formats (MX) 1.0.

Conversion is integer arithmetic in plain PyTorch, on any device and under torch.compile. Where nothing fuses its many
passes over memory, in eager mode on the host, what it gives is looked up instead. torch's own cast to float8 is not
used: what it makes of a value that is too large changed between torch 2.9 (NaN) and 2.13 (the largest number).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from accelbridge.backend import Format
from accelbridge.errors import ConfigError

FORMATS: Mapping[str, Format] = {
    format.name: format
    for format in (
        Format("float16", 5, 10, 15, 65504.0, "ieee", "inf"),
        Format("bfloat16", 8, 7, 127, (2.0 - 2.0**-7) * 2.0**127, "ieee", "inf"),
        # Of 8 bits: saturating, because gradients of a tensor scaled by an older maximum do overshoot.
        Format("float8_e4m3fn", 4, 3, 7, 448.0, "all_ones", "saturate"),
        Format("float8_e4m3fnuz", 4, 3, 8, 240.0, "negative_zero", "saturate"),
        Format("float8_e4m3", 4, 3, 7, 240.0, "ieee", "saturate"),
        Format("float8_e5m2", 5, 2, 15, 57344.0, "ieee", "saturate"),
        Format("float8_e5m2fnuz", 5, 2, 16, 57344.0, "negative_zero", "saturate"),
        Format("float8_e8m0fnu", 8, 0, 127, 2.0**127, "all_ones", "nan", signed=False),
        Format("float4_e2m1fn", 2, 1, 1, 6.0, "none", "saturate"),
    )
}
"""By torch's name, where torch has one."""

_INF = 0x7F800000
"""float32 infinity as an integer; what is above it is NaN."""


def width(format: Format) -> int:
    """Bits of a code."""
    return format.signed + format.exponent_bits + format.mantissa_bits


def is_narrow(name: str) -> bool:
    """Whether ``name`` is that of a known format with a sign whose codes take a byte at most."""
    return name in FORMATS and FORMATS[name].signed and width(FORMATS[name]) <= 8


def magnitude_mask(format: Format) -> int:
    """The bits of a code but its sign."""
    return _ones(format.exponent_bits + format.mantissa_bits)


def same_layout(a: Format, b: Format) -> bool:
    """Whether a code means the same in both: they may differ in what they do with a value that is too large."""
    return all(
        getattr(a, name) == getattr(b, name)
        for name in ("name", "exponent_bits", "mantissa_bits", "bias", "nan", "signed")
    )


def nan_code(format: Format) -> int:
    """The code that :func:`encode` gives for NaN."""
    return _nan(format)


def encode(
    x: Tensor,
    format: Format,
    overflow: Literal["saturate", "inf", "nan"] | None = None,
    random: Tensor | None = None,
) -> Tensor:
    """Codes of ``x`` [...], float32 or narrower; uint8, or int16 for formats of 16 bits. Rounded to nearest with ties
    to even or, with ``random``, up in magnitude with a probability of the fraction dropped.

    ``random``: int32 of x's shape, all 32 bits uniform, as ``stochastic.random_bits`` makes them. The fraction is of
    the step between the two neighbours, a multiple of 2^-k where the step is 2^k units of float32's last place: k is
    20 for e4m3 and 21 for e5m2 in their normal numbers, one more for each binade below. Up to k = 31 the probability
    is exactly the fraction, counted over all 2^32 numbers; beyond, it is the fraction rounded down to a multiple of
    2^-31. So a number of the format stays what it is, and none passes its neighbour.

    What exceeds ``format.max`` after rounding becomes what ``overflow`` says (default: as the format does), infinity
    too. NaN becomes the format's NaN, or its largest number where it has none. Formats without a negative zero make it
    0; of formats without a sign, a negative number is NaN and 0 is the smallest number. Where no digit follows
    the first (e8m0), a tie goes up, as IEEE 754-2019, section 4.3.1, says of one-digit precision.
    """
    policy = overflow or format.overflow
    _check(x, format, policy, random)
    x = x.detach()
    if hasattr(x, "device_mesh"):
        from accelbridge.precision.shards import elementwise

        operands = (x,) if random is None else (x, random)
        return elementwise(lambda *local: encode(local[0], format, overflow, *local[1:]), *operands)
    if random is None and width(format) <= 8 and _looks_up(x):
        table = _table(("encode", format, policy), lambda: _encode(_every_bfloat16(), format, policy, None))
        codes = torch.empty(x.shape, dtype=table.dtype, device="cpu")
        for part, found in zip(x.flatten().split(_PART), codes.view(-1).split(_PART), strict=True):
            torch.index_select(table, 0, _upper_half(part), out=found)
        return codes
    return _encode(x, format, policy, random)


def _encode(x: Tensor, format: Format, policy: str, random: Tensor | None) -> Tensor:
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    code = _rounded(magnitude, format, random)
    too_large = code > _largest(format)
    nan = magnitude > _INF
    if policy == "nan":
        nan = nan | too_large
    code = code.masked_fill(too_large, _infinity(format) if policy == "inf" else _largest(format))
    if not format.signed:
        nan = nan | ((bits < 0) & (magnitude > 0))
        # The smallest number, 2^-127, is no step from 0 but the half of the next one, at 1.5 times which the tie is.
        code = code.masked_fill(magnitude < 0x600000, 0)
    else:
        negative = (bits < 0) & (code > 0) if format.nan == "negative_zero" else bits < 0
        code = code | (negative.to(torch.int32) << (width(format) - 1))
    return code.masked_fill(nan, _nan(format)).to(torch.uint8 if width(format) <= 8 else torch.int16)


def decode(codes: Tensor, format: Format) -> Tensor:
    """float32 values of ``codes`` [...], exactly."""
    if hasattr(codes, "device_mesh"):
        from accelbridge.precision.shards import elementwise

        return elementwise(lambda local: decode(local, format), codes)
    if width(format) <= 8 and _looks_up(codes):
        table = _table(("decode", format), lambda: _decode(torch.arange(256, dtype=torch.int32, device="cpu"), format))
        return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    return _decode(codes, format)


_SMALL = 256
"""Elements up to which arithmetic is as fast as looking up."""
_PART = 1 << 17
"""Elements at a time, so that what lies between input and codes stays in the processor's caches."""
_TABLES: dict[tuple[object, ...], Tensor] = {}


def _looks_up(x: Tensor) -> bool:
    """Whether what becomes of ``x`` is to be looked up: not where a compiler or a subclass of tensors, fake or
    distributed, is to see the arithmetic."""
    plain = type(x) is Tensor and x.device.type == "cpu"
    return plain and x.numel() > _SMALL and not torch.compiler.is_compiling()


def _table(key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
    found = _TABLES.get(key)
    if found is None:
        with torch.inference_mode(False):
            found = make()
        if type(found) is Tensor:  # under a mode that fakes tensors it is none to keep
            _TABLES[key] = found
    return found


def _every_bfloat16() -> Tensor:
    return (torch.arange(1 << 16, dtype=torch.int32, device="cpu") << 16).view(torch.float32)


def _upper_half(x: Tensor) -> Tensor:
    """int32 in [0, 2^16): the upper half of each float32, with its last bit set if the lower half isn't 0.

    So rounded to odd, 8 significand bits give the same as all 24 when they are rounded to 6 or less: what lies between
    two numbers of the format, or between one and a midpoint, stays there. Boldo and Melquiond, "Emulation of FMA and
    correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57(4), 2008.
    """
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    upper = (bits & 0xFFFF).add_(0xFFFF).bitwise_or_(bits)  # a lower half that isn't 0 carries into the upper
    return upper.bitwise_right_shift_(16).bitwise_and_(0xFFFF)


def _decode(codes: Tensor, format: Format) -> Tensor:
    mantissa = format.mantissa_bits
    code = codes.to(torch.int32) & _ones(width(format))
    magnitude = code & _ones(format.exponent_bits + mantissa)
    exponent, fraction = magnitude >> mantissa, magnitude & _ones(mantissa)
    if format.exponent_bits == 8:  # float32's own exponents, subnormal numbers included
        bits = magnitude << (23 - mantissa)
        value = (bits if format.signed else bits.masked_fill(magnitude == 0, 1 << 22)).view(torch.float32)
    else:
        normal = ((exponent + 127 - format.bias) << 23) | (fraction << (23 - mantissa))
        subnormal = fraction.to(torch.float32) * 2.0 ** (1 - format.bias - mantissa)
        value = torch.where(exponent == 0, subnormal, normal.view(torch.float32))
    nan = torch.zeros_like(code, dtype=torch.bool)
    if format.nan == "ieee":
        top = exponent == _ones(format.exponent_bits)
        value = value.masked_fill(top & (fraction == 0), math.inf)
        nan = top & (fraction != 0)
    elif format.nan == "all_ones":
        nan = magnitude == _ones(format.exponent_bits + mantissa)
    elif format.nan == "negative_zero":
        nan = code == 1 << (width(format) - 1)
    if format.signed:
        value = torch.where(code >> (width(format) - 1) == 1, -value, value)
    return value.masked_fill(nan, math.nan)


def fits_float32(dtype: torch.dtype) -> bool:
    """Whether float32 holds every number of ``dtype``, so that rounding from there is rounding once."""
    return dtype.is_floating_point and dtype.itemsize <= 4


def _check(x: Tensor, format: Format, policy: str, random: Tensor | None) -> None:
    if not fits_float32(x.dtype):
        raise ConfigError(f"{x.dtype} asked to be encoded as {format.name}; it would be rounded twice; use float32")
    if (policy == "inf" and format.nan != "ieee") or (policy == "nan" and format.nan == "none"):
        raise ConfigError(f"{format.name} asked to overflow to {policy}, which it has no code for; use saturate")
    if random is not None and not format.signed:
        raise ConfigError(f"{format.name} asked to be rounded at random; it holds scales, which are not; leave it out")
    if random is not None and (random.dtype != torch.int32 or random.shape != x.shape):
        raise ConfigError(
            f"{tuple(x.shape)} asked to be rounded by random numbers {tuple(random.shape)} {random.dtype}; "
            f"use torch.int32 of its shape"
        )


_MOST = 31
"""Bits dropped at most: beyond 25 no half is reached; 31 is what a random int32 decides without its sign."""


def _rounded(magnitude: Tensor, format: Format, random: Tensor | None) -> Tensor:
    """Codes without sign of float32 magnitudes, as if exponents went on for ever."""
    # Significand (with its hidden bit) and exponent of float32; a subnormal number has the smallest exponent.
    field = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | ((field > 0).to(torch.int32) << 23)
    exponent = field.clamp_min(1) - 127
    least = 1 - format.bias  # exponent of the smallest normal number
    # Bits to drop: more for what is subnormal in the format.
    wanted = 23 - format.mantissa_bits + (least - exponent).clamp_min(0)
    drop = wanted.clamp_max(_MOST)
    kept = significand >> drop
    rest = significand - (kept << drop)
    if random is None:
        half = 1 << (drop - 1)
        up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    else:
        draw = (torch.bitwise_right_shift(random, 1) & 0x7FFFFFFF) >> (_MOST - drop)  # as many bits as are dropped
        up = draw < rest >> (wanted - drop).clamp_max(_MOST)
    kept = kept + up.to(torch.int32)
    # The hidden bit counts as the first step of the exponent, and a carry as the next one.
    return ((exponent - least).clamp_min(0) << format.mantissa_bits) + kept


def _ones(bits: int) -> int:
    return (1 << bits) - 1


def _largest(format: Format) -> int:
    fraction, exponent = math.frexp(format.max)
    mantissa = format.mantissa_bits
    return ((exponent - 1 + format.bias) << mantissa) + int((2.0 * fraction - 1.0) * 2.0**mantissa)


def _infinity(format: Format) -> int:
    return _ones(format.exponent_bits) << format.mantissa_bits


def _nan(format: Format) -> int:
    if format.nan == "ieee":
        return _infinity(format) | 1 << (format.mantissa_bits - 1)
    if format.nan == "all_ones":
        return _ones(format.exponent_bits + format.mantissa_bits)
    return 1 << (width(format) - 1) if format.nan == "negative_zero" else _largest(format)
