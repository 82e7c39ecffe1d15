"""fp8 in plain PyTorch: right on any device, fast on none. A backend opts in by returning :class:`EmulatedFp8`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from accelbridge.backend import Format
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.portable.fp8_cells import FAMILIES
from accelbridge.portable.matmul import PortableMatmul
from accelbridge.precision import formats
from accelbridge.precision.quantized import QuantizedTensor, block_counts, spread
from accelbridge.precision.scalings import WHOLE, Scaling, scaling_of

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: below, a quotient of scales would lose bits or divide by 0."""


class EmulatedFp8(PortableMatmul):
    """Quantized products by way of float32."""

    def quantize(self, x: Tensor, format: Format, scaling: str, scale: Tensor | None = None) -> QuantizedTensor:
        """A block's scale is made of its largest magnitude (``Scaling`` says how), and 1 where it is all zero, so that
        its codes are 0. An infinity or NaN makes NaN of its whole block; with unit scales, or with a ``scale`` given,
        of nothing but itself, an infinity by the format's overflow."""
        known = formats.FORMATS.get(format.name)
        if not any(format.name in family for family in FAMILIES):
            names = ", ".join(name for family in FAMILIES for name in family)
            raise Unsupported(f'backend "{self.name}" was asked to quantize to {format.name}; use one of {names}')
        if known is None or not formats.same_layout(format, known) or format.max > known.max:
            raise ConfigError(f"a format called {format.name} asked, with another layout: {format}; use {known}")
        if x.dim() != 2 or not formats.fits_float32(x.dtype):
            raise ConfigError(
                f"{tuple(x.shape)} {x.dtype} asked to be quantized; hand over a matrix in float32 or less"
            )
        chosen = scaling_of(scaling)
        return quantized(x, format, chosen, scale)

    def scaled_mm(
        self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None = None
    ) -> Tensor:
        """Products of decoded codes (exact in float32) are added up in float32 over each stretch of K with the same
        scales; sums are then multiplied with the scales of ``a`` and of ``b``, and added in order."""
        self._check(a, b, out_dtype)
        step = k_step(a, b)
        left, right = widen(a), widen(b)
        out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32, device=left.device)
        for start in range(0, a.shape[1], step or max(1, a.shape[1])):
            part = slice(start, start + step if step else None)
            product = left[:, part] @ right[part]
            out = out + product * k_scale(a, start) * k_scale(b.t(), start).t()
        if bias is not None:
            out = out + bias.to(torch.float32)
        return out.to(out_dtype)

    def _check(self, a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype) -> None:
        for x in (a, b):
            if not isinstance(x, QuantizedTensor):
                raise ConfigError(f"a scaled product takes quantized tensors, found {type(x).__name__}; quantize first")
        if not any(a.format.name in family and b.format.name in family for family in FAMILIES):
            raise Unsupported(
                f'backend "{self.name}" was asked for a scaled product {a.format.name} x {b.format.name}; '
                f"formats that may meet: {' | '.join(', '.join(family) for family in FAMILIES)}"
            )
        if a.shape[1] != b.shape[0]:
            raise ConfigError(f"a scaled product {tuple(a.shape)} x {tuple(b.shape)} asked; K must be equal")
        if out_dtype not in OUT_DTYPES:
            raise Unsupported(f"a scaled product in {out_dtype} asked; use one of {', '.join(map(str, OUT_DTYPES))}")


def quantized(x: Tensor, format: Format, scaling: Scaling, scale: Tensor | None = None) -> QuantizedTensor:
    """The matrix ``x``, float32 or narrower, in any narrow format; ``scale`` as in ``Matmul.quantize``."""
    if scale is None:
        scale = make_scale(x, format, scaling)
    elif scaling.unit:
        raise ConfigError('scaling "unit" asked with a scale, which it would not use; use "tensor"')
    elif scale.dtype != torch.float32 or tuple(scale.shape) != block_counts(x.shape, scaling.block):
        raise ConfigError(
            f'scaling "{scaling.name}" of {tuple(x.shape)} asked with a scale {tuple(scale.shape)} {scale.dtype}; '
            f"use {block_counts(x.shape, scaling.block)} torch.float32"
        )
    if torch.compiler.is_compiling() and max(scaling.block) > 1:
        codes = _codes_of_blocks(x, scale, format.name, format.max, format.overflow, list(scaling.block))
    else:
        codes = formats.encode(x if scaling.unit else divided(x, scale, scaling.block), format)
    return QuantizedTensor.of_codes(codes, scale, format, scaling.block)


