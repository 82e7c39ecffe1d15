"""What ``portable/fp8.py`` serves, for the capabilities of a backend that opts in. Imports no torch."""

from __future__ import annotations

from accelbridge.backend import Support
from accelbridge.precision.scalings import SCALINGS

FAMILIES = (("float8_e4m3fn", "float8_e5m2"), ("float8_e4m3fnuz", "float8_e5m2fnuz"))
"""Formats that may meet in one product."""
MIXED = ("block1x128 x block128x128", "block1x128_pow2 x block128x128_pow2")
"""Activations by weights: scalings that usually meet. Others do too, but are nobody's recipe."""
EMULATED = Support("emulated", "fp8 operands are widened to float32 and multiplied there")
FACTS: dict[str, str | int] = {"fp8.variant": "fn fnuz", "fp8.overflow": "asked", "fp8.accumulator_bits": 24}


def cells() -> dict[tuple[str, str, str], Support]:
    """Cells of the capability table."""
    table: dict[tuple[str, str, str], Support] = {}
    for family in FAMILIES:
        for a in family:
            table.update({("quantize", a, scaling): EMULATED for scaling in SCALINGS})
            for b in family:
                pair = a if a == b else f"{a} x {b}"
                table.update({("scaled_mm", pair, scaling): EMULATED for scaling in (*SCALINGS, *MIXED)})
    return table
