"""The op ``fp8_linear``: a linear layer whose three products have fp8 operands.

    forward            y  [T, out] = x [T, in]   w^T [in, out]     both in the forward format
    gradient of x      dx [T, in]  = g [T, out]  w   [out, in]     g in the backward format
    gradient of w      dw [out, in] = g^T [out, T] x [T, in]

T counts tokens. Sums are rounded once, to the dtype of x. The weight is quantized again in the backward pass: to keep
what was quantized would hold a model that is sharded whole. An input whose scale serves both of its products is kept as
codes, half the bytes of bfloat16; else itself. (Layers that share an input each keep codes of their own: three of them
keep 3 bytes an element, where bfloat16 would keep 2.)
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from accelbridge.backend import Matmul
from accelbridge.portable.fp8 import scale_for
from accelbridge.precision.formats import FORMATS
from accelbridge.precision.gathered import GatheredWeight
from accelbridge.precision.quantized import QuantizedTensor, shares
from accelbridge.precision.recipe import ROLES, Fp8Recipe, Role
from accelbridge.precision.scalings import scaling_of


class Fp8Layer:
    """What one linear layer needs to compute in fp8. Its tensors are rows of those that :class:`.state.Fp8State` holds
    for all layers; without one (no delayed scaling, no counters) they are None."""

    def __init__(self, name: str, matmul: Matmul, recipe: Fp8Recipe) -> None:
        self.name = name
        self.matmul = matmul
        self.recipe = recipe
        self.formats = [FORMATS[recipe.format_of(role)] for role in ROLES]
        self.amax: Tensor | None = None
        """float32 [3]: largest magnitude of each role in this step so far."""
        self.scale: Tensor | None = None
        """float32 [3, 1, 1]: to multiply with when dequantizing; 0 as long as nothing is known."""
        self.counts: Tensor | None = None
        """float32 [3, 4]: shares of saturated, underflowed and nonfinite elements, added up, and how many were."""

    def quantize(self, x: Tensor, role: Role, scaling: str, *, noted: bool = True) -> QuantizedTensor:
        """``x``, a matrix, as the recipe says for this role. ``noted``: its magnitude counts for later scales."""
        index = ROLES.index(role)
        scale = None if self.scale is None else self._known_scale(x, index, noted)
        return self.matmul.quantize(x, self.formats[index], scaling, scale)

    def count(self, x: Tensor, quantized: QuantizedTensor, role: Role) -> None:
        """Add what quantizing ``x`` lost to the counters."""
        if self.counts is None:
            return
        found = shares(x, quantized)
        self.counts[ROLES.index(role)] += torch.stack([*found, torch.ones_like(found[0])])

    def _known_scale(self, x: Tensor, index: int, noted: bool) -> Tensor:
        """That of earlier steps; before there is one, that of ``x`` itself."""
        assert self.amax is not None
        assert self.scale is not None
        largest = x.detach().abs().amax().to(torch.float32) if x.numel() else self.amax.new_zeros(())
        if noted:
            self.amax[index].copy_(torch.maximum(self.amax[index], largest))
        own = scale_of(largest, self.formats[index].max, self.recipe).reshape(1, 1)
        return torch.where(self.scale[index] > 0, self.scale[index], own)

    def weight(self, weight: Tensor, *, transposed: bool = False, noted: bool = True) -> QuantizedTensor:
        """``weight`` [out, in] in blocks along in; ``transposed``: [in, out] in blocks along out."""
        if isinstance(weight, GatheredWeight):
            found = self.padded_codes(weight.quantized)
            return found.t() if transposed else found
        kind = self.recipe.weight
        square = len(set(scaling_of(kind).block)) == 1
        if transposed and not square:
            return self.quantize(self.padded(weight.t()), "weight", kind, noted=noted)
        found = self.quantize(self.padded(weight), "weight", kind, noted=noted)
        return found.t() if transposed else found

    def padded(self, x: Tensor) -> Tensor:
        """``x`` with zeros up to the multiples that the chip's products need, as the plan's lowering says."""
        rows, columns = (-size % self.recipe.multiple for size in x.shape)
        return F.pad(x, (0, columns, 0, rows)) if rows or columns else x

    def padded_codes(self, x: QuantizedTensor) -> QuantizedTensor:
        """The same for codes; code 0 is the number 0 in every format."""
        codes = x.codes(x.format.name)
        padded = self.padded(codes)
        return x if padded is codes else QuantizedTensor.of_codes(padded, x.scale, x.format, x.block)


def scale_of(amax: Tensor, largest: float | Tensor, recipe: Fp8Recipe) -> Tensor:
    """float32 scale of one block for all: ``amax * 2^margin / largest``; 1 where that is 0 or not finite."""
    margin = recipe.config.margin if recipe.delayed else 0
    scale = scale_for(amax * 2.0**margin, largest, scaling_of(recipe.weight))
    return torch.where((amax > 0) & scale.isfinite(), scale, 1.0)


class _Fp8Linear(torch.autograd.Function):
    """x [T, in], weight [out, in] -> [T, out]. ``training``: magnitudes are noted for later scales, and losses counted;
    an evaluation between two steps must not change the second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Fp8Layer, training: bool) -> Tensor:
        given = layer.padded(x)
        a = layer.quantize(given, "input", layer.recipe.moving, noted=training)
        w = layer.weight(weight, noted=training)
        if training:
            layer.count(given, a, "input")
        if training and not isinstance(weight, GatheredWeight):
            layer.count(layer.padded(weight), w, "weight")
        ctx.layer, ctx.shape = layer, x.shape
        if layer.recipe.symmetric:
            ctx.save_for_backward(weight, a.payload, a.scale)
        else:
            ctx.save_for_backward(weight, x)
        return layer.matmul.scaled_mm(a, w.t(), x.dtype)[: x.shape[0], : weight.shape[0]]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = cast(tuple[Tensor], grads)
        layer: Fp8Layer = ctx.layer
        weight, *kept = ctx.saved_tensors
        rows, columns = ctx.shape
        given = layer.padded(grad)
        g = layer.quantize(given, "gradient", layer.recipe.moving)
        layer.count(given, g, "gradient")
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = layer.matmul.scaled_mm(g, layer.weight(weight, transposed=True).t(), grad.dtype)[:rows, :columns]
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(layer, given, g, kept, grad.dtype)[: weight.shape[0], :columns]
        return dx, dw, None, None


