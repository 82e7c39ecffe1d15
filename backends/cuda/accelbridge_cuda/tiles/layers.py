"""Tiles of rms_norm, rope, swiglu and the losses: those that suit every chip."""

from __future__ import annotations

from collections.abc import Mapping

from accelbridge.kernels import usual_tiles
from accelbridge.kernels.tiles import Tile

PROCESSORS: Mapping[str, int] = {
    "sm80": 108,
    "sm86": 82,
    "sm89": 142,
    "sm90": 132,
    "sm100": 148,
    "sm103": 148,
    "sm120": 188,
}
"""Multiprocessors of A100, RTX 3090, L40S, H100 SXM, B200, B300 and RTX PRO 6000, by their data sheets."""

TILES: Mapping[str, Mapping[str, Tile]] = {name: usual_tiles.layers(count) for name, count in PROCESSORS.items()}
LACKING: Mapping[str, Mapping[str, str]] = {}
