"""The op ``rms_norm``: one pass forward, one pass backward that also sums the gradient of the weight.

R rows of D elements of b bytes. Floors, with nothing else to read or write:

    forward     bytes  2 R D b + D b_w + 4 R             operations  4 R D
    backward    bytes  3 R D b + D b_w + 4 R + 8 P D     operations  9 R D

b_w: bytes of an element of the weight; P: programs of the backward pass, each of which leaves one float32 row of
partial sums. The rows of a program, and their order, follow from R and the tile alone: the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from accelbridge.errors import Unsupported
from accelbridge.kernels.limits import RMS_NORM_COLUMNS, check_dtype
from accelbridge.kernels.tiles import tile
from accelbridge.ops.layers import check_rms_norm


@triton.jit
def rms_norm_forward(
    x, weight, y, rstd, rows, columns, stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """y = x / sqrt(mean(x^2) + eps) * weight for ROWS rows, and 1 / sqrt(...) of each. BLOCK >= columns."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    there = column < columns
    mask = (row < rows)[:, None] & there[None, :]
    wide = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / columns + eps)
    out = wide * scale[:, None] * w[None, :]
    tl.store(y + row[:, None] * columns + column[None, :], out.to(y.dtype.element_ty), mask=mask)
    tl.store(rstd + row, scale, mask=row < rows)


@triton.jit
def rms_norm_backward(
    grad, x, weight, rstd, dx, partial, rows, columns, grad_stride, stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """With n = x rstd and g = grad weight: dx = (g - n mean(g n)) rstd, and the sum of grad n over the rows of this
    program, which takes every PROGRAMS-th step of ROWS."""
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    there = column < columns
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(program, tl.cdiv(rows, ROWS), PROGRAMS):
        row = tl.cast(step, tl.int64) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & there[None, :]
        wide = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        given = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        normal = wide * scale
        total += tl.sum(given * normal, 0)
        w = tl.load(weight + column, mask=there, other=0.0).to(tl.float32)  # again each step: registers are scarcer
        weighted = given * w[None, :]
        mean = tl.sum(normal * weighted, 1) / columns
        out = (weighted - normal * mean[:, None]) * scale
        tl.store(dx + row[:, None] * columns + column[None, :], out.to(dx.dtype.element_ty), mask=mask)
    tl.store(partial + program.to(tl.int64) * columns + column, total, mask=there)


# ------------------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("accelbridge::rms_norm", mutates_args=())
def _forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y, rstd = _outputs(x)
    if x.numel():
        x_RD, weight = _rows(x), weight.contiguous()
        rows, columns = x_RD.shape
        launch = tile(f"rms_norm_forward.{_block(columns)}").launch
        grid = (triton.cdiv(rows, launch["ROWS"]),)
        rms_norm_forward[grid](x_RD, weight, y, rstd, rows, columns, x_RD.stride(0), eps, **launch)
    return y, rstd


@_forward.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _outputs(x)


@torch.library.custom_op("accelbridge::rms_norm_backward", mutates_args=())
def _backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    dx, dw = _gradients(x, weight)
    if not x.numel():
        return dx, dw.zero_()
    grad_RD, x_RD, weight = _rows(grad), _rows(x), weight.contiguous()
    rows, columns = x_RD.shape
    launch = tile(f"rms_norm_backward.{_block(columns)}").launch
    programs = min(launch["PROGRAMS"], triton.cdiv(rows, launch["ROWS"]))
    partial_PD = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    rms_norm_backward[(programs,)](
        grad_RD, x_RD, weight, rstd.contiguous(), dx, partial_PD, rows, columns, grad_RD.stride(0), x_RD.stride(0),
        **launch,
    )  # fmt: skip
    return dx, dw.copy_(partial_PD.sum(0))


@_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _gradients(x, weight)


def _setup(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight, rstd = ctx.saved_tensors
    return *torch.ops.accelbridge.rms_norm_backward(grad, x, weight, rstd), None


_forward.register_autograd(_differentiate, setup_context=_setup)


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _gradients(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _rows(x: Tensor) -> Tensor:
    """As a matrix whose rows are dense: a view where the strides let it."""
    x_RD = x.reshape(-1, x.shape[-1])
    return x_RD if x_RD.stride(1) == 1 else x_RD.contiguous()


def _block(columns: int) -> int:
    return max(triton.next_power_of_2(columns), 128)


# --------------------------------------------------------------------------------------------------------- sharding


@register_sharding(torch.ops.accelbridge.rms_norm.default)
def _(x, weight, eps):
    split = [([Shard(d), Shard(d)], [Shard(d), Replicate(), None]) for d in range(x.ndim - 1)]
    return [([Replicate(), Replicate()], [Replicate(), Replicate(), None]), *split]


@register_sharding(torch.ops.accelbridge.rms_norm_backward.default)
def _(grad, x, weight, rstd):
    whole = ([Replicate(), Replicate()], [Replicate()] * 4)
    return [whole] + [([Shard(d), Partial()], [Shard(d), Shard(d), Replicate(), Shard(d)]) for d in range(x.ndim - 1)]


# --------------------------------------------------------------------------------------------------------------- op


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`accelbridge.ops.rms_norm`; float32, bfloat16 and float16, and up to 16384 columns.

    Raises ``ValueError`` for shapes that don't fit, ``Unsupported`` for other dtypes and for longer rows.
    """
    check_rms_norm(x, weight)
    check_dtype("rms_norm", x, weight)
    if x.shape[-1] > RMS_NORM_COLUMNS:
        raise Unsupported(
            f"rms_norm over rows of {x.shape[-1]} asked of the Triton kernel, which holds a row in registers and takes "
            f"{RMS_NORM_COLUMNS}; bind the portable reference"
        )
    return torch.ops.accelbridge.rms_norm(x, weight, eps)[0]
