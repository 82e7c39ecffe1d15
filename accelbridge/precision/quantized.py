"""Matrices in a narrow format, with the scales that they are multiplied with to be read."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from accelbridge.backend import Format
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.precision import formats
from accelbridge.precision.scalings import WHOLE


def block_counts(shape: torch.Size, block: tuple[int, int]) -> tuple[int, int]:
    """Blocks along each dimension; the last ones may be smaller."""
    rows, columns = (1 if size == WHOLE else -(-n // size) for n, size in zip(shape, block, strict=True))
    return rows, columns


def spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """``scale`` for each element of ``shape``; a dimension along which all share it stays 1."""
    for dim, size in enumerate(block):
        if size > 1:
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return scale


def dtype_of(format: Format) -> torch.dtype:
    """torch's dtype of ``format``, or uint8 where it has none."""
    found = getattr(torch, format.name, torch.uint8) if formats.width(format) == 8 else torch.uint8
    assert isinstance(found, torch.dtype)
    return found


class Shares(NamedTuple):
    """Shares of a tensor's elements, float32 scalars on its device."""

    saturated: Tensor
    underflowed: Tensor
    nonfinite: Tensor


def shares(x: Tensor, q: QuantizedTensor) -> Shares:
    """What quantizing ``x`` to ``q`` lost: finite elements that are above ``format.max`` once scaled, before rounding
    (by more than 2^-22 of it: a scale made of ``x`` itself is rounded, which may lift the largest element that far);
    elements that are not 0, of which the code is; infinities and NaN among the inputs."""
    x, finite = x.detach(), x.isfinite()
    limit = spread(q.scale * (q.format.max * (1 + 2.0**-22)), q.block, q.shape)
    # A zero has a sign of its own, but where that code is NaN.
    numbers = 0xFF if q.format.nan == "negative_zero" else formats.magnitude_mask(q.format)
    kept = (q.codes(q.format.name) & numbers).count_nonzero()
    saturated = ((x.abs() > limit) & finite).count_nonzero()
    counts = (saturated, x.count_nonzero() - kept, x.numel() - finite.count_nonzero())
    return Shares(*(count.to(torch.float32) / max(1, x.numel()) for count in counts))


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix in ``format``: an element is its decoded code times the scale of its block."""

    payload: Tensor
    """One code an element: uint8, or torch's dtype of the format. The same bits mean other numbers in another variant
    (e4m3fn read as e4m3fnuz is halved), so they are read through :meth:`codes`, which asks for the variant meant."""
    scale: Tensor
    """float32, one for each block: multiply to dequantize."""
    format: Format
    block: tuple[int, int]
    """Rows and columns that share a scale; :data:`WHOLE` for all of them."""

    def __post_init__(self) -> None:
        what = f"quantized tensor in {self.format.name}"
        if self.payload.dtype not in (torch.uint8, dtype_of(self.format)):
            raise ConfigError(f"{what}: its payload is {self.payload.dtype}; use uint8 or {dtype_of(self.format)}")
        if self.payload.dim() != 2:
            raise ConfigError(f"{what}: its payload is {tuple(self.payload.shape)}; make it a matrix")
        wanted = block_counts(self.payload.shape, self.block)
        if self.scale.dtype != torch.float32 or tuple(self.scale.shape) != wanted:
            raise ConfigError(
                f"{what}: scales are {tuple(self.scale.shape)} {self.scale.dtype}; blocks of {self.block} "
                f"in {tuple(self.payload.shape)} need {wanted} torch.float32"
            )

    @classmethod
    def of_codes(cls, codes: Tensor, scale: Tensor, format: Format, block: tuple[int, int]) -> QuantizedTensor:
        """From uint8 ``codes`` of ``format``."""
        return cls(codes.view(dtype_of(format)), scale, format, block)

    @property
    def shape(self) -> torch.Size:
        return self.payload.shape

    def codes(self, format: str) -> Tensor:
        """The codes as uint8, for a reader that takes them as ``format``; another variant than ours is refused."""
        if format != self.format.name:
            raise Unsupported(
                f"codes of {self.format.name} asked as {format}: the same bits are other numbers there; convert, or "
                f"dequantize and quantize anew"
            )
        return self.payload.view(torch.uint8)

    def dequantize(self) -> Tensor:
        """float32: exact where scales are powers of two (and nothing overflows), else rounded once."""

        def values(payload: Tensor, scale: Tensor) -> Tensor:
            value = formats.decode(payload.view(torch.uint8), self.format)
            return value * spread(scale, self.block, value.shape)

        if hasattr(self.payload, "device_mesh"):
            from accelbridge.precision.shards import with_local_scales

            return with_local_scales(values, self.payload, self.scale, self.block)
        return values(self.payload, self.scale)

    def t(self) -> QuantizedTensor:
        """The transposed matrix, as views."""
        return replace(self, payload=self.payload.t(), scale=self.scale.t(), block=(self.block[1], self.block[0]))

    def convert(self, format: Format) -> QuantizedTensor:
        """The matrix in another variant of its format, as of e4m3fn in e4m3fnuz: the codes' values times 2^-k, the
        scales times 2^k. For weights that are loaded, not for each step: the host waits for what it finds in the codes.

        k is the difference of the biases where all numbers fit so: they keep their bits. Else it is the least from 0
        on at which the largest one fits, ceil(log2(own max / new max)), and an element is off by at most half the new
        format's smallest number times its new scale, as only what becomes subnormal is rounded. Nothing saturates.

        e4m3fn to e4m3fnuz and back keeps all bits, but -0, which e4m3fnuz lacks, becomes 0. So does e4m3fnuz to e4m3fn
        without codes 0x7F and 0xFF (240), whose bits are NaN there; with them k is 0. NaN stays NaN, and infinity
        becomes NaN where there is none.

        Raises ``Unsupported`` for a format that is no variant, ConfigError for scales that float32 could not hold.
        """
        own = self.format
        if (own.exponent_bits, own.mantissa_bits) != (format.exponent_bits, format.mantissa_bits):
            raise Unsupported(
                f"{own.name} asked to be converted to {format.name}, which is no variant of it; dequantize, then "
                f"quantize anew"
            )
        values, k = formats.decode(self.codes(own.name), own), format.bias - own.bias
        if bool((values.isfinite() & (values.abs() * 2.0**-k > format.max)).any()):
            k = max(0, math.ceil(math.log2(own.max / format.max)))
        scale = self.scale * 2.0**k
        if bool((self.scale.isfinite() & (scale * 2.0**-k != self.scale)).any()):
            raise ConfigError(
                f"{own.name} asked to be converted to {format.name}, with scales times {2.0**k:g}; some of them leave "
                f"the range of float32; dequantize, then quantize anew"
            )
        # What is too large now are infinities.
        codes = formats.encode(values * 2.0**-k, format, "inf" if format.nan == "ieee" else "nan")
        return QuantizedTensor.of_codes(codes, scale, format, self.block)
