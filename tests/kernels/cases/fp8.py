"""Quantizing and products of 8-bit floats, in the formats of each chip."""

from __future__ import annotations

from collections.abc import Iterator

from accelbridge.precision.formats import FORMATS, nan_code
from tests.kernels.aot import TARGETS, Case, tiles_of

MODULE = "accelbridge.kernels.quantize"
FNUZ = ("gfx942",)
"""Chips whose 8-bit floats are the fnuz ones."""
TYPES = {
    "float8_e4m3fn": "fp8e4nv",
    "float8_e5m2": "fp8e5",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2fnuz": "fp8e5b16",
}
DTYPES = {
    "float8_e4m3fn": "tl.float8e4nv",
    "float8_e5m2": "tl.float8e5",
    "float8_e4m3fnuz": "tl.float8e4b8",
    "float8_e5m2fnuz": "tl.float8e5b16",
}


def formats_of(target: str) -> tuple[str, str]:
    """(E4M3, E5M2) of the chip."""
    return ("float8_e4m3fnuz", "float8_e5m2fnuz") if target in FNUZ else ("float8_e4m3fn", "float8_e5m2")


def cases(target: str) -> Iterator[Case]:
    yield Case("amax", f"{MODULE}:amax_kernel", {"x": "*bf16", "largest": "*i32", "count": "i32:16"})
    for format in formats_of(target):
        yield from _quantizing(format)
    yield from _products(target)


def _quantizing(name: str) -> Iterator[Case]:
    format = FORMATS[name]
    label = name.removeprefix("float8_")
    pointers = {"x": "*bf16", "largest": "*i32", "scale": "*fp32", "codes": "*u8"}
    sizes = {"rows": "i32:16", "columns": "i32:16", "x_row": "i32:16"}
    common = {"LIMIT": format.max, "FORMAT": DTYPES[name], "NAN": nan_code(format), "TOP": format.max, "x_column": 1}
    yield Case("quantize_tensor", f"{MODULE}:quantize_tensor_kernel", {**pointers, **sizes},
               {**common, "SCALES": "quotient"}, label)  # fmt: skip
    for tile, more in (("quantize_rows", {"ONE_PASS": True}), ("quantize_rows", {"ONE_PASS": False}),
                       ("quantize_rows.transposed", {"ONE_PASS": False})):  # fmt: skip
        strides = {"x_row": 1, "x_column": "i32:16"} if tile.endswith("transposed") else {}
        types = {**pointers, **sizes, **{k: v for k, v in strides.items() if isinstance(v, str)}}
        constants = {**common, "SCALES": "quotient", **more}
        if strides:
            del constants["x_column"]
            constants["x_row"] = 1
        passes = "" if more["ONE_PASS"] else ", two passes"
        yield Case(tile, f"{MODULE}:quantize_rows_kernel", types, constants, label + passes)
    for rows, columns, scales in ((1, 128, "quotient"), (128, 128, "power"), (1, 32, "power_e8m0")):
        constants = {**common, "SCALES": scales, "GROUP_ROWS": rows, "GROUP_COLUMNS": columns}
        types = {**pointers, **sizes, "scale_row": "i32:16", "scale_column": "i32:16"}
        if rows == 1:
            constants["scale_row"] = 1
        else:
            constants["scale_column"] = 1
        yield Case(f"quantize_blocks.{rows}x{columns}", f"{MODULE}:quantize_blocks_kernel", types, constants, label)


# ----------------------------------------------------------------------------------------------------------- products

PRODUCTS = "accelbridge.kernels.scaled_mm"
SCALARS = {"m": "i32:16", "n": "i32:16", "k": "i32:16", "a_row": "i32:16", "b_row": "i32:16", "out_row": "i32:16"}
SCALES = {"a_scale": "*fp32", "b_scale": "*fp32", "bias": "*bf16"}


def _products(target: str) -> Iterator[Case]:
    e4m3, e5m2 = formats_of(target)
    for a, b in ((e4m3, e4m3), (e5m2, e4m3)):
        yield _product(target, "whole", a, b, "rows", {"A_SHARED": 1, "A_STEP": 0, "B_SHARED": 1, "B_STEP": 0})
        yield _product(target, "blocks", a, b, "1x128 x 128x128",
                       {"A_SHARED": 1, "A_STEP": 128, "B_SHARED": 128, "B_STEP": 128})  # fmt: skip
        names = {"A_FORMAT": a[7:11], "B_FORMAT": b[7:11]}
        yield _product(target, "mx", a, b, "", names)
    yield _product(target, "blocks", e4m3, e4m3, "1x128 x 1x128",
                   {"A_SHARED": 1, "A_STEP": 128, "B_SHARED": 1, "B_STEP": 128})  # fmt: skip


def _product(target: str, tile: str, a: str, b: str, what: str, constants: dict[str, object]) -> Case:
    shipped = tiles_of(TARGETS[target])[0].get(f"scaled_mm.{tile}")
    descriptors = shipped is not None and bool(shipped.blocks["DESCRIPTORS"])
    rows = {"a": "BLOCK_M", "b": "BLOCK_N"}
    operands = {
        name: f"tensordesc<{TYPES[format]}[{shipped.blocks[rows[name]]},{shipped.blocks['BLOCK_K']}]>"
        if shipped is not None and descriptors
        else f"*{TYPES[format]}"
        for name, format in (("a", a), ("b", b))
    }
    strides: dict[str, str] = {}
    constants = {**constants, "BIAS": False, "EVEN_K": True}
    # Scales of rows lie side by side; those of square blocks in rows of a matrix.
    for name in ("as", "bs"):
        along = constants.get(f"{name[0].upper()}_SHARED", 1) == 1
        constants[f"{name}_row" if along else f"{name}_step"] = 1
        strides[f"{name}_step" if along else f"{name}_row"] = "i32:16"
    label = f"{a[7:]} x {b[7:]}" + (f", {what}" if what else "")
    kernel = "scaled_mm_mx_kernel" if tile == "mx" else "scaled_mm_kernel"
    types = {**operands, "out": "*bf16", **SCALES, **SCALARS, **strides}
    return Case(f"scaled_mm.{tile}", f"{PRODUCTS}:{kernel}", types, constants, label, "mx" if tile == "mx" else "fp8")
