"""Cells of the capability table that any device with a full torch has, for its backend to start from. No torch."""

from __future__ import annotations

from collections.abc import Callable

from accelbridge.backend import FULL, Support, unsupported
from accelbridge.portable.fp8_cells import MIXED
from accelbridge.precision.scalings import SCALINGS

Cells = dict[tuple[str, str, str], Support]

FLOATS = ("float32", "float64", "bfloat16", "float16")
MOVES = ("all_gather", "broadcast", "all_to_all")
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
OPS = (
    "linear",
    "attention",
    "embedding",
    "rms_norm",
    "rope",
    "swiglu",
    "dropout",
    "cross_entropy",
    "vocab_parallel_cross_entropy",
    "linear_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
    "adamw",
)


def op_cells() -> Cells:
    """Ops of ``accelbridge.ops`` and the optimizer, in every float dtype."""
    table: Cells = {(op, dtype, ""): FULL for op in OPS for dtype in FLOATS}
    table["adamw", "float16", ""] = unsupported(
        "float16 cannot hold the squares of gradients below 2^-12: keep parameters in float32"
    )
    return table


def group_cells() -> Cells:
    """Collectives of a library that has SUM, PRODUCT, MIN, MAX, AVG and PREMUL_SUM over every float dtype."""
    kinds = ("sum", "product", "min", "max", "avg", "premul_sum")
    table: Cells = {(op, dtype, kind): FULL for op in REDUCTIONS for dtype in FLOATS for kind in kinds}
    table |= {(op, dtype, ""): FULL for op in MOVES for dtype in (*FLOATS, "uint8")}
    table |= {(op, "bool", "avg"): unsupported("the mean of truth values is none") for op in REDUCTIONS}
    return table


def fp8_cells(
    family: tuple[str, str], quantizing: Callable[[str], Support], product: Callable[[str, str, str], Support]
) -> Cells:
    """Products of one family of formats, (E4M3, E5M2). ``quantizing(scaling)`` and ``product(a, b, scaling)`` say what
    becomes of each; scalings whose scales are powers of two, and unit scales, are served as those they are a case
    of."""
    table = product_cells(family, product)
    table |= {("quantize", a, scaling): quantizing(general(scaling)) for a in family for scaling in SCALINGS}
    return table


def product_cells(family: tuple[str, str], product: Callable[[str, str, str], Support]) -> Cells:
    """Those of :func:`fp8_cells` that are products."""
    table: Cells = {}
    for a in family:
        for b in family:
            pair = a if a == b else f"{a} x {b}"
            for scaling in (*SCALINGS, *MIXED):
                table["scaled_mm", pair, scaling] = product(a, b, general(scaling))
    return table


def general(scaling: str) -> str:
    """``"block1x128_pow2 x block128x128_pow2"`` -> ``"block1x128 x block128x128"``, ``"unit"`` -> ``"tensor"``."""
    plain = scaling.replace("_pow2", "")
    return "tensor" if plain == "unit" else plain