def _weight_gradient(
    layer: Fp8Layer, grad: Tensor, g: QuantizedTensor, kept: list[Tensor], dtype: torch.dtype
) -> Tensor:
    if layer.recipe.symmetric:
        payload, scale = kept
        a = QuantizedTensor(payload, scale, layer.formats[0], g.block)
        return layer.matmul.scaled_mm(g.t(), a, dtype)
    # Blocks along the tokens now.
    moving, (x,) = layer.recipe.moving, kept
    left = layer.quantize(grad.t(), "gradient", moving)
    right = layer.quantize(layer.padded(x).t(), "input", moving)
    return layer.matmul.scaled_mm(left, right.t(), dtype)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: Fp8Layer) -> Tensor:
    """``x @ weight.T + bias`` for ``x [*, in]``, ``weight [out, in]``, ``bias [out]``: ``[*, out]`` in the dtype of x,
    with fp8 operands in the products of the forward and of the backward pass. Raises ``ValueError`` for shapes that
    don't fit.

    An infinity or NaN in an operand makes NaN of what its block reaches. A tensor of zeros gives exactly 0.
    """
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"fp8_linear takes x [*, in] and weight [out, in] with the same in; found x {tuple(x.shape)} and weight "
            f"{tuple(weight.shape)}"
        )
    # Asked here: inside of an autograd.Function gradients are always off.
    y = cast(Tensor, _Fp8Linear.apply(x.reshape(-1, x.shape[-1]), weight, layer, torch.is_grad_enabled()))
    y = y.reshape(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias
