"""Tiles of quantizing to 8-bit floats, and of their products."""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels.tiles import Tile
from accelbridge.kernels.usual_tiles import QUANTIZE

_MM = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "GROUP": 8}
_PRODUCTS: Mapping[str, Mapping[str, Tile]] = {
    "sm89": {
        "scaled_mm.whole": Tile({**_MM, "DESCRIPTORS": 0, "PROMOTE": 1}, warps=8, stages=3),
        "scaled_mm.blocks": Tile({**_MM, "DESCRIPTORS": 0, "PROMOTE": 1}, warps=8, stages=3),
    },
    "sm90": {
        "scaled_mm.whole": Tile({**_MM, "DESCRIPTORS": 1, "PROMOTE": 1}, warps=8, stages=4),
        "scaled_mm.blocks": Tile({**_MM, "DESCRIPTORS": 1, "PROMOTE": 1}, warps=8, stages=4),
    },
    "sm100": {
        "scaled_mm.whole": Tile({**_MM, "DESCRIPTORS": 1, "PROMOTE": 0}, warps=8, stages=4),
        "scaled_mm.blocks": Tile({**_MM, "DESCRIPTORS": 1, "PROMOTE": 0}, warps=8, stages=4),
        "scaled_mm.mx": Tile({**_MM, "DESCRIPTORS": 1}, warps=8, stages=3),
    },
    "sm120": {
        "scaled_mm.whole": Tile({**_MM, "DESCRIPTORS": 1, "PROMOTE": 1}, warps=8, stages=3),
        "scaled_mm.blocks": Tile({**_MM, "DESCRIPTORS": 1, "PROMOTE": 1}, warps=8, stages=3),
        "scaled_mm.mx": Tile({**_MM, "DESCRIPTORS": 1}, warps=8, stages=3),
    },
}

_NO_FP8 = dict.fromkeys((*QUANTIZE, "scaled_mm.whole", "scaled_mm.blocks", "scaled_mm.mx"), "it has no 8-bit floats")
_NO_MX = {"scaled_mm.mx": "its matrix instructions apply no scales: that begins with sm100"}

TILES: Mapping[str, Mapping[str, Tile]] = {
    name: {**QUANTIZE, **products} for name, products in (*_PRODUCTS.items(), ("sm103", _PRODUCTS["sm100"]))
}
LACKING: Mapping[str, Mapping[str, str]] = {"sm80": _NO_FP8, "sm86": _NO_FP8, "sm89": _NO_MX, "sm90": _NO_MX}
