"""Quantizing and products of 8-bit floats, in the formats of each chip."""

from __future__ import annotations

from collections.abc import Iterator

from accelbridge.precision.formats import FORMATS, nan_code
from tests.kernels.aot import Case

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
