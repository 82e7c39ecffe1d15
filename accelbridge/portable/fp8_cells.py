"""What ``portable/fp8.py`` serves, for the capabilities of a backend that opts in. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.backend import Support
from accelbridge.precision.scalings import SCALINGS

FAMILIES = (("float8_e4m3fn", "float8_e5m2"), ("float8_e4m3fnuz", "float8_e5m2fnuz"))
"""Formats that may meet in one product."""
EMULATED = Support("emulated", "fp8 operands are widened to float32 and multiplied there")
FACTS: Mapping[str, str | int] = {"fp8_variant": "fn fnuz", "fp8_overflow": "asked", "fp8_accumulator_bits": 24}


def cells() -> dict[tuple[str, str, str], Support]:
    """Cells of the capability table."""
    table: dict[tuple[str, str, str], Support] = {}
    for scaling in SCALINGS:
        for family in FAMILIES:
            for a in family:
                table["quantize", a, scaling] = EMULATED
                for b in family:
                    table["scaled_mm", a if a == b else f"{a} x {b}", scaling] = EMULATED
    return table
