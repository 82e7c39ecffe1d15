"""The suite's own tables of narrow number formats, from their definitions; nothing of it is the library's.

A code's number is worked out from its bits with Python's integers and floats (exact: all are multiples of 2^-17 with
few bits, or powers of two down to 2^-127). Rounding compares with the midpoints of neighbours, which float64 holds.

Sources: OCP 8-bit Floating Point Specification 1.0, table 1 (e4m3fn, e5m2); arXiv:2206.02915 (fnuz: bias one larger,
no infinities, no negative zero, whose code is the only NaN); IEEE 754's rules on 4 exponent bits (e4m3); OCP
Microscaling Formats 1.0, sections 5.3.3 and 5.4.1 (e2m1, e8m0).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from accelbridge.backend import Format


@dataclass(frozen=True)
class Table:
    """All codes of one format."""

    format: Format
    values: Tensor
    """float64, by code."""

    @property
    def name(self) -> str:
        return self.format.name

    @cached_property
    def magnitudes(self) -> Tensor:
        """The finite numbers without sign: ascending, each at the place of its code."""
        half = self.values[: len(self.values) // 2] if self.format.signed else self.values
        return half[half.isfinite()]

    @cached_property
    def canonical(self) -> Tensor:
        """uint8 by code: the code itself, or one and the same code for every NaN."""
        codes = torch.arange(len(self.values), dtype=torch.uint8)
        nans = self.values.isnan()
        return codes.masked_fill(nans, int(nans.to(torch.uint8).argmax())) if nans.any() else codes

    @property
    def half_step(self) -> float:
        """Largest relative error of rounding a normal number."""
        return 2.0 ** -(self.format.mantissa_bits + 1)

    @property
    def smallest(self) -> float:
        """The smallest positive number: subnormal."""
        return float(self.magnitudes[1])

    def overflowing(self, nonfinite: bool) -> Format:
        """The format, to make infinity (NaN where there is none) of what is too large, or its largest number."""
        other = "inf" if self.format.nan == "ieee" else "nan"
        return replace(self.format, overflow=other if nonfinite else "saturate")

    def decode(self, codes: Tensor) -> Tensor:
        """float64 values of uint8 codes."""
        return self.values[codes.long()]

    def encode(self, x: Tensor, nonfinite: bool = False) -> Tensor:
        """Canonical uint8 codes of float64 ``x``, rounded to nearest, ties to the even code, once. What rounds beyond
        the largest number becomes it or, with ``nonfinite``, infinity (NaN where there is none); infinity too."""
        last = len(self.magnitudes) - 1
        step = self.magnitudes[-1] - self.magnitudes[-2]
        ladder = torch.cat([self.magnitudes, (self.magnitudes[-1] + step).reshape(1)])
        size = x.abs().nan_to_num(nan=0.0, posinf=math.inf)
        lower = (torch.searchsorted(ladder, size, right=True) - 1).clamp(0, last)
        middle = (ladder[lower] + ladder[lower + 1]) / 2.0
        code = lower + ((size > middle) | ((size == middle) & (lower % 2 == 1))).long()
        beyond = code > last
        code = code.clamp(max=last)
        special = self.values.isinf() if self.format.nan == "ieee" else self.values.isnan()
        if nonfinite:
            code = code.masked_fill(beyond, int(special.to(torch.uint8).argmax()))
        signed = x.signbit() & ((code > 0) | (self.format.nan != "negative_zero"))
        half = len(self.values) // 2
        code = torch.where(signed & (code < half), code + half, code)
        if x.isnan().any():
            code = code.masked_fill(x.isnan(), int(self.values.isnan().to(torch.uint8).argmax()))
        return self.canonical[code]


def _number(code: int, format: Format) -> float:
    """Sign, exponent and fraction of a code without special cases."""
    mantissa = format.mantissa_bits
    sign = code >> (format.exponent_bits + mantissa) if format.signed else 0
    exponent = code >> mantissa & (1 << format.exponent_bits) - 1
    fraction = code & (1 << mantissa) - 1
    if not format.signed:  # a scale: a power of two, 0 has no code
        return math.ldexp(1.0, exponent - format.bias)
    hidden = 1 << mantissa if exponent else 0
    return (-1.0 if sign else 1.0) * math.ldexp(hidden + fraction, max(exponent, 1) - format.bias - mantissa)


def _table(format: Format, special: Callable[[int], float | None] = lambda code: None) -> Table:
    bits = format.signed + format.exponent_bits + format.mantissa_bits
    numbers = [found if (found := special(code)) is not None else _number(code, format) for code in range(1 << bits)]
    return Table(format, torch.tensor(numbers, dtype=torch.float64))


def _ieee(exponent_bits: int, mantissa_bits: int) -> Callable[[int], float | None]:
    """Infinities and NaN where all bits of the exponent are set."""

    def special(code: int) -> float | None:
        top, fraction = (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
        if code >> mantissa_bits & top != top:
            return None
        return math.nan if fraction else -math.inf if code >> (exponent_bits + mantissa_bits) else math.inf

    return special


def _nan_at(*codes: int) -> Callable[[int], float | None]:
    return lambda code: math.nan if code in codes else None


TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        _table(Format("float8_e4m3fn", 4, 3, 7, 448.0, "all_ones", "saturate"), _nan_at(0x7F, 0xFF)),
        _table(Format("float8_e4m3fnuz", 4, 3, 8, 240.0, "negative_zero", "saturate"), _nan_at(0x80)),
        _table(Format("float8_e4m3", 4, 3, 7, 240.0, "ieee", "saturate"), _ieee(4, 3)),
        _table(Format("float8_e5m2", 5, 2, 15, 57344.0, "ieee", "saturate"), _ieee(5, 2)),
        _table(Format("float8_e5m2fnuz", 5, 2, 16, 57344.0, "negative_zero", "saturate"), _nan_at(0x80)),
        _table(Format("float8_e8m0fnu", 8, 0, 127, 2.0**127, "all_ones", "nan", signed=False), _nan_at(0xFF)),
        _table(Format("float4_e2m1fn", 2, 1, 1, 6.0, "none", "saturate")),
    )
}
E4M3 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e4m3")
E5M2 = ("float8_e5m2", "float8_e5m2fnuz")


def every_bfloat16() -> Tensor:
    """All 65,536 bfloat16 values, [256, 256]."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def near_ties(table: Table) -> Tensor:
    """float32 [3, n]: each midpoint of two neighbours and float32's next numbers below and above it."""
    middle = ((table.magnitudes[1:] + table.magnitudes[:-1]) / 2.0).to(torch.float32)
    infinity = torch.tensor(math.inf)
    return torch.stack([torch.nextafter(middle, -infinity), middle, torch.nextafter(middle, infinity)])
