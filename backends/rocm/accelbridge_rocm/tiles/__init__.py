"""Tiles of the portable kernels for AMD's GPUs, by architecture; a module for each family of kernels.

Chosen by what the compiler makes of them ahead of time (docs/kernels.md): no spills, and as much shared memory as lets
two programs run where that hides more than a longer pipeline does. None of them was tuned on a chip.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from accelbridge.kernels.tiles import Tile
from accelbridge_rocm.tiles import flash, fp8, layers

SHARED_BYTES: Mapping[str, int] = {"gfx90a": 64 * 1024, "gfx942": 64 * 1024, "gfx950": 160 * 1024}
"""Local data share of a compute unit: rocm.docs.amd.com, "Accelerator and GPU hardware specifications"."""

FAMILIES = (fp8, flash, layers)


def tiles(architecture: str) -> Mapping[str, Tile]:
    """Tiles by name for ``architecture``, such as "gfx942"; empty for one that is not known."""
    return ChainMap(*(family.TILES.get(architecture, {}) for family in FAMILIES))


def lacking(architecture: str) -> Mapping[str, str]:
    """Kernels, by names as in :func:`tiles`, that ``architecture`` does not get, and why."""
    return ChainMap(*(family.LACKING.get(architecture, {}) for family in FAMILIES))
