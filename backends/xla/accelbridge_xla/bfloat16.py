"""Ops on parameters for compute in bfloat16, whose gradients of parameters are float32.

The partitioner adds up what data-parallel devices contribute to a gradient in the dtype of the product that makes it.
So parameters reach their ops in float32, each op rounds what it takes to bfloat16, and the products that make gradients
are float32, of operands that hold bfloat16 values: exact products and float32 sums, on one device and between them.
What a layout pays for it is that parameters are gathered in float32.

rms_norm needs nothing of the kind: its reference computes in float32 and takes a float32 weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from accelbridge.errors import ConfigError


def watch(name: str) -> Callable[..., None]:
    """A forward hook of module ``name``, which owns parameters: what it returns must be bfloat16. A module that does
    not call our ops would compute in float32, since its parameters are."""

    def hook(module: nn.Module, _: Any, output: Any) -> None:
        found = output.dtype if isinstance(output, Tensor) and output.is_floating_point() else torch.bfloat16
        if found != torch.bfloat16:
            raise ConfigError(
                f"precision.compute bfloat16 asked; module {name} ({type(module).__name__}) returned {found}, since "
                "parameters stay float32 here and only ops of accelbridge.ops round them; build it of those (linear, "
                "embedding, rms_norm), or set precision.compute: float32"
            )

    return hook


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in the dtype of ``x [*, in]``, to which ``weight [out, in]`` and ``bias [out]`` are
    rounded. Raises ``ValueError`` for shapes that don't fit."""
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        raise ValueError(
            f"linear takes x [*, in], weight [out, in] and bias [out]; found x {tuple(x.shape)}, weight "
            f"{tuple(weight.shape)} and bias {None if bias is None else tuple(bias.shape)}"
        )
    return _Linear.apply(x, weight, bias)  # type: ignore[return-value]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, bias = ctx.saved_tensors
        wide = gradient.flatten(0, -2).float()
        of_x = gradient @ weight.to(gradient.dtype) if ctx.needs_input_grad[0] else None
        of_weight = (wide.T @ x.flatten(0, -2).float()).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = wide.sum(0).to(bias.dtype) if ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias


def embedding(tokens_BS: Tensor, weight_VD: Tensor) -> Tensor:
    """Rows of ``weight_VD`` by token id, rounded to bfloat16 once they are picked: ``[*tokens.shape, D]``."""
    if weight_VD.dim() != 2:
        raise ValueError(f"embedding takes a weight [vocabulary, dim]; found shape {tuple(weight_VD.shape)}")
    return F.embedding(tokens_BS, weight_VD).to(torch.bfloat16)
