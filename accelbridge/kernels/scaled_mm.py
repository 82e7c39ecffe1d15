"""Products of 8-bit floats with scales, for what a vendor's library has no kernel for.

    out [M, N] = sum over k of (a [M, K] times its scales) (b [N, K] times its scales), + bias [N]

Both operands lie along K. Scales are one for a matrix, one for a row, one for 128 terms of a row, one for 128 x 128, or
one for 32 terms of a row as a power of two (MX), which the matrix instructions read themselves.

The floor is arithmetic: 2 M N K operations, or memory where M or N is small: (M + N) K bytes of codes, 4 bytes a scale
and e M N of the result. At 4096 x 4096 x 4096: 69 us at the 1979 TFLOP/s of an H100 or H200 SXM in fp8, 53 us at the
2615 TFLOP/s of an MI300X (dense, their datasheets); the 67 MB take 20 us, 14 us and 13 us.

Sums: matrix instructions add in float32 or, where a chip adds in fewer bits (``fp8.accumulator_bits``), for at most 128
terms, after which they move on to float32 registers. Scales of 128 terms ask for that anyway.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from accelbridge.errors import ConfigError, Unsupported
from accelbridge.kernels.launch import FARTHEST, MOST, cdiv, check_reach, processors, run
from accelbridge.kernels.tiles import Tile, tile
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.quantized import QuantizedTensor, dtype_of
from accelbridge.precision.scalings import WHOLE

OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MX_NAMES = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
"""Formats that ``dot_scaled`` takes."""


# ---------------------------------------------------------------------------------------------------- on the device


@triton.jit
def _place(number, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and first column of block ``number``: GROUP blocks below each other, then those to their right, so that
    what one reads is in the cache for the next."""
    down, across = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    group, within = number // (GROUP * across), number % (GROUP * across)
    height = min(down - group * GROUP, GROUP)
    return (group * GROUP + within % height) * BLOCK_M, (within // height) * BLOCK_N


@triton.jit
def _operand(
    x, first, start, rows, k, x_row,
    DESCRIPTORS: tl.constexpr, EVEN_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_K] of ``x`` [rows, k] from (first, start) on; what is beyond K is 0, a row beyond the last is some
    row, whose results nobody stores."""
    if DESCRIPTORS:
        found = x.load([first, start])
    else:
        r, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)[None, :]
        r = tl.where(r < rows - first, r, 0)
        pointers = x + tl.cast(first, tl.int64) * x_row + start + (r[:, None] * x_row + c)
        if EVEN_K:
            found = tl.load(pointers)
        else:
            found = tl.load(pointers, mask=c < k - start, other=0.0)
    return found


@triton.jit
def _scales(
    scale, first, start, rows, s_row, s_step,
    SHARED: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales of BLOCK rows for the terms from ``start`` on, [BLOCK]; SHARED rows have one in common (0: all), and STEP
    terms (0: all)."""
    r = first + tl.arange(0, BLOCK)
    r = tl.where(r < rows, r, first)
    block = tl.zeros_like(r) if SHARED == 0 else r // SHARED
    step = 0 if STEP == 0 else start // STEP
    return tl.load(scale + (block * s_row + step * s_step))


@triton.jit
def _finish(
    sums, out, bias, first_m, first_n, m, n, out_row,
    BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    r, c = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    if BIAS:
        sums += tl.load(bias + first_n + c, mask=c < n - first_n, other=0.0).to(tl.float32)[None, :]
    pointers = out + tl.cast(first_m, tl.int64) * out_row + first_n + (r[:, None] * out_row + c[None, :])
    mask = (r[:, None] < m - first_m) & (c[None, :] < n - first_n)
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=mask)


@triton.jit
def scaled_mm_kernel(
    a, b, out, bias, a_scale, b_scale, m, n, k, a_row, b_row, out_row, as_row, as_step, bs_row, bs_step,
    A_SHARED: tl.constexpr, A_STEP: tl.constexpr, B_SHARED: tl.constexpr, B_STEP: tl.constexpr,
    BIAS: tl.constexpr, EVEN_K: tl.constexpr, DESCRIPTORS: tl.constexpr, PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Scales that the matrix instructions don't know. A_STEP and B_STEP are 0 or the same multiple of BLOCK_K; PROMOTE:
    sums of BLOCK_K terms are added in float32 registers, also where no scale asks for it."""
    total = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        first_m, first_n = _place(number, m, n, BLOCK_M, BLOCK_N, GROUP)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):
            x = _operand(a, first_m, start, m, k, a_row, DESCRIPTORS, EVEN_K, BLOCK_M, BLOCK_K)
            y = _operand(b, first_n, start, n, k, b_row, DESCRIPTORS, EVEN_K, BLOCK_N, BLOCK_K)
            if A_STEP == 0 and B_STEP == 0:
                if PROMOTE:
                    # Not 0, so that the compiler does not make one sum of both.
                    sums += tl.dot(x, y.T, max_num_imprecise_acc=BLOCK_K)
                else:
                    sums = tl.dot(x, y.T, sums)
            else:
                left = _scales(a_scale, first_m, start, m, as_row, as_step, A_SHARED, A_STEP, BLOCK_M)
                right = _scales(b_scale, first_n, start, n, bs_row, bs_step, B_SHARED, B_STEP, BLOCK_N)
                sums += tl.dot(x, y.T) * left[:, None] * right[None, :]
        if A_STEP == 0 and B_STEP == 0:
            left = _scales(a_scale, first_m, 0, m, as_row, as_step, A_SHARED, A_STEP, BLOCK_M)
            right = _scales(b_scale, first_n, 0, n, bs_row, bs_step, B_SHARED, B_STEP, BLOCK_N)
            sums = sums * left[:, None] * right[None, :]
        _finish(sums, out, bias, first_m, first_n, m, n, out_row, BIAS, BLOCK_M, BLOCK_N)


@triton.jit
def _exponents(
    scale, first, start, rows, k, s_row, s_step, EVEN_K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr
):
    """e8m0 codes [BLOCK, BLOCK_K / 32] of float32 scales, powers of two: their exponents (OCP MX 1.0, section 5.4.1);
    of terms beyond K that of 1."""
    r, c = first + tl.arange(0, BLOCK), start // 32 + tl.arange(0, BLOCK_K // 32)
    r = tl.where(r < rows, r, first)
    pointers = scale + (r[:, None] * s_row + c[None, :] * s_step)
    if EVEN_K:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=c[None, :] < tl.cdiv(k, 32), other=1.0)
    return ((found.to(tl.int32, bitcast=True) >> 23) & 0xFF).to(tl.uint8)


@triton.jit
def scaled_mm_mx_kernel(
    a, b, out, bias, a_scale, b_scale, m, n, k, a_row, b_row, out_row, as_row, as_step, bs_row, bs_step,
    A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr, BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """MX: blocks of 32 terms, whose scales the matrix instructions apply."""
    total = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        first_m, first_n = _place(number, m, n, BLOCK_M, BLOCK_N, GROUP)
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):
            x = _operand(a, first_m, start, m, k, a_row, DESCRIPTORS, EVEN_K, BLOCK_M, BLOCK_K)
            y = _operand(b, first_n, start, n, k, b_row, DESCRIPTORS, EVEN_K, BLOCK_N, BLOCK_K)
            left = _exponents(a_scale, first_m, start, m, k, as_row, as_step, EVEN_K, BLOCK_M, BLOCK_K)
            right = _exponents(b_scale, first_n, start, n, k, bs_row, bs_step, EVEN_K, BLOCK_N, BLOCK_K)
            sums = tl.dot_scaled(x, left, A_FORMAT, y.T, right, B_FORMAT, sums)
        _finish(sums, out, bias, first_m, first_n, m, n, out_row, BIAS, BLOCK_M, BLOCK_N)


# ------------------------------------------------------------------------------------------------------ on the host


def scaled_mm(a: QuantizedTensor, b: QuantizedTensor, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """``Matmul.scaled_mm`` by these kernels: ``a`` [M, K] and ``b`` [K, N] in blocks along K, whose codes are copied
    where they don't lie along it. Accumulated in float32, rounded once to ``out_dtype``.

    Raises ``Unsupported`` for what no kernel knows (:func:`lacks`), dtypes and sizes beyond reach; ConfigError
    where K differs.
    """
    right = b.t()
    if a.shape[1] != right.shape[1]:
        raise ConfigError(f"a scaled product {tuple(a.shape)} x {tuple(b.shape)} asked; K must be equal")
    if why := lacks(a, right) or (out_dtype not in OUT_DTYPES and f"none gives {out_dtype}"):
        asked = f"{a.format.name} in blocks {a.block} x {b.format.name} in {b.block}"
        raise Unsupported(f"a scaled product of {asked} asked of a kernel; {why}")
    codes = [x.codes(x.format.name).contiguous() for x in (a, right)]
    check_reach("a scaled product", *codes)
    if right.shape[0] > FARTHEST or max(a.scale.numel(), right.scale.numel()) > MOST:
        raise Unsupported(
            f"a scaled product {tuple(a.shape)} x {tuple(b.shape)} asked of a kernel; N ends at {FARTHEST}, and scales "
            f"of an operand at {MOST}; split it"
        )
    return torch.ops.accelbridge.scaled_mm(
        *codes,
        a.scale,
        right.scale,
        bias,
        a.format.name,
        right.format.name,
        list(a.block),
        list(right.block),
        out_dtype,
    )


def lacks(a: QuantizedTensor, right: QuantizedTensor) -> str:
    """Why there is no kernel for such blocks and formats of the two operands, both [rows, K]; "" where there is one."""
    steps = {x.block[1] for x in (a, right)}
    if any(x.block[0] not in (1, 128, WHOLE) for x in (a, right)):
        return "kernels know scales of one row, of 128 and of all"
    if 32 in steps:
        if not {a.format.name, right.format.name} <= MX_NAMES.keys():
            return f"MX is defined for {' and '.join(MX_NAMES)}"
        return "" if a.block == right.block == (1, 32) else "MX scales meet MX scales only"
    return "" if steps <= {128, WHOLE} else "kernels know scales of 32 terms, of 128 and of all along K"


@torch.library.custom_op("accelbridge::scaled_mm", mutates_args=())
def _scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
    a_format: str, b_format: str, a_block: list[int], b_block: list[int], out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """``a`` [M, K] and ``b`` [N, K]: contiguous uint8 codes. Without a gradient, which codes have none."""
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)
    if 0 in out.shape:
        return out
    if a.shape[1] == 0:
        return out.copy_(bias) if bias is not None else out.zero_()
    left, right = a.view(dtype_of(FORMATS[a_format])), b.view(dtype_of(FORMATS[b_format]))
    if a_block[1] == 32:
        chosen, kernel = tile("scaled_mm.mx"), scaled_mm_mx_kernel
        constants: dict[str, Any] = {"A_FORMAT": MX_NAMES[a_format], "B_FORMAT": MX_NAMES[b_format]}
    else:
        whole = a_block[1] == b_block[1] == WHOLE
        chosen, kernel = tile("scaled_mm.whole" if whole else "scaled_mm.blocks"), scaled_mm_kernel
        constants = {"A_SHARED": max(0, a_block[0]), "A_STEP": max(0, a_block[1]),
                     "B_SHARED": max(0, b_block[0]), "B_STEP": max(0, b_block[1])}  # fmt: skip
    _launch(kernel, chosen, constants, left, right, out, bias, a_scale, b_scale)
    return out


@_scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor | None,
    a_format: str, b_format: str, a_block: list[int], b_block: list[int], out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device)


if torch.distributed.is_available():
    from accelbridge.kernels.sharding import register_scaled_mm

    register_scaled_mm(torch.ops.accelbridge.scaled_mm.default)


def _launch(
    kernel: Any, chosen: Tile, constants: dict[str, Any], a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None,
    a_scale: Tensor, b_scale: Tensor,
) -> None:  # fmt: skip
    (m, k), n = a.shape, b.shape[0]
    blocks = dict(chosen.launch)
    even = k % blocks["BLOCK_K"] == 0
    # What loads by descriptor wants rows of a multiple of 16 bytes.
    blocks["DESCRIPTORS"] = bool(blocks["DESCRIPTORS"]) and k % 16 == 0 and a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    # Large blocks take all registers of a processor, of smaller ones two find room.
    each = 1 if blocks["BLOCK_M"] * blocks["BLOCK_N"] >= 128 * 128 else 2
    programs = min(cdiv(m, blocks["BLOCK_M"]) * cdiv(n, blocks["BLOCK_N"]), each * processors(a.device))
    left, right = a, b
    if blocks["DESCRIPTORS"]:
        left = TensorDescriptor.from_tensor(a, [blocks["BLOCK_M"], blocks["BLOCK_K"]])
        right = TensorDescriptor.from_tensor(b, [blocks["BLOCK_N"], blocks["BLOCK_K"]])
    run(
        kernel, programs, left, right, out, bias, a_scale, b_scale, m, n, k, a.stride(0), b.stride(0), out.stride(0),
        *a_scale.stride(), *b_scale.stride(), BIAS=bias is not None, EVEN_K=even, **constants, **blocks,
    )  # fmt: skip
