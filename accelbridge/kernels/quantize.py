"""Quantizing to 8-bit floats, with the scale made of the tensor itself: bit for bit what ``portable/fp8.py`` gives.

The floor of every kernel here is memory: it reads ``x`` [R, C], e bytes an element, and writes a code of 1 byte for
each and a float32 for each of the B blocks that share a scale. In one pass, (e + 1) R C + 4 B bytes: for 16-bit inputs
3 bytes an element, 0.90 ps at the 3.35 TB/s of an H100 SXM, 0.63 ps at the 4.8 TB/s of an H200, 0.57 ps at the 5.3 TB/s
of an MI300X (their datasheets). One scale for the whole matrix takes two passes, 2 e + 1 bytes an element. Arithmetic,
some 10 operations an element, is not what they wait for.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from accelbridge.backend import Format
from accelbridge.errors import ConfigError, Unsupported
from accelbridge.kernels.launch import cdiv, check_reach, processors, run
from accelbridge.kernels.tiles import tile
from accelbridge.precision import formats
from accelbridge.precision.quantized import QuantizedTensor, block_counts
from accelbridge.precision.scalings import WHOLE, Scaling, scaling_of

TYPES: dict[str, Any] = {
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
    "float8_e4m3fnuz": tl.float8e4b8,
    "float8_e5m2fnuz": tl.float8e5b16,
}
"""Triton's names of torch's formats."""
_SMALLEST = tl.constexpr(2.0**-126)
"""The smallest normal float32."""


# ---------------------------------------------------------------------------------------------------- on the device


@triton.jit
def _bits(x):
    """Of the magnitudes of ``x``, as int32: ordered as the magnitudes are, NaN above infinity."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(largest, LIMIT: tl.constexpr, SCALES: tl.constexpr):
    """float32 scales of blocks whose largest magnitudes have the bits ``largest``; ``make_scale`` of portable/fp8.py.

    SCALES: "quotient" of the largest and LIMIT, "power" of two that is not below it, "power_e8m0" the same, NaN where
    it is not finite, "shared_e8m0" by OCP MX 1.0, section 6.3, where LIMIT is the power of two below the format's
    largest number.
    """
    if SCALES == "shared_e8m0":
        below = (largest & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.maximum(below * (1.0 / LIMIT), _SMALLEST)
    else:
        scale = tl.maximum(tl.div_rn(largest.to(tl.float32, bitcast=True), LIMIT + tl.zeros_like(largest)), _SMALLEST)
        if SCALES != "quotient":
            above = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
            scale = tl.where(largest < 0x7F800000, above.to(tl.float32, bitcast=True), scale)
    if SCALES == "shared_e8m0" or SCALES == "power_e8m0":
        scale = tl.where(largest >= 0x7F800000, float("nan"), scale)
    else:
        scale = tl.where(largest > 0x7F800000, float("nan"), scale)
    return tl.where(largest == 0, 1.0, scale)


@triton.jit
def _codes(x, scale, LIMIT: tl.constexpr, FORMAT: tl.constexpr, NAN: tl.constexpr, EXACT: tl.constexpr):
    """uint8 codes of ``x / scale``, which broadcast: rounded once, saturated before the cast, NaN as NAN. EXACT: scales
    are powers of two, by whose reciprocal a product is the quotient."""
    wide = x.to(tl.float32)
    if EXACT:
        quotient = wide * tl.div_rn(1.0 + tl.zeros_like(scale), scale)
    else:
        wide, scale = tl.broadcast(wide, scale)
        quotient = tl.div_rn(wide, scale)
    codes = tl.clamp(quotient, -LIMIT, LIMIT).to(FORMAT).to(tl.uint8, bitcast=True)
    if NAN == 0x80:  # where a negative zero would be
        codes = tl.where(codes == 0x80, 0, codes)
    return tl.where(quotient == quotient, codes, NAN)


@triton.jit
def amax_kernel(x, largest, count, BLOCK: tl.constexpr):
    """The bits of the largest magnitude of ``x``, ``count`` elements that lie side by side, into int32 ``largest``,
    which is 0 before. Programs take blocks in turn. The order of a maximum does not matter: it is deterministic."""
    found = tl.zeros((BLOCK,), tl.int32)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        start = tl.cast(block, tl.int64) * BLOCK
        here = tl.arange(0, BLOCK)
        value = tl.load(x + start + here, mask=here < count - start, other=0.0)
        found = tl.maximum(found, _bits(value))
    tl.atomic_max(largest, tl.max(found, 0), sem="relaxed")


@triton.jit
def quantize_tensor_kernel(
    x, largest, scale, codes, rows, columns, x_row, x_column,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, NAN: tl.constexpr, TOP: tl.constexpr, SCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``x`` [rows, columns] with one scale: made of ``largest``, the bits of the largest magnitude, and stored; or read
    from ``scale`` where SCALES is "given"."""
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    if SCALES == "given":
        one = tl.load(scale)
    else:
        one = _scale(tl.load(largest), TOP, SCALES)
        if tl.program_id(0) == 0:
            tl.store(scale, one)
    r, c = tl.arange(0, BLOCK_ROWS)[:, None], tl.arange(0, BLOCK_COLUMNS)[None, :]
    first_row, first_column = row.to(tl.int64) * BLOCK_ROWS, column.to(tl.int64) * BLOCK_COLUMNS
    mask = (r < rows - first_row) & (c < columns - first_column)
    value = tl.load(x + first_row * x_row + first_column * x_column + (r * x_row + c * x_column), mask=mask, other=0.0)
    spread = one + tl.zeros((1, 1), tl.float32)
    code = _codes(value, spread, LIMIT, FORMAT, NAN, SCALES == "power")
    tl.store(codes + first_row * columns + first_column + (r * columns + c), code, mask=mask)


@triton.jit
def quantize_rows_kernel(
    x, scale, codes, rows, columns, x_row, x_column,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, NAN: tl.constexpr, TOP: tl.constexpr, SCALES: tl.constexpr,
    ONE_PASS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``x`` [rows, columns] with a scale for each row. A program takes BLOCK_ROWS of them; where a row fits into
    BLOCK_COLUMNS (ONE_PASS) it is read once, else a second time, from the cache where that is large enough."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    r, c = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)[None, :]
    here = r < rows - first
    source = x + first * x_row + (r[:, None] * x_row + c * x_column)
    target = codes + first * columns + (r[:, None] * columns + c)
    if ONE_PASS:
        mask = here[:, None] & (c < columns)
        value = tl.load(source, mask=mask, other=0.0)
        if SCALES == "given":
            own = tl.load(scale + first + r, mask=here, other=1.0)
        else:
            own = _scale(tl.max(_bits(value), 1), TOP, SCALES)
            tl.store(scale + first + r, own, mask=here)
        tl.store(target, _codes(value, own[:, None], LIMIT, FORMAT, NAN, SCALES == "power"), mask=mask)
    else:
        if SCALES == "given":
            own = tl.load(scale + first + r, mask=here, other=1.0)
        else:
            largest = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.int32)
            for start in range(0, columns, BLOCK_COLUMNS):
                step = tl.cast(start, tl.int64)
                mask = here[:, None] & (c < columns - start)
                largest = tl.maximum(largest, _bits(tl.load(source + step * x_column, mask=mask, other=0.0)))
            own = _scale(tl.max(largest, 1), TOP, SCALES)
            tl.store(scale + first + r, own, mask=here)
        for start in range(0, columns, BLOCK_COLUMNS):
            step = tl.cast(start, tl.int64)
            mask = here[:, None] & (c < columns - start)
            value = tl.load(source + step * x_column, mask=mask, other=0.0)
            code = _codes(value, own[:, None], LIMIT, FORMAT, NAN, SCALES == "power")
            tl.store(target + start, code, mask=mask)


@triton.jit
def quantize_blocks_kernel(
    x, scale, codes, rows, columns, x_row, x_column, scale_row, scale_column,
    LIMIT: tl.constexpr, FORMAT: tl.constexpr, NAN: tl.constexpr, TOP: tl.constexpr, SCALES: tl.constexpr,
    GROUP_ROWS: tl.constexpr, GROUP_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """``x`` [rows, columns] with a scale for every GROUP_ROWS x GROUP_COLUMNS elements, in one pass. A program takes
    BLOCK_ROWS x BLOCK_COLUMNS, a whole number of them."""
    DOWN: tl.constexpr = BLOCK_ROWS // GROUP_ROWS
    ACROSS: tl.constexpr = BLOCK_COLUMNS // GROUP_COLUMNS
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    row, column = tl.program_id(0) // across, tl.program_id(0) % across
    first_row, first_column = row.to(tl.int64) * BLOCK_ROWS, column.to(tl.int64) * BLOCK_COLUMNS
    r, c = tl.arange(0, BLOCK_ROWS)[:, None], tl.arange(0, BLOCK_COLUMNS)[None, :]
    mask = (r < rows - first_row) & (c < columns - first_column)
    value = tl.load(x + first_row * x_row + first_column * x_column + (r * x_row + c * x_column), mask=mask, other=0.0)
    groups = tl.reshape(value, (DOWN, GROUP_ROWS, ACROSS, GROUP_COLUMNS))
    i, j = row * DOWN + tl.arange(0, DOWN)[:, None], column * ACROSS + tl.arange(0, ACROSS)[None, :]
    place = scale + (i.to(tl.int64) * scale_row + j.to(tl.int64) * scale_column)
    there = (i < tl.cdiv(rows, GROUP_ROWS)) & (j < tl.cdiv(columns, GROUP_COLUMNS))
    if SCALES == "given":
        own = tl.load(place, mask=there, other=1.0)
    else:
        own = _scale(tl.max(tl.max(_bits(groups), 3), 1), TOP, SCALES)
        tl.store(place, own, mask=there)
    EXACT: tl.constexpr = SCALES == "power" or SCALES == "power_e8m0" or SCALES == "shared_e8m0"
    code = _codes(groups, own[:, None, :, None], LIMIT, FORMAT, NAN, EXACT)
    target = codes + first_row * columns + first_column + (r * columns + c)
    tl.store(target, tl.reshape(code, (BLOCK_ROWS, BLOCK_COLUMNS)), mask=mask)


# ------------------------------------------------------------------------------------------------------ on the host


def quantize(x: Tensor, format: Format, scaling: str, scale: Tensor | None = None) -> QuantizedTensor:
    """``Matmul.quantize`` by these kernels: ``x`` [R, C], float32 or narrower, on one device. Codes and scales are
    those of ``EmulatedFp8.quantize``, bit for bit (a NaN of a scale may be another NaN).

    Raises ``Unsupported`` for a format without a kernel, one that does not saturate, and sizes beyond reach;
    ConfigError for what no ``quantize`` takes.
    """
    chosen = scaling_of(scaling)
    _check(x, format, chosen, scale)
    x = x.detach()
    if chosen.unit:
        scale = torch.ones(block_counts(x.shape, chosen.block), dtype=torch.float32, device=x.device)
    if scale is None:
        codes, made = torch.ops.accelbridge.quantize(x, format.name, format.max, scaling)
        return QuantizedTensor.of_codes(codes, made, format, chosen.block)
    codes = torch.ops.accelbridge.quantize_by(x, scale, format.name, format.max, list(chosen.block))
    return QuantizedTensor.of_codes(codes, scale, format, chosen.block)


def rounds_otherwise(format: Format) -> str:
    """Why the kernels can't round to ``format``; "" where they can."""
    known = formats.FORMATS.get(format.name)
    if known is None or format.name not in TYPES:
        return f"there is no kernel for {format.name}"
    if not formats.same_layout(format, known) or format.max != known.max:
        return f"kernels know {format.name} as {known}, not as {format}"
    if format.overflow != "saturate":
        return f"kernels saturate, and {format.overflow} was asked for what is too large"
    return ""


def _check(x: Tensor, format: Format, scaling: Scaling, scale: Tensor | None) -> None:
    if why := rounds_otherwise(format):
        raise Unsupported(f"{format.name} asked of a kernel; {why}; bind the portable implementation")
    if x.dim() != 2 or not formats.fits_float32(x.dtype):
        raise ConfigError(f"{tuple(x.shape)} {x.dtype} asked to be quantized; hand over a matrix in float32 or less")
    if scale is not None and scaling.unit:
        raise ConfigError('scaling "unit" asked with a scale, which it would not use; use "tensor"')
    wanted = block_counts(x.shape, scaling.block)
    if scale is not None and (scale.dtype != torch.float32 or tuple(scale.shape) != wanted):
        raise ConfigError(
            f'scaling "{scaling.name}" of {tuple(x.shape)} asked with a scale {tuple(scale.shape)} {scale.dtype}; '
            f"use {wanted} torch.float32"
        )
    check_reach("quantizing", x)


@torch.library.custom_op("accelbridge::quantize", mutates_args=())
def _quantize(x: Tensor, format: str, largest: float, scaling: str) -> tuple[Tensor, Tensor]:
    """uint8 codes [R, C] and float32 scales of ``x``. Without a gradient: rounding has none that would be of use, and
    layers bring their own (precision/linear.py)."""
    chosen = scaling_of(scaling)
    codes, scale = _results(x, chosen)
    _launch(x, codes, scale, format, largest, chosen.block, _rule(chosen))
    return codes, scale


@_quantize.register_fake
def _(x: Tensor, format: str, largest: float, scaling: str) -> tuple[Tensor, Tensor]:
    return _results(x, scaling_of(scaling))


@torch.library.custom_op("accelbridge::quantize_by", mutates_args=())
def _quantize_by(x: Tensor, scale: Tensor, format: str, largest: float, block: list[int]) -> Tensor:
    """uint8 codes [R, C] of ``x`` over a scale that is given, as delayed scaling does."""
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    _launch(x, codes, scale, format, largest, (block[0], block[1]), "given")
    return codes


@_quantize_by.register_fake
def _(x: Tensor, scale: Tensor, format: str, largest: float, block: list[int]) -> Tensor:
    return torch.empty(x.shape, dtype=torch.uint8, device=x.device)


if torch.distributed.is_available():
    from accelbridge.kernels.sharding import register_quantize

    register_quantize(torch.ops.accelbridge.quantize.default, torch.ops.accelbridge.quantize_by.default)


def _results(x: Tensor, scaling: Scaling) -> tuple[Tensor, Tensor]:
    """Where codes and scales go. Scales of blocks within rows lie along the rows, [R, C / 128] transposed: so a product
    reads those of one stretch of K side by side, and vendors' libraries want them so."""
    down, across = block_counts(x.shape, scaling.block)
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    if scaling.block[0] == 1 and scaling.block[1] != WHOLE:
        return codes, torch.empty((across, down), dtype=torch.float32, device=x.device).t()
    return codes, torch.empty((down, across), dtype=torch.float32, device=x.device)


def _rule(scaling: Scaling) -> str:
    if scaling.scale_format == "float8_e8m0fnu":
        return "power_e8m0" if scaling.power_of_two else "shared_e8m0"
    return "power" if scaling.power_of_two else "quotient"


def _launch(
    x: Tensor, codes: Tensor, scale: Tensor, name: str, largest: float, block: tuple[int, int], rule: str
) -> None:
    format = formats.FORMATS[name]
    if scale.numel() == 0 or (0 in x.shape and rule == "given"):
        return
    if 0 in x.shape:  # nothing to scale, but a scale for the whole of it, or for each empty row
        scale.fill_(1.0)
        return
    constants = {
        "LIMIT": largest,
        "FORMAT": TYPES[name],
        "NAN": formats.nan_code(format),
        "TOP": 2.0 ** math.floor(math.log2(largest)) if rule == "shared_e8m0" else largest,
        "SCALES": rule,
    }
    if block == (WHOLE, WHOLE):
        _whole(x, codes, scale, constants)
    elif block == (1, WHOLE):
        _rows(x, codes, scale, constants)
    else:
        _blocks(x, codes, scale, block, constants)


def _whole(x: Tensor, codes: Tensor, scale: Tensor, constants: dict[str, Any]) -> None:
    largest = torch.zeros(1, dtype=torch.int32, device=x.device) if constants["SCALES"] != "given" else scale
    if constants["SCALES"] != "given":
        flat = _side_by_side(x)
        chosen = tile("amax")
        programs = min(cdiv(flat.numel(), chosen.blocks["BLOCK"]), 8 * processors(x.device))
        run(amax_kernel, programs, flat, largest, flat.numel(), **chosen.launch)
    chosen = tile("quantize_tensor")
    rows, columns = x.shape
    grid = cdiv(rows, chosen.blocks["BLOCK_ROWS"]) * cdiv(columns, chosen.blocks["BLOCK_COLUMNS"])
    run(
        quantize_tensor_kernel, grid, x, largest, scale, codes, rows, columns, *x.stride(), **constants, **chosen.launch
    )


def _side_by_side(x: Tensor) -> Tensor:
    """The elements of ``x`` in any order, in one row of memory: of a transposed matrix, as they lie."""
    return x.t().reshape(-1) if x.stride(0) == 1 else x.reshape(-1)


def _rows(x: Tensor, codes: Tensor, scale: Tensor, constants: dict[str, Any]) -> None:
    rows, columns = x.shape
    chosen = tile("quantize_rows" if x.stride(1) == 1 or columns == 1 else "quantize_rows.transposed")
    one_pass = columns <= chosen.blocks["BLOCK_COLUMNS"]
    grid = cdiv(rows, chosen.blocks["BLOCK_ROWS"])
    run(
        quantize_rows_kernel,
        grid,
        x,
        scale,
        codes,
        rows,
        columns,
        *x.stride(),
        ONE_PASS=one_pass,
        **constants,
        **chosen.launch,
    )


def _blocks(x: Tensor, codes: Tensor, scale: Tensor, block: tuple[int, int], constants: dict[str, Any]) -> None:
    rows, columns = x.shape
    chosen = tile(f"quantize_blocks.{block[0]}x{block[1]}")
    grid = cdiv(rows, chosen.blocks["BLOCK_ROWS"]) * cdiv(columns, chosen.blocks["BLOCK_COLUMNS"])
    run(quantize_blocks_kernel, grid, x, scale, codes, rows, columns, *x.stride(), *scale.stride(),
        GROUP_ROWS=block[0], GROUP_COLUMNS=block[1], **constants, **chosen.launch,
    )  # fmt: skip
