"""Tiles of quantizing to 8-bit floats, and of their products."""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels.tiles import Tile
from accelbridge.kernels.usual_tiles import QUANTIZE

_MM = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8, "DESCRIPTORS": 0}
_PRODUCTS: Mapping[str, Mapping[str, Tile]] = {
    "gfx942": {
        "scaled_mm.whole": Tile({**_MM, "PROMOTE": 0}, warps=8, stages=2),
        "scaled_mm.blocks": Tile({**_MM, "PROMOTE": 0}, warps=8, stages=2),
    },
    "gfx950": {
        "scaled_mm.whole": Tile({**_MM, "PROMOTE": 0}, warps=8, stages=2),
        "scaled_mm.blocks": Tile({**_MM, "PROMOTE": 0}, warps=8, stages=2),
        "scaled_mm.mx": Tile(_MM, warps=8, stages=2),
    },
}

_NO_FP8 = dict.fromkeys(
    (*QUANTIZE, "scaled_mm.whole", "scaled_mm.blocks", "scaled_mm.mx"),
    "its matrix instructions know no 8-bit floats",
)
_NO_MX = {"scaled_mm.mx": "its matrix instructions apply no scales: that begins with gfx950"}

TILES: Mapping[str, Mapping[str, Tile]] = {name: {**QUANTIZE, **products} for name, products in _PRODUCTS.items()}
LACKING: Mapping[str, Mapping[str, str]] = {"gfx90a": _NO_FP8, "gfx942": _NO_MX}
