"""The op ``swiglu``: one pass forward, one backward.

E elements of b bytes. Floors, with nothing else to read or write:

    forward     bytes  3 E b      operations   5 E, of them E exponentials
    backward    bytes  5 E b      operations  11 E, of them E exponentials

Gate and up are kept for the backward pass, and nothing besides.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from accelbridge.kernels.limits import check_dtype
from accelbridge.kernels.tiles import tile
from accelbridge.ops.layers import check_swiglu


@triton.jit
def swiglu_forward(gate, up, y, elements, BLOCK: tl.constexpr):
    """y = gate sigmoid(gate) up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, (g / (1.0 + tl.exp(-g)) * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward(grad, gate, up, dgate, dup, elements, BLOCK: tl.constexpr):
    """With s = sigmoid(gate): dgate = grad up s (1 + gate (1 - s)), dup = grad gate s."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < elements
    d = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    tl.store(dgate + at, (d * u * s * (1.0 + g * (1.0 - s))).to(dgate.dtype.element_ty), mask=mask)
    tl.store(dup + at, (d * g * s).to(dup.dtype.element_ty), mask=mask)


# ------------------------------------------------------------------------------------------------------- custom ops


@torch.library.custom_op("accelbridge::swiglu", mutates_args=())
def _forward(gate: Tensor, up: Tensor) -> Tensor:
    y = gate.new_empty(gate.shape)
    _launch(swiglu_forward, "swiglu_forward", gate.contiguous(), up.contiguous(), y)
    return y


@_forward.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("accelbridge::swiglu_backward", mutates_args=())
def _backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _launch(swiglu_backward, "swiglu_backward", grad.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup)
    return dgate, dup


@_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _launch(kernel: Any, name: str, *tensors: Tensor) -> None:
    """``kernel`` over every element of ``tensors``, which are dense and of one shape."""
    elements = tensors[0].numel()
    if elements:
        launch = tile(name).launch
        kernel[(triton.cdiv(elements, launch["BLOCK"]),)](*tensors, elements, **launch)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.accelbridge.swiglu_backward(grad, *ctx.saved_tensors)


_forward.register_autograd(_differentiate, setup_context=_setup)


@register_sharding(torch.ops.accelbridge.swiglu.default)
def _(gate, up):
    return [([place], [place] * 2) for place in [Replicate(), *map(Shard, range(gate.ndim))]]


@register_sharding(torch.ops.accelbridge.swiglu_backward.default)
def _(grad, gate, up):
    return [([place] * 2, [place] * 3) for place in [Replicate(), *map(Shard, range(gate.ndim))]]


# --------------------------------------------------------------------------------------------------------------- op


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """See :func:`accelbridge.ops.swiglu`; float32, bfloat16 and float16, rounded once.

    Raises ``ValueError`` for shapes or dtypes that don't fit, ``Unsupported`` for other dtypes.
    """
    check_swiglu(gate, up)
    check_dtype("swiglu", gate)
    if gate.dtype != up.dtype:
        raise ValueError(f"swiglu takes two tensors of one dtype; found {gate.dtype} and {up.dtype}")
    return torch.ops.accelbridge.swiglu(gate, up)
