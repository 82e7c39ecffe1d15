"""The op ``rope``: one pass, backward the same turn the other way round.

B S H D elements of b bytes, angles of float32. Floor, forward and backward alike, with nothing else to read or write:

    bytes  2 B S H D b + 4 S D (B times as much where positions differ by row)      operations  3 B S H D

Nothing but the angles is kept for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from accelbridge.errors import Unsupported
from accelbridge.kernels.limits import ROPE_PAIRS, check_dtype
from accelbridge.kernels.tiles import tile
from accelbridge.ops.layers import check_rope


@triton.jit
def rope_kernel(
    x, cos, sin, y, sequence, heads, pairs, batch_stride, sequence_stride, head_stride, angle_stride,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns pairs (i, i + pairs) of HEADS heads at one position. BLOCK >= pairs."""
    place = tl.program_id(0).to(tl.int64)
    row, position = place // sequence, place % sequence
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, BLOCK)
    there = pair < pairs
    angle = row * angle_stride + position * pairs + pair
    c = tl.load(cos + angle, mask=there, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=there, other=0.0).to(tl.float32)[None, :]
    if INVERSE:
        s = -s
    mask = (head < heads)[:, None] & there[None, :]
    source = x + row * batch_stride + position * sequence_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + pairs, mask=mask, other=0.0).to(tl.float32)
    target = y + place * heads * pairs * 2 + head[:, None] * pairs * 2 + pair[None, :]
    tl.store(target, (first * c - second * s).to(y.dtype.element_ty), mask=mask)
    tl.store(target + pairs, (second * c + first * s).to(y.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------------- custom op


@torch.library.custom_op("accelbridge::rope", mutates_args=())
def _turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    y = x.new_empty(x.shape)
    if not x.numel():
        return y
    batch, sequence, heads, dim = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    launch = tile(f"rope.{max(triton.next_power_of_2(dim // 2), 16)}").launch
    rope_kernel[(batch * sequence, triton.cdiv(heads, launch["HEADS"]))](
        x, cos, sin, y, sequence, heads, dim // 2, *x.stride()[:3], cos.stride(0) if cos.dim() == 3 else 0,
        INVERSE=inverse, **launch,
    )  # fmt: skip
    return y


@_turn.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return torch.ops.accelbridge.rope(grad, *ctx.saved_tensors, not ctx.inverse), None, None, None


_turn.register_autograd(_differentiate, setup_context=_setup)


@register_sharding(torch.ops.accelbridge.rope.default)
def _(x, cos, sin, inverse):
    whole = ([Replicate()], [Replicate(), Replicate(), Replicate(), None])
    heads = ([Shard(2)], [Shard(2), Replicate(), Replicate(), None])
    sequence = ([Shard(1)], [Shard(1), Shard(cos.ndim - 2), Shard(cos.ndim - 2), None])
    angles = Shard(0) if cos.ndim == 3 else Replicate()
    batch = ([Shard(0)], [Shard(0), angles, angles, None])
    return [whole, heads, sequence, batch]


# --------------------------------------------------------------------------------------------------------------- op


def rope(x_BSHD: Tensor, cos_SP: Tensor, sin_SP: Tensor) -> Tensor:
    """See :func:`accelbridge.ops.rope`; float32, bfloat16 and float16, heads up to 512, angles without gradient.

    Raises ``ValueError`` for shapes that don't fit, ``Unsupported`` for what the kernel cannot do.
    """
    check_rope(x_BSHD, cos_SP, sin_SP)
    check_dtype("rope", x_BSHD)
    if cos_SP.requires_grad or sin_SP.requires_grad:
        raise Unsupported(
            "rope with angles that take a gradient asked of the Triton kernel, which gives none; bind the portable "
            "reference"
        )
    if cos_SP.shape[-1] > ROPE_PAIRS:
        raise Unsupported(
            f"rope over heads of {x_BSHD.shape[3]} asked of the Triton kernel, which takes {2 * ROPE_PAIRS}; bind the "
            "portable reference"
        )
    return torch.ops.accelbridge.rope(x_BSHD, cos_SP, sin_SP, False)
