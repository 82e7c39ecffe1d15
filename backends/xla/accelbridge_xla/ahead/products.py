"""FLOPs of products that a program repeats, which a cost analysis leaves out.

XLA's counts the body of a loop once (openxla/xla, ``HloCostAnalysis::HandleWhile``), and its partitioner makes loops of
products whose operands or results are sharded ("windowed einsum").
"""

from __future__ import annotations

import re
from math import prod

from accelbridge_xla.ahead.hlo import Computation, Instruction, Program, shapes

PRODUCTS = {"dot", "convolution"}
"""On TPUs every product is a convolution."""


def repeated_flops(program: Program) -> float:
    """FLOPs of all runs but the first of each product."""
    total = 0.0
    for name, times in program.runs.items():
        computation = program.computations[name]
        for each in computation.instructions.values():
            if times > 1 and each.opcode in PRODUCTS:
                total += (times - 1) * flops(each, computation)
    return total


def flops(product: Instruction, computation: Computation) -> float:
    """Two per multiplication of a ``dot`` or ``convolution``; places of a window that lie in padding have none."""
    lhs, rhs = (_dims(computation.result(each)) for each in product.operands[:2])
    out = _dims(product.result)
    if product.opcode == "dot":
        contracted = [int(dim) for dim in (product.attribute("lhs_contracting_dims") or "").split(",") if dim]
        return 2.0 * prod(out) * prod(lhs[dim] for dim in contracted)
    labels = re.fullmatch(r"(\w+)_(\w+)->(\w+)", product.attribute("dim_labels") or "")
    if labels is None:
        raise ValueError(f"a convolution without dim_labels: {product.rest[:200]}")
    image, kernel, result = (
        dict(zip(text, dims, strict=True)) for text, dims in zip(labels.groups(), (lhs, rhs, out), strict=True)
    )
    window = _window(product.attribute("window") or "")
    places = 1
    for spatial in filter(str.isdigit, result):
        i = int(spatial)
        places *= _places(image[spatial], kernel[spatial], result[spatial], {k: v[i] for k, v in window.items()})
    return 2.0 * result["b"] * result["f"] * kernel["i"] * places


def _dims(text: str) -> tuple[int, ...]:
    return shapes(text)[0][1]


def _window(text: str) -> dict[str, list[str]]:
    """``size=2x3 pad=1_1x0_0`` by name, per spatial dimension."""
    pairs = (each.split("=") for each in text.split())
    return {name: value.split("x") for name, value in pairs}


def _places(size: int, kernel: int, out: int, window: dict[str, str]) -> int:
    """Pairs of a kernel's and a result's place, along one dimension, whose operand is no padding."""
    stride, dilation, spread = (int(window.get(name, "1")) for name in ("stride", "rhs_dilate", "lhs_dilate"))
    low = int(window.get("pad", "0_0").split("_")[0])
    last = (size - 1) * spread
    count = 0
    for tap in range(kernel):
        at = range(tap * dilation - low, tap * dilation - low + out * stride, stride)
        count += sum(1 for place in at if 0 <= place <= last and place % spread == 0)
    return count