@torch.library.custom_op("accelbridge::codes_of_blocks", mutates_args=())
def _codes_of_blocks(x: Tensor, scale: Tensor, name: str, largest: float, overflow: str, block: list[int]) -> Tensor:
    """uint8 codes in blocks, opaque to compilers: inductor fails on loops over them (torch 2.13, an AssertionError in
    ``codegen/cpp.py``, ``try_loop_split``)."""
    format = replace(formats.FORMATS[name], max=largest, overflow=cast(Any, overflow))
    return formats.encode(divided(x, scale, (block[0], block[1])), format)


@_codes_of_blocks.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


def blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """``x`` as [blocks, rows, blocks, columns]; a view where blocks fit, else with zeros beyond its edge."""
    counts = block_counts(x.shape, block)
    rows, columns = (max(1, n) if size == WHOLE else size for n, size in zip(x.shape, block, strict=True))
    padding = (0, counts[1] * columns - x.shape[1], 0, counts[0] * rows - x.shape[0])
    return (F.pad(x, padding) if any(padding) else x).reshape(counts[0], rows, counts[1], columns)


def divided(x: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32: ``x`` over its blocks' scales."""
    quotient = blocks(x.detach(), block).to(torch.float32, copy=True).div_(scale[:, None, :, None])
    return quotient.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]


def make_scale(x: Tensor, format: Format, scaling: Scaling) -> Tensor:
    """float32 scales of each block of ``x``: multiply to dequantize."""
    counts = block_counts(x.shape, scaling.block)
    if scaling.unit:
        return torch.ones(counts, dtype=torch.float32, device=x.device)
    largest = blocks(x.detach().abs(), scaling.block).amax((1, 3)).to(torch.float32)
    exponents_only = scaling.scale_format == "float8_e8m0fnu"
    if exponents_only and not scaling.power_of_two:
        scale = shared_exponent(largest, format)
    else:
        scale = scale_for(largest, format.max, scaling)
        scale = scale.masked_fill(scale.isinf(), math.nan) if exponents_only else scale
    return scale.masked_fill(largest == 0, 1.0)


def scale_for(largest: Tensor, limit: float | Tensor, scaling: Scaling) -> Tensor:
    """float32 scales by which magnitudes ``largest`` become ``limit``, rounded up where ``scaling`` says so."""
    scale = (largest / limit).clamp_min(_SMALLEST_SCALE)
    return power_of_two_above(scale) if scaling.power_of_two else scale


def shared_exponent(largest: Tensor, format: Format) -> Tensor:
    """Scales by OCP MX 1.0, section 6.3, of blocks' ``largest`` magnitudes: the power of two at or below each, over
    that at or below ``format.max``. NaN for infinity and NaN, as e8m0 has no infinity. At least 2^-126: e8m0 ends one
    lower, where a float32 is subnormal and flushed to 0 on some devices."""
    below = (largest.view(torch.int32) & 0x7F800000).view(torch.float32)
    scale = (below * 2.0 ** -math.floor(math.log2(format.max))).clamp_min(_SMALLEST_SCALE)
    return scale.masked_fill(~largest.isfinite(), math.nan)


def power_of_two_above(scale: Tensor) -> Tensor:
    """The smallest power of two that is not below each of ``scale``, normal positive float32."""
    bits = (scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000
    return torch.where(scale.isfinite(), bits.view(torch.float32), scale)


def widen(x: QuantizedTensor) -> Tensor:
    """The decoded codes, without scales."""
    return formats.decode(x.codes(x.format.name), x.format)


def k_step(a: QuantizedTensor, b: QuantizedTensor) -> int:
    """Terms along K over which neither operand changes its scale; 0: all of them."""
    step = math.gcd(*(size for size in (a.block[1], b.block[0]) if size != WHOLE))
    if step == 1:
        raise Unsupported(
            "a scaled product was asked with a scale for each term along K, which no sum can be multiplied with "
            "afterwards; quantize the matrix whose rows lie along K, and transpose it"
        )
    return step


def k_scale(x: QuantizedTensor, start: int) -> Tensor:
    """Scales of the rows of ``x`` [rows, K] for the terms from ``start`` on: [rows, 1] or [1, 1]."""
    column = 0 if x.block[1] == WHOLE else start // x.block[1]
    return spread(x.scale[:, column : column + 1], (x.block[0], WHOLE), x.shape)
